"""eval.py: its numbers against the same ones computed in another way."""
import importlib.util
import io
import json
import math
import os
import sys

import pytest
import torch

import bench
import data
import eval as evaluation
import sample
from config import UserError
from config.checkpoint import load_checkpoint, save_checkpoint
from cyb import CYB, CYBConfig
from train import build_model
from data.text import TextBatches, write_text_dataset


@pytest.fixture
def numbers(run, dataset, tmp_path):
    """numbers(**settings of the run) trains a tiny model, evaluates it; returns (numbers, model, idx, targets)."""
    def numbers(**settings):
        with torch.enable_grad():
            run('run', **{'max_iters': 30, 'eval_interval': 30, 'learning_rate': 0.01, **settings})
        evaluation.main([f'--out_dir={tmp_path}/run', '--device=cpu', '--eval_rows=8', '--slow_rows=3',
                         '--batch_size=3'])
        model = build_model(load_checkpoint(f'{tmp_path}/run/ckpt.pt')).eval()
        rows = TextBatches(dataset, data.read_meta(dataset), model.config, 0, 8).val_batch(list(range(8)))
        with open(tmp_path / 'run' / 'eval.json') as f:
            return json.load(f), model, *rows
    return numbers


@pytest.mark.parametrize('settings', [dict(method='gpt'), dict(method='thoughtbubbles'), dict(method='cyb', gamma0=0.5),
                                      dict(method='cyb', objective='tbys', W=3), dict(method='cyb', W=1)])
@torch.no_grad()
def test_loss_and_files(numbers, settings, tmp_path, capsys):
    got, model, idx, targets = numbers(**settings)
    predictions = model(idx)[0].log_softmax(dim=-1)  # gamma0 is no part of them
    loss = -predictions.gather(2, targets[..., None]).mean().item()
    assert got['loss'] == pytest.approx(loss, rel=1e-4) and got['perplexity'] == pytest.approx(math.exp(loss), rel=1e-4)
    assert got['accuracy'] == pytest.approx((predictions.argmax(dim=2) == targets).double().mean().item())
    assert got['method'] == settings['method'] and got['step'] == 30 and got['rows'] == 8
    said = capsys.readouterr()
    assert f'{got["loss"]:.4f} nats per token\n' in said.out and got['unit of loss'] == 'nats per token'
    assert said.err == f'{tmp_path}/run/ckpt.pt: {settings["method"]}, step 30, best validation loss {got["loss"]:.4f} nats per token\n'
    drawn = settings['method'] == 'cyb' and importlib.util.find_spec('matplotlib') is not None
    assert (tmp_path / 'run' / 'eval.png').exists() == drawn


@torch.no_grad()
def test_prefixes_are_scored_one_by_one(numbers):
    got, model, idx, targets = numbers(method='thoughtbubbles', kappa=1.5)
    nll = [-model(row[None, :t + 1])[0][0, -1].log_softmax(0)[target].item()
           for row, answers in zip(idx[:3], targets[:3]) for t, target in enumerate(answers)]
    assert got['loss by prefixes'] == pytest.approx(sum(nll) / len(nll), rel=1e-5)
    assert got['loss in one pass'] == pytest.approx(model(idx[:3], targets[:3])[1].item(), rel=1e-5)
    assert got['loss by prefixes'] != pytest.approx(got['loss in one pass'], rel=1e-5)


@torch.no_grad()
def test_slots(numbers, monkeypatch):
    monkeypatch.setattr(evaluation, 'CHUNK', 200)  # several chunks
    monkeypatch.setattr(evaluation, 'NAMED', 3)
    got, model, idx, targets = numbers(method='cyb', W=3, omega='uniform')
    x = model.every_slot(idx)
    z, k = model.logits(x).double(), model.dont_know_logit(model.ln_f(x)).double()
    t = z.softmax(-1).gather(3, targets[..., None, None].expand(-1, -1, 3, 1))[..., 0].flatten(0, 1)  # (N,W)
    right = (z.argmax(-1) == targets[..., None]).flatten(0, 1).double()
    d = torch.cat((z, k[..., None]), dim=-1).softmax(-1)[..., -1].flatten(0, 1)
    d1, d2 = d[:, 0], d[:, 1]
    stops = torch.stack((1 - d1, d1 * (1 - d2), d1 * d2), dim=1)
    for i, row in enumerate(got['slots']):
        assert row['slot'] == i + 1
        assert row['loss if forced'] == pytest.approx(-t[:, i].log().mean().item(), rel=1e-5)
        assert row['accuracy if forced'] == pytest.approx(right[:, i].mean().item())
        assert row['stops here'] == pytest.approx(stops[:, i].mean().item(), rel=1e-5)
        assert row["P(don't know)"] == pytest.approx(d[:, i].mean().item(), rel=1e-5)
        if i < 2:
            gain = t[:, i + 1] - t[:, i]
            assert row['gain of the next'] == pytest.approx(gain.mean().item(), rel=1e-4)
            assert row['r(d, gain)'] == pytest.approx(torch.corrcoef(torch.stack((d[:, i], gain)))[0, 1].item(), rel=1e-3)
            assert 0 <= row['p'] <= 1
    assert got['loss at its own pace'] == pytest.approx(-(stops * t).sum(1).log().mean().item(), rel=1e-5)
    assert got['perplexity at its own pace'] == pytest.approx(math.exp(got['loss at its own pace']), rel=1e-5)
    assert got['accuracy at its own pace'] == pytest.approx((stops * right).sum(1).mean().item(), rel=1e-5)
    assert got['slots per token'] == pytest.approx((stops @ torch.arange(1.0, 4).double()).mean().item(), rel=1e-5)
    gain = t[:, 1:] - t[:, :-1]
    within = [torch.cat([x[:, i] - x[:, i].mean() for i in range(2)]) for x in (d, gain)]
    r = torch.corrcoef(torch.stack(within))[0, 1].item()
    assert got['r(d, gain) within slots'] == pytest.approx(r, rel=1e-4)
    for i in range(2):
        table, want = got[f'calibration of slot {i + 1}'], [(int(10 * x), x, g) for x, g in zip(d[:, i].tolist(), gain[:, i].tolist())]
        for b, row in zip(sorted({b for b, _, _ in want}), table, strict=True):
            x, g = (torch.tensor(v, dtype=torch.double) for v in zip(*[(x, g) for at, x, g in want if at == b]))
            assert row['tokens'] == len(g) and row["P(don't know)"] == pytest.approx(x.mean().item(), rel=1e-4)
            assert row['gain of the next'] == pytest.approx(g.mean().item(), rel=1e-3)
            assert row['standard error'] == pytest.approx(g.std(correction=0).item() / len(g) ** 0.5, rel=2e-3, abs=1e-9)
    assert len(got['calibration of slot 1']) > 1
    taken = [row['slots taken'] for row in got['tokens that pause longest and shortest']]
    assert taken == sorted(taken, reverse=True) and taken[0] > taken[-1]
    mean = {int(v): (stops @ torch.arange(1.0, 4).double())[idx.flatten() == v].mean().item() for v in idx.unique()
            if (idx == v).sum() >= 10}
    assert taken[0] == pytest.approx(max(mean.values()), rel=1e-4)
    assert taken[-1] == pytest.approx(min(mean.values()), rel=1e-4)
    space = next(row for row in got['tokens that pause longest and shortest'] if row['token'] == "' '")
    here = idx.flatten() == 1  # characters are sorted: newline, space, ...
    assert space['seen'] == here.sum()
    assert space['slots taken'] == pytest.approx((stops @ torch.arange(1.0, 4).double())[here].mean().item(), rel=1e-5)


def test_a_relation_within_slots_does_not_hide_behind_that_of_their_means(monkeypatch):
    spread = torch.randn(500).double() * 0.02
    d = torch.stack((0.8 + spread, 0.2 + spread, torch.full_like(spread, 0.5)), dim=1)
    gain = torch.stack((0.1 + spread, 0.4 + spread), dim=1)  # in each slot more where d is more, yet more where d is low
    log_t = torch.cat((torch.full((500, 1), 0.1), 0.1 + gain.cumsum(1)), dim=1).log()
    monkeypatch.setattr(evaluation, 'slot_numbers', lambda *batch: (log_t, -torch.logit(d), log_t < 0))
    model = CYB(CYBConfig(vocab_size=3, W=3))
    got = evaluation.slots(model, [(torch.zeros(500, 1, dtype=torch.long), torch.zeros(500, 1))], [], None)
    assert [row['r(d, gain)'] for row in got['slots'][:2]] == pytest.approx([1, 1])
    assert got['r(d, gain) within slots'] == pytest.approx(1)
    assert evaluation.correlation(d[:, :2].flatten(), gain.flatten())[0] < -0.9
    assert got['calibration of slot 1'][0]["P(don't know)"] > 0.7 and got['calibration of slot 2'][-1]["P(don't know)"] < 0.3


@torch.no_grad()
def test_what_skipping_costs(numbers):
    _, model, idx, targets = numbers(method='cyb', W=3)
    model.dont_know.bias += 4  # so that it pauses
    model.dont_know.weight *= 20
    got = evaluation.skipping(model, [], [(idx[:4], targets[:4]), (idx[4:], targets[4:])], None)
    x = model.every_slot(idx)
    z, k = model.logits(x), model.dont_know_logit(model.ln_f(x))
    know = k <= z.logsumexp(-1)  # d <= 1/2
    know[..., -1] = True
    slot = know.long().argmax(dim=2)  # (B,T): the first slot that answers
    at_slot = z.log_softmax(-1).gather(2, slot[..., None, None].expand(-1, -1, 1, z.size(3)))[:, :, 0]
    assert got['loss where d > 1/2'] == pytest.approx(-at_slot.gather(2, targets[..., None]).mean().item(), rel=1e-4)
    assert got['slots where d > 1/2'] == pytest.approx((slot + 1.0).mean().item())
    assert 1.01 < got['slots where d > 1/2'] < 2.99 and got['loss without unused pauses'] != got['loss where d > 1/2']


@pytest.mark.parametrize('script', [evaluation, sample])
def test_a_training_config_or_a_folder_tells_where_the_run_is(run, dataset, tmp_path, capsys, script):
    run('run')
    for name, lines in [('training', f"method = 'gpt'\ndataset = 'no such set'\nn_mem, n_blocks, seed = 3, 4, 5\nout_dir = '{tmp_path}/run'"),
                        ('own', f"out_dir = '{tmp_path}/run'\nseed = 6"), ('elsewhere', "method = 'gpt'"),
                        ('wrong', "outdir = 'x'")]:
        (tmp_path / f'{name}.py').write_text(lines + '\n', encoding='utf-8')
    where = f'{tmp_path}/run/ckpt.pt: gpt, step 4, best validation loss '
    own_seed = 1337
    for arguments, seed in [(['training.py'], own_seed), (['own.py'], 6), ([f'--checkpoint={tmp_path}/run'], own_seed),
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


@pytest.mark.parametrize('method, bars', [('thoughtbubbles', ['losses', 'prefixes']), ('cyb', ['losses', 'slots', 'skipping'])])
def test_progress_is_shown_on_a_terminal(run, tmp_path, monkeypatch, method, bars):
    class Terminal(io.StringIO):
        def isatty(self):
            return True
    run('run', method=method)
    monkeypatch.setattr(sys, 'stderr', Terminal())
    evaluation.main([f'--out_dir={tmp_path}/run', '--device=cpu', '--eval_rows=8', '--slow_rows=2'])
    assert all(f'{bar}: ' in sys.stderr.getvalue() for bar in bars)


def test_no_script_is_run_for_a_data_set_that_a_checkpoint_names(run, dataset, tmp_path):
    run('run')
    os.remove(os.path.join(dataset, 'meta.json'))
    mark = tmp_path / 'mark'
    with open(os.path.join(dataset, 'prepare.py'), 'w', encoding='utf-8') as f:
        f.write(f'SMALL = True\nopen({str(mark)!r}, "w").close()\n')
    with pytest.raises(UserError, match='behind a path no prepare.py is run'):
        evaluation.main([f'--out_dir={tmp_path}/run', '--device=cpu'])
    assert not mark.exists()


def test_correlation():
    x = torch.randn(400, dtype=torch.double)
    y = 0.05 * x + torch.randn(400, dtype=torch.double)
    r, p = evaluation.correlation(x, y)
    drawn = [abs(evaluation.correlation(x[torch.randperm(400)], y)[0]) >= abs(r) for _ in range(4000)]
    assert p == pytest.approx(sum(drawn) / 4000, abs=0.02) and 0.1 < p < 0.9
    assert evaluation.correlation(torch.ones(9), y[:9]) == (None, None)


def test_wrong_inputs(run, dataset, tmp_path):
    run('run')
    with pytest.raises(UserError, match='tokenizer'):
        other = tmp_path / 'other'
        other.mkdir()
        write_text_dataset(str(other), 'abc' * 400, {'kind': 'char', 'chars': list('abc')}, 'a test')
        evaluation.main([f'--out_dir={tmp_path}/run', f'--dataset={other}'])
    with pytest.raises(UserError, match='nowhere'):
        evaluation.main([f'--out_dir={tmp_path}/nowhere'])
    for wrong, message in [('--threads=-1', 'threads = -1'), (f'--seed={10 ** 20}', f'seed = {10 ** 20}'),
                           ('--threads=100000', 'threads = 100000'), ('--n_mem=2', 'is a gpt model'), ('--beside=x', 'is a gpt model')]:
        with pytest.raises(UserError, match=message):
            evaluation.main([f'--out_dir={tmp_path}/run', wrong])
    with pytest.raises(UserError, match='threads = 100000'):
        bench.main(['--threads=100000'])
    with pytest.raises(UserError, match='slow_rows = 0'):
        evaluation.main([f'--out_dir={tmp_path}/run', '--slow_rows=0'])
