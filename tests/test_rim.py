"""Reasoning in Memory: rows and mask against the definition, one pass against single sequences, stages, answers.

A kind is what a model of records is trained on: rim and its baselines.
"""
import json
import os
import re
import shlex
import shutil

import pytest
import torch
import torch.nn.functional as F

import data
import eval as evaluation
import reference
import rim
import sample
import train
from config import UserError, answering, measures
from config.checkpoint import load_checkpoint
from conftest import interrupted, read_log, write_records, write_text
from data import records
from data.test_sets import read_test_set
from model import GPT, GPTConfig, Stage
from rim import Coconut, CoconutBatches, CoconutConfig, RiM, RiMBatches, RiMConfig, build_row

HERE = os.path.dirname(os.path.abspath(__file__))
with open(os.path.join(HERE, 'rim_cases.json'), encoding='utf-8') as f:
    CASES = json.load(f)
V = 14  # ten text tokens and <b> <m> </b> <end>
SPECIAL = records.Special(10, 11, 12, 13)
KINDS = [*rim.STAGES, 'coconut']


def config_of(kind, **settings):
    return CoconutConfig(**settings) if kind == 'coconut' else RiMConfig(train_on=kind, **settings)


def tiny(kind='rim', **settings):
    small = dict(vocab_size=V, block_size=64, n_layer=3, n_head=2, n_embd=16, n_blocks=3)
    config = config_of(kind, **{**small, **settings})
    return (Coconut if kind == 'coconut' else RiM)(config).double()


def tensors(row):
    """A single row: idx, targets, weights, positions and what it reads out, (1,S) each."""
    tokens, targets, positions, read_by = (torch.tensor([values]) for values in
                                           (row.tokens, row.targets, row.positions, records.read_by(row)))
    return tokens, targets, torch.tensor([row.weights], dtype=torch.double), positions, read_by


def some_row(n_mem=2, weights=(1.0, 1.0, 1.0)):
    return build_row([1, 2, 3, 4], [[5, 6], [7], [8, 9, 5]], list(weights), n_mem, SPECIAL)


def readouts_of(row):
    return [token for token, kind in zip(row.tokens, row.kind) if kind == records.READOUT]


@pytest.fixture
def dataset(tmp_path):
    return write_records(tmp_path / 'records')


@pytest.fixture
def rim_run(run):
    """rim_run(out, kind, **settings): as run, on records."""
    def rim_run(out='run', kind='rim', **settings):
        small = dict(block_size=48, n_blocks=2, max_iters=3, eval_interval=2)
        method = dict(method='coconut') if kind == 'coconut' else dict(method='rim', train_on=kind, stage2_iters=3)
        return run(out, **{**small, **method, **settings})
    return rim_run


def batches(dataset, kind='rim', rows_per_step=4, **settings):
    meta = data.read_meta(dataset)
    small = dict(vocab_size=meta['vocab_size'], block_size=64, n_blocks=3)
    second = {} if kind == 'coconut' else dict(stage2_iters=2)
    config = config_of(kind, **{**small, **second, **settings})
    return (CoconutBatches if kind == 'coconut' else RiMBatches)(dataset, meta, config, 1, 8, rows_per_step)


def rows_at(source, it, question, steps, answer, max_iters=4):
    """A record's row in training and in validation at an iteration; a second stage has 2."""
    encoded = records.Encoded(question, steps, answer, source.data.newline)
    source.data.encoded['train'] = [encoded] * 50
    stage = train.stage_at(source.config.stages(max_iters, 1e-3, 1), it)
    return source.train_rows(stage, it, [0])[0], source.val_row(stage.name, encoded)


# --- rows ---

@pytest.mark.parametrize('case', CASES, ids=lambda c: f'{c["question"]}+{c["readouts"]}')
def test_layout_positions_and_mask(case):
    readouts = [[5] * n for n in case['readouts']]
    row = build_row([1] * case['question'], readouts, [1.0] * len(readouts), case['n_mem'], SPECIAL)
    assert ''.join({'question': 'q', 'memory': 'b', 'readout': 'r'}[kind] for kind in row.kind) == case['kind']
    assert ''.join(map(str, row.block)) == case['block'] and row.positions == case['positions']
    mask = rim.memory_mask(torch.tensor([records.read_by(row)]))[0, 0]
    assert [''.join('1' if sees else '0' for sees in line) for line in mask.tolist()] == case['mask']


def test_targets_run_from_the_end_of_a_block_to_the_end_token():
    row = some_row(weights=(1.0, 0.5, 0.2))
    assert row.tokens == [1, 2, 3, 4, 10, 11, 11, 12, 5, 6, 10, 11, 11, 12, 7, 10, 11, 11, 12, 8, 9, 5]
    used = [(i, t, w) for i, (t, w) in enumerate(zip(row.targets, row.weights)) if w]
    assert used == [(7, 5, 1.0), (8, 6, 1.0), (9, 13, 1.0), (13, 7, 0.5), (14, 13, 0.5),
                    (18, 8, 0.2), (19, 9, 0.2), (20, 5, 0.2), (21, 13, 0.2)]
    assert all(t == -1 for t, w in zip(row.targets[4:], row.weights[4:]) if not w)  # behind the question
    plain = build_row([1, 2], [[5, 6]], [1.0], None, SPECIAL, question_weight=0.3)
    assert plain.tokens == [1, 2, 5, 6] and plain.targets == [2, 5, 6, 13]
    assert plain.weights == [0.3, 1.0, 1.0, 1.0]


def test_a_readout_of_weight_zero_is_left_out_and_moves_nothing():
    row, whole = some_row(weights=(0.0, 1.0, 0.0)), some_row()
    assert row.tokens == [1, 2, 3, 4, 10, 11, 11, 12, 10, 11, 11, 12, 7, 10, 11, 11, 12]
    kept = [i for i, (kind, block) in enumerate(zip(whole.kind, whole.block)) if kind != 'readout' or block == 2]
    assert row.positions == [whole.positions[i] for i in kept] and row.block == [whole.block[i] for i in kept]


def test_weights_of_both_stages_by_hand():
    # T = 4, half way: read-outs fade after 1/4, 2/4, 3/4 and 4/4 of the stage
    assert rim.stage1_weights(4, 0.5, 'relative') == pytest.approx([0, 0, 1 / 3, 1 / 2])
    assert rim.stage1_weights(4, 0.125, 'relative') == pytest.approx([1 / 2, 3 / 4, 5 / 6, 7 / 8])
    assert rim.stage1_weights(2, 0.0, 'relative') == [1, 1] and rim.stage1_weights(2, 1.0, 'relative') == [0, 0]
    assert rim.stage1_weights(3, 0.25, 'uniform') == [0.75] * 3 and rim.stage1_weights(3, 0.9, 'none') == [1] * 3
    assert rim.stage2_weights(3) == pytest.approx([1 / 6, 2 / 6, 3 / 6])
    assert sum(rim.stage2_weights(8)) == pytest.approx(1)


# --- one pass ---

@torch.no_grad()
@pytest.mark.parametrize('n_mem', [1, 2, 3])
def test_one_pass_equals_a_sequence_per_readout(n_mem):
    model, row = tiny(), some_row(n_mem)
    idx, _, _, positions, read_by = tensors(row)
    logits = model(idx, positions=positions, read_by=read_by)[0][0]
    for k, tokens in enumerate([[5, 6], [7], [8, 9, 5]], 1):
        own = [i for i, (kind, block) in enumerate(zip(row.kind, row.block))
               if block <= k and (kind != 'readout' or block == k)]
        alone = reference.readout_logits(model, [1, 2, 3, 4], k, tokens, n_mem)
        assert (alone - logits[own]).abs().max() < 1e-9


def test_readouts_see_neither_each_other_nor_are_they_seen():
    model, row = tiny(), some_row()
    idx, _, _, positions, read_by = tensors(row)
    before = model.trunk(idx, positions, rim.memory_mask(read_by))[0]
    changed = [i for i, (kind, block) in enumerate(zip(row.kind, row.block)) if kind == 'readout' and block == 2]
    idx[0, changed] = 9
    after = model.trunk(idx, positions, rim.memory_mask(read_by))[0]
    same = [i for i in range(len(row.tokens)) if i not in changed]
    assert torch.equal(before[same], after[same])
    assert (before[changed] - after[changed]).abs().min(1).values.max() > 1e-6


@pytest.mark.parametrize('k', [1, 2, 3])
def test_gradients_reach_a_readouts_blocks_and_no_later_one(k):
    model, row = tiny(), some_row()
    idx, targets, _, positions, read_by = tensors(row)
    x = model.wte(idx).detach().requires_grad_()
    hidden = x
    for block in model.layers:
        hidden = block(hidden, model.rope(positions), rim.memory_mask(read_by))
    own = [i for i, kind in enumerate(row.kind) if row.targets[i] >= 0 and row.block[i] == k]
    F.cross_entropy(model.logits(hidden)[0, own], targets[0, own]).backward()
    size = x.grad[0].abs().sum(1)
    for i, (kind, block) in enumerate(zip(row.kind, row.block)):
        reached = block <= k and (kind != 'readout' or block == k)
        assert (size[i] > 1e-12) == reached, (i, kind, block)


def test_a_batch_is_the_mean_of_its_rows_whatever_the_padding(dataset):
    for kind in KINDS:
        source = batches(dataset, kind)
        model = tiny(kind, vocab_size=source.config.vocab_size)
        stage = source.config.stages(4, 1e-3, 1)[0]
        whole = model(*source.train_batch(stage, 1, [0, 1, 2, 3]))[1]
        single = torch.stack([model(*source.train_batch(stage, 1, [i]))[1] for i in range(4)])
        assert whole.item() == pytest.approx(single.mean().item(), abs=1e-7), kind  # weights are float32


# --- the baselines ---

def test_without_blocks_it_is_the_plain_gpt():
    torch.manual_seed(1)
    model = tiny('cot')
    torch.manual_seed(1)
    gpt = GPT(GPTConfig(vocab_size=V, block_size=64, n_layer=3, n_head=2, n_embd=16)).double()
    idx, targets = torch.randint(V, (2, 9)), torch.randint(V, (2, 9))
    assert torch.equal(model(idx)[0], gpt(idx)[0])
    weights = torch.full((18,), 1 / 9, dtype=torch.double)
    loss = model(idx, targets.flatten(), weights, torch.arange(18))[1]
    assert loss.item() == pytest.approx(gpt(idx, targets)[1].item(), abs=1e-12)


def test_coconut_feeds_hidden_states_back_and_gradients_through_all_passes():
    model = tiny('coconut')
    row = build_row([1, 2, 3], [[5, 6]], [1.0], 2, SPECIAL)
    idx, targets, weights, positions, read_by = tensors(row)
    logits = model(idx, positions=positions, read_by=read_by)[0][0]
    x, rope = model.wte(idx), model.rope(positions)

    def run(x):
        for block in model.layers:
            x = block(x, rope)
        return x
    # <b> is column 3; each thought is the final state of the column before, reread from the start
    for column in (4, 5):
        x = torch.cat((x[:, :column], model.ln_f(run(x))[:, column - 1:column], x[:, column + 1:]), dim=1)
    assert (model.logits(run(x))[0] - logits).abs().max() < 1e-9
    # the question reaches the loss through the thoughts alone if the answer can't see it
    mask = rim.memory_mask(read_by)
    mask[:, :, 6:, :4] = False
    from_wte = []
    for detach in (False, True):
        model.zero_grad()
        cache = [rim.KVCache() for _ in model.layers]
        x = model.trunk(idx, positions, mask, cache=cache)
        loss = F.cross_entropy(model.logits(x.detach() if detach else x)[0][targets[0] >= 0],
                               targets[targets >= 0])
        loss.backward()
        from_wte.append(model.wte.weight.grad[1:4].abs().sum().item())
    assert from_wte[0] > 1.1 * from_wte[1]


def test_coconut_stages_replace_steps_by_thoughts(dataset):
    source = batches(dataset, 'coconut', n_blocks=3, n_mem=2)
    assert source.config.stages(9, 1e-3, 1) == [Stage(f'stage{j}', 3 * (j - 1), 3, 1e-3, 0.0) for j in (1, 2, 3)]
    steps = [[1], [2], [3], [4], [5]]
    both = [rows_at(source, it, [7, 7], steps, [6], 9) for it in (0, 2, 3, 8)]
    rows = [row for row, _ in both]
    nl = source.data.newline[0]
    assert [row.tokens.count(source.special.mem) for row in rows] == [2, 2, 4, 6]
    written = [2, nl, 3, nl, 4, nl, 5, nl, 6]
    assert [readouts_of(row) for row in rows] == [written, written, written[2:], [6]]
    # validation is that of the answer in every stage, after all thoughts, as it is asked
    assert [val for _, val in both] == [rows[-1]] * 4


def test_rows_of_each_stage(dataset):
    record = [7, 7], [[1], [2, 2], [3]], [4]
    source = batches(dataset)
    row, val = rows_at(source, 0, *record)
    assert readouts_of(row) == [2, 2, 3, 4] and max(row.block) == 3
    late, _ = rows_at(source, 2, *record)  # half of stage 1: the first read-out of three has faded
    assert readouts_of(late) == [3, 4] and max(late.block) == 3
    assert [w for w in late.weights if w] == pytest.approx([1 / 4] * 2 + [1 / 2] * 2)
    second, second_val = rows_at(source, 4, *record)
    assert readouts_of(second) == [4] * 3
    assert [w for w in second.weights if w] == pytest.approx([1 / 6] * 2 + [2 / 6] * 2 + [3 / 6] * 2)
    assert all(readouts_of(v) == [4] and max(v.block) == 3 and [w for w in v.weights if w] == [1, 1]
               for v in (val, second_val))
    uniform, val = rows_at(batches(dataset, anneal='uniform', train_question=True), 2, *record)
    assert [w for w in uniform.weights if w] == [1] + [0.5] * 7 and [w for w in val.weights if w] == [1, 1]
    for kind, expected in [('pause', [4] * 3), ('sft', [4]), ('cot', [1, 0, 2, 2, 0, 3, 0, 4])]:
        row, _ = rows_at(batches(dataset, kind), 0, *record)
        assert readouts_of(row) == expected
    assert source.data.newline == [0]


# --- training ---

@pytest.mark.parametrize('kind', ['rim', 'coconut', 'sft'])
def test_accumulation_changes_nothing(rim_run, kind):
    no_dropout = {} if kind == 'coconut' else dict(stage2_dropout=0)
    runs = [rim_run(f'run{a}', kind, batch_size=4 // a, grad_accum=a, **no_dropout) for a in (1, 2, 4)]
    for other in runs[1:]:
        for name, weight in runs[0]['model'].items():
            assert (weight - other['model'][name]).abs().max() < 1e-4, name


def test_a_finished_run_without_stage_2_goes_on(rim_run):
    rim_run(stage2_iters=0)
    assert rim_run(init_from='resume', stage2_iters=0)['step'] == 3
    assert rim_run(init_from='resume', stage2_iters=0, max_iters=4)['stage'] == ['stage1', 0]


@pytest.mark.parametrize('stop', [1, 2, 4], ids=['in stage 1', 'between the stages', 'in stage 2'])
def test_resume_is_exact_in_either_stage(rim_run, tmp_path, stop):
    settings = dict(dropout=0.1, stage2_dropout=0.3, stage2_learning_rate=1e-3)
    whole = rim_run('whole', **settings)
    with interrupted(stop):
        half = rim_run('parts', **settings)
    assert half['step'] == stop + 1
    # stage 2 starts with an optimizer that knows nothing
    assert bool(half['optimizer']['state']) == (stop != 2)
    if stop == 2:
        stage1 = load_checkpoint(str(tmp_path / 'parts' / 'stage1.pt'))
        assert stage1['step'] == 3 and 'optimizer' not in stage1 and stage1['stage'] == ['stage1', 0]
    resumed = rim_run('parts', init_from='resume', **settings)
    assert resumed['step'] == 6 and resumed['best_val_loss'] == whole['best_val_loss']
    for name, weight in whole['model'].items():
        assert torch.equal(weight, resumed['model'][name]), name
    for one, two in zip(whole['optimizer']['state'].values(), resumed['optimizer']['state'].values(), strict=True):
        assert one['step'] == 3 and all(torch.equal(one[key], two[key]) for key in one)


def test_each_stage_has_its_own_schedule_dropout_and_length(rim_run, dataset, tmp_path, monkeypatch):
    seen = []
    set_dropout = RiM.set_dropout
    monkeypatch.setattr(RiM, 'set_dropout', lambda self, p: (seen.append(p), set_dropout(self, p)))
    rim_run(learning_rate=1e-2, min_lr=1e-2, stage2_learning_rate=2e-3, dropout=0.1, stage2_dropout=0.4,
            warmup_iters=2)
    rates = [entry['lr'] for entry in read_log(tmp_path / 'run') if 'lr' in entry]
    assert rates == pytest.approx([5e-3, 1e-2, 1e-2, 1e-3, 2e-3, 2e-3]) and seen == [0.1, 0.4]
    model = tiny(dropout=0.1)
    set_dropout(model, 0.4)
    assert model.layers[0].attn.resid_dropout.p == model.drop.p == 0.4
    source = batches(dataset, epochs=2, stage2_epochs=0.5)  # 50 records, 4 a step: 13 steps an epoch
    assert [stage.iters for stage in source.config.stages(1, 1e-3, source.epoch_iters)] == [26, 6]


def test_an_epoch_takes_every_record_once_and_wastes_little():
    rng = records.np.random.default_rng(0)
    lengths = rng.integers(10, 100, 1000)
    order = records.epoch_order(lengths, 16, records.np.random.default_rng(1))
    assert order.shape == (63, 16) and set(order.ravel()) == set(range(1000))
    assert (order == records.epoch_order(lengths, 16, records.np.random.default_rng(1))).all()
    shuffled = rng.permutation(1008).reshape(63, 16) % 1000
    padded, careless = (sum(16 * lengths[batch].max() for batch in o) / lengths[o].sum()
                        for o in (order, shuffled))
    assert padded < 1.1 < 1.5 < careless
    firsts = lengths[order].mean(1)
    assert abs(records.np.corrcoef(firsts, range(63))[0, 1]) < 0.3  # batches do not come sorted


@pytest.mark.parametrize('kind', KINDS)
def test_rows_of_about_as_many_tokens_go_together(dataset, kind):
    source = batches(dataset, kind)
    stage = source.config.stages(99, 1e-3, 1)[0]
    steps = [source.train_rows(stage, it, [0, 1, 2, 3]) for it in range(source.epoch_iters)]
    tokens = torch.tensor([[len(row.tokens) for row in rows] for rows in steps])
    counted = [source.epochs.lengths[source.epochs.numbers(it, [0, 1, 2, 3])].tolist()
               for it in range(source.epoch_iters)]
    assert tokens.tolist() == counted
    assert (tokens.amax(1) - tokens.amin(1)).float().mean() < 0.5 * (tokens.max() - tokens.min())


def test_epochs_are_never_rounded_to_another_setting(dataset):
    source = batches(dataset, epochs=0.01, stage2_epochs=2.0)
    assert [stage.iters for stage in source.config.stages(99, 1e-3, source.epoch_iters)] == [1, 26]


def test_settings_of_a_run_are_not_taken_over(rim_run, tmp_path):
    rim_run('cot', 'cot', epochs=0.2, n_mem=3, rope_base=300)
    tuned = rim_run('tuned', init_from=str(tmp_path / 'cot' / 'ckpt.pt'))
    config = tuned['model_config']
    assert (config['train_on'], config['epochs'], config['n_mem'], tuned['step']) == ('rim', 0.0, 2, 6)
    assert config['rope_base'] == 300  # the weights mean nothing without it


def test_a_plain_gpt_can_be_the_start_and_the_vocabulary_grows(run, dataset, tmp_path, capsys):
    folder = write_text(tmp_path / 'plain', '1+2=3\n4+5=9?678+0\n' * 40)
    text, padding = 14, 9
    assert data.read_meta(folder)['tokenizer']['chars'] == data.read_meta(dataset)['tokenizer']['chars']
    for name, shape in [('gpt', {}), ('padded', dict(vocab_size=text + padding))]:
        old = run(name, dataset=folder, block_size=48, **shape)['model']['wte.weight']
        new = run('rim_' + name, method='rim', block_size=48, n_blocks=2, max_iters=0, stage2_iters=0,
                  init_from=str(tmp_path / name / 'ckpt.pt'))['model']['wte.weight']
        assert len(old) == text + bool(shape) * padding and len(new) == text + 4
        assert torch.equal(new[:-4], old[:text])
        assert not shape or not torch.equal(new[-4:], old[text:text + 4])


@pytest.mark.parametrize('tied', [True, False])
def test_lora_trains_adapters_and_new_embeddings_only(rim_run, tmp_path, tied):
    rim_run('start', 'cot', tie_weights=tied)
    start = str(tmp_path / 'start' / 'ckpt.pt')
    tuned = rim_run('lora', init_from=start, lora_rank=2, learning_rate=1e-2, weight_decay=0.5)
    before = load_checkpoint(start)['model']
    for name, weight in before.items():
        assert torch.equal(weight, tuned['model'][name]), name
    for name, own in [('wte.weight', 'special_in'), ('lm_head.weight', 'special_out')]:
        assert (before[name][-4:] != tuned['model'][own]).any(1).all()
    assert torch.equal(tuned['model']['special_in'], tuned['model']['special_out']) == tied
    assert all(p.abs().sum() > 0 for name, p in tuned['model'].items() if 'lora_b' in name)
    model = train.build_model(tuned).double()
    idx = torch.randint(10, (2, 7))
    apart = model.train()(idx)[0]
    assert (model.eval()(idx)[0] - apart).abs().max() < 1e-12


def test_lora_follows_its_weights_wherever_they_change():
    model, other, idx = tiny(lora_rank=2).eval(), tiny(lora_rank=2), torch.randint(10, (2, 7))
    for p in other.parameters():
        torch.nn.init.normal_(p, std=0.2)
    model(idx)
    changes = [lambda: model.load_state_dict(other.state_dict()), lambda: model.float(), lambda: model.double(),
               lambda: model.layers[0].mlp.c_fc.lora_b.data.mul_(2), lambda: other.eval()]
    for change in changes:
        change()
        want = model.train()(idx)[0].detach()
        for _ in range(2):
            torch.testing.assert_close(model.eval()(idx)[0], want)
    before = model(idx)[0]
    model.layers[1].attn.c_proj.weight.data.mul_(3)  # no .eval() in between
    assert (model(idx)[0] - before).abs().max() > 1e-6
    model(idx)[0].sum().backward()
    assert model.layers[0].mlp.c_fc.lora_a.grad.abs().max() > 0  # in eval mode too


# --- inference ---

def answer_log_probs(model, logits):
    """Of the next token of an answer, from logits (V,): a memory block's tokens have no part in it."""
    return logits.index_fill(0, torch.tensor(model.special[:3]), -torch.inf).log_softmax(-1)


@pytest.mark.parametrize('K, M', [(3, 2), (5, 1), (1, 4)])
def test_cached_answers_equal_rereading_at_every_block_and_in_batches(K, M):
    model = tiny().eval()
    with torch.no_grad():
        model.wte.weight.mul_(8)  # away from uniform guesses, so that rows end at different lengths
        questions = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [2, 2]]
        read = model.answers(questions, 6, n_blocks=K, n_mem=M, every_block=True)
        assert len(read) == K
        for k, [(rows, log_p)] in enumerate(read, 1):
            for q, row, p in zip(questions, rows, log_p):
                slow, slow_p = reference.answer_by_rereading(model, q, k, M, 6)
                assert row == slow and p.item() == pytest.approx(slow_p, abs=1e-9)
        assert model.answers(questions, 6, n_blocks=K, n_mem=M)[0][0][0] == read[-1][0][0]


@pytest.mark.parametrize('learned_positions', [False, True])
@pytest.mark.parametrize('kind', ['rim', 'cot', 'coconut'])
def test_an_answer_is_as_long_beside_others_as_alone(kind, learned_positions):
    model = tiny(kind, block_size=24, learned_positions=learned_positions,
                 n_mem=1 if kind == 'coconut' else 2).eval()
    with torch.no_grad():
        model.wte.weight.mul_(8)
        model.wte.weight[-1] = 0  # <end> is never the likeliest
    questions = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 1, 2]]
    memory = dict(rim=12, cot=0, coconut=5)[kind]
    [[(rows, _)]] = model.answers(questions, max_new_tokens=99)
    assert [len(row) for row in rows] == [24 - memory - len(q) for q in questions]
    assert rows == [model.answers([q], max_new_tokens=99)[0][0][0][0] for q in questions]


@pytest.mark.parametrize('kind', KINDS)
def test_answers_are_short_unless_steps_are_written(kind):
    model = tiny(kind, tie_weights=False).eval()
    model.lm_head.weight.data.zero_()  # text and <end> are equally likely, and the first id is taken
    [[(rows, _)]] = model.answers([[1, 2]])
    assert len(rows[0]) == (62 if kind == 'cot' else 32)  # of 64


def test_coconut_and_plain_answers_equal_rereading():
    with torch.no_grad():
        model = tiny('coconut', n_mem=1).eval()
        model.wte.weight.mul_(8)
        questions = [[1, 2, 3], [4]]
        [[(rows, _)]] = model.answers(questions, max_new_tokens=5)
        for question, row in zip(questions, rows):
            out = []
            for _ in range(5):
                full = build_row(question, [out or [0]], [1.0], 3, model.special)
                n = len(question) + 5 + len(out)
                idx, _, _, positions, read_by = (t[:, :n] for t in tensors(full))
                logits = model(idx, positions=positions, read_by=read_by)[0][0, -1]
                token = answer_log_probs(model, logits).argmax().item()
                if token == model.special[3]:
                    break
                out.append(token)
            assert row == out
        for kind in ('sft', 'cot'):
            model = tiny(kind).eval()
            [[(rows, _)]] = model.answers(questions, max_new_tokens=5)
            assert rows == [reference.answer_by_rereading(model, q, 0, 2, 5)[0] for q in questions]


@pytest.mark.parametrize('kind', KINDS)
def test_a_memory_blocks_tokens_are_never_drawn(kind):
    model = tiny(kind, tie_weights=False)
    model.lm_head.weight.data.mul_(20)
    for sampling in (dict(temperature=0.0), dict(temperature=3.0), dict(temperature=1.0, top_k=13)):
        [samples] = model.answers([[1, 2], [3]] * 8, samples=4, max_new_tokens=6, **sampling)
        assert all(token < 10 for rows, _ in samples for row in rows for token in row)
        assert all(log_p.isfinite().all() for _, log_p in samples)


def test_the_probabilities_of_all_answers_sum_to_one():
    model = tiny(vocab_size=6)  # two text tokens
    [samples] = model.answers([[0, 1]], samples=400, temperature=1.0, max_new_tokens=2)
    found = {tuple(rows[0]): log_p.exp().item() for rows, log_p in samples}
    assert set(found) == {(), (0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)}
    assert sum(found.values()) == pytest.approx(1)


def test_samples_differ_and_share_one_prefill(monkeypatch):
    model, calls = tiny(), []
    prefill = model.prefill
    monkeypatch.setattr(model, 'prefill', lambda *a: (calls.append(a), prefill(*a))[1])
    [samples] = model.answers([[1, 2]], samples=8, temperature=1.0, max_new_tokens=4)
    assert len(samples) == 8 and len({tuple(rows[0]) for rows, _ in samples}) > 1 and len(calls) == 1


def test_score_is_per_block_and_compares_numbers(dataset):
    tokenizer = data.Tokenizer(data.read_meta(dataset)['tokenizer'])
    problems = [records.Record('1?', ['1'], '3.0', ''), records.Record('12?', ['1'], '$1,234', '')]
    # question -> sample -> block
    said = {'1?\n': [['\n\n', '3\n\n'], ['3', '3']], '12?\n': [['1234', '4'], ['5', '1+1=2\n1234']]}

    def ask(samples):
        def ask(questions):
            texts = [said[tokenizer.decode(q)] for q in questions]
            return [[([tokenizer.encode(t[s][k]) for t in texts], None) for s in range(samples)] for k in range(2)]
        return ask
    assert records.score(ask(1), tokenizer, problems).tolist() == [[False, True], [True, False]]
    assert records.score(ask(2), tokenizer, problems).tolist() == [[True, True], [True, True]]


def test_time_to_the_answers_first_token_counts_written_steps(dataset, monkeypatch):
    tokenizer = data.Tokenizer(data.read_meta(dataset)['tokenizer'])
    newline, end = tokenizer.encode('\n')[0], tokenizer.special['<end>']
    model = tiny()
    monkeypatch.setattr(model, 'prefill', lambda questions, n_mem: (None, None, ['the end']))
    monkeypatch.setattr(model, 'read', lambda *_: ((torch.tensor([token]), 0.0, True) for token in said))
    # a second per token: which one begins the answer
    for said, first in [((3, newline, 4, newline, 5, 6, end), 5), ((3, newline, 5, 6, newline, newline, end), 3),
                        ((5, end), 1), ((newline, newline), 1), ((end,), 1)]:
        ticks = iter(range(100))
        monkeypatch.setattr(answering.time, 'perf_counter', lambda: next(ticks))
        assert answering.time_answer(model, tokenizer, '1+1?', 0) == (first, len(said))


def test_the_report_shows_each_block_with_its_probability(rim_run, capsys):
    checkpoint = rim_run(report=True)
    out = capsys.readouterr().out
    assert 'accuracy on 8 validation records: ' in out and 'by block: 1: ' in out and 'right: ' in out
    assert re.findall(r'^(block \d): .*  \(probability 0\.\d{3}\)$', out, re.MULTILINE) == ['block 1', 'block 2']
    tokenizer = data.Tokenizer(checkpoint['meta']['tokenizer'])
    line_break = tokenizer.encode('\n')
    read = [[([line_break * 30], torch.zeros(1))], [([line_break + [5] + line_break], torch.zeros(1))]]
    assert records.blocks_text(read, tokenizer) == ('block 1:   (probability 1.000)\n'
                                                    f'block 2: {tokenizer.decode([5])}  (probability 1.000)')
    assert records.blocks_text(read[1:], tokenizer) == f'answer 1: {tokenizer.decode([5])}  (probability 1.000)'


@pytest.mark.parametrize('eval_rows', [3, 50])
def test_the_final_accuracy_is_that_of_eval_rows_records(rim_run, capsys, eval_rows):
    rim_run(eval_rows=eval_rows, max_iters=1, stage2_iters=0, report=True)
    assert f'accuracy on {min(10, eval_rows)} validation records: ' in capsys.readouterr().out


def test_the_line_that_ends_a_run_is_a_command_that_works(rim_run, tmp_path, capsys):
    rim_run("it's a run", max_iters=1, stage2_iters=0)
    script, *arguments = shlex.split(re.search('python (.*) samples from it', capsys.readouterr().out)[1])
    assert os.path.samefile(script, sample.__file__) and len(arguments) == 2
    sample.main(arguments)
    said = capsys.readouterr()
    assert said.err.startswith(f"{tmp_path}/it's a run/ckpt.pt: rim, step 1, best validation loss ")
    assert said.err.endswith(' nats per record\n') and said.out


@pytest.mark.parametrize('kind', ['rim', 'sft', 'cot', 'coconut'])
def test_sampling_and_evaluation(rim_run, dataset, tmp_path, capsys, kind):
    length = 48 if kind == 'rim' else 28  # the longest row just fits: an untrained model writes until it is full
    checkpoint, folder = rim_run(kind=kind, max_iters=6, block_size=length), str(tmp_path / 'run')
    capsys.readouterr()
    sample.main([f'--out_dir={folder}', '--prompt=1+2?', '--num_samples=2'])
    one, two = capsys.readouterr().out.splitlines()[-2:] if kind != 'cot' else ('', '')
    assert one == two  # the likeliest answer, without a temperature
    sample.main([f'--out_dir={folder}', '--prompt=1+2?', '--show'])
    shown = capsys.readouterr().out.splitlines()
    assert shown[-1].startswith('block 2: ' if kind == 'rim' else 'answer 1: ' if kind != 'cot' else shown[-1])
    assert kind == 'cot' or shown[-1].split(': ')[1].split('  (probability 0.')[0] == one
    shutil.copy(os.path.join(folder, 'ckpt.pt'), os.path.join(folder, 'step_6.pt'))
    sample.main([f'--out_dir={folder}', '--prompt=1+2?', '--over_training'])
    step, *blocks = capsys.readouterr().out.splitlines()
    assert step == f'step {checkpoint["step"]}' and blocks and blocks == shown[-len(blocks):]
    sample.main([f'--out_dir={folder}', '--prompt=1+1?'])
    asked = capsys.readouterr()
    sample.main([f'--out_dir={folder}'])  # one of the data's questions
    assert capsys.readouterr() == (asked.out, asked.err + 'prompt: 1+1?\n')
    evaluation.main([f'--out_dir={folder}', '--eval_rows=10', '--batch_size=4', '--device=cpu'])
    with open(os.path.join(folder, 'eval.json'), encoding='utf-8') as f:
        numbers = json.load(f)
    model, tokenizer = train.build_model(checkpoint), data.Tokenizer(checkpoint['meta']['tokenizer'])
    right = []
    for record in records.read_records(os.path.join(dataset, 'test.jsonl')):
        [[(rows, _)]] = model.answers([records.encode_question(tokenizer, record.question)])
        right.append(tokenizer.decode(rows[0]).strip().split('\n')[-1] == record.answer)
    assert re.search('^loss  .* nats per record$', capsys.readouterr().out, re.MULTILINE)
    assert numbers['unit of loss'] == 'nats per record'
    assert numbers['questions'] == 10 and numbers['accuracy'] == sum(right) / 10
    assert sum(row['questions'] for row in numbers['accuracy by steps']) == 10
    [time] = numbers['times']
    assert time['trained on'] == kind and 0 < time['ms to the first token'] <= time['ms to the answer']
    assert ('block states' in numbers) == (kind == 'rim')
    expected = [0.0, 0.0] if kind == 'rim' else [0.0]  # by reading each answer as a row of its own
    for record in records.read_records(os.path.join(dataset, 'test.jsonl')):
        question = records.encode_question(tokenizer, record.question)
        block = rim.memory_block(model.special, 2)
        steps = tokenizer.encode(''.join(step + '\n' for step in record.steps)) if kind == 'cot' else []
        answer = [*tokenizer.encode(record.answer), model.special.end]
        for k in range(len(expected)):
            before = question + (k + 1) * block * (kind == 'rim') + steps
            if kind == 'coconut':
                before = question + [model.special.begin] + [model.special.mem] * 4 + [model.special.close]
            log_p = model(torch.tensor([before + answer]))[0][0, len(before) - 1:-1].log_softmax(-1)
            expected[k] -= log_p[range(len(answer)), answer].sum().item() / 10
    table = numbers['-log P(right answer)']
    assert [row['nats'] for row in table] == pytest.approx(expected, rel=1e-4)
    assert all(0 < row['standard error'] < row['nats'] for row in table)
    if kind == 'rim':  # K from 1 to 2K; K itself is the model's own
        assert [row['blocks'] for row in numbers['accuracy by blocks']] == [1, 2, 3, 4]
        assert numbers['accuracy by blocks'][1]['accuracy'] == numbers['accuracy'] <= numbers['any block']


def measured_on(source, n_rows):
    return measures.On([], [], source, {}, n_rows, 0, 5)


def test_numbers_of_answers(dataset, monkeypatch, capsys):
    source, on = batches(dataset, n_blocks=2), measured_on(batches(dataset, n_blocks=2), 10)
    right, drawn, calls = torch.rand(10, 4) > 0.5, torch.rand(10, 1) > 0.5, []

    def score(ask, tokenizer, asked, batch_size):
        calls.append((ask.keywords, batch_size))
        ask([records.encode_question(tokenizer, record.question) for record in asked[:3]])
        return (drawn if 'samples' in ask.keywords else right[:, :ask.keywords['n_blocks']]).numpy()
    monkeypatch.setattr(records, 'score', score)
    got = answering.answers(tiny(vocab_size=source.config.vocab_size, n_blocks=2), on)
    assert calls == [(dict(n_mem=0, n_blocks=4, every_block=True), 5),
                     (dict(n_mem=0, samples=8, temperature=1.0), 5)]
    n_steps = [len(record.steps) for record in source.data.test_records(10)]
    assert got['accuracy'] == pytest.approx(right[:, 1].double().mean().item())
    any_block = right[:, :2].any(1).double()
    assert got['any block'] == pytest.approx(any_block.mean().item())
    assert got['error of any block'] == pytest.approx(any_block.std(correction=0).item() / 10 ** 0.5)
    assert got['pass@8 at temperature 1'] == pytest.approx(drawn.double().mean().item())
    assert got['block of the last step'] == sum(right[i, n - 1].item() for i, n in enumerate(n_steps)) / 10
    by_steps = {row['steps']: row['accuracy'] for row in got['accuracy by steps']}
    assert by_steps[2] == pytest.approx(right[[n == 2 for n in n_steps], 1].double().mean().item())
    own = {row['steps']: row['at the block of the last step'] for row in got['accuracy by steps']}
    assert own[3] == pytest.approx(right[[n == 3 for n in n_steps], 2].double().mean().item())
    assert [row['accuracy'] for row in got['accuracy by blocks']] == pytest.approx(right.double().mean(0).tolist())
    longest = max(len(record.question) + 1 for record in source.data.test_records(10))
    # 8 for the answer
    short = tiny(vocab_size=source.config.vocab_size, n_blocks=2, block_size=longest + 3 * 4 + 8)
    assert len(answering.answers(short, on)['accuracy by blocks']) == calls[2][0]['n_blocks'] == 3
    assert f'block_size = {longest + 20} has room for 3 blocks, not for 4' in capsys.readouterr().out


def test_of_each_block_is_told_how_sure_it_is_and_whether_it_agrees_with_the_last(dataset):
    torch.manual_seed(5)
    source = batches(dataset, n_blocks=2)
    model = tiny(vocab_size=source.config.vocab_size, n_blocks=2, n_layer=1, block_size=48)
    for p in model.parameters():
        p.data *= 6  # so that blocks disagree
    asked = source.data.test_records(10)
    got = answering.answers(model, measured_on(source, 10))['accuracy by blocks']
    said, sure = [], []  # by block and question, each asked alone
    for k in range(1, 5):
        each = [model.answers([records.encode_question(source.tokenizer, record.question)], n_blocks=k)[0][0]
                for record in asked]
        said.append([rows[0] for rows, _ in each])
        sure.append([log_p.exp().item() for _, log_p in each])
    for row, answers, p in zip(got, said, sure):
        same = torch.tensor([a == b for a, b in zip(answers, said[1])]).double()
        p = torch.tensor(p).double()
        for name, values in [('P(its answer)', p), ('agrees with 2', same)]:
            assert row[name] == pytest.approx(values.mean().item(), rel=1e-6)
            assert row[f'error of {name}'] == pytest.approx(values.std(correction=0).item() / 10 ** 0.5, abs=1e-9)
    assert got[1]['agrees with 2'] == 1 and min(row['agrees with 2'] for row in got) < 1


FOREIGN = [  # as published: GSM-Hard, SVAMP, ASDiv, MAWPS, GSM8K
    ({'input': '1+1?', 'code': 'x', 'target': 2.0}, '1+1?', '2'),
    ({'ID': 'c-1', 'Body': '1+2', 'Question': '+1?', 'Equation': '( 1.0 + 3.0 )', 'Answer': 4.0}, '1+2 +1?', '4'),
    ({'body': '', 'question': '2+1?', 'answer': '3 (apples)', 'formula': '2+1=3'}, '2+1?', '3'),
    ({'iIndex': 1, 'sQuestion': '3+4?', 'lEquations': ['X=3+4'], 'lSolutions': [0.5]}, '3+4?', '0.5'),
    ({'question': '4+4?', 'answer': 'It is\n4+4=<<4+4=8>>8\n#### 1,008'}, '4+4?', '1008')]


@pytest.mark.parametrize('form', ['list', 'lines'])
def test_other_makers_problems_become_records(tmp_path, capsys, form):
    broken = '2:3', 'yes', None, True, [1, 2], '', '4 (red); 3 (blue)'
    objects = [entry for entry, *_ in FOREIGN] + [{'question': 'x?', 'answer': wrong} for wrong in broken]
    path = tmp_path / 'set.json'
    path.write_text(json.dumps(objects) if form == 'list' else '\n'.join(map(json.dumps, objects)), 'utf-8')
    found = read_test_set(str(path))
    assert [[record.question, record.answer] for record in found] == [expected for _, *expected in FOREIGN]
    assert all(record.steps == [] for record in found)
    left_out = '7 of 12 problems are left out, since their answer is not a number'
    assert capsys.readouterr().out == f'{path}: {left_out}\n'
    assert found[1].where == f'{path} {"entry" if form == "list" else "line"} 2'


@pytest.mark.parametrize('content, message', [
    ('[{"question": "a"}]', 'entry 1: a problem needs a text as question or input or squestion or problem and a'),
    ('{"answer": 3}', 'line 1: a problem needs a text'), ('{"input": "", "target": 3}', 'line 1: a problem needs'),
    ('[3]', "entry 1 is '3', not an object"), ('[', 'is not JSON'), ('{', 'line 1 is not JSON'),
    ('', 'holds no problem whose answer is a number'), ('[{"input": "a", "target": "b"}]', 'holds no problem')])
def test_a_test_set_that_cannot_be_read_is_refused(tmp_path, content, message):
    (tmp_path / 'set.json').write_text(content, 'utf-8')
    with pytest.raises(UserError, match=re.escape(message)):
        read_test_set(str(tmp_path / 'set.json'))


@pytest.mark.parametrize('kind', ['rim', 'cot'])
def test_a_model_is_asked_another_test_set(rim_run, tmp_path, kind):
    checkpoint, folder = rim_run(kind=kind, max_iters=6), str(tmp_path / 'run')
    asked = [{'input': f'{a}+2?', 'target': a + 2.0} for a in range(1, 6)]
    path = tmp_path / 'svamp.json'
    path.write_text(json.dumps(asked), 'utf-8')
    evaluation.main([f'--out_dir={folder}', f'--test_set={path}', '--eval_rows=4', '--device=cpu'])
    with open(os.path.join(folder, 'eval_svamp.json'), encoding='utf-8') as f:
        numbers = json.load(f)
    model, tokenizer = train.build_model(checkpoint), data.Tokenizer(checkpoint['meta']['tokenizer'])
    right = 0
    for entry in asked[:4]:
        [[(rows, _)]] = model.answers([records.encode_question(tokenizer, entry['input'])])
        right += tokenizer.decode(rows[0]).strip().split('\n')[-1] == str(int(entry['target']))
    assert numbers['questions'] == 4 and numbers['accuracy'] == right / 4 and numbers['test set'] == str(path)
    assert [row['steps'] for row in numbers['accuracy by steps']] == [0]
    assert 'block of the last step' not in numbers
    assert ('-log P(right answer)' in numbers) == (kind == 'rim')  # what the other one would write is not known


def test_test_questions_that_do_not_fit_are_left_out_and_counted(dataset, capsys, monkeypatch):
    source, read = batches(dataset, 'sft').data, records.read_records
    monkeypatch.setattr(records, 'read_records', lambda *a: [records.Record('12+1?', [], '13', ''), *read(*a)])
    source.config.block_size = 7  # '12+1?' and its line break leave room for half its answer
    assert len(source.test_records(10)) == 9 and '1 of 10 test records are left out' in capsys.readouterr().out
    assert len(source.test_records(10)) == 9 and not capsys.readouterr().out  # said once
    source.config.block_size = 8
    assert len(source.test_records(10)) == 10
    source.config.block_size = 5  # '1+1?' and its line break fill it
    with pytest.raises(UserError, match='no test record is left; raise block_size'):
        source.test_records(10)
    monkeypatch.setattr(records, 'read_records', lambda *a: [records.Record('1+1?', [], 'many', 'here')])
    with pytest.raises(UserError, match="here: answer = 'many' is not a number"):
        source.test_records(10)


def test_models_side_by_side(rim_run, dataset, tmp_path, monkeypatch):
    for kind in ('rim', 'sft', 'coconut'):
        rim_run(kind, kind, max_iters=6)
    other = str(tmp_path / 'sft'), str(tmp_path / 'coconut' / 'ckpt.pt')
    asked = []

    def time_answer(model, tokenizer, question, n_mem):
        asked.append((getattr(model.config, 'train_on', 'coconut'), question))
        return len(asked) * 1e-3, 0.1
    monkeypatch.setattr(answering, 'time_answer', time_answer)
    evaluation.main([f'--out_dir={tmp_path}/rim', f'--beside={",".join(other)}', '--eval_rows=3', '--device=cpu'])
    with open(tmp_path / 'rim' / 'eval.json', encoding='utf-8') as f:
        table = json.load(f)['times']
    assert [row['checkpoint'] for row in table] == [str(tmp_path / 'rim'), *other]
    assert [row['trained on'] for row in table] == ['rim', 'sft', 'coconut']
    # in turn, after a first question that does not count: 4, 7 and 10 milliseconds of 1, 4, 7, 10
    questions = [record.question for record in records.read_records(os.path.join(dataset, 'test.jsonl'))[:3]]
    assert asked == [(on, q) for q in [questions[0], *questions] for on in ('rim', 'sft', 'coconut')]
    assert [row['ms to the first token'] for row in table] == pytest.approx([7, 8, 9])


def test_one_question(rim_run, tmp_path):
    rim_run()
    evaluation.main([f'--out_dir={tmp_path}/run', '--eval_rows=1', '--device=cpu'])
    with open(tmp_path / 'run' / 'eval.json', encoding='utf-8') as f:
        assert json.load(f)['questions'] == 1


@torch.no_grad()
def test_block_states_in_the_plane_of_their_principal_components(dataset):
    model, source = tiny(vocab_size=batches(dataset).config.vocab_size).eval(), batches(dataset)
    got = answering.block_states(model, measured_on(source, 100))
    states = []  # of one question at a time
    for k in range(3):
        for record in source.data.test_records(100):
            states.append(model.prefill([records.encode_question(source.tokenizer, record.question)])[2][k][1][0])
    states = torch.stack(states) - torch.stack(states).mean(dim=0)
    values, axes = torch.linalg.eigh(states.T @ states)
    plane = torch.tensor([[point['x'], point['y']] for point in got['block states']])
    assert [point['block'] for point in got['block states']] == [1] * 10 + [2] * 10 + [3] * 10
    assert torch.allclose(plane.abs(), (states @ axes[:, [-1, -2]]).abs().float(), atol=1e-4)
    variance = (values[-2:].sum() / values.sum()).item()
    assert got['variance in the two components'] == pytest.approx(variance, rel=1e-4)


def test_the_first_batch_as_a_table(rim_run, tmp_path, capsys):
    with pytest.raises(UserError, match='ckpt.pt is not there'):  # nothing is trained or written
        rim_run(show_batch=True)
    out = capsys.readouterr().out
    assert "</b>" in out and 'memory' in out and 'readout' in out and '<end>' in out


def test_records_with_too_many_steps_or_tokens_are_left_out_and_counted(dataset, capsys):
    assert len(batches(dataset, max_steps=2).data.records['train']) == 33
    out = capsys.readouterr().out
    assert '17 of 50 train records are left out, they have more steps than max_steps = 2' in out
    assert batches(dataset, block_size=18).epoch_iters < 13
    assert 'do not fit into block_size = 18' in capsys.readouterr().out
    batches(dataset, max_steps=2, block_size=18)  # both reasons count from the same number
    assert capsys.readouterr().out.count('of 50 train records are left out') == 2
