"""Catch Your Breath: the loss against reference values and enumerated paths, one pass against slots one by one."""
import functools
import itertools
import json
import math
import os
import runpy

import pytest
import torch
import torch.nn.functional as F

import bench
import config
import model as core
import reference
import sample
import train
from config import UserError
from cyb import CYB, CYBConfig, SlotRows, cyb_loss, stop_log_probs, stopping_distribution
from model import GPT, GPTConfig, head_numbers, left_pad, mean_nll

SIZE = dict(vocab_size=11, block_size=8, n_layer=2, n_head=2, n_embd=16)
OMEGAS = ['last', 'uniform', 'first', 'geometric', (0.2, 0.0, 0.8, 0.0)]
with open(os.path.join(os.path.dirname(__file__), 'cyb_cases.json')) as f:
    CASES = json.load(f)


def breath(seed=0, **settings):
    """A model whose answers and pauses vary from token to token."""
    torch.manual_seed(seed)
    model = CYB(CYBConfig(**{**SIZE, 'W': 4, **settings})).double()
    for p in model.parameters():
        if p.dim() > 1:
            p.data *= 10
    return model.eval()


def every_slot(model, idx, pad=None):
    """z (B,T,W,V) and d (B,T,W) from the one pass of training."""
    x = model.every_slot(idx, pad)
    z = model.logits(x)
    return z, torch.sigmoid(model.dont_know_logit(model.ln_f(x)) - z.logsumexp(-1))


# --- the loss ---

@pytest.mark.parametrize('dtype, tolerance', [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize('case', CASES)
def test_stops_and_loss_equal_the_worked_values(case, dtype, tolerance):
    logits = torch.tensor(case['logits'], dtype=dtype)
    z, k = logits[:, :-1], logits[:, -1]
    lse, a = z.logsumexp(1), z[:, case['target']]
    stop = stop_log_probs(lse - k, case['omega']).exp()
    assert stop.tolist() == pytest.approx(case['stop'], rel=tolerance, abs=tolerance)
    assert (a - lse).exp().tolist() == pytest.approx(case['answer'], rel=tolerance)
    loss = cyb_loss(a, k, lse, case['omega'], case['gamma']).item()
    assert loss == pytest.approx(case['loss'], rel=tolerance, abs=tolerance)


@pytest.mark.parametrize('omega', OMEGAS)
def test_stops_and_loss_equal_all_paths_enumerated(omega):
    target, gamma = 2, [1.0, 0.9, 0.7, 0.4]
    omega = stopping_distribution(omega, 4)
    z, k = torch.randn(4, 5).double() * 2, torch.randn(4).double() * 2
    gap = z.logsumexp(1) - k
    stops = reference.stopping(torch.sigmoid(-gap).tolist(), omega)
    assert sum(stops) == pytest.approx(1, abs=1e-12)
    assert stop_log_probs(gap, omega).exp().tolist() == pytest.approx(stops, abs=1e-12)
    want = reference.breath_loss(z, k, target, omega, gamma)
    assert abs(cyb_loss(z[:, target], k, z.logsumexp(1), omega, gamma) - want) < 1e-12


@pytest.mark.parametrize('omega', OMEGAS)
@pytest.mark.parametrize('scale', [1, 30, 1000])
def test_stops_sum_to_one(omega, scale):
    gap = torch.randn(200, 4, dtype=torch.double) * scale  # d within exp(-1000) of 0 and of 1
    assert (stop_log_probs(gap, stopping_distribution(omega, 4)).logsumexp(1)).abs().max() < 1e-12


def test_omega_below_what_float32_holds():
    gap = torch.zeros(2, 160, requires_grad=True)
    stops = stop_log_probs(gap, stopping_distribution('geometric', 160))
    [grad] = torch.autograd.grad(stops[:, :20].sum(), gap)
    assert stops[:, 0].exp().tolist() == pytest.approx([0.75, 0.75]) and grad.isfinite().all()


def test_omega_is_brought_to_sum_to_one():
    assert sum(stopping_distribution((0.5, 0.5000009), 2)) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize('omega', OMEGAS)
def test_extreme_logits_in_float32(omega):
    omega, gamma = stopping_distribution(omega, 4), [0.9 ** i for i in range(4)]
    values = torch.tensor(list(itertools.product([-100.0, 0.0, 100.0], [-100.0, -28.0, 28.0, 100.0])))
    a, k = values[torch.randint(len(values), (500, 4))].double().unbind(-1)
    exact, single = ([t.to(dtype).requires_grad_() for t in (a, k, torch.logaddexp(a, torch.tensor(1.0).double()))]
                     for dtype in (torch.double, torch.float32))
    want, got = cyb_loss(*exact, omega, gamma), cyb_loss(*single, omega, gamma)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    for g, w in zip(torch.autograd.grad(got.sum(), single), torch.autograd.grad(want.sum(), exact)):
        torch.testing.assert_close(g.double(), w, rtol=1e-3, atol=1e-5)


def test_a_discount_too_small_for_a_float_counts_as_nearly_nothing():
    gamma = [1e-200 ** i for i in range(3)]
    assert gamma[2] == 0.0
    a, k, lse = torch.zeros(3), torch.zeros(3), torch.full((3,), math.log(2))  # t = 1/2; d = 1/3
    loss = cyb_loss(a, k, lse, stopping_distribution('last', 3), gamma)
    assert loss.item() == pytest.approx(-math.log(2 / 3 / 2))  # what slot 1 alone gives


@pytest.fixture(params=[1, 5, 1000], ids='chunks of {}'.format)
def split(request, monkeypatch):
    """The head takes so many slots at once."""
    monkeypatch.setattr(core, 'chunks', lambda N, V: [slice(i, min(i + request.param, N))
                                                      for i in range(0, N, request.param)])


@pytest.mark.parametrize('omega', ['last', 'uniform', 'first', 'geometric'])
def test_gradients_equal_finite_differences(omega, split):
    N, W, C, V = 5, 3, 4, 7
    y, k, weight = (torch.randn(*shape).double().requires_grad_() for shape in ((N, W, C), (N, W), (V, C)))
    targets = torch.randint(V, (N,))
    targets[1] = -1
    each = targets.clamp(min=0).repeat_interleave(W)
    omega, gamma = stopping_distribution(omega, W), [0.8 ** i for i in range(W)]

    def loss(y, k, weight):
        target_logit, lse = (t.view(N, W) for t in head_numbers(y.flatten(0, 1), weight, each, torch.double))
        return mean_nll(cyb_loss(target_logit, k, lse, omega, gamma), targets)
    assert torch.autograd.gradcheck(loss, (y, k, weight))


def test_loss_and_gradients_equal_the_definition_over_all_logits(split):
    model = breath(gamma0=0.7, omega='geometric').train()  # gamma is for training alone
    idx, targets = torch.randint(11, (2, 3, 8))
    targets[0, :3] = -1
    z, _ = every_slot(model, idx)
    k = model.dont_know_logit(model.ln_f(model.every_slot(idx)))
    a = z.gather(3, targets.clamp(min=0)[..., None, None].expand(-1, -1, 4, 1))[..., 0]
    omega, gamma = [8 / 15, 4 / 15, 2 / 15, 1 / 15], [1, 0.7, 0.49, 0.343]
    want = cyb_loss(a, k, z.logsumexp(3), omega, gamma)[targets >= 0].mean()
    got = model(idx, targets)[1]
    assert got.item() == pytest.approx(want.item(), abs=1e-12)
    params = list(model.parameters())
    for g, w in zip(torch.autograd.grad(got, params), torch.autograd.grad(want, params)):
        torch.testing.assert_close(g, w)
    with torch.no_grad():
        assert model(idx, targets)[1].item() == pytest.approx(want.item(), abs=1e-12)


@pytest.mark.parametrize('see_pauses', [True, False])
@pytest.mark.parametrize('omega', OMEGAS)
def test_model_equals_the_plain_rendering(omega, see_pauses):
    model = breath(omega=omega, gamma0=0.8, see_pauses=see_pauses).train()
    tokens, targets = torch.randint(11, (2, 8)).tolist()
    z, k = reference.breath_slots(model, tokens)
    gamma = [1, 0.8, 0.64, 0.512]
    want = sum(reference.breath_loss(z[t], k[t], targets[t], model.omega, gamma) for t in range(8)) / 8
    assert abs(model(torch.tensor([tokens]), torch.tensor([targets]))[1] - want) < 1e-10


def test_validation_is_the_plain_likelihood_whatever_the_discount():
    idx, targets = torch.randint(11, (2, 3, 8))
    for omega in OMEGAS:
        plain, discounted = breath(omega=omega), breath(omega=omega, gamma0=0.5)
        want = F.nll_loss(discounted(idx)[0].flatten(0, 1), targets.flatten()).item()
        assert discounted(idx, targets)[1].item() == pytest.approx(want, abs=1e-12)
        assert discounted(idx, targets)[1].item() == plain(idx, targets)[1].item()
        if omega != 'first':  # there the discount never acts
            assert discounted.train()(idx, targets)[1].item() > plain.train()(idx, targets)[1].item() + 1e-3


def test_a_pause_after_the_stop_gets_no_gradient():
    model = breath()
    for bias, nothing in [(-1e4, True), (0.0, False)]:  # d = 0, or not
        model.zero_grad()
        model.dont_know.bias.data.fill_(bias)
        model(torch.tensor([[3]]), torch.tensor([[5]]))[1].backward()
        assert bool((model.pauses.grad == 0).all()) == nothing and (model.wte.weight.grad != 0).any()


def test_to_measure_memory_writes_no_lines(capfd):
    assert bench.peak_memory(lambda: torch.zeros(1000)) == 4000
    assert capfd.readouterr() == ('', '')


# --- the model ---

def test_one_slot_is_the_plain_gpt():
    plain, one = GPT(GPTConfig(**SIZE)).double(), breath(W=1)
    for p in plain.parameters():
        if p.dim() > 1:
            p.data *= 10
    one.load_pretrained(plain.state_dict())
    idx, targets = torch.randint(11, (2, 3, 8))
    targets[1, 2] = -1
    want, got = plain(idx, targets)[1], one(idx, targets)[1]
    assert got.item() == pytest.approx(want.item(), abs=1e-12)
    want.backward()
    got.backward()
    own = dict(one.named_parameters())
    for name, p in plain.named_parameters():
        torch.testing.assert_close(own[name].grad, p.grad)


@pytest.mark.parametrize('see_pauses', [True, False])
@pytest.mark.parametrize('learned_positions', [False, True])
def test_one_pass_equals_slots_one_by_one(see_pauses, learned_positions):
    model = breath(see_pauses=see_pauses, learned_positions=learned_positions)
    tokens = torch.randint(11, (8,)).tolist()
    want, rows, got = model.every_slot(torch.tensor([tokens]))[0], SlotRows(model, [tokens[:1]]), []
    for token in tokens:
        for slot in range(4):
            got.append(rows.feed()[0])
            rows.answer(0, token) if slot == 3 else rows.pause(0)
            if slot == 3 and len(rows.tokens[0]) - 1 < 8:
                rows.tokens[0][-1] = tokens[len(rows.tokens[0]) - 1]
    torch.testing.assert_close(torch.stack(got).view(8, 4, -1), want)


@pytest.mark.parametrize('see_pauses', [True, False])
@pytest.mark.parametrize('learned_positions', [False, True])
def test_left_padding_changes_nothing(see_pauses, learned_positions):
    model = breath(see_pauses=see_pauses, learned_positions=learned_positions)
    rows = [[3, 1, 4], [1, 5, 9, 2, 6, 5]]
    idx, pad = left_pad(rows, 'cpu')
    together = model(idx, pad=pad)[0]
    for r, row in enumerate(rows):
        torch.testing.assert_close(together[r, -len(row):], model(torch.tensor([row]))[0][0])


def test_predictions_are_the_distribution_that_the_loss_scores():
    model = breath(omega='geometric')
    idx, targets = torch.randint(11, (2, 3, 8))
    predictions = model(idx)[0]
    torch.testing.assert_close(predictions.logsumexp(-1), torch.zeros(3, 8).double())
    torch.testing.assert_close(F.nll_loss(predictions.flatten(0, 1), targets.flatten()), model(idx, targets)[1])


def test_later_tokens_and_pauses_do_not_leak():
    model = breath()
    idx = torch.randint(10, (1, 8))
    z, _ = every_slot(model, idx)
    changed = idx.clone()
    changed[0, 5] += 1
    assert torch.equal(every_slot(model, changed)[0][:, :5], z[:, :5])
    model.pauses.data[2] *= -1  # the third pause: slots 1 to 3 of the first token are before it
    after = every_slot(model, idx)[0]
    assert torch.equal(after[:, 0, :3], z[:, 0, :3]) and not torch.allclose(after[:, 1, 0], z[:, 1, 0])


def test_tbys_is_cross_entropy_in_the_last_slot():
    model = breath(objective='tbys')
    idx, targets = torch.randint(11, (2, 3, 8))
    logits = model.logits(model.every_slot(idx)[:, :, -1])
    torch.testing.assert_close(model(idx, targets)[1], F.cross_entropy(logits.flatten(0, 1), targets.flatten()))
    assert model.complete([[1, 2]], 3, temperature=0)[0][0] == model(torch.tensor([[1, 2]]))[0][0, -1].argmax()
    assert model.slots == [[4, 4, 4]]


def test_ids_that_are_no_text_are_not_drawn():
    model = breath(tie_weights=False)
    for settings in (dict(temperature=0), dict(temperature=3.0), dict(pace='all', top_k=9)):
        assert any(max(row) >= 4 for row in model.complete(PROMPTS, 20, **settings))
        assert all(max(row) < 4 for row in model.complete(PROMPTS, 20, n_text=4, **settings))


def test_bfloat16_autocast_keeps_the_loss_in_float32():
    model = breath().float()
    idx, targets = torch.randint(11, (2, 3, 8))
    with torch.autocast('cpu', dtype=torch.bfloat16):
        got, y = model(idx, targets)[1], model.ln_f(model.every_slot(idx))
        z = model.lm_head(y)
    assert z.dtype == torch.bfloat16 and got.dtype == torch.float32
    z, k = z.double(), F.linear(y, model.dont_know.weight, model.dont_know.bias)[..., 0].double()
    a = z.gather(3, targets[..., None, None].expand(-1, -1, 4, 1))[..., 0]
    want = cyb_loss(a, k, z.logsumexp(3), model.omega, model.gamma).mean().item()
    assert got.item() == pytest.approx(want, rel=1e-5)
    got.backward()
    single = breath().float()
    single.load_state_dict(model.state_dict())
    single(idx, targets)[1].backward()
    for p, want in zip(model.parameters(), single.parameters()):
        assert p.grad.dtype == torch.float32
        assert F.cosine_similarity(p.grad.flatten(), want.grad.flatten(), dim=0) > 0.9
        assert 0.8 < p.grad.norm() / want.grad.norm() < 1.25


@pytest.mark.parametrize('d_init', [0.5, 0.9, 1 / 12])
def test_starts_with_the_probability_of_not_knowing_that_is_set(d_init):
    model = CYB(CYBConfig(**SIZE, d_init=d_init))
    assert (every_slot(model, torch.randint(11, (3, 8)))[1] - d_init).abs().max() < 0.2 * d_init


# --- generation ---

PROMPTS = [[3], [1, 5, 9, 2], [2, 2]]


def wavering(seed=3, **settings):
    """A model that pauses at some tokens and not at others in greedy texts, found by trying seeds."""
    model = breath(seed, tie_weights=False, **settings)
    model.dont_know.weight.data *= 3
    model.dont_know.bias.data.fill_(2)
    model.pauses.data *= 5
    return model


def check_greedy(model, n, threshold=0.5, skip=False, **settings):
    """Text and slots of PROMPTS are those of the plain rendering."""
    new = model.complete(PROMPTS, n, temperature=0, threshold=threshold, skip_unused_pauses=skip, **settings)
    want = [list(zip(*text)) for text in slow_texts(model, n, threshold, skip)]
    assert new == [list(tokens) for tokens, _ in want] and model.slots == [list(slots) for _, slots in want]


@functools.lru_cache(1)  # for the same model with a cache and without
@torch.no_grad()
def slow_texts(model, n, threshold, skip):
    return [list(reference.breath_text(model, prompt, n, threshold, skip)) for prompt in PROMPTS]


@pytest.mark.parametrize('seed, see_pauses, skip', [
    (3, True, False), (14, True, False), (22, True, False), (3, True, True), (14, True, True), (22, True, True),
    (22, False, False)])
def test_rows_that_pause_differently_equal_the_plain_rendering(seed, see_pauses, skip):
    model = wavering(seed, see_pauses=see_pauses)
    for use_cache in (True, False):
        check_greedy(model, 20, skip=skip, use_cache=use_cache)  # beyond the window
        assert len(set(sum(model.slots, []))) > 1 and model.slots[0] != model.slots[1]


@pytest.mark.parametrize('see_pauses', [True, False])
@pytest.mark.parametrize('pace', ['model', 'first', 'all'])
def test_cached_equals_uncached_when_drawn(see_pauses, pace):
    model = breath(see_pauses=see_pauses)
    texts = []
    for use_cache in (True, False):
        torch.manual_seed(5)
        texts.append((model.complete(PROMPTS, 20, temperature=0.7, pace=pace, use_cache=use_cache), model.slots))
    assert texts[0] == texts[1]


@pytest.mark.parametrize('threshold', [0.0, 0.2, 0.9, 1.0])
def test_a_token_pauses_where_d_is_above_the_threshold(threshold):
    model = wavering(22)
    check_greedy(model, 8, threshold)
    assert threshold not in (0.0, 1.0) or set(sum(model.slots, [])) == {4 if threshold == 0 else 1}


def test_a_window_of_one_token():
    model = breath(block_size=1)
    assert model.complete([[3]], 4, temperature=0) == model.complete([[3]], 4, temperature=0, use_cache=False)


def test_generation_leaves_the_mode_as_it_was():
    model = breath(dropout=0.5).train()
    model.complete([[3]], 2)
    assert model.training


def test_unseen_pauses_generate_alike_in_a_batch_and_alone():
    model = wavering(see_pauses=False)
    new, slots = model.complete(PROMPTS, 20, temperature=0), model.slots
    for r, prompt in enumerate(PROMPTS):
        assert model.complete([prompt], 20, temperature=0) == [new[r]] and model.slots == [slots[r]]
    first = every_slot(model, torch.tensor([PROMPTS[1]]))
    assert new[1][0] == first[0][0, -1, slots[1][0] - 1].argmax()


def test_pace_first_answers_in_slot_one_and_pace_all_in_slot_w():
    model = breath()
    z, _ = every_slot(model, torch.tensor([PROMPTS[1]]))
    for pace, slot in [('first', 1), ('all', 4)]:
        new = model.complete(PROMPTS, 6, temperature=0, pace=pace)
        assert new[1][0] == z[0, -1, slot - 1].argmax() and model.slots == [[slot] * 6] * 3


def test_pauses_are_drawn_with_probability_d():
    model = breath(W=2)
    _, d = every_slot(model, torch.tensor([[3, 7]]))
    model.complete([[3, 7]] * 4000, 1, temperature=1.0)
    assert sum(s == [2] for s in model.slots) / 4000 == pytest.approx(d[0, 1, 0].item(), abs=0.03)


@pytest.mark.parametrize('rows', [1, 3])
def test_few_forward_passes_beyond_the_slots_used(rows, monkeypatch):
    model, passes, feed = wavering(22, block_size=64), [], SlotRows.feed
    monkeypatch.setattr(SlotRows, 'feed', lambda self: passes.append(1) or feed(self))
    model.complete(PROMPTS[:rows], 50, temperature=0)
    used = sum(sum(s) for s in model.slots) / 50 / rows
    assert 1.2 < used and len(passes) / 50 <= used + 1.1
    assert rows > 1 or len(passes) == sum(model.slots[0])
    passes.clear()
    model.complete(PROMPTS[:rows], 50, temperature=0, pace='all')
    assert len(passes) == 50


def test_a_stop_token_ends_its_row_and_spent_are_the_slots_of_the_rest():
    model = wavering()
    text = model.complete(PROMPTS, 12, temperature=0)
    stop = text[0][2]
    cut = model.complete(PROMPTS, 12, temperature=0, stop_token=stop)
    for whole, row in zip(text, cut):
        assert row == (whole[:whole.index(stop) + 1] if stop in whole else whole)
    assert [len(s) for s in model.slots] == [len(row) for row in cut]
    unit, slots = model.spent(PROMPTS, cut)
    assert unit == 'slots' and slots == [[None] * len(p) + s for p, s in zip(PROMPTS, model.slots)]
    for other in (breath(W=1), breath(objective='tbys')):
        assert other.spent(PROMPTS, cut) is None  # the same on every token: nothing to show


def test_a_step_yields_none_for_rows_that_pause():
    model = wavering()
    steps = list(model.generate(PROMPTS, 12, temperature=0))
    each = [[token for token in row if token is not None] for row in zip(*steps)]
    assert each == model.complete(PROMPTS, 12, temperature=0)
    # a row takes as many steps as slots, up to its last token
    for row, slots in zip(zip(*steps), model.slots):
        assert max(i for i, token in enumerate(row) if token is not None) + 1 == sum(slots)


def test_sample_prints_nothing_before_it_refuses(run, tmp_path, capsys):
    run('cyb', method='cyb')
    capsys.readouterr()
    with pytest.raises(UserError, match='pace'):
        sample.main([f'--out_dir={tmp_path}/cyb', '--prompt=1', '--pace=slow'])
    assert capsys.readouterr().out == ''


def test_sample_shows_the_slots(run, tmp_path, capsys):
    run('cyb', method='cyb', W=3, learned_positions=True)
    capsys.readouterr()
    sample.main([f'--out_dir={tmp_path}/cyb', '--max_new_tokens=20', '--show=True', '--pace=all', '--prompt=1'])
    assert 'mean slots per token: 3.00' in capsys.readouterr().out


def test_spent_on_a_prompt_are_the_slots_up_to_the_first_that_knows():
    torch.manual_seed(51)
    model = CYB(CYBConfig(vocab_size=11, block_size=8, n_layer=2, n_head=2, n_embd=16, W=3)).double().eval()
    model.dont_know.weight.data *= 40
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5]  # longer than block_size
    unit, (slots,) = model.spent([prompt], [[]])
    with torch.no_grad():
        x = model.every_slot(torch.tensor([prompt[1:]]))[0]
        z, k = model.logits(x), model.dont_know_logit(model.ln_f(x))
    d = torch.cat((z, k[..., None]), dim=-1).softmax(-1)[..., -1]  # (T,W)
    expected = [next((i + 1 for i in range(2) if row[i] <= 0.5), 3) for row in d.tolist()]
    assert unit == 'slots' and slots == [None, *expected] and {*expected} == {1, 2, 3}
    assert (d > 0.5).all(dim=1).any()  # a token that no slot knows takes them all


# --- starting from another model ---

FROM_GPT = {name: value for name, value in runpy.run_path(f'{config.ROOT}/config/cyb_from_gpt.py').items()
            if name in ('see_pauses', 'd_init')}


@pytest.mark.parametrize('learned_positions', [False, True])
@pytest.mark.parametrize('shift', [0, -5, 5])
def test_starts_as_the_plain_gpt(learned_positions, shift):
    settings = dict(learned_positions=learned_positions, bias=True, tie_weights=False)
    plain = GPT(GPTConfig(**SIZE, **settings)).double()
    for p in plain.parameters():
        if p.dim() > 1:
            p.data *= 10
    plain.ln_f.bias.data.fill_(1)
    plain.lm_head.weight.data += shift  # all logits far below or above 0 mean the same model
    model = breath(**settings, **FROM_GPT)
    assert set(model.load_pretrained(plain.state_dict())) == {'pauses', 'dont_know.weight', 'dont_know.bias'}
    idx, targets = torch.randint(11, (2, 3, 8))
    z, d = every_slot(model, idx)
    torch.testing.assert_close(z[:, :, 0], plain(idx)[0])
    assert d.max() < 1e-4
    assert model(idx, targets)[1].item() == pytest.approx(plain(idx, targets)[1].item(), abs=1e-3)
    assert model.complete(PROMPTS, 20, temperature=0) == plain.complete(PROMPTS, 20, temperature=0)


def test_slots_stand_where_their_token_stood():
    settings = dict(SIZE, learned_positions=True)
    plain = GPT(GPTConfig(**settings))
    for block_size in (8, 24):  # 24 = 3 * 8 is no sign that the table has running positions
        model = CYB(CYBConfig(**{**settings, 'W': 3, 'block_size': block_size}))
        model.load_pretrained(plain.state_dict())
        for slot in range(3):
            assert torch.equal(model.wpe.weight[slot:24:3], plain.wpe.weight)
    longer = CYB(CYBConfig(**{**settings, 'W': 3, 'block_size': 72}))
    longer.load_pretrained(model.state_dict())
    assert torch.equal(longer.wpe.weight[:72], model.wpe.weight)
    shorter = CYB(CYBConfig(**{**settings, 'W': 2, 'block_size': 4}))
    shorter.load_pretrained(plain.state_dict())
    assert torch.equal(shorter.wpe.weight[1::2], plain.wpe.weight[:4])


def test_pauses_that_later_tokens_do_not_see_stand_between_tokens():
    for see_pauses, expected in [(False, [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75]), (True, list(range(8)))]:
        model, seen = breath(see_pauses=see_pauses), []
        rope = model.rope
        model.rope = lambda positions: seen.append(positions.tolist()) or rope(positions)
        model(torch.tensor([[3, 4]]))
        assert seen == [[expected]]


def test_fine_tuning_run_starts_at_the_loss_of_the_plain_gpt(run, tmp_path):
    run('plain', method='gpt', max_iters=60, eval_interval=60, learning_rate=0.01)
    run('tuned', method='cyb', W=3, init_from=f'{tmp_path}/plain/ckpt.pt', **FROM_GPT)
    last, first = (json.loads(open(tmp_path / name / 'log.jsonl').readlines()[i])['val_loss']
                   for name, i in (('plain', -1), ('tuned', 0)))
    assert last < 3.0 and first == pytest.approx(last, abs=2e-4)
    again = run('again', method='cyb', init_from=f'{tmp_path}/tuned/ckpt.pt')
    assert again['model_config']['W'] == 3 and again['model_config']['see_pauses'] is False


def test_what_a_run_is_trained_for_is_not_taken_over(run, tmp_path):
    run('tbys', method='cyb', W=3, objective='tbys')
    tuned = run('tuned', method='cyb', gamma0=0.5, init_from=f'{tmp_path}/tbys/ckpt.pt')
    again = run('again', method='cyb', init_from=f'{tmp_path}/tuned/ckpt.pt')
    for config, gamma0 in ((tuned['model_config'], 0.5), (again['model_config'], 1.0)):
        assert (config['objective'], config['W'], config['gamma0']) == ('cyb', 3, gamma0)


def test_another_number_of_slots_is_refused(run, tmp_path):
    run('two', method='cyb', W=2)
    with pytest.raises(UserError, match='W = 4: .*two/ckpt.pt has 2'):
        run('four', method='cyb', W=4, init_from=f'{tmp_path}/two/ckpt.pt')
    run('one', method='cyb', W=1)
    with pytest.raises(UserError, match='W = 4: .*one/ckpt.pt has 1'):
        run('four', method='cyb', W=4, init_from=f'{tmp_path}/one/ckpt.pt')
    with pytest.raises(UserError, match='W = 4.* 2'):
        run('two', method='cyb', W=4, init_from='resume')
    with pytest.raises(UserError, match='cyb model, not gpt'):
        run('two', method='gpt', init_from='resume')


# --- wrong inputs ---

@pytest.mark.parametrize('settings, message', [
    (dict(W=0), 'W = 0'), (dict(gamma0=0.0), 'gamma0 = 0.0'), (dict(gamma0=1.1), 'gamma0 = 1.1'),
    (dict(W=3, omega=(0.5, 0.5)), '2 numbers.*W = 3'), (dict(W=2, omega=(-0.5, 1.5)), 'from 0 to 1'),
    (dict(W=2, omega=(0.5, 0.6)), 'sums to 1.1'), (dict(W=2, omega=(0.5, 0.50001)), 'sums to 1.00001'),
    (dict(objective='tbys', gamma0=0.5), 'gamma0 = 0.5: they have no effect'),
    (dict(omega='never'), "'never'.*last, uniform"), (dict(d_init=1.0), 'd_init = 1.0'),
    (dict(objective='ce'), "objective = 'ce'")])
def test_impossible_settings_are_named(settings, message):
    with pytest.raises(UserError, match=message):
        CYBConfig(**{**SIZE, **settings})


def test_impossible_ways_to_sample_are_named():
    model = breath()
    for settings, message in [(dict(pace='slow'), 'pace = .slow'), (dict(threshold=2), 'threshold = 2'),
                              (dict(temperature=-1), 'temperature = -1'),
                              (dict(threshold=0.2), 'threshold = 0.2: has an effect'),
                              (dict(threshold=0.2, temperature=0, pace='all'), 'threshold = 0.2: has an effect')]:
        with pytest.raises(UserError, match=message):
            model.complete([[1]], 2, **settings)
    with pytest.raises(UserError, match='pace = first'):
        breath(objective='tbys').complete([[1]], 2, pace='first')
    with pytest.raises(UserError, match='skip_unused_pauses = True'):
        breath(see_pauses=False).complete([[1]], 2, skip_unused_pauses=True)
    with pytest.raises(UserError, match='9 tokens.*block_size = 8'):
        model(torch.zeros(1, 9, dtype=torch.long))


def test_sampling_settings_of_another_method_are_refused(run, tmp_path):
    run('plain', method='gpt')
    with pytest.raises(UserError, match='threshold = 0.2.*gpt model'):
        sample.main([f'--out_dir={tmp_path}/plain', '--threshold=0.2'])


def test_a_row_beyond_memory_says_what_it_needs(run, monkeypatch):
    monkeypatch.setattr(train.os, 'sysconf', lambda name: 2 ** 17)  # 16 GB: 128k pages of 128 kB
    needs = r'batch_size = 1000000 rows of 64 positions: .* about \d{3,} GB, cpu has 17 GB: \d{3,} rows would fit'
    with pytest.raises(UserError, match=needs):
        run('huge', method='cyb', W=4, batch_size=10 ** 6)
