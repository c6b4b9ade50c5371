"""The core against its formulas, and cached generation against rereading the whole text."""
import math

import pytest
import torch

from config import UserError
from model import GPT, CausalSelfAttention, GPTConfig, causal_mask, left_pad, mean_nll, rotate, sample_token

SETTINGS = dict(vocab_size=11, block_size=16, n_layer=2, n_head=2, n_embd=16)


def gpt(**settings):
    return GPT(GPTConfig(**{**SETTINGS, **settings})).double()


def explicit_attention(attn, x, positions, visible, logit_score, value_score):
    """One query, one key at a time; x (S,C), positions (S,), visible (S,S), the log scores (S,) of the keys."""
    S, C = x.shape
    D = C // attn.n_head
    q, k, v = (attn.c_attn.weight @ x.T).T.reshape(S, 3, attn.n_head, D).unbind(1)
    out = {(i, h): 0 for i in range(S) for h in range(attn.n_head)}

    def turn(u, position):  # rotary: pair i turns by position * 10000^(-2i/D)
        a, b = u[:D // 2], u[D // 2:]
        angle = position * 10000.0 ** (-torch.arange(D // 2, dtype=x.dtype) * 2 / D)
        return torch.cat((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()))
    for h in range(attn.n_head):
        for i in range(S):
            keys = [j for j in range(S) if visible[i][j]]
            logits = torch.stack([(turn(q[i, h], positions[i]) @ turn(k[j, h], positions[j]) + logit_score[j]) / math.sqrt(D)
                                  for j in keys])
            for weight, j in zip(logits.softmax(0), keys):
                out[i, h] = out[i, h] + weight * value_score[j].exp() * v[j, h]
    return torch.stack([torch.cat([out[i, h] for h in range(attn.n_head)]) for i in range(S)]) @ attn.c_proj.weight.T


@pytest.mark.parametrize('scored', [False, True])
@pytest.mark.parametrize('masked', [False, True])
def test_attention_equals_the_formula(scored, masked):
    model = gpt()
    attn, S = model.layers[0].attn, 7
    torch.nn.init.normal_(attn.c_attn.weight)  # sharp attention, so that a wrong scale or angle shows
    x, positions = torch.randn(1, S, 16).double(), torch.rand(1, S).double().cumsum(1) * 2
    log_p = -3 * torch.rand(1, S).double()
    visible = torch.ones(S, S, dtype=torch.bool).tril()
    if masked:
        visible[4:, 1] = False
    y = attn(x, model.rope(positions), mask=visible[None, None] if masked else None, log_p=log_p if scored else None)
    score = log_p[0] if scored else torch.zeros(S).double()
    expected = explicit_attention(attn, x[0], positions[0], visible, score, score)
    assert (y[0] - expected).abs().max() < 1e-12


def test_the_plain_and_the_scored_path_form_no_mask(monkeypatch):
    seen = []
    fused = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(torch.nn.functional, 'scaled_dot_product_attention',
                        lambda *a, **kw: seen.append((kw['attn_mask'], kw['is_causal'])) or fused(*a, **kw))
    attn = CausalSelfAttention(GPTConfig(**SETTINGS))
    x = torch.randn(2, 5, 16)
    attn(x)
    attn(x, log_p=-torch.rand(2, 5))
    gpt()(torch.zeros(1, 5, dtype=torch.long))
    assert seen and all(call == (None, True) for call in seen)


def test_rotation_depends_on_distance_only():
    model = gpt()
    q, k = torch.randn(2, 1, 1, 1, 8).double()
    dot = [(rotate(q, model.rope(torch.tensor([[a]]))) * rotate(k, model.rope(torch.tensor([[b]])))).sum()
           for a, b in [(0.5, 3.25), (100.5, 103.25)]]
    assert abs(dot[0] - dot[1]) < 1e-12


@pytest.mark.parametrize('queries, keys', [(4, 4), (1, 4), (2, 5)])
def test_causal_mask(queries, keys):
    pad = torch.tensor([[True, True] + [False] * (keys - 2), [False] * keys])
    mask = causal_mask(queries, keys, pad).expand(2, 1, queries, keys)
    for b in range(2):
        for i in range(queries):
            query = keys - queries + i
            for j in range(keys):
                assert mask[b, 0, i, j] == (j <= query and (not pad[b, j] or j == query))
    unpadded = causal_mask(queries, keys)
    assert (unpadded is None) == (queries in (1, keys))
    if unpadded is not None:
        assert (unpadded[0] == mask[1]).all()


@pytest.mark.parametrize('settings', [{}, {'learned_positions': True, 'bias': True, 'tie_weights': False}])
def test_later_tokens_and_other_rows_do_not_matter(settings):
    model = gpt(**settings)
    idx = torch.randint(11, (2, 12))
    logits = model(idx)[0]
    changed = idx.clone()
    changed[0, 8:] = (changed[0, 8:] + 1) % 11
    difference = (model(changed)[0] - logits).abs().amax(-1)
    assert difference[0, :8].max() < 1e-12 and difference[1].max() < 1e-12 and difference[0, 8:].min() > 1e-6
    rows = [idx[0, :5].tolist(), idx[1].tolist()]
    padded, pad = left_pad(rows, 'cpu')
    padded_logits = model(padded, pad=pad)[0]
    assert (padded_logits[0, -5:] - logits[0, :5]).abs().max() < 1e-12
    assert (padded_logits[1] - logits[1]).abs().max() < 1e-12


def test_loss_is_cross_entropy_and_ignores():
    model = gpt()
    idx = torch.randint(11, (2, 6))
    targets = torch.randint(11, (2, 6))
    targets[0, :3] = -1
    logits, loss = model(idx, targets)
    expected = [-logits[b, t].log_softmax(0)[targets[b, t]] for b in range(2) for t in range(6) if targets[b, t] >= 0]
    assert len(expected) == 9 and abs(loss - sum(expected) / 9) < 1e-12


def test_the_mean_over_targets_equals_torchs_bit_for_bit():
    for dtype in (torch.float32, torch.double):
        logits = torch.randn(5, 7, 11, dtype=dtype, requires_grad=True)
        targets = torch.randint(-1, 11, (5, 7))
        want = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        got = mean_nll(logits, targets)
        assert torch.equal(got, want)
        assert torch.equal(*(torch.autograd.grad(loss, logits)[0] for loss in (got, want)))


@pytest.mark.parametrize('settings', [dict(tie_weights=False), dict(tie_weights=False, learned_positions=True)])
def test_cached_generation_equals_uncached_also_past_block_size(settings):
    model = gpt(**settings)
    for p in model.parameters():
        p.data *= 5  # far from uniform, so that a wrong cache changes the choice
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 1], list(range(11)) * 2]  # the last one is longer than block_size
    cached = model.complete(prompts, 40, temperature=0)
    assert cached == model.complete(prompts, 40, temperature=0, use_cache=False)
    assert [len(row) for row in cached] == [40] * 3 and len({tuple(row) for row in cached}) == 3
    # rows in a batch do not affect each other
    assert cached == [model.complete([p], 40, temperature=0)[0] for p in prompts]
    # logits, not only their argmax
    cache, idx = model.new_cache(), torch.randint(11, (2, 9))
    parts = [model.trunk(idx[:, a:b], cache=cache) for a, b in [(0, 3), (3, 4), (4, 9)]]
    assert (torch.cat(parts, 1) - model.trunk(idx)).abs().max() < 1e-12


def test_a_stop_token_ends_its_row_only():
    model = gpt()
    free = model.complete([[1], [2]], 12, temperature=0)
    stop = free[0][4]
    stopped = model.complete([[1], [2]], 12, temperature=0, stop_token=stop)
    for row, full in zip(stopped, free):
        assert row == (full[:full.index(stop) + 1] if stop in full else full)
    steps = list(model.generate([[1]], 12, temperature=0, stop_token=stop))
    assert len(steps) == len(stopped[0])


def test_sampling():
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]]).expand(4000, -1)
    assert (sample_token(logits, 0) == 3).all()
    counts = sample_token(logits, 2.0).bincount(minlength=4) / 4000
    assert (counts - (logits[0] / 2).softmax(0)).abs().max() < 0.04
    assert set(sample_token(logits, 1.0, top_k=2).tolist()) == {2, 3}
    assert set(sample_token(logits, 1.0, top_p=0.6).tolist()) == {3}  # it alone has probability 0.64
    assert set(sample_token(logits, 1.0, top_p=0.7).tolist()) == {2, 3}


@pytest.mark.parametrize('settings, drawn', [
    (dict(top_k=1), {1}), (dict(top_k=2), {1, 2}), (dict(top_k=3), {1, 2, 4}), (dict(top_k=9), {0, 1, 2, 3, 4}),
    (dict(top_p=0.2), {1}), (dict(top_p=0.5), {1, 2}), (dict(top_k=2, top_p=0.5), {1}), (dict(temperature=0), {1})], ids=str)
def test_equal_logits_are_cut_by_rank(settings, drawn):
    logits = torch.tensor([[0.0, 1.0, 1.0, 0.0, 1.0]]).expand(400, -1)  # 0.27 for each of the best three, 0.1 for the others
    assert set(sample_token(logits, **{'temperature': 1.0, **settings}).tolist()) == drawn


def test_the_order_of_a_draw_does_not_depend_on_a_cut_that_cuts_nothing():
    logits = torch.randn(200, 11)
    drawn = []
    for settings in ({}, dict(top_k=11), dict(top_p=0.999999)):
        torch.manual_seed(1)
        drawn.append(sample_token(logits, 1.0, **settings))
    assert torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize('settings', [dict(temperature=0), dict(temperature=5.0), dict(top_k=9), dict(top_p=0.99)], ids=str)
def test_ids_that_are_no_text_are_not_drawn(settings):
    model = gpt(tie_weights=False)
    model.lm_head.weight.data *= 100
    prompts = [[1, 2], [3]] * 8
    assert any(token >= 4 for row in model.complete(prompts, 20, **settings) for token in row)
    rows = model.complete(prompts, 20, n_text=4, **settings)
    assert all(len(row) == 20 and max(row) < 4 for row in rows)


def test_dropout_is_off_in_eval():
    torch.manual_seed(0)
    model = gpt(dropout=0.5)
    idx = torch.randint(11, (2, 9))
    assert (model(idx)[0] - model(idx)[0]).abs().max() > 1e-3
    # generation switches it off and puts the mode back
    assert model.complete([[1, 2]], 8, temperature=0) == model.complete([[1, 2]], 8, temperature=0)
    assert model.training
    model.eval()
    assert (model(idx)[0] - model(idx)[0]).abs().max() == 0


@pytest.mark.parametrize('site', ['embedding', 'attention', 'attention output', 'mlp output'])
def test_dropout_acts_at_each_site_in_training_alone(site):
    model, idx = gpt(), torch.randint(11, (2, 9))
    block = model.layers[1]
    if site == 'attention':
        block.attn.dropout = 0.5
    else:
        {'embedding': model.drop, 'attention output': block.attn.resid_dropout, 'mlp output': block.mlp.dropout}[site].p = 0.5
    assert (model(idx)[0] - model(idx)[0]).abs().max() > 1e-4
    model.eval()
    assert (model(idx)[0] - model(idx)[0]).abs().max() == 0


def test_dropout_setting_reaches_every_site():
    model = gpt(dropout=0.3)
    assert sum(isinstance(m, torch.nn.Dropout) and m.p == 0.3 for m in model.modules()) == 1 + 2 * 2
    assert all(block.attn.dropout == 0.3 for block in model.layers)


def test_initial_weights():
    model = GPT(GPTConfig(**{**SETTINGS, 'n_embd': 256, 'n_layer': 8, 'vocab_size': 100}))
    assert model.wte.weight.detach().std() == pytest.approx(0.02, rel=0.05)
    for block in model.layers:
        assert block.attn.c_attn.weight.detach().std() == pytest.approx(0.02, rel=0.05)
        assert block.attn.c_proj.weight.detach().std() == pytest.approx(0.02 / 4, rel=0.05)  # 1 / sqrt(2 * 8)
        assert block.mlp.c_proj.weight.detach().std() == pytest.approx(0.02 / 4, rel=0.05)


def test_what_decays():
    model = gpt(bias=True)
    decay, rest = model.param_groups(0.3)
    assert decay['weight_decay'] == 0.3 and rest['weight_decay'] == 0.0
    assert len(decay['params']) + len(rest['params']) == len(list(model.parameters()))
    names = {id(p): name for name, p in model.named_parameters()}
    assert {names[id(p)].split('.')[-2] for p in decay['params']} == {'wte', 'c_attn', 'c_proj', 'c_fc'}
    assert all(names[id(p)].endswith('bias') or 'ln_' in names[id(p)] for p in rest['params'])


def test_attention_with_a_cache_is_causal_without_being_told():
    model = gpt()
    x, attn = torch.randn(1, 6, 16).double(), model.layers[0].attn
    cache = model.new_cache()[0]
    parts = [attn(x[:, a:b], model.rope(torch.arange(a, b)[None]), cache=cache) for a, b in [(0, 3), (3, 6)]]
    assert (torch.cat(parts, 1) - attn(x, model.rope(torch.arange(6)[None]))).abs().max() < 1e-12


def test_flops_are_six_per_weight_and_token_plus_attention():
    model = gpt()
    matrices = sum(p.numel() for p in model.layers.parameters()) + model.lm_head.weight.numel()
    assert model.flops_per_token() == 6 * matrices + 2 * 12 * 16 * 16


def test_pretrained_weights_fill_a_larger_vocabulary():
    small, large = gpt(), gpt(vocab_size=13)
    assert large.load_pretrained(small.state_dict()) == []
    assert (large.wte.weight[:11] == small.wte.weight).all()
    idx = torch.randint(11, (1, 5))
    assert (large(idx)[0][..., :11] - small(idx)[0]).abs().max() < 1e-12
    with pytest.raises(UserError, match='wte.weight'):
        small.load_pretrained(large.state_dict())


def test_a_head_of_its_own_does_not_overwrite_tied_embeddings():
    apart, tied = gpt(tie_weights=False), gpt()
    before = tied.wte.weight.clone()
    with pytest.raises(UserError, match='tie_weights = True: the checkpoint to start from has a head of its own'):
        tied.load_pretrained(apart.state_dict())
    assert torch.equal(tied.wte.weight, before)
    assert apart.load_pretrained(tied.state_dict()) == [] and torch.equal(apart.lm_head.weight, before)


@pytest.mark.parametrize('settings, named', [
    (dict(n_embd=15), 'n_embd = 15 .*try n_embd = 12'), (dict(n_layer=0), 'n_layer = 0'), (dict(dropout=1.0), 'dropout = 1.0'),
    (dict(n_embd=18), 'heads of even width: try n_embd = 16'), (dict(n_embd=15, learned_positions=True), 'try n_embd = 14'), (dict(rope_base=1.0), 'rope_base'), (dict(vocab_size=0), 'vocab_size = 0')])
def test_impossible_settings_are_named(settings, named):
    with pytest.raises(UserError, match=named):
        gpt(**settings)


def test_impossible_inputs_are_named():
    model = gpt()
    with pytest.raises(UserError, match='17 tokens is longer than block_size = 16'):
        model(torch.zeros(1, 17, dtype=torch.long))
    for prompts, settings, named in [([[]], {}, 'prompt is empty'), ([], {}, 'prompt is empty'),
                                     ([[1]], dict(temperature=-1), 'temperature = -1'), ([[1]], dict(top_p=0), 'top_p = 0')]:
        with pytest.raises(UserError, match=named):
            model.complete(prompts, 3, **settings)
    assert model.effort_unit is None  # nothing to show
