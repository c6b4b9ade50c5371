"""Published models: equal to transformers' where that is installed; their tokenizers; what is refused."""
import copy
import json
import os
import random
import string

import pytest
import torch

import data
import train
from config import UserError
from config.checkpoint import load_checkpoint, load_start
from config.pretrained import theirs
from conftest import ROOT, arguments, torchrun, without_reports, write_records
from data import Tokenizer, bpe
from published import FAMILIES, LAYOUTS, SPECIAL, change_json, change_tensors, tokenizer_json, write_json, write_model

transformers = pytest.importorskip('transformers', reason='pip install transformers safetensors tokenizers')


def both(family, folder, layout='transformers 5', **settings):
    """(transformers' model, ours) of the same weights."""
    other = write_model(family, str(folder), layout)
    start = load_start(str(folder))
    return other, train.build_model({**start, 'model_config': {**start['model_config'], **settings}}).eval()


@pytest.mark.parametrize('layout', LAYOUTS)
@pytest.mark.parametrize('family', FAMILIES)
def test_a_published_model_says_what_transformers_says(family, layout, tmp_path):
    other, model = both(family, tmp_path, layout)
    idx = torch.randint(256, (2, 24))  # Gemma 3's window is 5
    assert (model(idx)[0] - other(idx).logits).abs().max() < 1e-4

    # padding on the left
    pad = torch.arange(24) < torch.tensor([[7], [0]])
    positions = (torch.arange(24) - torch.tensor([[7], [0]])).clamp(min=0)
    expected = other(idx, attention_mask=(~pad).long(), position_ids=positions).logits
    assert (model(idx, pad=pad)[0] - expected)[~pad].abs().max() < 1e-4


@pytest.mark.parametrize('family', FAMILIES)
def test_cached_generation_goes_on_as_transformers_does_without_a_cache(family, tmp_path):
    other, model = both(family, tmp_path)
    prompts = [[5, 6, 7], [1, 2, 3, 4, 5, 6, 7, 8]]
    new = model.complete(prompts, 20, temperature=0)
    for prompt, tokens in zip(prompts, new):
        text = list(prompt)
        for token in tokens:
            assert other(torch.tensor([text])).logits[0, -1].argmax() == token
            text.append(token)


@pytest.mark.parametrize('family', FAMILIES)
def test_loss_and_gradients_are_those_of_transformers(family, tmp_path):
    other, model = both(family, tmp_path)
    idx = torch.randint(256, (2, 25))
    loss = model.train()(idx[:, :-1], idx[:, 1:])[1]
    expected = torch.nn.functional.cross_entropy(other(idx[:, :-1]).logits.flatten(0, 1), idx[:, 1:].flatten())
    assert (loss - expected).abs() < 1e-4
    loss.backward()
    expected.backward()
    for name, p in model.named_parameters():
        grads = [other.get_parameter(('' if part.startswith('lm_head') else other.base_model_prefix + '.') + part).grad
                 for part in theirs(name, other.config.model_type)]
        if family == 'gpt2' and name.endswith(('c_attn.weight', 'c_fc.weight', 'c_proj.weight')):
            grads = [grad.T for grad in grads]
        if name.endswith('q_norm.weight'):  # holds a factor of sqrt(16 / 10)
            grads = [grad / 1.6 ** 0.5 for grad in grads]
        torch.testing.assert_close(p.grad, torch.cat(grads), atol=1e-4, rtol=1e-3)


def test_shards_half_precision_and_a_vision_tower_are_read(tmp_path, capsys):
    from safetensors.torch import load_file, save_file
    other, model = both('gemma3', tmp_path / 'a')
    for prefixes in [('language_model.model.', 'vision_tower.'), ('model.language_model.', 'model.vision_tower.')]:
        folder = tmp_path / prefixes[0]
        folder.mkdir()
        config = json.loads((tmp_path / 'a' / 'config.json').read_text())
        del config['rms_norm_eps'], config['head_dim']  # 1e-6 and 256 where they are not said
        write_json(folder, 'config.json', {'model_type': 'gemma3', 'eos_token_id': [259, 1],
                                           'text_config': {**config, 'head_dim': 16}})
        write_json(folder, 'tokenizer.json', tokenizer_json())
        weights = {name.replace('model.', prefixes[0], 1): tensor.bfloat16()
                   for name, tensor in load_file(tmp_path / 'a' / 'model.safetensors').items()}
        weights[prefixes[1] + 'embeddings.weight'] = torch.zeros(3, 3)
        weights[prefixes[1].replace('vision_tower', 'multi_modal_projector') + 'weight'] = torch.zeros(3)
        shards = {f'model-0000{i + 1}-of-00003.safetensors': dict(list(weights.items())[i::3]) for i in range(3)}
        for file, part in shards.items():
            save_file(part, folder / file)
        write_json(folder, 'model.safetensors.index.json',
                   {'weight_map': {name: file for file, part in shards.items() for name in part}})
        start = load_start(str(folder))
        assert '2 tensors of the vision tower are left out' in capsys.readouterr().out
        assert start['model']['wte.weight'].dtype == torch.float32
        idx = torch.randint(256, (2, 24))
        expected = rounded(other)(idx).logits
        assert (train.build_model(start).eval()(idx)[0] - expected).abs().max() < 1e-4
        assert start['meta']['tokenizer']['end'] == 259


def rounded(other):
    """The model with its weights, not its buffers, rounded to bfloat16."""
    other = copy.deepcopy(other)
    for p in other.parameters():
        p.data = p.data.bfloat16().float()
    return other


def test_gemma_3_4b_is_read_with_the_defaults_that_its_file_leaves_out(tmp_path):
    from config.pretrained import read_settings
    write_json(tmp_path, 'config.json', {  # as published
        'model_type': 'gemma3', 'eos_token_id': [1, 106], 'torch_dtype': 'bfloat16', 'vision_config': {},
        'text_config': {'hidden_size': 2560, 'intermediate_size': 10240, 'model_type': 'gemma3_text',
                        'num_hidden_layers': 34, 'rope_scaling': {'factor': 8.0, 'rope_type': 'linear'},
                        'sliding_window': 1024}})
    _, _, settings = read_settings(str(tmp_path / 'config.json'))
    config = transformers.Gemma3TextConfig(hidden_size=2560, num_hidden_layers=34)
    assert (settings['n_head'], settings['n_kv_head'], settings['head_dim'], settings['vocab_size']) == (
        config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.vocab_size)
    assert settings['local_layers'] == tuple(
        i for i, kind in enumerate(config.layer_types) if kind == 'sliding_attention')
    assert (settings['window'], settings['local_rope_base'], settings['rope_base']) == (1024, 10000.0, 1e6)
    assert settings['rope_frequencies'][:2] == (1 / 8, 1e6 ** (-1 / 128) / 8)


# --- methods on them ---

def loss_of(start, method, idx, **settings):
    """The first loss of a method that starts from a published model."""
    config_class, model_class, _ = train.METHODS[method]
    model = model_class(config_class(**{**start['model_config'], **settings})).eval()
    model.load_pretrained(start['model'])
    return model(idx[:, :-1], idx[:, 1:])[1].item()


@pytest.mark.parametrize('family', FAMILIES)
def test_pauses_and_forks_begin_at_the_loss_of_the_published_model(family, tmp_path):
    write_model(family, str(tmp_path))
    start = load_start(str(tmp_path))
    idx = torch.randint(256, (2, 25))
    plain = loss_of(start, 'gpt', idx)
    assert abs(loss_of(start, 'cyb', idx, see_pauses=False, d_init=1e-5) - plain) < 1e-3
    if family != 'gpt2':  # its copies stand where their token stands
        forked = dict(fork_layers=(1, 2), keep_bias=12.0, fork_bias=-12.0, undivided_scores=True)
        for merge in ('probs', 'residual'):
            assert abs(loss_of(start, 'thoughtbubbles', idx, merge=merge, **forked) - plain) < 1e-3
    assert abs(loss_of(start, 'thoughtbubbles', idx, fork_layers=(1, 2)) - plain) > 1e-2


def test_inputs_of_a_methods_own_begin_at_the_scale_of_the_embeddings(tmp_path):
    write_model('gemma', str(tmp_path))
    start = load_start(str(tmp_path))
    model = train.CYB(train.CYBConfig(**{**start['model_config'], 'W': 3}))
    model.load_pretrained(start['model'])
    tokens = model.token_vectors(torch.arange(300)).std()
    assert tokens > 1 and 0.5 < model.pauses.std() / tokens < 2
    for rank in (0, 2):
        rim = train.RiM(train.RiMConfig(**{**start['model_config'], 'vocab_size': 304, 'lora_rank': rank}))
        rim.load_pretrained(start['model'])
        assert 0.5 < rim.token_vectors(torch.arange(300, 304)).std() / tokens < 2


@pytest.mark.parametrize('method', ['gpt', 'thoughtbubbles', 'cyb'])
def test_a_window_counts_tokens_whatever_stands_between_them(method):
    config_class, model_class, _ = train.METHODS[method]
    more = {'gpt': {}, 'cyb': dict(W=3), 'thoughtbubbles': dict(fork_layers=(0,), kappa=9)}[method]
    model = model_class(config_class(vocab_size=30, n_layer=1, n_head=2, n_embd=16, block_size=12, local_layers=(0,),
                                     window=4, **more)).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    idx = torch.randint(30, (1, 10))
    before = model(idx)[0][0, -1]
    for back in range(1, 9):
        other = idx.clone()
        other[0, -1 - back] = (other[0, -1 - back] + 1) % 30
        assert torch.equal(before, model(other)[0][0, -1]) == (back >= 4), back


def test_a_window_is_kept_by_cached_pauses_and_read_outs():
    window = dict(vocab_size=30, n_layer=3, n_head=2, n_embd=16, block_size=32, local_layers=(0, 2), window=4)
    for see_pauses in (True, False):
        model = train.CYB(train.CYBConfig(**window, W=3, see_pauses=see_pauses)).double().eval()
        for p in model.parameters():
            torch.nn.init.normal_(p, std=0.3)
        answers = [model.complete([[1, 2, 3], [4] * 9], 12, temperature=0, use_cache=use) for use in (True, False)]
        assert answers[0] == answers[1]
    rim = train.RiM(train.RiMConfig(**window, n_blocks=2)).double().eval()
    for p in rim.parameters():
        torch.nn.init.normal_(p, std=0.3)
    (rows, log_p), = rim.answers([[1, 2, 3, 4, 5, 6], [7, 8]], 5)[0]
    for question, answer, total in zip([[1, 2, 3, 4, 5, 6], [7, 8]], rows, log_p.tolist()):
        block = [26, 27, 27, 28]
        text = question + 2 * block
        said = answer + [29] * (len(answer) < 5)
        logits = rim(torch.tensor([text + answer]))[0][0, len(text) - 1:]
        logits[:, 26:29] = -torch.inf
        expected = logits.log_softmax(-1)[range(len(said)), said].sum().item()
        assert abs(expected - total) < 1e-9


# --- fine-tuning from a folder ---

@pytest.fixture
def folder(tmp_path):
    write_model('gpt2', str(tmp_path / 'gpt2'), 'published')
    return str(tmp_path / 'gpt2')


@pytest.mark.parametrize('lora_rank', [0, 2])
def test_a_folder_is_trained_resumed_and_sampled_on_one_process_and_on_two(folder, tmp_path, lora_rank, capsys):
    import sample
    text = tmp_path / 'my.txt'
    text.write_text('the cat and the dog\n' * 200)
    out = [str(tmp_path / f'out{i}') for i in range(3)]
    tiny = [f'--init_from={folder}', f'--dataset={text}', '--block_size=16', '--batch_size=2', '--eval_rows=4',
            '--warmup_iters=1', '--eval_interval=3', '--grad_accum=2', f'--lora_rank={lora_rank}', '--device=cpu']
    with without_reports():
        train.main([*tiny, f'--out_dir={out[0]}', '--max_iters=3'])
        train.main([*tiny, f'--out_dir={out[1]}', '--max_iters=1'])
        train.main(['--init_from=resume', f'--out_dir={out[1]}', '--max_iters=3'])
    status, said = torchrun(2, 'train.py', *tiny, f'--out_dir={out[2]}', '--max_iters=3')
    assert status == 0, said
    one, resumed, two = (load_checkpoint(f'{path}/ckpt.pt') for path in out)
    assert one['step'] == resumed['step'] == two['step'] == 3
    for name, weight in one['model'].items():
        torch.testing.assert_close(weight, two['model'][name], atol=2e-4, rtol=1e-3)
    assert one['model']['wpe.weight'].shape == (16, 32)
    changed = [name for name, weight in one['model'].items() if not torch.equal(
        weight, load_start(folder)['model'].get(name, torch.zeros_like(weight))[:len(weight)])]
    assert all('lora_' in name for name in changed) == bool(lora_rank)
    capsys.readouterr()
    sample.main([f'--out_dir={out[1]}', '--prompt=the cat', '--max_new_tokens=5', '--temperature=0'])
    assert capsys.readouterr().out.startswith('the cat')
    assert os.listdir(f'{text}.data') != []


def test_adapters_and_special_rows_can_be_merged(folder, tmp_path, capsys):
    from config import lora
    dataset = write_records(tmp_path / 'records')
    with without_reports():
        train.main([f'--init_from={folder}', f'--dataset={dataset}', '--method=rim', '--lora_rank=2', '--block_size=64',
                    '--batch_size=2', '--eval_rows=4', '--warmup_iters=1', '--max_iters=3', '--stage2_iters=2',
                    '--learning_rate=1e-2', f'--out_dir={tmp_path}/out', '--device=cpu'])
    lora.main([f'--out_dir={tmp_path}/out'])
    tuned, tokenizer = train.load(f'{tmp_path}/out')
    merged, _ = train.load(f'{tmp_path}/out/merged.pt')
    assert not [name for name in merged.state_dict() if 'lora_' in name or 'special_' in name]
    idx = torch.cat((torch.randint(256, (2, 20)), torch.arange(261, 265).expand(2, -1)), dim=1)
    assert (tuned(idx)[0] - merged(idx)[0]).abs().max() < 1e-4
    at = torch.arange(48)
    targets = torch.randint(261, 265, (48,))
    losses = [model(idx, targets, torch.ones(48), at)[1].item() for model in (tuned, merged)]
    assert abs(losses[0] - losses[1]) < 1e-4
    assert tokenizer.special == {'<b>': 261, '<m>': 262, '</b>': 263, '<end>': 264}
    os.replace(f'{tmp_path}/out/merged.pt', f'{tmp_path}/out/ckpt.pt')
    with pytest.raises(UserError, match='lora_rank is 0'):
        lora.main([f'--out_dir={tmp_path}/out'])


# --- tokenizers ---

def texts(n=300):
    random.seed(0)
    parts = [*string.ascii_letters, *' \n\t\r', '  ', ' the', 'the', "'ll", "'S", 'é', '日本', '🙂', '½', '²', '\u00a0', '12',
             '345', *'.,!?<|>_-', *SPECIAL, '<|endoftext|']
    return [''.join(random.choice(parts) for _ in range(random.randint(0, 25))) for _ in range(n)]


@pytest.mark.parametrize('steps, first', [
    ([], None), ([{'type': 'Digits', 'individual_digits': True}], None),
    ([{'type': 'Split', 'pattern': {'Regex': bpe.LLAMA3}, 'behavior': 'Isolated', 'invert': False}], False)])
def test_tiktoken_and_the_tokenizers_package_agree_where_that_is_claimed(steps, first):
    parsed = tokenizer_json()
    level = {**parsed['pre_tokenizer'], 'use_regex': first is None}
    parsed['pre_tokenizer'] = {'type': 'Sequence', 'pretokenizers': [*steps, level]}
    assert bpe.is_tiktoken(parsed)
    spec = {'kind': 'json', 'json': json.dumps(parsed)}
    ours, theirs_ = Tokenizer({**spec, 'tiktoken': True}), Tokenizer(spec)
    assert isinstance(ours.text, bpe.Tiktoken) and isinstance(theirs_.text, bpe.HuggingFace)
    for text in texts():
        assert ours.encode(text) == theirs_.encode(text)
        assert ours.decode(ours.encode(text)) == text == theirs_.decode(ours.encode(text))
    assert ours.encode(' the') == [258]


@pytest.mark.parametrize('change', [
    lambda t: t['model']['merges'].reverse(),  # not in the order of ids
    lambda t: t['model']['merges'].append('Ġ t'),  # a merge that is no token
    lambda t: t['model']['merges'].__setitem__(1, 't he'),  # "the" comes about in another way than is listed
    lambda t: t['added_tokens'].append({**t['added_tokens'][0], 'id': 261, 'content': 'xyz', 'special': False}),
    lambda t: t.update(normalizer={'type': 'NFC'}),
    lambda t: t['pre_tokenizer'].update(add_prefix_space=True),
    lambda t: t['model'].update(byte_fallback=True),
    lambda t: t['model']['vocab'].update({'zz': 300}),  # ids with a hole
    lambda t: t.update(pre_tokenizer={'type': 'Whitespace'})])
def test_what_tiktoken_would_read_otherwise_is_left_to_the_tokenizers_package(change):
    parsed = tokenizer_json()
    assert bpe.is_tiktoken(parsed)
    change(parsed)
    assert not bpe.is_tiktoken(parsed)


def test_merges_of_later_tokens_inside_longer_pieces_are_seen():
    """c c, cc b, c ccb, c b: tiktoken joins cc + cb to a token that the list makes of c + ccb alone."""
    parsed = tokenizer_json()
    vocab = {token: i for i, token in enumerate([*bpe.byte_alphabet(), 'cc', 'ccb', 'cccb', 'cb'])}
    parsed['model'].update(vocab=vocab, merges=['c c', 'cc b', 'c ccb', 'c b'], ignore_merges=True)
    for i, token in enumerate(parsed['added_tokens']):
        token['id'] = 260 + i
    assert not bpe.is_tiktoken(parsed)


def test_the_published_file_of_gpt2s_tokenizer_is_gpt2s():
    try:
        own = bpe.gpt2_tokens({})
    except UserError:
        pytest.skip('the gpt2 vocabulary is not here: set TIKTOKEN_CACHE_DIR')
    char = {b: ch for ch, b in bpe.byte_alphabet().items()}
    ranks = own.encoding._mergeable_ranks
    parsed = tokenizer_json()
    parsed['model']['vocab'] = {''.join(char[b] for b in token): i for token, i in ranks.items()}
    parsed['added_tokens'] = [{**parsed['added_tokens'][0], 'id': 50256}]
    assert bpe.same_tokens(own, bpe.as_tiktoken(parsed))
    parsed['model']['vocab'].update({'Ġthe': 300, parsed_token(parsed, 300): parsed['model']['vocab']['Ġthe']})
    assert not bpe.same_tokens(own, bpe.as_tiktoken(parsed))


def parsed_token(parsed, i):
    return next(token for token, j in parsed['model']['vocab'].items() if j == i)


def test_what_a_tokenizer_cannot_write_is_named():
    parsed = tokenizer_json()
    parsed['normalizer'] = {'type': 'NFC'}
    spec = {'kind': 'json', 'json': json.dumps(parsed)}
    assert Tokenizer(spec).encode('a\udcffb') == Tokenizer(spec).encode('a?b')  # half a character
    vocab = parsed['model']['vocab']
    vocab['<|endoftext|>'] = vocab.pop(next(ch for ch, b in bpe.byte_alphabet().items() if b == 4))
    parsed['added_tokens'] = [{**parsed['added_tokens'][0], 'id': vocab['<|endoftext|>']}]
    parsed['model'].update(unk_token='<|endoftext|>')
    with pytest.raises(UserError, match='makes its special token <|endoftext|> of the text'):
        Tokenizer({'kind': 'json', 'json': json.dumps(parsed)}).encode('a\x04b')
    with pytest.raises(UserError, match='a run of spaces or of other like characters that is too long'):
        Tokenizer({'kind': 'json', 'json': json.dumps(tokenizer_json()), 'tiktoken': True}).encode(' ' * 10 ** 6 + 'x')


def test_a_text_that_changed_is_not_mixed_with_what_was_made_of_it(folder, tmp_path):
    text = tmp_path / 'set' / 'input.txt'
    text.parent.mkdir()
    data.text.write_text_dataset(str(text.parent), 'the cat\n' * 50, {'kind': 'char', 'chars': sorted(set('the cat\n'))},
                                 'input.txt')
    text.write_text('the cat\n' * 51)
    with pytest.raises(UserError, match='has changed since'):
        data.read_with(str(text.parent), load_start(folder)['meta']['tokenizer'])


def test_special_tokens_are_never_made_from_a_users_text():
    spec = {'kind': 'json', 'json': json.dumps(tokenizer_json(begin=True)), 'begin': [260], 'end': 259}
    for tiktoken in (True, False):
        tokenizer = Tokenizer({**spec, 'tiktoken': tiktoken})
        for name in SPECIAL:
            ids = tokenizer.encode(f'a{name}b')
            assert not {259, 260} & {*ids} and tokenizer.decode(ids) == f'a{name}b'
        assert tokenizer.decode([260, 97 - 33]) == '<bos>a'


def test_a_byte_that_the_vocabulary_lacks_is_named():
    parsed = tokenizer_json()
    vocab = parsed['model']['vocab']
    lacking = next(ch for ch, b in bpe.byte_alphabet().items() if b == 4)
    moved = max(vocab, key=lambda token: vocab[token] if len(token) == 1 else -1)
    vocab[moved] = vocab.pop(lacking)
    assert sorted(vocab.values()) != list(range(259))
    ids = {token: i for i, token in enumerate(sorted(vocab, key=vocab.get))}
    parsed['model']['vocab'] = ids
    for i, token in enumerate(parsed['added_tokens']):
        token['id'] = len(ids) + i
    assert bpe.is_tiktoken(parsed)
    tokenizer = Tokenizer({'kind': 'json', 'json': json.dumps(parsed), 'tiktoken': True})
    assert tokenizer.decode(tokenizer.encode('the cat')) == 'the cat'
    with pytest.raises(UserError, match=r"has no b'\\x04'"):
        tokenizer.encode('a\x04b')


def test_a_begin_token_opens_a_document_and_nothing_else(tmp_path, capsys):
    import sample
    write_model('gemma', str(tmp_path / 'model'), begin=True)
    tokenizer = Tokenizer(load_start(str(tmp_path / 'model'))['meta']['tokenizer'])
    assert (tokenizer.begin, tokenizer.end) == ([260], 259)
    text = tmp_path / 'my.txt'
    text.write_text('the cat and the dog\n' * 100)
    data.ensure_prepared(str(text))
    folder, meta = data.read_with(str(text), load_start(str(tmp_path / 'model'))['meta']['tokenizer'])
    train_ids, val_ids = (data.text.read_bin(f'{folder}/{split}.bin', meta, 4).tolist() for split in ('train', 'val'))
    assert train_ids[0] == 260 and 260 not in train_ids[1:] and 260 not in val_ids
    assert data.records.encode_question(tokenizer, 'the')[0] == 260
    read = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.GPT, 'generate', lambda self, prompts, *_, **__: read.extend(prompts) or iter([[97]]))
        sample.main([f'--init_from={tmp_path}/model', '--prompt=the'])
    assert read == [[260, *tokenizer.encode('the')]]
    # some files say it in tokenizer_config.json only
    parsed = tokenizer_json()
    write_json(tmp_path / 'model', 'tokenizer.json', parsed)
    assert load_start(str(tmp_path / 'model'))['meta']['tokenizer'].get('begin', []) == []
    write_json(tmp_path / 'model', 'tokenizer_config.json', {'add_bos_token': True, 'bos_token': '<bos>'})
    assert load_start(str(tmp_path / 'model'))['meta']['tokenizer']['begin'] == [260]


@pytest.mark.parametrize('settings', [
    dict(method='thoughtbubbles', fork_layers='1'), dict(method='cyb', objective='tbys'), dict(method='coconut'),
    *(dict(method='rim', train_on=kind) for kind in ('rim', 'pause', 'sft', 'cot'))], ids=lambda s: '-'.join(s.values()))
def test_every_method_starts_from_a_published_model_and_is_evaluated(settings, folder, tmp_path):
    import eval as evaluation
    if settings['method'] in ('rim', 'coconut'):
        dataset = write_records(tmp_path / 'records')
    else:
        dataset = tmp_path / 'my.txt'
        dataset.write_text('the cat and the dog\n' * 200)
    out = f'--out_dir={tmp_path}/out'
    rim = settings['method'] == 'rim'
    with without_reports():
        train.main([out, f'--init_from={folder}', f'--dataset={dataset}', '--block_size=64', '--batch_size=2',
                    '--eval_rows=4', '--max_iters=2', '--device=cpu', *(['--stage2_iters=1'] if rim else []),
                    *(f'--{name}={value}' for name, value in settings.items())])
    evaluation.main([out, '--eval_rows=2', '--slow_rows=1', '--device=cpu'])


# --- what is refused ---

def truncate(folder):
    path = os.path.join(folder, 'model.safetensors')
    with open(path, 'r+b') as f:
        f.truncate(os.path.getsize(path) - 100)


def shard_missing(folder):
    write_json(folder, 'model.safetensors.index.json', {'weight_map': {'wte.weight': 'model-00001-of-00002.safetensors'}})


def set_config(**values):
    return lambda folder: change_json(folder, 'config.json', lambda config: config.update(values))


@pytest.mark.parametrize('spoil, message', [
    (lambda f: os.remove(f'{f}/model.safetensors'), 'model.safetensors is missing: other formats, such as pickles'),
    (shard_missing, 'model-00001-of-00002.safetensors is missing: .*index.json names it'),
    (truncate, 'model.safetensors is damaged or not complete'),
    (lambda f: os.remove(f'{f}/tokenizer.json'), 'tokenizer.json is missing'),
    (lambda f: open(f'{f}/tokenizer.json', 'w').write('{'), 'tokenizer.json cannot be read'),
    (lambda f: open(f'{f}/config.json', 'w').write('[]'), 'config.json does not hold an object'),
    (set_config(model_type='mamba'), "architecture 'mamba' is not supported: there are gpt2, llama"),
    (set_config(n_embd=64), r'wte.weight \(300, 32\) does not fit config.json, which makes \(300, 64\) of it'),
    (set_config(n_layer=4), 'no tensor h.3.ln_1.weight'),
    (set_config(n_layer=2), 'h.2.attn.c_attn.bias has no place in this architecture'),
    (set_config(n_head=5), 'config.json: n_embd = 32 is not divisible by n_head = 5'),
    (set_config(n_head='x'), 'config.json'),
    (set_config(activation_function='relu6'), "config.json: activation_function = 'relu6': there are gelu_new"),
    (set_config(scale_attn_weights=False), 'scale_attn_weights = False is not supported'),
    (set_config(quantization_config={'bits': 8}), 'quantization_config = .* is not supported'),
    (set_config(model_type=['gpt2']), r"architecture \['gpt2'\] is not supported"),
    (lambda f: write_json(f, 'model.safetensors.index.json', {'weight_map': ['a']}), 'do not fit together'),
    (lambda f: write_json(f, 'model.safetensors.index.json', {'weight_map': {'a': 5}}), 'do not fit together'),
    (lambda f: change_json(f, 'tokenizer.json', lambda t: t.update(model=None)), 'tokenizer.json'),
    (lambda f: change_tensors(f, lambda w: {**w, 'transformer.wte.weight': w['wte.weight'].clone()}),
     'are the same tensor twice'),
    (lambda f: change_tensors(f, lambda w: {**w, 'lm_head.weight': w['wte.weight'] + 1}),
     'ties head and embeddings, but the files have two different ones'),
    (lambda f: change_tensors(f, lambda w: {**w, 'wte.weight': w['wte.weight'].to(torch.int8)}),
     'holds torch.int8: quantized weights are not read'),
    (lambda f: change_json(f, 'tokenizer.json', lambda t: t.update(decoder={'type': 'Strip', 'content': ' '})),
     'a space before each text is not supported'),
    (set_config(scale_attn_by_inverse_layer_idx=True), 'scale_attn_by_inverse_layer_idx = True is not supported'),
    (lambda f: change_json(f, 'config.json', lambda c: c.pop('n_layer') and c), "lacks a setting .*n_layer"),
    (set_config(vocab_size=200), r'wte.weight \(300, 32\) does not fit'),
    (lambda f: change_tensors(f, lambda w: {**w, 'h.0.attn.rel.weight': torch.zeros(3)}), 'h.0.attn.rel.weight has no'),
])
def test_a_folder_that_is_not_whole_is_refused_in_one_line(folder, spoil, message):
    spoil(folder)
    with pytest.raises(UserError, match=message) as error:
        load_start(folder)
    assert '\n' not in str(error.value)


@pytest.mark.parametrize('family, change, message', [
    ('gemma3', dict(layer_types=['chunked_attention'] * 7), 'layer_types = .* expected sliding_attention or'),
    ('gemma3', dict(layer_types=['full_attention'] * 9), 'for each of 7 layers'),
    ('gemma3', dict(query_pre_attn_scalar=0), 'do not fit together'),
    ('gemma3', dict(rope_parameters={'full_attention': {'rope_type': 'default', 'rope_theta': 1e6},
                                     'sliding_attention': {'rope_type': 'linear', 'rope_theta': 1e4, 'factor': 4.0}}),
     'rotary scaling of the local layers'),
    ('llama', dict(num_attention_heads=2, num_key_value_heads=4, head_dim=8), 'n_kv_head = 4'),
    ('llama', dict(num_key_value_heads=4, num_attention_heads=4, head_dim=6), 'does not fit config.json'),
    ('llama3', dict(tie_word_embeddings=True), 'two different ones')])
def test_settings_that_the_core_lacks_are_refused(family, change, message, tmp_path):
    write_model(family, str(tmp_path))
    set_config(**change)(str(tmp_path))
    with pytest.raises(UserError, match=message):
        load_start(str(tmp_path))


def test_parts_of_a_matrix_must_fit_one_by_one(tmp_path):
    write_model('llama', str(tmp_path))
    q, k = (f'model.layers.0.self_attn.{part}_proj.weight' for part in 'qk')
    change_tensors(str(tmp_path), lambda w: {**w, q: w[k].clone(), k: w[q].clone()})  # the sum of rows is the same
    with pytest.raises(UserError, match='does not fit config.json'):
        load_start(str(tmp_path))


def test_gemma_1_takes_the_activation_that_its_file_names(tmp_path):
    from config.pretrained import gemma
    base = dict(num_hidden_layers=1, num_attention_heads=1, hidden_size=8, intermediate_size=8, vocab_size=9)
    found = [gemma({**base, **more})['activation'] for more in (
        {}, dict(hidden_act='gelu'), dict(hidden_act='silu'), dict(hidden_act='silu', hidden_activation='gelu_new'))]
    assert found == ['gelu_tanh', 'gelu_tanh', 'silu', 'gelu_tanh']


def test_a_tokenizers_last_special_token_may_have_no_row(tmp_path):
    """As in Gemma 3 1B, whose tokenizer knows a token for pictures."""
    write_model('llama', str(tmp_path))
    parsed = tokenizer_json()
    set_config(vocab_size=261)(str(tmp_path))
    change_tensors(str(tmp_path), lambda w: {name: t[:261].clone() if len(t) == 300 else t for name, t in w.items()})
    parsed['added_tokens'].append({**parsed['added_tokens'][0], 'id': 261, 'content': '<picture>'})
    parsed['normalizer'] = {'type': 'NFC'}
    write_json(str(tmp_path), 'tokenizer.json', parsed)
    tokenizer = Tokenizer(load_start(str(tmp_path))['meta']['tokenizer'])
    assert tokenizer.n_text == 261 and tokenizer.decode([261]) == '<261>'
    parsed['added_tokens'][-1]['special'] = False
    write_json(str(tmp_path), 'tokenizer.json', parsed)
    with pytest.raises(UserError, match='the tokenizer has 262 tokens, config.json has vocab_size = 261'):
        load_start(str(tmp_path))


def test_a_folder_with_a_checkpoint_of_ours_is_that_run(folder, tmp_path):
    text = tmp_path / 'my.txt'
    text.write_text('the cat and the dog\n' * 200)
    with without_reports():
        train.main([f'--init_from={folder}', f'--dataset={text}', '--block_size=16', '--max_iters=1', '--device=cpu',
                    f'--out_dir={folder}'])
    assert load_start(folder)['step'] == 1


def test_a_rotary_scaling_that_is_not_known_is_named(tmp_path):
    write_model('llama', str(tmp_path))
    set_config(rope_parameters={'rope_type': 'yarn', 'rope_theta': 1e4, 'factor': 2.0})(str(tmp_path))
    with pytest.raises(UserError, match="rotary scaling of type 'yarn': there are default, linear and llama3"):
        load_start(str(tmp_path))


@pytest.mark.parametrize('package', ['safetensors', 'tokenizers', 'huggingface_hub'])
def test_a_missing_optional_package_is_named(package, folder, monkeypatch):
    monkeypatch.setitem(__import__('sys').modules, package, None)
    name = 'org/name' if package == 'huggingface_hub' else folder
    if package == 'tokenizers':
        change_json(folder, 'tokenizer.json', lambda parsed: parsed.update(normalizer={'type': 'NFC'}))
    with pytest.raises(UserError, match=f'needs the {package} package: pip install {package}'):
        load_start(name)


@pytest.mark.parametrize('error, message', [
    ('GatedRepoError', 'accepted its licence'), ('RepositoryNotFoundError', 'is not on the Hugging Face hub'),
    (ConnectionError, 'could not be fetched .*: without a network, give a folder')])
def test_what_the_hub_refuses_is_said_in_one_line(error, message, monkeypatch):
    import huggingface_hub

    def fail(*_, **__):
        if isinstance(error, str):
            cls = getattr(huggingface_hub.errors, error)
            raise cls.__new__(cls)
        raise error('no route\nto host')

    monkeypatch.setattr(huggingface_hub, 'snapshot_download', fail)
    with pytest.raises(UserError, match=message) as refused:
        load_start('meta-llama/Llama-3.2-1B')
    assert '\n' not in str(refused.value)


def test_a_name_of_the_hub_is_fetched_and_a_missing_path_is_not(folder, tmp_path, monkeypatch):
    import huggingface_hub
    asked = []
    monkeypatch.setattr(huggingface_hub, 'snapshot_download', lambda name, **_: asked.append(name) or folder)
    for name in ('gpt2', 'gpt2-xl', 'HuggingFaceTB/SmolLM2-135M'):
        load_start(name)
    assert asked == ['gpt2', 'gpt2-xl', 'HuggingFaceTB/SmolLM2-135M']
    monkeypatch.chdir(tmp_path)  # from where a config's paths count from the repository, but not a model's name
    found = train.config.load(train.__file__, [f'{ROOT}/config/cyb_smollm2.py'], {'cyb': train.CYBConfig})[0]
    assert found['init_from'] == 'HuggingFaceTB/SmolLM2-135M'
    for name in ('out/gpt_small', 'data/x', 'tests/x', 'gpt3', 'a/b/c', 'org/x.pt', '/tmp/none'):
        with pytest.raises(UserError, match='is not there'):
            load_start(name)
    assert len(asked) == 3
