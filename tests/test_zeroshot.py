"""Zero-shot tasks: log-likelihoods against the same token by token, the forms of the tasks, files, resuming."""
import io
import json
import math
import os
import runpy
import urllib.request
import zipfile
from types import SimpleNamespace
from unittest.mock import NonCallableMock  # unlike a SimpleNamespace, a key of a cache

import pytest
import torch

import data
import eval as evaluation
from config import UserError, likelihood
from config.harness import adapter
from config.likelihood import log_likelihood
from conftest import ROOT
from cyb import CYB, CYBConfig
from data import zeroshot
from model import GPT, GPTConfig
from rim import Coconut, CoconutConfig, RiM, RiMConfig, memory_block
from test_seams import Breathing, BreathingConfig
from thoughtbubbles import Thoughtbubbles, ThoughtbubblesConfig

TINY = dict(vocab_size=13, block_size=24, n_layer=3, n_head=2, n_embd=16)
FORKING = dict(fork_layers=(0, 2), kappa=1.4)
MODELS = {
    'gpt': (GPT, GPTConfig()),
    'learned positions': (GPT, GPTConfig(learned_positions=True)),
    'a window': (GPT, GPTConfig(n_layer=3, local_layers=(1,), window=3)),
    'thoughtbubbles': (Thoughtbubbles, ThoughtbubblesConfig(**FORKING)),
    'residual': (Thoughtbubbles, ThoughtbubblesConfig(merge='residual', **FORKING)),
    'copy-2': (Thoughtbubbles, ThoughtbubblesConfig(fork_layers=(), copies=2, merge='rightmost')),
    'without forks': (Thoughtbubbles, ThoughtbubblesConfig(fork_layers=())),
    'cyb': (CYB, CYBConfig(W=3, omega='uniform')),
    'unseen pauses': (CYB, CYBConfig(W=3, see_pauses=False)),
    'tbys': (CYB, CYBConfig(W=2, objective='tbys')),
    'cyb on thoughtbubbles': (Breathing, BreathingConfig(**FORKING)),
    'rim': (RiM, RiMConfig(n_blocks=2)),
    'rim, learned positions': (RiM, RiMConfig(n_blocks=2, n_mem=1, learned_positions=True)),
    'sft': (RiM, RiMConfig(train_on='sft')),
    'cot': (RiM, RiMConfig(train_on='cot')),
    'coconut': (Coconut, CoconutConfig(n_blocks=2, n_mem=1)),
}


def build(name):
    """A random model whose predictions are far from uniform."""
    model_class, config = MODELS[name]
    torch.manual_seed(1)
    model = model_class(type(config)(**{**vars(config), **TINY})).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    return model.eval()


def next_log_probs(model, context, written):
    """Of the token after a context and what was written so far, by one forward pass over just that."""
    row = context + written
    if hasattr(model, 'special'):
        blocks, n_mem = model.config.layout
        row = context + memory_block(model.special, n_mem) * blocks + written
    logits = model(torch.tensor([row]))[0][0, -1]
    if hasattr(model, 'special'):
        logits[model.special.begin:model.special.end] = -math.inf
    return logits.log_softmax(dim=0)


def naive(model, context, continuation):
    total, greedy = 0.0, True
    for n, token in enumerate(continuation):
        log_p = next_log_probs(model, context, continuation[:n])
        total += log_p[token].item()
        greedy = greedy and log_p.argmax().item() == token
    return total, greedy


def pairs_for(model):
    """Contexts and continuations of several lengths, some continued as greedy decoding would, one by nothing."""
    contexts = [torch.randint(9, (n,)).tolist() for n in (7, 1, 3, 10, 3, 5, 2)]
    continuations = [torch.randint(9, (n,)).tolist() for n in (2, 5, 1, 4, 0)] + [[], []]
    for i, n in ((5, 3), (6, 5)):
        for _ in range(n):
            continuations[i].append(next_log_probs(model, contexts[i], continuations[i]).argmax().item())
    continuations[6][-1] = (continuations[6][-1] + 1) % 9
    return contexts, continuations


@pytest.mark.parametrize('name', MODELS)
@torch.no_grad()
def test_a_log_likelihood_is_the_sum_over_tokens_read_one_at_a_time_in_any_batch(name):
    model = build(name)
    contexts, continuations = pairs_for(model)
    right = [naive(model, *pair) for pair in zip(contexts, continuations)]
    assert right[5][1] and not all(greedy for _, greedy in right)
    for batch_size in (1, 3, 64):
        got = log_likelihood(model, contexts, continuations, batch_size)
        assert [greedy for _, greedy in got] == [greedy for _, greedy in right]
        assert [p for p, _ in got] == pytest.approx([p for p, _ in right], abs=1e-10)
    assert got[4] == (0.0, True)
    single = log_likelihood(model.float(), contexts, continuations, 3)
    assert [p for p, _ in single] == pytest.approx([p for p, _ in right], abs=1e-5)


@pytest.mark.parametrize('name', ['rim', 'sft', 'coconut'])
def test_a_greedy_answer_has_the_log_likelihood_that_the_model_says_it_has(name):
    model = build(name)
    questions = [[1, 2, 3], [4, 5], [6]]
    answers, log_p = model.answers(questions, 4)[-1][0]
    written = [answer + [model.special.end] * (len(answer) < 4) for answer in answers]
    got = log_likelihood(model, questions, written, 2)
    assert [p for p, _ in got] == pytest.approx(log_p.tolist(), abs=1e-10) and all(greedy for _, greedy in got)


@pytest.mark.parametrize('name', ['gpt', 'thoughtbubbles', 'cyb', 'rim', 'coconut'])
@torch.no_grad()
def test_a_context_that_is_too_long_loses_its_beginning(name, capsys):
    model = build(name)
    memory = {'rim': 8, 'coconut': 4}.get(name, 0)
    contexts = [torch.randint(9, (n,)).tolist() for n in (40, 21 - memory, 22 - memory)]
    got = log_likelihood(model, contexts, [[1, 2, 3, 4]] * 3, 2)
    assert '2 of 3 contexts were cut on the left, to fit into block_size = 24\n' in capsys.readouterr().err
    right = [naive(model, context[-21 + memory:], [1, 2, 3, 4])[0] for context in contexts]
    assert [p for p, _ in got] == pytest.approx(right, abs=1e-10)
    with pytest.raises(UserError, match='continuation 2 has 25 tokens.*block_size = 24'):
        log_likelihood(model, [[1], [1]], [[1], [2] * 25], 2)
    with pytest.raises(UserError, match='context 2 is empty'):
        log_likelihood(model, [[1], []], [[1], [2]], 2)


@pytest.mark.parametrize('name', ['gpt', 'cyb', 'tbys', 'rim', 'without forks'])
def test_logits_exist_for_few_positions_at_a_time(name, monkeypatch):
    model = build(name)
    sizes = []
    logits = model.logits

    def counted(x):
        sizes.append(len(x))
        return logits(x)
    monkeypatch.setattr(model, 'logits', counted)
    monkeypatch.setattr(likelihood, 'AT_ONCE', 5)
    log_likelihood(model, [[1, 2, 3, 4, 5, 6, 7]] * 9, [[1, 2, 3]] * 9, 9)
    assert max(sizes) == 5 and sum(sizes) == 27


@pytest.mark.parametrize('name', ['gpt', 'cyb', 'sft'])
@torch.no_grad()
def test_the_adapter_for_lm_evaluation_harness_says_the_same(name):
    pytest.importorskip('lm_eval')
    model = build(name)
    digits = SimpleNamespace(begin=[], bos=None, end=8, n_text=9, encode=lambda text: [int(ch) for ch in text],
                             decode=lambda ids: ''.join(map(str, ids)))
    adapted = adapter(model, digits, 2)

    def asked(*arguments):
        return [SimpleNamespace(args=arguments)]
    right = naive(model, [1, 2, 3], [4, 5])
    assert adapted.loglikelihood(asked('123', '45'))[0] == pytest.approx(right, abs=1e-10)
    assert adapted.loglikelihood(asked('', '45'))[0] == pytest.approx(naive(model, [8], [4, 5]), abs=1e-10)
    text = torch.randint(8, (30,)).tolist()
    in_windows = naive(model, [8], text[:24])[0] + naive(model, text[5:24], text[24:])[0]
    if name != 'sft':  # which wants room for an answer
        rolled = adapted.loglikelihood_rolling(asked(digits.decode(text)))[0]
        assert rolled == pytest.approx(in_windows, abs=1e-10)
    whole = adapted.generate_until(asked('123', {'max_gen_toks': 6}))[0]
    assert whole and adapted.generate_until(asked('123', {'max_gen_toks': 6, 'until': [whole[-1]]}))[0] \
        == whole[:whole.index(whole[-1])]


# --- texts ---

ARC = {'question': 'Hot?', 'choices': {'text': ['ice', 'fire', 'fog'], 'label': ['1', '2', '3']}, 'answerKey': '2'}
CHOICES = [{'text': text, 'label': label} for text, label in zip(*ARC['choices'].values())]
THEIRS = {'question': {'stem': 'Hot?', 'choices': CHOICES}, 'answerKey': '2'}  # as the authors of ARC write it
HELLASWAG = {'activity_label': 'Fun', 'ctx': 'We go. he', 'ctx_a': 'We go.', 'ctx_b': 'he', 'label': '1',
             'endings': ['sits [x] down', 'runs [title] Now  on']}
BLIMP = {'sentence_good': 'I am.', 'sentence_bad': 'I are.'}
PIQA = {'goal': 'Cut', 'sol1': 'saw', 'sol2': 'cup', 'label': 0}


@pytest.mark.parametrize('name, form, entry, row', [
    ('lambada', 'ours', {'context': 'He saw the', 'target': 'sea'}, ('He saw the', [' sea'], 0)),
    ('lambada', 'ours', {'text': 'He saw the sea'}, ('He saw the', [' sea'], 0)),
    ('piqa', 'ours', PIQA, ('Question: Cut\nAnswer:', [' saw', ' cup'], 0)),
    ('arc_easy', 'ours', ARC, ('Question: Hot?\nAnswer:', [' ice', ' fire', ' fog'], 1)),
    ('arc_easy', 'ours', THEIRS, ('Question: Hot?\nAnswer:', [' ice', ' fire', ' fog'], 1)),
    ('arc_challenge', 'harness', ARC, ('Question: Hot?\nAnswer:', [' ice', ' fire', ' fog'], 1)),
    ('hellaswag', 'ours', HELLASWAG, ('Fun: We go. he', [' sits [x] down', ' runs [title] Now  on'], 1)),
    ('hellaswag', 'harness', HELLASWAG, ('Fun: We go. He', [' sits down', ' runs. Now on'], 1)),
    ('blimp/x', 'ours', BLIMP, ('', ['I am.', 'I are.'], 0)),
    ('blimp/x', 'harness', BLIMP, ('', [' I am.', ' I are.'], 0))])
def test_a_row_of_a_task_becomes_a_context_and_choices(name, form, entry, row):
    assert zeroshot.parse(name, entry, form, 'here') == row


@pytest.mark.parametrize('name, form, entry, message', [
    ('piqa', 'ours', {**PIQA, 'label': 2}, 'line 3 is not a row of piqa .ValueError: choice 2 of 2.: expected'),
    ('piqa', 'ours', {**PIQA, 'goal': 5}, 'line 3 is not a row of piqa .TypeError'),
    ('hellaswag', 'ours', {'ctx': 'x'}, "line 3 .*KeyError: 'activity_label'"),
    ('lambada', 'ours', {'context': 5, 'target': 'x'}, 'line 3 .*TypeError'),
    ('lambada', 'ours', {'text': 'one'}, 'line 3 .*ValueError'),
    ('hellaswag', 'harness', {'activity_label': '', 'endings': []}, 'expected activity_label, ctx_a, ctx_b, endi'),
    ('arc_easy', 'ours', {**ARC, 'answerKey': 'E'}, 'line 3 .*ValueError'),
    ('arc_easy', 'ours', {**ARC, 'choices': 7}, 'line 3 .*TypeError')])
def test_a_broken_row_is_named(name, form, entry, message):
    with pytest.raises(UserError, match=message):
        zeroshot.parse(name, entry, form, 'line 3')


def words(text):
    """The ids of a text's longest words; two of them may be a word as well."""
    ids = {'a': 1, ' b': 2, ' c': 3, ' b c': 4}
    found = []
    while text:
        word = max((w for w in ids if text.startswith(w)), key=len)
        found.append(ids[word])
        text = text[len(word):]
    return found


def tokenizer(**about):
    return NonCallableMock(**{**dict(begin=[], bos=None, end=None, n_text=9, encode=words, decode=str), **about})


def test_context_and_continuation_are_encoded_together_and_cut_after_the_context():
    rows = [zeroshot.Row('a b', [' c', ' b'], 0), zeroshot.Row('a', [' c'], 0)]
    contexts, continuations = zeroshot.encode(tokenizer(), rows, 'ours', 'x')
    assert contexts == [[1, 4], [1, 2], [1]] and continuations == [[], [2], [3]]
    contexts, _ = zeroshot.encode(tokenizer(begin=[7, 8]), rows, 'ours', 'x')
    assert contexts == [[7, 8, 1, 4], [7, 8, 1, 2], [7, 8, 1]]


@pytest.mark.parametrize('about, form, opening', [
    (dict(begin=[7], bos=6, end=5), 'harness', [7]),
    (dict(bos=6, end=5), 'harness', [6]), (dict(bos=6, end=5), 'ours', [5]),
    (dict(bos=6, end=5, decode=lambda ids: zeroshot.BETWEEN if ids == [3] else 'x'), 'ours', [3]),
    (dict(end=0), 'ours', [0]), (dict(), 'ours', [])], ids=str)
def test_a_bare_sentence_follows_what_begins_a_text_or_its_own_first_token(about, form, opening):
    rows = [zeroshot.Row('', ['a b', 'a c'], 0)]
    contexts, continuations = zeroshot.encode(tokenizer(**about), rows, form, 'x')
    if opening:
        assert contexts == [opening] * 2 and continuations == [[1, 2], [1, 3]]
    else:
        assert contexts == [[1], [1]] and continuations == [[2], [3]]


def test_the_bos_of_a_tokenizer_is_one_of_its_ids():
    spec = {'kind': 'char', 'chars': ['a', 'b']}
    found = [data.Tokenizer({**spec, 'bos': bos}).bos for bos in (1, 2, -1, 'a', None)]
    assert found == [1, None, None, None, None]


def test_the_likeliest_choice_counts_in_all_and_per_character():
    rows = [zeroshot.Row('x', [' ab', ' abcd'], 1), zeroshot.Row('x', [' ab', ' cd'], 0),
            zeroshot.Row('x', [' a', ' b'], 1), zeroshot.Row('x', [' ab', ' cd'], 1)]
    log_p = [-2.0, -3.9, -1.0, -1.0, -4.0, -1.0, -1.0, -5.0]  # per character: right, tie, right, wrong
    numbers = zeroshot.score(rows, [(p, False) for p in log_p])
    assert numbers['accuracy'] == {'value': 0.5, 'standard error': pytest.approx(0.25), 'note': 'chance'}
    assert numbers['normalised'] == {'value': 0.75, 'standard error': pytest.approx((0.75 * 0.25 / 4) ** 0.5),
                                     'note': 'chance'}
    alone = [zeroshot.Row('', ['a', 'b'], 0)] * 2  # a sentence is not divided by its length
    assert zeroshot.score(alone, [(-1.0, False), (-2.0, False)] * 2) == {
        'accuracy': {'value': 1.0, 'standard error': 0.0, 'note': 'chance'}}  # two lucky guesses are not rare
    assert zeroshot.score(alone * 3, [(-1.0, False), (-2.0, False)] * 6)['accuracy']['note'] == ''
    parts = [{'accuracy': zeroshot.number(0.8, 0.03, 0.5)}, {'accuracy': zeroshot.number(0.6, 0.04, 0.5)}]
    assert zeroshot.mean_of(parts)['accuracy'] == {'value': pytest.approx(0.7), 'note': '',
                                                   'standard error': pytest.approx(0.025)}


def test_a_word_is_right_where_greedy_decoding_writes_it_and_its_perplexity_is_per_row():
    rows = [zeroshot.Row('x', [' word'], 0)] * 4
    numbers = zeroshot.score(rows, [(-1.0, True), (-2.0, False), (-3.0, True), (-2.0, True)])
    assert numbers['accuracy']['value'] == 0.75 and numbers['accuracy']['note'] == ''
    assert numbers['perplexity']['value'] == pytest.approx(math.exp(2))
    assert numbers['perplexity']['standard error'] == pytest.approx(math.exp(2) * 0.5 ** 0.5 / 2)
    assert zeroshot.score(rows, [(-1.0, False)] * 4)['accuracy']['note'] == 'chance'


# --- files, and eval.py ---

@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Files of tasks that a vocabulary of 18 characters can say."""
    folder = tmp_path / 'zeroshot'
    (folder / 'blimp').mkdir(parents=True)
    monkeypatch.setattr(zeroshot, 'FOLDER', str(folder))
    pairs = [{'sentence_good': f'{i} plus 1 is', 'sentence_bad': f'{i} plus is 1'} for i in range(6)]
    for name, rows in {'lambada': [{'context': f'{i} plus 1 is', 'target': str(i + 1)} for i in range(5)],
                       'blimp/good': pairs, 'blimp/well': pairs[:4], 'piqa': [PIQA]}.items():
        (folder / f'{name}.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows), encoding='utf-8')
    return folder


@pytest.fixture
def evaluate(folder, run, tmp_path, monkeypatch, capsys):
    """evaluate(*arguments) of a tiny run: (its JSON file, what was said, how often the model was asked)."""
    run('run')
    asked = []

    def counted(*arguments):
        asked.append(arguments)
        return log_likelihood(*arguments)
    monkeypatch.setattr(evaluation, 'log_likelihood', counted)

    def evaluate(*arguments, out='run'):
        asked.clear()
        capsys.readouterr()
        evaluation.main([f'--out_dir={tmp_path / out}', '--device=cpu', '--batch_size=3', *arguments])
        found = json.loads((tmp_path / out / 'zeroshot.json').read_text('utf-8'))
        return found, capsys.readouterr().out, len(asked)
    return evaluate


def test_tasks_are_written_down_with_their_form_and_not_run_twice(evaluate, folder, run, tmp_path):
    found, said, asked = evaluate('--tasks=lambada,blimp', '--eval_rows=5')
    assert asked == 3 and found['method'] == 'gpt' and found['step'] == 4
    assert [(r['task'], r['form'], r['rows']) for r in found['results']] == [
        ('lambada', 'ours', 5), ('blimp/good', 'ours', 5), ('blimp/well', 'ours', 4), ('blimp', 'ours', 9)]
    good, well, mean = [r['numbers']['accuracy'] for r in found['results'][1:]]
    assert mean['value'] == pytest.approx((good['value'] + well['value']) / 2)
    assert 'lambada (form: ours, 5 rows)\n' in said and 'blimp (form: ours, 9 rows, mean of 2 paradigms)' in said
    assert 'perplexity: exp of the mean' in said and ' ± ' in said
    assert not os.path.exists(tmp_path / 'run' / 'eval.json')
    again, said, asked = evaluate('--tasks=blimp/well,blimp,lambada', '--eval_rows=5')
    assert asked == 0 and said.count('known from before') == 3
    assert sorted(map(str, again['results'])) == sorted(map(str, found['results']))
    # other rows, another form, another file, another step
    assert evaluate('--tasks=lambada', '--eval_rows=2')[2] == 1
    both, said, asked = evaluate('--tasks=lambada', '--eval_rows=2', '--form=harness')
    assert asked == 1 and 'form: harness' in said and len(both['results']) == 5
    (folder / 'lambada.jsonl').write_text(json.dumps({'context': '1', 'target': '2'}), encoding='utf-8')
    assert evaluate('--tasks=lambada')[2] == 1
    run('run', overwrite=True, max_iters=6)
    found, _, asked = evaluate('--tasks=blimp/good')
    assert asked == 1 and len(found['results']) == 1 and found['step'] == 6
    # other weights at the same step, another dtype
    run('run', overwrite=True, max_iters=6, seed=5)
    assert evaluate('--tasks=blimp/good')[2] == 1
    assert evaluate('--tasks=blimp/good', '--dtype=bfloat16')[2] == 1
    assert evaluate('--tasks=blimp/good', '--dtype=bfloat16')[2] == 0


def test_an_interrupted_evaluation_goes_on_with_the_task_that_it_was_at(evaluate, monkeypatch):
    ask = evaluation.log_likelihood
    with monkeypatch.context() as patch:
        replies = iter([ask])
        patch.setattr(evaluation, 'log_likelihood', lambda *arguments: next(replies)(*arguments))
        with pytest.raises(StopIteration):
            evaluate('--tasks=lambada,blimp')
    found, said, asked = evaluate('--tasks=lambada,blimp')
    assert asked == 2 and said.count('known from before') == 1 and len(found['results']) == 4


@pytest.mark.parametrize('tasks, content, message', [
    ('piqa', None, "tasks = piqa, row 1: the tokenizer has no 'Q', 'e', 't', 'o'"),
    ('arc_easy', None, 'arc_easy.jsonl is missing: run python data/zeroshot/prepare.py'),
    ('lambada', '\n', 'lambada.jsonl holds no row'),
    ('lambada', '{"context": "1", "target": "2"}\n{"context": "1"}', 'line 2 is not a row of lambada .KeyError'),
    ('lambada', '{"context": "1", "target": "2"}\n{"context"', 'lambada.jsonl line 2 is not JSON'),
    ('lambada', '{"context": "1", "target": "222222222222222222"}',
     'tasks = lambada: continuation 1 has 19 tokens.*_size = 16')])
def test_files_that_cannot_be_used_are_refused_before_the_work_begins(evaluate, folder, tasks, content, message):
    if content:
        (folder / f'{tasks}.jsonl').write_text(content, encoding='utf-8')
    with pytest.raises(UserError, match=message) as refused:
        evaluate(f'--tasks={tasks}')
    assert '\n' not in str(refused.value)


@pytest.mark.parametrize('setting', ['kappa=2.0', 'slow_rows=3', 'test_set=x'])
def test_settings_without_effect_on_tasks_are_refused(evaluate, setting):
    with pytest.raises(UserError, match=f'{setting.partition("=")[0]} = .* has no effect with tasks'):
        evaluate('--tasks=lambada', f'--{setting}')


def test_without_any_paradigm_blimp_is_missing(evaluate, folder):
    for path in (folder / 'blimp').iterdir():
        path.unlink()
    with pytest.raises(UserError, match='zeroshot/blimp is missing: run python'):
        evaluate('--tasks=blimp')


# --- data/zeroshot/prepare.py, with its sources replaced ---

@pytest.fixture
def prepare(tmp_path):
    """prepare(*arguments): what the script writes, {file: rows}."""
    functions = runpy.run_path(os.path.join(ROOT, 'data', 'zeroshot', 'prepare.py'))
    target = tmp_path / 'prepared'
    functions['main'].__globals__['FOLDER'] = str(target)

    def prepare(*arguments):
        functions['main'](list(arguments))
        return {str(path.relative_to(target)): [json.loads(line) for line in path.read_text('utf-8').splitlines()]
                for path in target.rglob('*.jsonl')}
    return prepare


def archive(files):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, 'w') as file:
        for name, row in files.items():
            file.writestr(name, json.dumps(row))
    return packed.getvalue()


def test_the_files_of_the_authors_are_downloaded_and_read(prepare, monkeypatch):
    net = {'lambada_test.jsonl': json.dumps({'text': 'He saw the sea'}),
           'hellaswag_val.jsonl': json.dumps(HELLASWAG),
           'valid.jsonl': json.dumps({k: v for k, v in PIQA.items() if k != 'label'}), 'valid-labels.lst': '0\n',
           'ARC-V1-Feb2018.zip': archive({'ARC/ARC-Easy/ARC-Easy-Test.jsonl': THEIRS,
                                          'ARC/ARC-Challenge/ARC-Challenge-Test.jsonl': ARC}),
           'master.zip': archive({'blimp-master/data/a.jsonl': BLIMP, 'blimp-master/README.md': {}})}
    asked = []

    def urlopen(url, timeout):
        asked.append(os.path.basename(url))
        content = net[asked[-1]]
        return io.BytesIO(content if isinstance(content, bytes) else content.encode())
    monkeypatch.setattr(urllib.request, 'urlopen', urlopen)
    assert prepare() == {
        'lambada.jsonl': [{'text': 'He saw the sea'}], 'hellaswag.jsonl': [HELLASWAG],
        'piqa.jsonl': [{**PIQA, 'label': '0'}], 'arc_easy.jsonl': [THEIRS], 'arc_challenge.jsonl': [ARC],
        'blimp/a.jsonl': [BLIMP]}
    assert sorted(asked) == sorted(net)  # each once


def test_files_that_are_there_are_taken_by_either_name(prepare, tmp_path, capsys):
    source = tmp_path / 'source'
    (source / 'blimp').mkdir(parents=True)
    for name, row in {'piqa': PIQA, 'ARC-Easy-Test': ARC, 'blimp/a': BLIMP, 'b': BLIMP}.items():
        (source / f'{name}.jsonl').write_text(json.dumps(row), encoding='utf-8')
    assert prepare(f'--input={source}') == {'piqa.jsonl': [PIQA], 'arc_easy.jsonl': [ARC],
                                            'blimp/a.jsonl': [BLIMP], 'blimp/b.jsonl': [BLIMP]}
    said = capsys.readouterr().out
    assert 'lambada: no file in ' in said and 'blimp/a: 1 rows' in said


def test_sources_that_cannot_be_used_are_named(prepare, tmp_path, monkeypatch):
    def no_net(url, timeout):
        raise OSError('no route')
    monkeypatch.setattr(urllib.request, 'urlopen', no_net)
    with pytest.raises(UserError, match='valid.jsonl cannot be read .no route.: give a folder'):
        prepare('--tasks=piqa')
    monkeypatch.setattr(urllib.request, 'urlopen', lambda url, timeout: io.BytesIO(b'<html>sign in</html>'))
    with pytest.raises(UserError, match='master.zip is damaged .*--input=DIR'):
        prepare('--tasks=blimp')
    with pytest.raises(UserError, match="tasks = 'x': choose lambada, hellaswag"):
        prepare('--tasks=x')
    with pytest.raises(UserError, match='has no file of piqa'):
        prepare('--tasks= piqa', f'--input={tmp_path}')
    with pytest.raises(UserError, match='nowhere.: there is no such folder'):
        prepare('--tasks=piqa', f'--input={tmp_path}/nowhere')
    (tmp_path / 'valid.jsonl').write_text(json.dumps({**PIQA, 'label': 1}).replace('label', 'x'), encoding='utf-8')
    (tmp_path / 'valid-labels.lst').write_text('0\n1\n', encoding='utf-8')
    with pytest.raises(UserError, match='valid.jsonl has 1 rows, valid-labels.lst has 2 labels'):
        prepare('--tasks=piqa', f'--input={tmp_path}')
    for content, message in (('{"question": {"stem": "x"}}', 'line 1 is not a row of arc_easy .KeyError'),
                             (json.dumps(PIQA), 'line 1 is not a row of arc_easy'), ('\n', 'holds no row')):
        (tmp_path / 'arc_easy.jsonl').write_text(content, encoding='utf-8')
        with pytest.raises(UserError, match=message):
            prepare('--tasks=arc_easy', f'--input={tmp_path}')
