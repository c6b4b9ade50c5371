"""The core against its formulas, and cached generation against rereading the whole text."""
import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import bench
import model as core
import reference
from config import UserError
from config.machine import flops_per_token
from model import (GPT, MLP, Block, CausalSelfAttention, GPTConfig, KVCache, causal_mask, head_gradients,
                   head_numbers, left_pad, mean_nll, rotate, sample_token)
from train import METHODS

SETTINGS = dict(vocab_size=11, block_size=16, n_layer=2, n_head=2, n_embd=16)


def build(method, **settings):
    config_class, model_class, _ = METHODS[method]
    return model_class(config_class(**{**SETTINGS, **settings}))


def gpt(**settings):
    return build('gpt', **settings).double()


# --- attention ---

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
    y = attn(x, model.rope(positions), mask=visible[None, None] if masked else None,
             log_p=log_p if scored else None)
    score = log_p[0] if scored else torch.zeros(S).double()
    expected = reference.attention(attn, x[0], positions[0].tolist(), lambda i, j: visible[i, j], score, score)
    assert (y[0] - expected).abs().max() < 1e-12


@pytest.mark.parametrize('rope_base', [100.0, 10000.0])
def test_the_longest_wavelength_is_that_of_rope_base(rope_base):
    model = gpt(rope_base=rope_base)
    attn, x = model.layers[0].attn, torch.randn(1, 7, 16).double()
    torch.nn.init.normal_(attn.c_attn.weight)
    none = torch.zeros(7).double()
    expected = reference.attention(attn, x[0], range(7), lambda i, j: j <= i, none, none, rope_base)
    assert (attn(x, model.rope(torch.arange(7)[None]))[0] - expected).abs().max() < 1e-12


def test_model_equals_the_plain_rendering():
    model = gpt(tie_weights=False)
    for p in model.layers.parameters():
        p.data *= 8
    idx = torch.randint(11, (1, 9))
    expected = reference.logits(model, reference.plain_gpt(model, model.wte.weight[idx[0]], range(9)))
    assert (model(idx)[0][0] - expected).abs().max() < 1e-10


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
def test_the_mask_hides_later_keys_and_padding_but_oneself(queries, keys):
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
    logits, loss = model(idx)[0], model(idx, targets)[1]
    expected = [-logits[b, t].log_softmax(0)[targets[b, t]]
                for b in range(2) for t in range(6) if targets[b, t] >= 0]
    assert len(expected) == 9 and abs(loss - sum(expected) / 9) < 1e-12


def test_predictions_and_loss_come_one_at_a_time():
    model, idx = gpt(), torch.randint(11, (2, 6))
    assert model(idx)[1] is None and model(idx, idx)[0] is None


# --- the head ---

def head_inputs(N=23, C=4, V=7, dtype=torch.double):
    """y (N,C), weight (V,C) and targets (N,); y has large logits as well as small ones."""
    torch.manual_seed(0)
    y = torch.randn(N, C, dtype=dtype) * torch.logspace(-1, 1, N, dtype=dtype)[:, None]
    return y.requires_grad_(), torch.randn(V, C, dtype=dtype, requires_grad=True), torch.randint(V, (N,))


@pytest.fixture(params=[1, 5, 23, 100], ids='chunks of {}'.format)
def split(request, monkeypatch):
    """The head takes so many positions at once."""
    monkeypatch.setattr(core, 'chunks', lambda N, V: [slice(i, min(i + request.param, N))
                                                      for i in range(0, N, request.param)])


def test_head_numbers_and_gradients_are_those_of_all_logits_at_once(split):
    y, weight, targets = head_inputs()
    z = y @ weight.T
    want = z[torch.arange(23), targets], z.logsumexp(1)
    got = head_numbers(y, weight, targets, torch.double)
    d_numbers = torch.randn(2, 23).double().unbind()  # each position counts differently in each number
    for g, w in zip(got, want, strict=True):
        assert (g - w).abs().max() < 1e-12
    for g, w in zip(*(torch.autograd.grad(numbers, (y, weight), d_numbers) for numbers in (got, want))):
        assert (g - w).abs().max() < 1e-12


def test_head_gradients_equal_finite_differences(split):
    y, weight, targets = head_inputs(N=12)
    assert torch.autograd.gradcheck(lambda y, weight: head_numbers(y, weight, targets, torch.double), (y, weight))
    # and where one of the two numbers alone is used, or the head alone learns
    fixed_y, fixed_weight = y.detach(), weight.detach()
    assert torch.autograd.gradcheck(lambda weight: head_numbers(fixed_y, weight, targets, torch.double)[1], weight)
    assert torch.autograd.gradcheck(lambda y: head_numbers(y, fixed_weight, targets, torch.double)[0], y)


def test_mean_nll_through_the_head_is_torchs_cross_entropy(split):
    model = gpt(tie_weights=False)
    model.lm_head.weight.data *= 50
    x, targets = torch.randn(4, 6, 16).double().requires_grad_(), torch.randint(-1, 11, (4, 6))
    got = mean_nll(model.nll(x, targets), targets)
    want = F.cross_entropy(model.logits(x).flatten(0, 1), targets.flatten(), ignore_index=-1)
    inputs = (x, model.lm_head.weight, model.ln_f.weight)
    assert (targets < 0).any() and abs(got - want) < 1e-12
    for g, w in zip(torch.autograd.grad(got, inputs), torch.autograd.grad(want, inputs)):
        assert (g - w).abs().max() < 1e-12


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_the_operators_are_what_the_compiler_expects(dtype):
    y, weight, targets = head_inputs(dtype=torch.float32)
    torch.library.opcheck(head_numbers, (y, weight, targets, dtype))
    with torch.no_grad():
        d_target, d_lse, lse = torch.randn(3, 23)
        torch.library.opcheck(head_gradients, (y, weight, targets, dtype, lse, d_target, d_lse, False))


@pytest.mark.parametrize('dtype', [torch.double, torch.float32, torch.bfloat16])
@pytest.mark.parametrize('y_dtype', [torch.double, torch.float32, torch.bfloat16])
def test_without_data_the_operators_know_shapes_and_types(dtype, y_dtype):
    def outputs():
        y, weight, targets = torch.randn(5, 4, dtype=y_dtype), torch.randn(7, 4), torch.arange(5)
        numbers = head_numbers(y, weight, targets, dtype)
        return *numbers, *head_gradients(y, weight, targets, dtype, numbers[1], numbers[0], numbers[1], False)
    with FakeTensorMode():
        fake = [(tuple(t.shape), t.dtype) for t in outputs()]
    assert fake == [(tuple(t.shape), t.dtype) for t in outputs()]
    number = torch.promote_types(y_dtype, torch.float32)
    assert fake == [((5,), number), ((5,), number), ((5, 4), y_dtype), ((7, 4), torch.float32)]


def test_chunks_cover_all_positions_once_and_bound_the_logits():
    for N in (0, 1, 255, 256, 257, 100_000):
        for V in (2, 65, 8192, 50257):
            parts = core.chunks(N, V)
            assert [i for part in parts for i in range(N)[part]] == list(range(N))
            assert all(part.stop - part.start <= max(256, 2 ** 22 // V) for part in parts)


def test_ignored_targets_give_no_gradient():
    model = gpt(tie_weights=False)
    x, targets = torch.randn(1, 6, 16).double().requires_grad_(), torch.tensor([[3, -1, 5, -1, -1, 0]])
    grads = torch.autograd.grad(mean_nll(model.nll(x, targets), targets), (x, model.lm_head.weight))
    assert (grads[0][0].abs().amax(1) > 0).tolist() == [True, False, True, False, False, True]
    # those that are ignored do not count at all: the same as without them
    kept = x[:, [0, 2, 5]]
    alone = torch.autograd.grad(mean_nll(model.nll(kept, targets[:, [0, 2, 5]]), targets[:, [0, 2, 5]]),
                                (x, model.lm_head.weight))
    for g, w in zip(grads, alone):
        assert (g - w).abs().max() < 1e-12
    nobody = torch.full_like(targets, -1)
    loss = mean_nll(model.nll(x, nobody), nobody)
    assert loss == 0 and all((g == 0).all() for g in torch.autograd.grad(loss, (x, model.lm_head.weight)))


@pytest.mark.parametrize('tie_weights', [True, False])
def test_bfloat16_autocast_keeps_the_heads_numbers_in_float32(tie_weights, monkeypatch):
    monkeypatch.setattr(core, 'chunks', lambda N, V: [slice(i, i + 8) for i in range(0, N, 8)])
    model = gpt(tie_weights=tie_weights, vocab_size=300).float()
    model.lm_head.weight.data *= 10
    idx, targets = torch.randint(300, (2, 4, 8))
    model(idx, targets)[1].backward()
    exact = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with torch.autocast('cpu', dtype=torch.bfloat16):
        y = model.ln_f(model.trunk(idx))
        z = model.lm_head(y)
        numbers = model.target_numbers(y, targets)
        loss = model(idx, targets)[1]
    assert z.dtype == torch.bfloat16 and all(number.dtype == torch.float32 for number in numbers)
    # the products are those of bfloat16, the logsumexp over them is not
    assert torch.equal(numbers[0], z.float().gather(2, targets[..., None])[..., 0])
    assert (numbers[1] - z.float().logsumexp(-1)).abs().max() < 1e-5
    loss.backward()
    for p, want in zip(model.parameters(), exact, strict=True):
        assert p.grad.dtype == torch.float32
        assert F.cosine_similarity(p.grad.flatten(), want.flatten(), dim=0) > 0.99
        assert p.grad.norm() / want.norm() == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize('method, settings', [
    ('gpt', {}), *(('thoughtbubbles', dict(merge=merge)) for merge in ('probs', 'residual', 'rightmost')),
    ('cyb', dict(W=4)), ('cyb', dict(W=4, objective='tbys')), ('rim', {})], ids=str)
def test_memory_of_a_step_does_not_grow_with_positions_times_vocabulary(method, settings, monkeypatch):
    monkeypatch.setattr(core, 'chunks', lambda N, V: [slice(i, min(i + 16, N)) for i in range(0, N, 16)])
    V = 16_000
    model = build(method, vocab_size=V, n_layer=3, **settings)

    def peak(rows):
        idx = torch.randint(V, (rows, 16))
        targets = (idx,)
        if method == 'rim':  # targets, their weights, the positions that predict them
            targets = idx.flatten(), torch.ones(rows * 16), torch.arange(rows * 16)
        model.zero_grad()
        return bench.peak_memory(lambda: model(idx, *targets)[1].backward())
    peak(1)
    logits = 8 * model.row_lengths()[1] * V * 4  # bytes of one copy for eight more rows
    assert peak(10) - peak(2) < logits / 4


# --- generation ---

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
    cache, idx = [KVCache(16) for _ in model.layers], torch.randint(11, (2, 9))
    parts = [model.trunk(idx[:, a:b], cache=cache) for a, b in [(0, 3), (3, 4), (4, 9)]]
    assert (torch.cat(parts, 1) - model.trunk(idx)).abs().max() < 1e-12


@pytest.mark.parametrize('block_size', [1, 2, 7, 16])
@torch.no_grad()
def test_a_text_that_outgrows_the_window_goes_on_from_its_last_half(block_size):
    model = gpt(tie_weights=False, block_size=block_size)
    for p in model.parameters():
        p.data *= 5
    text, start, new = [1, 2, 3], 0, []
    for _ in range(30):
        if len(text) - start > block_size:
            start = len(text) - max(1, block_size // 2)
        new.append(model(torch.tensor([text[start:]]))[0][0, -1].argmax().item())
        text.append(new[-1])
    assert model.complete([[1, 2, 3]], 30, temperature=0) == [new]


def test_a_stop_token_ends_its_row_only():
    model = gpt()
    free = model.complete([[1], [2]], 12, temperature=0)
    stop = free[0][4]
    stopped = model.complete([[1], [2]], 12, temperature=0, stop_token=stop)
    for row, full in zip(stopped, free):
        assert row == (full[:full.index(stop) + 1] if stop in full else full)
    steps = list(model.generate([[1]], 12, temperature=0, stop_token=stop))
    assert len(steps) == len(stopped[0])


def test_temperature_flattens_and_top_k_and_top_p_cut():
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]]).expand(4000, -1)
    assert (sample_token(logits, 0) == 3).all()
    counts = sample_token(logits, 2.0).bincount(minlength=4) / 4000
    assert (counts - (logits[0] / 2).softmax(0)).abs().max() < 0.04
    assert set(sample_token(logits, 1.0, top_k=2).tolist()) == {2, 3}
    assert set(sample_token(logits, 1.0, top_p=0.6).tolist()) == {3}  # it alone has probability 0.64
    assert set(sample_token(logits, 1.0, top_p=0.7).tolist()) == {2, 3}


@pytest.mark.parametrize('settings, drawn', [
    (dict(top_k=1), {1}), (dict(top_k=2), {1, 2}), (dict(top_k=3), {1, 2, 4}), (dict(top_k=9), {0, 1, 2, 3, 4}),
    (dict(top_p=0.2), {1}), (dict(top_p=0.5), {1, 2}), (dict(top_k=2, top_p=0.5), {1}),
    (dict(temperature=0), {1})], ids=str)
def test_equal_logits_are_cut_by_rank(settings, drawn):
    # a probability of 0.27 for each of the best three, 0.1 for the others
    logits = torch.tensor([[0.0, 1.0, 1.0, 0.0, 1.0]]).expand(400, -1)
    assert set(sample_token(logits, **{'temperature': 1.0, **settings}).tolist()) == drawn


def test_the_order_of_a_draw_does_not_depend_on_a_cut_that_cuts_nothing():
    logits = torch.randn(200, 11)
    drawn = []
    for settings in ({}, dict(top_k=11), dict(top_p=0.999999)):
        torch.manual_seed(1)
        drawn.append(sample_token(logits, 1.0, **settings))
    assert torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize('settings', [dict(temperature=0), dict(temperature=5.0), dict(top_k=9), dict(top_p=0.99)],
                         ids=str)
def test_ids_that_are_no_text_are_not_drawn(settings):
    model = gpt(tie_weights=False)
    model.lm_head.weight.data *= 100
    prompts = [[1, 2], [3]] * 8
    assert any(token >= 4 for row in model.complete(prompts, 20, **settings) for token in row)
    rows = model.complete(prompts, 20, n_text=4, **settings)
    assert all(len(row) == 20 and max(row) < 4 for row in rows)


# --- training ---

@pytest.mark.parametrize('site', ['embedding', 'attention', 'attention output', 'mlp output'])
@pytest.mark.parametrize('method', ['gpt', 'thoughtbubbles'])
def test_dropout_acts_at_each_site_in_training_alone(method, site, monkeypatch):
    model = build(method, n_layer=3, tie_weights=False, dropout=0.5)
    sites = [(model.drop, 'embedding')]
    for layer in model.layers:  # the attention and its output have one rate
        sites += [(layer.attn.resid_dropout, site if 'attention' in site else ''), (layer.mlp.dropout, 'mlp output')]
    assert len(sites) == 1 + 3 * 2 and all(module.p == 0.5 for module, _ in sites)  # as set
    model.set_dropout(0.25)
    assert all(module.p == 0.25 for module, _ in sites)
    for module, where in sites:
        module.p = 0.5 if where == site else 0.0
    attention = F.scaled_dot_product_attention
    if site == 'attention':
        for layer in model.layers:
            monkeypatch.setattr(layer.attn.resid_dropout, 'forward', lambda x: x)
    if site == 'attention output':
        monkeypatch.setattr(F, 'scaled_dot_product_attention', lambda *qkv, dropout_p, **k: attention(*qkv, **k))
    model.lm_head.weight.data *= 20
    idx = torch.randint(11, (2, 9))
    assert (model(idx)[0] - model(idx)[0]).abs().max() > 1e-4
    # generation switches it off and puts the mode back
    drawn = model.complete([[1, 2]], 8, temperature=0)
    assert model.training
    model.eval()
    assert (model(idx)[0] - model(idx)[0]).abs().max() == 0
    assert drawn == model.complete([[1, 2]], 8, temperature=0) and not model.training


def test_initial_weights_are_as_large_as_gpt2s():
    model = GPT(GPTConfig(**{**SETTINGS, 'n_embd': 256, 'n_layer': 8, 'vocab_size': 100}))
    assert model.wte.weight.detach().std() == pytest.approx(0.02, rel=0.05)
    for block in model.layers:
        assert block.attn.c_attn.weight.detach().std() == pytest.approx(0.02, rel=0.05)
        assert block.attn.c_proj.weight.detach().std() == pytest.approx(0.02 / 4, rel=0.05)  # 1 / sqrt(2 * 8)
        assert block.mlp.c_proj.weight.detach().std() == pytest.approx(0.02 / 4, rel=0.05)


def test_an_mlp_of_ones_own_starts_as_small():
    class Gated(MLP):
        def forward(self, x):
            return super().forward(x) * torch.sigmoid(x)

    class GatedBlock(Block):
        mlp_class = Gated

    class GatedGPT(GPT):
        block_class = GatedBlock
    model = GatedGPT(GPTConfig(**{**SETTINGS, 'n_embd': 256}))
    for layer in model.layers:
        assert type(layer.mlp) is Gated
        assert layer.mlp.c_proj.weight.detach().std() == pytest.approx(0.02 / 2, rel=0.05)  # 1 / sqrt(2 * 2)


def test_matrices_and_embeddings_decay_and_nothing_else():
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
    cache = KVCache(16)
    parts = [attn(x[:, a:b], model.rope(torch.arange(a, b)[None]), cache=cache) for a, b in [(0, 3), (3, 6)]]
    assert (torch.cat(parts, 1) - attn(x, model.rope(torch.arange(6)[None]))).abs().max() < 1e-12


def test_flops_are_six_per_weight_and_token_plus_attention():
    model = gpt()
    in_blocks = 6 * sum(p.numel() for p in model.layers.parameters()) + 2 * 12 * 16 * 16
    head = 6 * model.lm_head.weight.numel()
    assert flops_per_token(model) == in_blocks + head
    model.layers.extend([*model.layers])  # the same weights run twice
    assert flops_per_token(model) == 2 * in_blocks + head


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
    (dict(n_embd=15), 'n_embd = 15 .*try n_embd = 12'), (dict(n_layer=0), 'n_layer = 0'),
    (dict(dropout=1.0), 'dropout = 1.0'), (dict(n_embd=18), 'heads of even width: try n_embd = 16'),
    (dict(n_embd=15, learned_positions=True), 'try n_embd = 14'), (dict(rope_base=1.0), 'rope_base'),
    (dict(vocab_size=0), 'vocab_size = 0')])
def test_impossible_settings_are_named(settings, named):
    with pytest.raises(UserError, match=named):
        gpt(**settings)


def test_impossible_inputs_are_named():
    model = gpt()
    with pytest.raises(UserError, match='17 tokens is longer than block_size = 16'):
        model(torch.zeros(1, 17, dtype=torch.long))
    for prompts, settings, named in [
            ([[]], {}, 'prompt is empty'), ([], {}, 'prompt is empty'),
            ([[1]], dict(temperature=-1), 'temperature = -1'), ([[1]], dict(top_p=0), 'top_p = 0')]:
        with pytest.raises(UserError, match=named):
            model.complete(prompts, 3, **settings)
    assert model.spent([[1]], [[2]]) is None  # the same on every token: nothing to show
