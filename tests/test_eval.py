"""eval.py: its numbers against the same ones computed in another way."""
import importlib.util
import io
import json
import math
import os
import re
import sys
from types import SimpleNamespace

import pytest
import torch

import bench
import data
import eval as evaluation
import model as core
import reference
import sample
from config import UserError, measures
from config.checkpoint import load_checkpoint, save_checkpoint
from cyb import CYB, CYBConfig
from data.text import TextBatches, write_text_dataset
from thoughtbubbles import Thoughtbubbles, ThoughtbubblesConfig
from train import build_model


@pytest.fixture
def numbers(run, dataset, tmp_path):
    """numbers(**settings of the run) trains a tiny model, evaluates it; returns (numbers, model, idx, targets)."""
    def numbers(**settings):
        with torch.enable_grad():
            run('run', **{'max_iters': 30, 'eval_interval': 30, 'learning_rate': 0.01, **settings})
        evaluation.main([f'--out_dir={tmp_path}/run', '--device=cpu', '--eval_rows=8', '--slow_rows=3',
                         '--batch_size=3'])
        model = build_model(load_checkpoint(f'{tmp_path}/run/ckpt.pt')).eval()
        batches = TextBatches(dataset, data.read_meta(dataset), model.config, 0, 8, 4)
        rows = batches.val_batch(None, list(range(8)))
        with open(tmp_path / 'run' / 'eval.json') as f:
            return json.load(f), model, *rows
    return numbers


@pytest.mark.parametrize('settings', [
    dict(method='gpt'), dict(method='thoughtbubbles'), dict(method='cyb', gamma0=0.5),
    dict(method='cyb', objective='tbys', W=3), dict(method='cyb', W=1)], ids=str)
@torch.no_grad()
def test_loss_and_accuracy_are_those_of_the_predictions_and_are_written_down(numbers, settings, tmp_path, capsys):
    got, model, idx, targets = numbers(**settings)
    predictions = model(idx)[0].log_softmax(dim=-1)  # gamma0 is no part of them
    loss = -predictions.gather(2, targets[..., None]).mean().item()
    assert got['loss'] == pytest.approx(loss, rel=1e-4)
    assert got['perplexity'] == pytest.approx(math.exp(loss), rel=1e-4)
    assert got['accuracy'] == pytest.approx((predictions.argmax(dim=2) == targets).double().mean().item())
    assert got['method'] == settings['method'] and got['step'] == 30 and got['rows'] == 8
    said = capsys.readouterr()
    assert f'{got["loss"]:.4f} nats per token\n' in said.out and got['unit of loss'] == 'nats per token'
    assert said.err == f'{tmp_path}/run/ckpt.pt: {settings["method"]}, step 30, ' \
                       f'best validation loss {got["loss"]:.4f} nats per token\n'
    drawn = settings['method'] != 'gpt' and importlib.util.find_spec('matplotlib') is not None
    assert (tmp_path / 'run' / 'eval.png').exists() == drawn
    # in half precision, as on a GPU: the same within its rounding, no longer the same number
    evaluation.main([f'--out_dir={tmp_path}/run', '--device=cpu', '--eval_rows=8', '--slow_rows=1',
                     '--dtype=bfloat16'])
    half = json.loads((tmp_path / 'run' / 'eval.json').read_text())
    assert half['dtype'] == 'bfloat16'
    assert half['loss'] == pytest.approx(loss, rel=0.02) and half['loss'] != got['loss']


@torch.no_grad()
def test_prefixes_are_scored_one_by_one(numbers):
    got, model, idx, targets = numbers(method='thoughtbubbles', kappa=1.5)
    nll = [-model(row[None, :t + 1])[0][0, -1].log_softmax(0)[target].item()
           for row, answers in zip(idx[:3], targets[:3]) for t, target in enumerate(answers)]
    assert got['loss by prefixes'] == pytest.approx(sum(nll) / len(nll), rel=1e-5)
    assert got['loss in one pass'] == pytest.approx(model(idx[:3], targets[:3])[1].item(), rel=1e-5)
    with torch.no_grad():
        cache = []
        streamed = [model.next_logits(idx[:3, t:t + 1], None, cache).gather(1, targets[:3, t:t + 1]) for t in range(16)]
    assert got['loss by streaming'] == pytest.approx(-torch.cat(streamed).mean().item(), rel=1e-5)
    assert got['perplexity by streaming'] == pytest.approx(math.exp(got['loss by streaming']), rel=1e-5)
    assert got['loss by prefixes'] != pytest.approx(got['loss in one pass'], rel=1e-5)


# --- the slots of Catch Your Breath ---

def on_rows(rows=(), slow=()):
    """What a measure of text is computed on; a token's text is its id."""
    batches = SimpleNamespace(tokenizer=SimpleNamespace(decode=str))
    return measures.On(list(rows), list(slow), batches, {}, 8, 0, 4)


@pytest.fixture
def three_slots(numbers, monkeypatch):
    """What eval.py says of a model of three slots, and what it should be made of, per token and slot (N,3): t, d,
    what the next slot gains, whether the likeliest token is right, Pr(the output happens there)."""
    monkeypatch.setattr(core, 'chunks', lambda N, V: [slice(i, min(i + 50, N)) for i in range(0, N, 50)])
    monkeypatch.setattr(measures, 'NAMED', 3)
    got, model, idx, targets = numbers(method='cyb', W=3, omega='uniform')
    with torch.no_grad():
        x = model.every_slot(idx)
        z, k = model.logits(x).double(), model.dont_know_logit(model.ln_f(x)).double()
        loss = model(idx, targets)[1].item()
    z, k, target = z.flatten(0, 1), k.flatten(0, 1), targets.flatten()  # (N,W,V), (N,W), (N,)
    t = z.softmax(-1)[torch.arange(len(z)), :, target]
    d = torch.cat((z, k[..., None]), dim=-1).softmax(-1)[..., -1]
    d1, d2 = d[:, 0], d[:, 1]
    stops = torch.stack((1 - d1, d1 * (1 - d2), d1 * d2), dim=1)
    return SimpleNamespace(got=got, idx=idx, loss=loss, t=t, d=d, gain=t[:, 1:] - t[:, :-1], stops=stops,
                           taken=stops @ torch.arange(1.0, 4).double(),
                           right=(z.argmax(-1) == target[:, None]).double())


def test_each_slot_has_its_loss_accuracy_and_share_of_the_answers(three_slots):
    s = three_slots
    assert len(s.got['slots']) == 3
    for i, row in enumerate(s.got['slots']):
        assert row['slot'] == i + 1
        assert row['loss if forced'] == pytest.approx(-s.t[:, i].log().mean().item(), rel=1e-5)
        assert row['accuracy if forced'] == pytest.approx(s.right[:, i].mean().item())
        assert row['stops here'] == pytest.approx(s.stops[:, i].mean().item(), rel=1e-5)
        assert row["P(don't know)"] == pytest.approx(s.d[:, i].mean().item(), rel=1e-5)


def test_at_its_own_pace_the_model_alone_decides_when_to_stop(three_slots):
    s, got = three_slots, three_slots.got
    own = -(s.stops * s.t).sum(1).log().mean().item()
    assert got['loss at its own pace'] == pytest.approx(own, rel=1e-5)
    assert got['perplexity at its own pace'] == pytest.approx(math.exp(own), rel=1e-5)
    assert got['accuracy at its own pace'] == pytest.approx((s.stops * s.right).sum(1).mean().item(), rel=1e-5)
    assert got['slots per token'] == pytest.approx(s.taken.mean().item(), rel=1e-5)
    # the loss is that of training, where the world stops too
    assert got['loss'] == pytest.approx(s.loss, rel=1e-5) and abs(s.loss - own) > 1e-4


def test_whether_the_model_pauses_where_that_helps_is_told_for_each_slot_and_within_slots(three_slots):
    s = three_slots
    for i, row in enumerate(s.got['slots'][:2]):
        r = torch.corrcoef(torch.stack((s.d[:, i], s.gain[:, i])))[0, 1].item()
        assert row['gain of the next'] == pytest.approx(s.gain[:, i].mean().item(), rel=1e-4)
        assert row['r(d, gain)'] == pytest.approx(r, rel=1e-3) and 0 <= row['p'] <= 1
    assert s.got['slots'][2]['gain of the next'] is None and s.got['slots'][2]['r(d, gain)'] is None
    within = [torch.cat([x[:, i] - x[:, i].mean() for i in range(2)]) for x in (s.d, s.gain)]
    r = torch.corrcoef(torch.stack(within))[0, 1].item()
    assert s.got['r(d, gain) within slots'] == pytest.approx(r, rel=1e-4)


def test_calibration_is_the_mean_gain_where_d_is_in_each_tenth(three_slots):
    s = three_slots
    for i in range(2):
        rows = iter(s.got[f'calibration of slot {i + 1}'])
        for tenth in range(10):
            here = (s.d[:, i] * 10).long() == tenth
            if here.any():
                row, gain = next(rows), s.gain[here, i]
                error = gain.std(correction=0).item() / len(gain) ** 0.5
                assert row['tokens'] == len(gain)
                assert row["P(don't know)"] == pytest.approx(s.d[here, i].mean().item(), rel=1e-4)
                assert row['gain of the next'] == pytest.approx(gain.mean().item(), rel=1e-3)
                assert row['standard error'] == pytest.approx(error, rel=2e-3, abs=1e-9)
        assert not list(rows)
    assert len(s.got['calibration of slot 1']) > 1


def test_the_common_tokens_that_pause_longest_and_shortest_are_named(three_slots):
    s = three_slots
    common = [int(token) for token in s.idx.unique() if (s.idx == token).sum() >= 10]
    mean = {token: s.taken[s.idx.flatten() == token].mean().item() for token in common}
    table = s.got['tokens that pause longest and shortest']
    told = [row['slots taken'] for row in table]
    assert told == sorted(told, reverse=True) and told[0] > told[-1]
    assert told[0] == pytest.approx(max(mean.values()), rel=1e-4)
    assert told[-1] == pytest.approx(min(mean.values()), rel=1e-4)
    space = next(row for row in table if row['token'] == "' '")
    assert space['seen'] == (s.idx == 1).sum()  # characters are sorted: newline, space, ...
    assert space['slots taken'] == pytest.approx(mean[1], rel=1e-5)


def test_a_relation_within_slots_does_not_hide_behind_that_of_their_means(monkeypatch):
    spread = torch.randn(500).double() * 0.02
    d = torch.stack((0.8 + spread, 0.2 + spread, torch.full_like(spread, 0.5)), dim=1)
    # in each slot more where d is more, yet more in the slot where d is low
    gain = torch.stack((0.1 + spread, 0.4 + spread), dim=1)
    log_t = torch.cat((torch.full((500, 1), 0.1), 0.1 + gain.cumsum(1)), dim=1).log()
    monkeypatch.setattr(measures, 'slot_numbers', lambda *batch: (log_t, -torch.logit(d), log_t < 0))
    model = CYB(CYBConfig(vocab_size=3, W=3))
    got = measures.slots(model, on_rows([(torch.zeros(500, 1, dtype=torch.long), torch.zeros(500, 1))]))
    assert [row['r(d, gain)'] for row in got['slots'][:2]] == pytest.approx([1, 1])
    assert got['r(d, gain) within slots'] == pytest.approx(1)
    assert measures.correlation(d[:, :2].flatten(), gain.flatten())[0] < -0.9
    assert got['calibration of slot 1'][0]["P(don't know)"] > 0.7
    assert got['calibration of slot 2'][-1]["P(don't know)"] < 0.3


@torch.no_grad()
def test_what_skipping_costs_is_the_loss_of_the_slots_that_answer(numbers):
    _, model, idx, targets = numbers(method='cyb', W=3)
    model.dont_know.bias += 4  # so that it pauses
    model.dont_know.weight *= 20
    got = measures.skipping(model, on_rows(slow=[(idx[:4], targets[:4]), (idx[4:], targets[4:])]))
    x = model.every_slot(idx)
    z, k = model.logits(x), model.dont_know_logit(model.ln_f(x))
    know = k <= z.logsumexp(-1)  # d <= 1/2
    know[..., -1] = True
    slot = know.long().argmax(dim=2)  # (B,T): the first slot that answers
    at_slot = z.log_softmax(-1).gather(2, slot[..., None, None].expand(-1, -1, 1, z.size(3)))[:, :, 0]
    loss = -at_slot.gather(2, targets[..., None]).mean().item()
    assert got['loss where d > 1/2'] == pytest.approx(loss, rel=1e-4)
    assert got['slots where d > 1/2'] == pytest.approx((slot + 1.0).mean().item())
    assert 1.01 < got['slots where d > 1/2'] < 2.99
    assert got['loss without unused pauses'] != got['loss where d > 1/2']


@pytest.mark.parametrize('script', [evaluation, sample])
def test_a_training_config_or_a_folder_tells_where_the_run_is(run, dataset, tmp_path, capsys, script):
    run('run')
    run_here = f"out_dir = '{tmp_path}/run'"
    for name, lines in [
            ('training', f"method = 'gpt'\ndataset = 'no such set'\nn_mem, n_blocks, seed = 3, 4, 5\n{run_here}"),
            ('own', f'{run_here}\nseed = 6'), ('elsewhere', "method = 'gpt'"), ('wrong', "outdir = 'x'")]:
        (tmp_path / f'{name}.py').write_text(lines + '\n', encoding='utf-8')
    where = f'{tmp_path}/run/ckpt.pt: gpt, step 4, best validation loss '
    own_seed = 1337
    for arguments, seed in [(['training.py'], own_seed), (['own.py'], 6),
                            ([f'--checkpoint={tmp_path}/run'], own_seed),
                            ([f'--out_dir={tmp_path}/run', 'elsewhere.py', '--seed=7'], 7)]:
        script.main([a if a.startswith('--') else f'{tmp_path}/{a}' for a in arguments] + ['--device=cpu'])
        assert capsys.readouterr().err.startswith(where) and script.seed == seed
    with pytest.raises(UserError, match='out/run/ckpt.pt is not there'):
        script.main([f'{tmp_path}/elsewhere.py'])
    for wrong in ([f'{tmp_path}/wrong.py'], ['--n_layer=3']):
        with pytest.raises(UserError, match='there is no setting'):
            script.main(wrong)


def test_a_checkpoint_that_was_never_evaluated_says_so(run, tmp_path, capsys):
    save_checkpoint(f'{tmp_path}/new.pt', {**run(), 'best_val_loss': math.inf})
    capsys.readouterr()
    sample.main([f'--checkpoint={tmp_path}/new.pt', '--device=cpu'])
    assert capsys.readouterr().err == f'{tmp_path}/new.pt: gpt, step 4, not evaluated yet\n'


@pytest.mark.parametrize('method, bars', [('thoughtbubbles', ['losses', 'prefixes']),
                                          ('cyb', ['losses', 'slots', 'skipping'])])
def test_progress_is_shown_on_a_terminal(run, tmp_path, monkeypatch, method, bars):
    class Terminal(io.StringIO):
        def isatty(self):
            return True
    run('run', method=method)
    monkeypatch.setattr(sys, 'stderr', Terminal())
    evaluation.main([f'--out_dir={tmp_path}/run', '--device=cpu', '--eval_rows=8', '--slow_rows=2'])
    assert all(f'{bar}: ' in sys.stderr.getvalue() for bar in bars)


def test_every_snapshot_of_a_run_is_measured_in_the_order_of_its_steps(run, tmp_path, capsys):
    run('run', method='thoughtbubbles', snapshots='10,2', max_iters=10, learning_rate=0.01)
    capsys.readouterr()
    evaluation.main([f'--out_dir={tmp_path}/run', '--over_training=True', '--device=cpu', '--eval_rows=4',
                     '--slow_rows=1'])
    said = capsys.readouterr().out
    assert re.findall(r'run/step_\d+.pt at step (\d+)', said) == ['2', '10']
    losses = []
    for step in (2, 10):
        numbers = json.loads((tmp_path / 'run' / f'step_{step}_eval.json').read_text())
        assert numbers['step'] == step and len(numbers['d loss / d log p']) == 8
        losses.append(numbers['loss'])
    assert losses[0] > losses[1] and said.count('d loss / d log p') == 2


def test_no_script_is_run_for_a_data_set_that_a_checkpoint_names(run, dataset, tmp_path):
    run('run')
    os.remove(os.path.join(dataset, 'meta.json'))
    mark = tmp_path / 'mark'
    with open(os.path.join(dataset, 'prepare.py'), 'w', encoding='utf-8') as f:
        f.write(f'SMALL = True\nopen({str(mark)!r}, "w").close()\n')
    with pytest.raises(UserError, match='behind a path no prepare.py is run'):
        evaluation.main([f'--out_dir={tmp_path}/run', '--device=cpu'])
    assert not mark.exists()


def test_p_is_how_often_shuffled_numbers_correlate_as_much():
    x = torch.randn(400, dtype=torch.double)
    y = 0.05 * x + torch.randn(400, dtype=torch.double)
    r, p = measures.correlation(x, y)
    drawn = [abs(measures.correlation(x[torch.randperm(400)], y)[0]) >= abs(r) for _ in range(4000)]
    assert p == pytest.approx(sum(drawn) / 4000, abs=0.02) and 0.1 < p < 0.9
    assert measures.correlation(torch.ones(9), y[:9]) == (None, None)


def test_wrong_inputs_are_named(run, dataset, tmp_path):
    run('run')
    with pytest.raises(UserError, match='tokenizer'):
        other = tmp_path / 'other'
        other.mkdir()
        write_text_dataset(str(other), 'abc' * 400, {'kind': 'char', 'chars': list('abc')}, 'a test')
        evaluation.main([f'--out_dir={tmp_path}/run', f'--dataset={other}'])
    with pytest.raises(UserError, match='nowhere'):
        evaluation.main([f'--out_dir={tmp_path}/nowhere'])
    for wrong, message in [('--threads=-1', 'threads = -1'), (f'--seed={10 ** 20}', f'seed = {10 ** 20}'),
                           ('--threads=100000', 'threads = 100000'), ('--n_mem=2', 'is a gpt model'),
                           ('--beside=x', 'is a gpt model')]:
        with pytest.raises(UserError, match=message):
            evaluation.main([f'--out_dir={tmp_path}/run', wrong])
    with pytest.raises(UserError, match='threads = 100000'):
        bench.main(['--threads=100000'])
    with pytest.raises(UserError, match='slow_rows = 0'):
        evaluation.main([f'--out_dir={tmp_path}/run', '--slow_rows=0'])


# --- the streams of Thoughtbubbles ---

def sharp_bubbles(**settings):
    """A random model in float64, of sharp scores and attention."""
    config = ThoughtbubblesConfig(vocab_size=11, block_size=12, n_layer=3, n_head=2, n_embd=16, **settings)
    model = Thoughtbubbles(config).double().eval()
    for p in model.parameters():
        p.data *= 8 if p.dim() > 1 else 1
    return model


def slow_blocks(model, tokens):
    """For each block, from the plain rendering: (what originals give to copies, streams per token, mean p)."""
    streams = [(model.wte.weight[token], torch.zeros(()).double(), i) for i, token in enumerate(tokens)]
    blocks = []
    for number, layer in enumerate(model.layers):
        if number in model.config.fork_layers:
            budget = math.ceil(model.config.kappa * len(tokens))
            streams = reference.forked(model.forks[str(number)], streams, budget)
        owner = [src for *_, src in streams]
        positions = [src - 1 + (owner[:at].count(src) + 1) / owner.count(src) for at, src in enumerate(owner)]
        x, log_p = torch.stack([x for x, *_ in streams]), torch.stack([score for _, score, _ in streams])
        given = []
        for h in range(2):
            q, k = (reference.rotated(reference.norm(layer.ln_1, x) @ w[8 * h:8 * h + 8].T, positions)
                    for w in layer.attn.c_attn.weight.split(16)[:2])
            for token in range(len(tokens)):
                copies = [j for j, src in enumerate(owner) if src == token][:-1]
                if copies:
                    last = copies[-1] + 1  # the original
                    weights = ((k[:last + 1] @ q[last] + log_p[:last + 1]) / 8 ** 0.5).softmax(0)
                    given.append(weights[copies].sum().item())
        mean = sum(given) / len(given) if given else None
        blocks.append((mean, len(streams) / len(tokens), log_p.exp().mean().item()))
        x = reference.block(layer, x, positions, lambda i, j: j <= i, log_p, log_p, log_p, log_p)
        streams = [(x[i], score, src) for i, (_, score, src) in enumerate(streams)]
    return blocks


@torch.no_grad()
def test_blocks_are_told_their_streams_p_and_how_originals_attend_to_copies():
    model, idx = sharp_bubbles(kappa=1.6), torch.randint(11, (2, 12))
    got = measures.streams(model, on_rows([(idx, idx)]))['streams by block']
    expected = [slow_blocks(model, row) for row in idx.tolist()]
    for i, row in enumerate(got):
        for value, column in zip(list(row.values())[1:], zip(*(blocks[i] for blocks in expected))):
            assert value == (None if column[0] is None else pytest.approx(sum(column) / 2, rel=1e-6))
    assert [row['block'] for row in got] == [0, 1, 2] and got[0]['mean p'] == 1.0
    assert got[0]['attention of originals to their copies'] is None
    assert got[2]['streams per token'] == pytest.approx(20 / 12) and 0.01 < list(got[2].values())[1] < 0.99
    assert all(not fork._forward_hooks for fork in model.forks.values())


@pytest.mark.parametrize('merge', ['probs', 'residual', 'logits'])
@torch.no_grad()
def test_streams_are_told_against_the_entropy_of_the_prediction(merge):
    model, idx = sharp_bubbles(kappa=1.6, merge=merge, fork_layers=(0, 2)), torch.randint(11, (5, 12))
    got = measures.streams(model, on_rows([(idx[:3], idx[:3]), (idx[3:], idx[3:])]))
    pairs = []
    for row in idx.tolist():
        for log_p, n in zip(model(torch.tensor([row]))[0][0].log_softmax(-1), model.spent([row], [[]])[1][0]):
            pairs.append((-sum(p.exp() * p for p in log_p).item(), n))
    assert len({n for _, n in pairs}) > 1
    r = torch.corrcoef(torch.tensor(pairs).double().T)[0, 1].item()
    assert got['r(entropy, streams)'] == pytest.approx(r, rel=1e-6)
    pairs.sort()
    for i, row in enumerate(got['streams by entropy of the prediction']):  # ten bins of six
        entropy, n = (torch.tensor(column).double() for column in zip(*pairs[6 * i:6 * i + 6]))
        assert list(row.values()) == [pytest.approx(entropy.mean().item()), pytest.approx(n.mean().item()),
                                      pytest.approx(n.std(correction=0).item() / 6 ** 0.5), 6]
    assert measures.streams(sharp_bubbles(fork_layers=()), on_rows()) == {}


@torch.no_grad()
def test_a_fixed_budget_is_that_of_a_full_row_from_the_first_token_on():
    model, idx = sharp_bubbles(kappa=1.5, fork_layers=(0, 1, 2)), torch.randint(11, (2, 12))
    targets = torch.randint(11, (2, 12))
    loss = measures.fixed_budget(model, on_rows(slow=[(idx, targets)]))['loss by prefixes, fixed budget']
    dynamic = measures.prefixes(model, on_rows(slow=[(idx, targets)]))['loss by prefixes']
    assert dynamic != pytest.approx(loss, rel=1e-4)
    total = 0.0
    for t in range(12):
        model.config.kappa = 18 / (t + 1)  # 18 = ceil(1.5 * 12) streams for t + 1 tokens
        total -= model(idx[:, :t + 1])[0][:, -1].log_softmax(-1)[[0, 1], targets[:, t]].sum().item()
    assert loss == pytest.approx(total / 24, rel=1e-6)


def test_kappa_may_be_another_one_than_in_training(numbers, tmp_path):
    got, model, idx, targets = numbers(method='thoughtbubbles', kappa=1.5)
    evaluation.main([f'--out_dir={tmp_path}/run', '--device=cpu', '--eval_rows=8', '--slow_rows=1', '--kappa=3'])
    with open(tmp_path / 'run' / 'eval.json') as f:
        more = json.load(f)
    model.config.kappa = 3.0
    with torch.no_grad():
        assert more['loss'] == pytest.approx(model(idx, targets)[1].item(), rel=1e-5)
    assert more['loss'] != pytest.approx(got['loss'], rel=1e-6)
    assert [m['model_config']['kappa'] for m in (got, more)] == [1.5, 3.0]
    assert [round(16 * m['streams by block'][-1]['streams per token']) for m in (got, more)] == [24, 48]
