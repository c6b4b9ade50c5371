"""config/paths.py: the gradient of log p, path by path, against other ways to take it apart, in float64."""
import pytest
import torch
import torch.nn.functional as F

import reference
import thoughtbubbles
from config.measures import On, entropies
from config.paths import PATHS, Paths, gradients, paths
from test_thoughtbubbles import MERGES, SIZE, USES, bubbles

IDX = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]])
TARGETS = torch.cat((IDX[:, 1:], torch.tensor([[5], [2]])), dim=1)
ABLATIONS = [dict(attenuate_attention=False), dict(attenuate_attention='keys'), dict(attenuate_attention='values'),
             dict(gate_updates=False), dict(undivided_scores=True), dict(copies=2), dict(n_kv_head=1),
             dict(fork_layers=(0, 1, 2), kappa=3.0), dict(fork_layers=(0,))]


@pytest.mark.parametrize('settings', [*(dict(merge=merge) for merge in MERGES), *ABLATIONS,
                                      dict(keep_bias=14.0, fork_bias=-14.0, merge='residual')], ids=str)
def test_the_paths_sum_to_the_gradient_of_log_p(settings):
    model = bubbles(**settings)
    found = gradients(model, IDX, TARGETS)
    added = {}
    for layer, fork in model.forks.items():
        def add(fork, inputs, output, layer=layer):
            added[layer] = torch.zeros_like(output[1], requires_grad=True)
            return output[0], output[1] + added[layer], output[2]
        fork.register_forward_hook(add)
    loss = model(IDX, TARGETS)[1] * IDX.numel()
    whole = torch.autograd.grad(loss, [added[str(layer)] for layer in model.config.fork_layers])
    assert len(found) == len(whole)
    for (log_p, src, by_path), expected in zip(found, whole):
        assert log_p.shape == src.shape == expected.shape and expected.abs().max() > 1e-3
        assert (sum(by_path.values()) - expected).abs().max() < 1e-9


@pytest.mark.parametrize('merge', ['probs', 'residual'])
def test_each_path_is_what_the_plain_rendering_learns_through_that_use_alone(merge):
    model = bubbles(fork_layers=(1,), merge=merge)
    weight = model.forks['1'].score.weight
    with Paths(model) as watch:
        model(IDX[:1], TARGETS[:1])
    by_path = gradients(model, IDX[:1], TARGETS[:1])[0][2]
    got = [torch.autograd.grad(watch.levels[0]['log_p'], weight, by_path[path], retain_graph=True)[0]
           for path in PATHS]
    parts = {}
    for use in USES:
        predicted = reference.thoughtbubbles(model, IDX[0].tolist(), detach=[u for u in USES if u != use])
        loss = F.nll_loss(predicted, TARGETS[0], reduction='sum')
        parts[use] = torch.autograd.grad(loss, weight)[0]
    expected = [parts['logits'], parts['values'], parts['attention update'] + parts['mlp update'], parts['merge']]
    for path, one, other in zip(PATHS, got, expected):
        assert (one - other).abs().max() < 1e-9 and other.abs().max() > 1e-3, path


def test_what_a_child_inherits_counts_for_its_parent(monkeypatch):
    model = bubbles(fork_layers=(1, 2))
    parents = []
    select = thoughtbubbles.select

    def watched(*args):
        parents.append(select(*args)[0])
        return select(*args)
    monkeypatch.setattr(thoughtbubbles, 'select', watched)
    first = gradients(model, IDX, TARGETS)[0]
    parents.clear()
    more = torch.zeros_like(first[0], requires_grad=True)  # log p of the first fork's streams, for the gates alone

    def scores(log_p):
        inherited = more if len(parents) == 1 else more.gather(1, parents[1])
        return log_p, (log_p + inherited).exp()[..., None]
    model.scores = lambda log_p: scores(log_p)
    expected, = torch.autograd.grad(model(IDX, TARGETS)[1] * IDX.numel(), more)
    assert (first[2]['as gate'] - expected).abs().max() < 1e-9


def test_an_ablation_has_no_gradient_through_what_it_takes_out():
    for settings, path in [(dict(attenuate_attention='values'), 'as key'),
                           (dict(attenuate_attention='keys'), 'as value'), (dict(gate_updates=False), 'as gate'),
                           (dict(merge='rightmost'), 'in the merge')]:
        _, _, by_path = gradients(bubbles(**settings), IDX, TARGETS)[-1]
        assert [name for name in PATHS if not by_path[name].any()] == [path]


def test_the_table_has_the_means_of_each_kind_of_stream(monkeypatch):
    monkeypatch.setattr('config.paths.HARD', 0.5)
    model = bubbles(fork_layers=(2, 1), kappa=1.5).eval()  # named in any order
    before = model(IDX, TARGETS)[1].item()
    with torch.no_grad():
        table = paths(model, On([(IDX, TARGETS)], [], None, {}, 2, 0, 2))['d loss / d log p']
    assert model(IDX, TARGETS)[1].item() == before and 'streams' not in vars(model)  # nothing is left behind
    assert all(p.grad is None for p in model.parameters())
    assert [tuple(row.values())[:3] for row in table] == [
        (layer, tokens, streams) for layer in (1, 2) for tokens in ('uncertain', 'others')
        for streams in ('originals', 'copies')]
    log_probs = model(IDX)[0]
    entropy = -(log_probs.exp() * log_probs).sum(-1)  # (2,8)
    assert (torch.stack([entropies(model, row) for row in IDX]) - entropy).abs().max() < 1e-9
    uncertain = entropy > entropy.median()  # the lower median: half of the tokens
    rows = iter(table)
    for log_p, src, by_path in gradients(model, IDX, TARGETS):
        for wanted in (True, False):
            for copy in (False, True):
                row = next(rows)
                here = [(b, s) for b in range(2) for s in range(src.size(1)) if uncertain[b, src[b, s]] == wanted
                        and (s + 1 < src.size(1) and src[b, s + 1] == src[b, s]) == copy]
                assert row['per token'] == pytest.approx(len(here) / 8)
                if not here:
                    assert row['mean p'] is None and row['sum'] is None
                    continue
                assert row['mean p'] == pytest.approx(sum(log_p[i].exp().item() for i in here) / len(here))
                for path in PATHS:
                    mean = sum(by_path[path][i].item() for i in here) / len(here)
                    assert row[path] == pytest.approx(mean, abs=1e-12)
                assert row['sum'] == pytest.approx(sum(row[path] for path in PATHS), abs=1e-12)
    assert paths(bubbles(fork_layers=()), None) == {}


def test_where_all_predictions_are_equally_uncertain_no_token_is_above_the_others():
    model = bubbles(tie_weights=False).eval()
    model.lm_head.weight.data.zero_()
    with torch.no_grad():
        table = paths(model, On([(IDX, TARGETS)], [], None, {}, 2, 0, 2))['d loss / d log p']
    assert {(row['per token'], row['mean p'], row['sum']) for row in table if row['tokens'] == 'uncertain'} == {
        (None, None, None)}
    assert all(row['per token'] >= 0.5 for row in table if row['tokens'] == 'others')
