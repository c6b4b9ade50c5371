"""eval.py: its numbers against the same ones computed in another way."""
import importlib.util
import json
import math

import pytest
import torch

import data
import eval as evaluation
from config import UserError
from config.checkpoint import load_checkpoint
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
        rows = data.TextBatches(dataset, data.read_meta(dataset), model.config, 0, 8).val_batch(list(range(8)))
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
    assert f'{got["loss"]:.4f}' in capsys.readouterr().out
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
    x = model.encode_slots(idx)
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
    r = torch.corrcoef(torch.stack((d[:, :-1].flatten(), gain.flatten())))[0, 1].item()
    assert got['r(d, gain)'] == pytest.approx(r, rel=1e-4)
    want = [(int(10 * x), x, g) for x, g in zip(d[:, :-1].flatten().tolist(), gain.flatten().tolist())]
    for b, row in zip(sorted({b for b, _, _ in want}), got['calibration'], strict=True):
        x, g = (torch.tensor(v, dtype=torch.double) for v in zip(*[(x, g) for at, x, g in want if at == b]))
        assert row['slots'] == len(g) and row["P(don't know)"] == pytest.approx(x.mean().item(), rel=1e-4)
        assert row['gain of the next'] == pytest.approx(g.mean().item(), rel=1e-3)
        assert row['standard error'] == pytest.approx(g.std(correction=0).item() / len(g) ** 0.5, rel=1e-3)
    assert len(got['calibration']) > 1
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


@torch.no_grad()
def test_what_skipping_costs(numbers):
    _, model, idx, targets = numbers(method='cyb', W=3)
    model.dont_know.bias += 4  # so that it pauses
    model.dont_know.weight *= 20
    got = evaluation.skipping(model, [], [(idx[:4], targets[:4]), (idx[4:], targets[4:])], None)
    x = model.encode_slots(idx)
    z, k = model.logits(x), model.dont_know_logit(model.ln_f(x))
    know = k <= z.logsumexp(-1)  # d <= 1/2
    know[..., -1] = True
    slot = know.long().argmax(dim=2)  # (B,T): the first slot that answers
    at_slot = z.log_softmax(-1).gather(2, slot[..., None, None].expand(-1, -1, 1, z.size(3)))[:, :, 0]
    assert got['loss where d > 1/2'] == pytest.approx(-at_slot.gather(2, targets[..., None]).mean().item(), rel=1e-4)
    assert got['slots where d > 1/2'] == pytest.approx((slot + 1.0).mean().item())
    assert 1.01 < got['slots where d > 1/2'] < 2.99 and got['loss without unused pauses'] != got['loss where d > 1/2']


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
        data.write_text_dataset(str(other), 'abc' * 400, {'kind': 'char', 'chars': list('abc')}, 'a test')
        evaluation.main([f'--out_dir={tmp_path}/run', f'--dataset={other}'])
    with pytest.raises(UserError, match='nowhere'):
        evaluation.main([f'--out_dir={tmp_path}/nowhere'])
    for wrong, message in [('--threads=-1', 'threads = -1'), (f'--seed={10 ** 20}', f'seed = {10 ** 20}'),
                           ('--n_mem=2', 'is a gpt model'), ('--beside=x', 'is a gpt model')]:
        with pytest.raises(UserError, match=message):
            evaluation.main([f'--out_dir={tmp_path}/run', wrong])
    with pytest.raises(UserError, match='slow_rows = 0'):
        evaluation.main([f'--out_dir={tmp_path}/run', '--slow_rows=0'])
