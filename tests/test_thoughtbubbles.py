"""Thoughtbubbles against a plain rendering of its formulas, one stream at a time in float64."""
import json
import math
import os

import pytest
import torch
import torch.nn.functional as F

import reference
from config import UserError
from config.machine import flops_per_token
from config.streams import Streams
from model import GPT, GPTConfig, left_pad
from thoughtbubbles import Thoughtbubbles, ThoughtbubblesConfig, alive, select, stream_positions

SIZE = dict(vocab_size=11, block_size=16, n_layer=3, n_head=2, n_embd=16)
MERGES = ['probs', 'residual', 'logits', 'rightmost']


def bubbles(seed=0, **settings):
    torch.manual_seed(seed)
    model = Thoughtbubbles(ThoughtbubblesConfig(**{**SIZE, **settings})).double()
    for name, p in model.named_parameters():
        if p.dim() > 1:
            p.data *= 8  # sharp scores and attention, so that every term matters
    return model


def log_probs(model, idx, **kw):
    return model(idx, **kw)[0].log_softmax(-1)  # merge='probs' gives log-probabilities: unchanged


# --- the definition ---

@pytest.mark.parametrize('settings', [
    *(dict(merge=merge) for merge in MERGES), dict(fork_layers=(0, 1, 2), kappa=4.0),
    dict(kappa=1.0, merge='residual'), dict(keep_bias=1.5),
    dict(attenuate_attention=False), dict(attenuate_attention='keys'), dict(attenuate_attention='values'),
    dict(attenuate_attention='keys', gate_updates=False), dict(gate_updates=False, copies=2),
    dict(fork_layers=(), copies=2, merge='rightmost'),
    dict(fork_layers=(1,), copies=2)], ids=str)
def test_model_equals_the_plain_rendering(settings):
    model = bubbles(**settings)
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    predicted = log_probs(model, torch.tensor([tokens]))[0]
    assert (predicted - reference.thoughtbubbles(model, tokens)).abs().max() < 1e-9
    loss = model(torch.tensor([tokens[:-1]]), torch.tensor([tokens[1:]]))[1]
    expected = F.nll_loss(reference.thoughtbubbles(model, tokens[:-1]), torch.tensor(tokens[1:]))
    assert abs(loss - expected) < 1e-9


def test_fork_step_equals_worked_values():
    with open(os.path.join(os.path.dirname(__file__), 'fork_cases.json'), encoding='utf-8') as f:
        cases = json.load(f)
    assert len(cases) == 6
    for case in cases:
        log_p, scores = (torch.tensor([case[key]], dtype=torch.float64) for key in ('log_p', 'scores'))
        src = torch.tensor([case['src']])
        parent, is_fork, new_log_p = select(log_p, src, scores, min(case['budget'], 2 * src.size(1)))
        new_src = src.gather(1, parent)
        assert parent[0].tolist() == case['parent'] and is_fork[0].tolist() == case['is_fork']
        assert new_src[0].tolist() == case['src_out']
        assert new_log_p[0].tolist() == pytest.approx(case['log_p_out'], abs=1e-9)
        positions = stream_positions(new_log_p, new_src, int(src.max()) + 1)
        assert positions[0].tolist() == pytest.approx(case['positions_out'], abs=1e-9)


def test_extreme_scores_keep_order_and_stay_finite():
    log_p, src = torch.zeros(1, 3), torch.arange(3)[None]
    scores = torch.tensor([[[1e4, -1e4], [-1e4, -1e4], [0.0, 1e4]]], requires_grad=True)
    parent, is_fork, out = select(log_p, src, scores, 4)
    # originals are forced whatever their score, which stays the learned one; the best copy gets the one free place
    assert parent[0].tolist() == [0, 0, 1, 2] and is_fork[0].tolist() == [True, False, False, False]
    assert out[0].tolist() == [0.0, -20.0, -20.0, 0.0]
    out.sum().backward()
    assert scores.grad.isfinite().all()
    # equal scores: the earlier stream wins
    parent, is_fork, _ = select(log_p, src, torch.zeros(1, 3, 2), 5)
    assert parent[0].tolist() == [0, 0, 1, 1, 2]


def test_without_forks_it_is_the_plain_gpt_exactly():
    for merge in MERGES:
        torch.manual_seed(3)
        plain = GPT(GPTConfig(**SIZE, dropout=0.1))
        torch.manual_seed(3)
        model = Thoughtbubbles(ThoughtbubblesConfig(**SIZE, dropout=0.1, fork_layers=(), merge=merge))
        idx, targets = torch.randint(11, (2, 2, 9))
        losses = []
        for m in (plain, model):
            torch.manual_seed(4)  # dropout
            loss = m(idx, targets)[1]
            loss.backward()
            losses.append(loss)
        assert losses[0].item() == losses[1].item()
        assert (plain(idx)[0].shape == model(idx)[0].shape)
        for (name, p), (other, q) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
            assert name == other and torch.equal(p, q) and torch.equal(p.grad, q.grad)
        assert plain.complete([[1, 2], [3]], 20, temperature=0) == model.complete([[1, 2], [3]], 20, temperature=0)
        assert flops_per_token(plain) == flops_per_token(model)


# --- gradients ---

USES = ['logits', 'values', 'attention update', 'mlp update', 'merge']


@pytest.mark.parametrize('merge', ['probs', 'residual'])
def test_scores_learn_through_each_use(merge):
    """With one fork step the gradient of the scores is the sum of five parts, one for each use."""
    model = bubbles(fork_layers=(1,), merge=merge)
    tokens, target = [3, 1, 4, 1, 5, 9], torch.tensor([1, 4, 1, 5, 9, 2])
    weight = model.forks['1'].score.weight
    parts = []
    for use in USES:
        loss = F.nll_loss(reference.thoughtbubbles(model, tokens, detach=[u for u in USES if u != use]), target)
        parts.append(torch.autograd.grad(loss, weight)[0])
    full = torch.autograd.grad(model(torch.tensor([tokens]), target[None])[1], weight)[0]
    assert (sum(parts) - full).abs().max() < 1e-9
    for use, part in zip(USES, parts):
        assert part.abs().max() > 1e-6, use


def test_every_parameter_learns():
    model = bubbles(kappa=1.5)
    model(torch.randint(11, (3, 12)), torch.randint(11, (3, 12)))[1].backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.abs().max() > 0, name


# --- what may see what ---

@pytest.mark.parametrize('merge', MERGES)
def test_with_a_budget_that_never_binds_the_future_is_invisible(merge):
    model = bubbles(kappa=4.0, merge=merge)  # two forks make at most four streams of a token
    idx = torch.randint(11, (1, 12))
    changed = idx.clone()
    changed[0, 7:] = (changed[0, 7:] + 1) % 11
    difference = (log_probs(model, idx) - log_probs(model, changed)).abs().amax(-1)[0]
    assert difference[:7].max() < 1e-10 and difference[7:].min() > 1e-6


def test_a_binding_budget_lets_the_future_choose_copies():
    model = bubbles(kappa=1.5)
    idx = torch.randint(11, (8, 12))
    changed = idx.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 11
    assert (log_probs(model, idx) - log_probs(model, changed)).abs()[:, :7].max() > 1e-6


@pytest.mark.parametrize('side', ['left', 'right'])
@pytest.mark.parametrize('settings', [*(dict(merge=merge) for merge in MERGES), dict(attenuate_attention=False),
                                      dict(attenuate_attention='keys'), dict(attenuate_attention='values'),
                                      dict(kappa=1.3, gate_updates=False),
                                      dict(copies=2, fork_layers=(), merge='rightmost'),
                                      dict(learned_positions=True)], ids=str)
def test_rows_and_padding_do_not_affect_each_other(settings, side):
    model = bubbles(**settings)
    rows = [torch.randint(11, (n,)).tolist() for n in (5, 12, 1, 9)]
    alone = [log_probs(model, torch.tensor([row]))[0] for row in rows]
    idx, pad = left_pad(rows, 'cpu')
    if side == 'right':
        for row, tokens in enumerate(rows):
            idx[row], pad[row] = torch.tensor(tokens + [7] * (12 - len(tokens))), torch.arange(12) >= len(tokens)
    together = log_probs(model, idx, pad=pad)
    for row in range(len(rows)):
        assert (together[row][~pad[row]] - alone[row]).abs().max() < 1e-8
    # nor does padding change the loss of the rest
    targets = torch.where(pad, -1, idx)
    expected = -sum(lp[torch.arange(len(r)), r].sum() for lp, r in zip(alone, map(torch.tensor, rows)))
    assert abs(model(idx, targets, pad=pad)[1] - expected / (~pad).sum()) < 1e-8
    assert log_probs(model, idx, pad=pad).isfinite().all()


def test_padding_takes_nothing_from_the_budget():
    model = bubbles(kappa=1.5)
    idx, pad = left_pad([list(range(4)), list(range(10))], 'cpu')
    _, log_p, src = model.streams(idx, pad)
    assert alive(log_p).sum(1).tolist() == [6, 15]  # ceil(1.5 T)
    assert not alive(log_p)[0][src[0] < 6].any()


@pytest.mark.parametrize('kappa', [1.0, 1.1, 2.0, 3.7])
@pytest.mark.parametrize('fork_layers', [(0,), (0, 1, 2)])
def test_the_budget_is_used_up_streams_stay_in_order_and_originals_stay(kappa, fork_layers):
    for random in (False, True):
        model = bubbles(random_forks=random, kappa=kappa, fork_layers=fork_layers)
        _, log_p, src = model.streams(torch.randint(11, (3, 10)))
        wanted = min(math.ceil(round(kappa * 10, 6)), 10 * 2 ** len(fork_layers))
        assert src.shape == (3, wanted) and (src.diff(dim=1) >= 0).all() and (log_p <= 0).all()
        assert all(set(row.tolist()) == set(range(10)) for row in src)  # every token keeps a stream


def test_random_forks_are_drawn_anew_and_ignore_the_scores():
    log_p, src = torch.zeros(2000, 4), torch.arange(4).expand(2000, 4)
    scores = torch.zeros(2000, 4, 2)
    scores[:, 0, 0] = 50.0  # by score the copy of token 0 would always win the one free place
    parent, is_fork, _ = select(log_p, src, scores, 5, random=True)
    winners = parent[is_fork].bincount(minlength=4) / 2000
    assert (winners - 0.25).abs().max() < 0.05


def test_initial_scores_are_small_and_fork_embeddings_of_length_one():
    fork = Thoughtbubbles(ThoughtbubblesConfig(**{**SIZE, 'n_embd': 512})).forks['1']
    assert fork.score.weight.detach().std() == pytest.approx(0.02, rel=0.1)
    assert fork.embedding.detach().std() == pytest.approx(512 ** -0.5, rel=0.1)


def test_half_precision_keeps_scores_and_predictions_in_float32():
    model = Thoughtbubbles(ThoughtbubblesConfig(**SIZE))
    idx = torch.randint(11, (2, 12))
    exact = model(idx)[0]
    keys_alone = Thoughtbubbles(ThoughtbubblesConfig(**SIZE, attenuate_attention='keys', merge='logits'))
    with torch.autocast('cpu', dtype=torch.bfloat16):
        assert keys_alone(idx)[0].dtype == keys_alone(idx, idx)[1].dtype == torch.float32
        prediction, log_p = model(idx)[0], model.streams(idx)[1]
        assert model.layers[0].mlp(torch.randn(1, 1, 16)).dtype == torch.bfloat16
    assert prediction.dtype == log_p.dtype == torch.float32
    assert (prediction.exp().sum(-1) - 1).abs().max() < 1e-5  # in bfloat16 it would be off by 1e-2
    assert (prediction - exact).abs().max() < 0.05


def test_merged_probabilities_sum_to_one():
    model = bubbles(merge='probs', kappa=3.0)
    assert (model(torch.randint(11, (3, 12)))[0].exp().sum(-1) - 1).abs().max() < 1e-12


# --- generation ---

@pytest.mark.parametrize('merge', MERGES)
def test_generation_rereads_the_text_under_its_present_budget(merge):
    model = bubbles(merge=merge)
    text = [1, 2, 3]
    for token in model.complete([[1, 2, 3]], 13, temperature=0)[0]:
        assert token == log_probs(model, torch.tensor([text]))[0, -1].argmax()
        text.append(token)
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 1], [9]]
    together = model.complete(prompts, 30, temperature=0)  # past block_size
    assert together == [model.complete([p], 30, temperature=0)[0] for p in prompts]


def test_spent_are_the_streams_that_each_token_holds():
    model = bubbles(kappa=1.5)
    prompts, new = [[1, 2, 3, 4], list(range(10))], [[5, 6], list(range(10))]
    unit, held = model.spent(prompts, new)
    assert unit == 'streams'
    assert len(held[0]) == 6 and sum(held[0]) == 9 and min(held[0]) >= 1
    assert held[1][:4] == [None] * 4 and sum(held[1][4:]) == 24
    assert bubbles(fork_layers=()).spent(prompts, new) is None  # a plain GPT has nothing to show


def test_flops_follow_the_streams():
    gpt, kappa2 = bubbles(fork_layers=()), bubbles(kappa=2.0)  # forks before blocks 1 and 2 of 3
    blocks = sum(p.numel() for p in gpt.layers[0].parameters())
    head = gpt.lm_head.weight.numel()
    by_hand = sum(6 * blocks * S + 12 * 16 * S * S for S in (16, 32, 32)) + 6 * head * 32
    assert flops_per_token(kappa2) == by_hand / 16


# --- streaming ---

def stream(model, rows, prompts):
    """Log-probabilities (B,steps,V) after the prompts, the first tokens of each row, and after each further token."""
    cache, steps = [], []
    for extra in range(min(len(row) - n for row, n in zip(rows, prompts)) + 1):
        idx, pad = left_pad([row[:n + extra] for row, n in zip(rows, prompts)], 'cpu')
        with torch.no_grad():
            steps.append(model.next_logits(idx[:, -1:] if extra else idx, pad, cache).log_softmax(-1))
    return torch.stack(steps, dim=1)


@pytest.mark.parametrize('settings', [
    *(dict(merge=merge) for merge in MERGES), dict(kappa=8.0, fork_layers=(0, 1, 2)), dict(kappa=8.0, copies=2),
    dict(fork_layers=(), copies=2), dict(attenuate_attention=False), dict(attenuate_attention='keys'),
    dict(attenuate_attention='values'), dict(gate_updates=False), dict(random_forks=True), dict(learned_positions=True), dict(undivided_scores=True, keep_bias=14.0, fork_bias=-14.0),
    dict(local_layers=(0, 2), window=3, n_kv_head=1, bias=True, rms_norm=True)], ids=str)
def test_streaming_equals_recomputation_where_the_budget_never_binds(settings, monkeypatch):
    monkeypatch.setattr(Streams, 'compact_every', 3)
    model = bubbles(**{'kappa': 4.0, **settings})
    rows, prompts = [torch.randint(11, (n + 8,)).tolist() for n in (5, 8, 1)], (5, 8, 1)
    alone = torch.stack([torch.stack([model.next_logits(torch.tensor([row[:n + extra]]), None, None)[0]
                                      for extra in range(9)]) for row, n in zip(rows, prompts)]).log_softmax(-1)
    assert (stream(model, rows, prompts) - alone).abs().max() < 1e-10
    assert (stream(model.float(), rows, prompts) - alone).abs().max() < 1e-4


@pytest.mark.parametrize('settings', [
    *(dict(merge=merge) for merge in MERGES), dict(kappa=1.1), dict(kappa=2.0, fork_layers=(0, 1, 2)),
    dict(attenuate_attention=False), dict(attenuate_attention='values', gate_updates=False),
    dict(copies=2, kappa=2.5, keep_bias=1.5)], ids=str)
@torch.no_grad()
def test_streaming_equals_its_plain_rendering_where_the_budget_binds(settings, monkeypatch):
    monkeypatch.setattr(Streams, 'compact_every', 4)
    model = bubbles(**{'kappa': 1.5, **settings})
    row = torch.randint(11, (12,)).tolist()
    for prompt in (1, 5):
        expected = reference.streamed(model, row, prompt)
        assert (stream(model, [row], [prompt])[0] - expected).abs().max() < 1e-9
    # the budget binds: what fell out makes a difference to recomputation
    again = torch.stack([log_probs(model, torch.tensor([row[:n]]))[0, -1] for n in range(5, 13)])
    assert (again[0] - expected[0]).abs().max() < 1e-9  # the prompt is read in one pass
    assert (again - expected).abs().max() > 1e-6


@pytest.mark.parametrize('settings', [dict(), dict(fork_layers=(0, 1, 2), merge='residual'), dict(copies=2)], ids=str)
def test_rows_of_a_batch_stream_as_if_alone(settings):
    model = bubbles(**{'kappa': 1.5, **settings})
    rows, prompts = [torch.randint(11, (n + 8,)).tolist() for n in (5, 8, 1)], (5, 8, 1)
    together = stream(model, rows, prompts)
    for row, n, got in zip(rows, prompts, together):
        assert (stream(model, [row], [n])[0] - got).abs().max() < 1e-9
    texts = [row[:n] for row, n in zip(rows, prompts)]
    generated = model.complete(texts, 18, temperature=0, streaming=True)  # past block_size
    assert generated == [model.complete([text], 18, temperature=0, streaming=True)[0] for text in texts]


def test_a_slide_reads_the_window_anew():
    model = bubbles(kappa=4.0)
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 1], list(range(11)) * 2]  # the last one is longer than block_size
    assert model.complete(prompts, 30, temperature=0, streaming=True) == model.complete(prompts, 30, temperature=0)


def test_compaction_changes_nothing_but_the_size_of_the_caches(monkeypatch):
    model = bubbles(kappa=1.2, fork_layers=(0, 1, 2), block_size=30)
    rows = torch.randint(11, (2, 30)).tolist()
    expected, sizes = None, []
    for every in (1, 5, 100):
        monkeypatch.setattr(Streams, 'compact_every', every)
        got = stream(model, rows, (3, 1))
        expected = got if expected is None else expected
        assert (got - expected).abs().max() < 1e-12
        held = Streams(model, 1)
        for token in rows[0]:
            held.feed(torch.tensor([[token]]))
        sizes.append(held.caches[2].length)
        assert [int((rank > -math.inf).sum()) for rank in held.rank] == [30, 36, 36, 36]  # 1.2 * 30
    assert 36 <= sizes[0] < sizes[1] < sizes[2] and sizes[0] <= 36 + 8


def test_random_forks_stream_within_the_budget():
    model = bubbles(kappa=1.5, random_forks=True)
    held = Streams(model, 2)
    for tokens in torch.randint(11, (2, 16)).split([4] + [1] * 12, dim=1):
        held.feed(tokens)
    assert [(rank > -math.inf).sum(1).tolist() for rank in held.rank[1:]] == [[24, 24]] * 2
    assert all((rank == math.inf).sum(1).tolist() == [16, 16] for rank in held.rank[1:])  # the originals


def test_streaming_in_half_precision_is_near_recomputation():
    model = Thoughtbubbles(ThoughtbubblesConfig(**SIZE, kappa=4.0))
    row = torch.randint(11, (12,)).tolist()
    exact = stream(model, [row], [4])
    with torch.autocast('cpu', dtype=torch.bfloat16):
        got = stream(model, [row], [4])
    assert got.dtype == torch.float32 and (got - exact).abs().max() < 0.05


def test_streaming_tells_what_was_held_while_generating():
    model = bubbles(kappa=1.5)
    prompts = [[1, 2, 3, 4], [5]]
    new = model.complete(prompts, 20, temperature=0, streaming=True)  # past block_size
    unit, held = model.spent(prompts, new)
    assert unit == 'streams' and [len(row) for row in held] == [24, 21]
    assert held[0][:3] == [None] * 3 and held[0][-1] is None and all(1 <= n <= 4 for n in held[0][3:-1])
    first = Streams(model, 1)
    _, _, src = first.feed(torch.tensor([prompts[0]]))
    assert held[0][3] == int((src == 3).sum())
    for n, token in zip(held[0][4:], new[0][:12]):
        assert first.feed(torch.tensor([[token]]))[0].size(1) == n
    assert None not in model.spent([[1, 2]], [[]])[1][0]  # another text, which was not generated
    model.complete(prompts, 2)
    assert None not in model.spent([[1, 2]], [[3]])[1][0]  # no longer what was held, but one pass
    with pytest.raises(UserError, match='use_cache = False: streaming'):
        model.complete(prompts, 2, streaming=True, use_cache=False)


@pytest.mark.parametrize('settings, named', [
    (dict(fork_layers=(1, 3)), 'fork_layers = .*3 is not a block of n_layer = 3'),
    (dict(fork_layers=(1.5,)), 'fork_layers'), (dict(fork_layers=(1, 1)), 'once'),
    (dict(kappa=0.5), 'kappa = 0.5'), (dict(kappa=math.nan), 'kappa = nan'),
    (dict(merge='rightmost', attenuate_attention=False, gate_updates=False), 'nothing is left that the scores'),
    (dict(merge='mean'), "merge = 'mean'"),
    (dict(attenuate_attention='all'), "attenuate_attention = 'all': choose True, False, keys, values"),
     (dict(keep_bias=math.inf), 'keep_bias = inf'),
    (dict(kappa=1e308), 'kappa'), (dict(copies=0), 'copies = 0')])
def test_impossible_settings_are_named(settings, named):
    with pytest.raises(UserError, match=named):
        bubbles(**settings)


def test_a_row_longer_than_block_size_is_named():
    with pytest.raises(UserError, match='17 tokens'):
        bubbles()(torch.zeros(1, 17, dtype=torch.long))
