"""The seams of model.py carry a method that was not foreseen: Catch Your Breath on Thoughtbubbles, in forty lines."""
import functools
from dataclasses import dataclass

import pytest
import torch

import sample
import train
from config import UserError
from config.checkpoint import load_checkpoint
from conftest import interrupted
from cyb import CYB, CYBConfig
from data.text import TextBatches
from thoughtbubbles import Thoughtbubbles, ThoughtbubblesConfig


# --- the method: a slot is what Thoughtbubbles calls a token ---

@dataclass
class BreathingConfig(CYBConfig, ThoughtbubblesConfig):
    merge: str = 'residual'  # a slot's streams become one vector, from which it answers or says <don't know>

    shape = (*CYBConfig.shape, *ThoughtbubblesConfig.shape)

    def __post_init__(self):
        super().__post_init__()
        if self.merge != 'residual' or not self.see_pauses:
            raise UserError(f'merge = {self.merge!r}, see_pauses = {self.see_pauses}: this method works with residual and '
                            'True alone')


class Breathing(CYB, Thoughtbubbles):
    def slot_outputs(self, ids, index, slot, pad=None, cache=None):
        """Positions, sources and the budget of ceil(kappa * W * tokens) are those of a row of slots."""
        return self.trunk(ids, pad=pad)

    @functools.wraps(CYB.generate)
    def generate(self, *args, **settings):
        if settings.get('skip_unused_pauses'):
            raise UserError('skip_unused_pauses = True: this method rereads all slots of a text')
        return super().generate(*args, **{**settings, 'use_cache': False})

    def row_lengths(self):
        return Thoughtbubbles.row_lengths(self)[0], CYB.row_lengths(self)[1]


# --- what it must do ---

def breathing(seed=0, **settings):
    torch.manual_seed(seed)
    tiny = dict(vocab_size=11, block_size=8, n_layer=3, n_head=2, n_embd=16, fork_layers=(0, 2), kappa=1.5, W=2)
    return Breathing(BreathingConfig(**{**tiny, **settings})).double()


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setitem(train.METHODS, 'breathing', (BreathingConfig, Breathing, TextBatches))


def test_without_forks_it_is_catch_your_breath():
    model = breathing(fork_layers=())
    torch.manual_seed(0)
    plain = CYB(CYBConfig(vocab_size=11, block_size=8, n_layer=3, n_head=2, n_embd=16, W=2)).double()
    plain.load_state_dict(model.state_dict())
    idx = torch.randint(11, (3, 8))
    pad = torch.tensor([[False] * 8, [True] * 3 + [False] * 5, [True] + [False] * 7])
    for padding in (None, pad):
        got, want = (m(idx, pad=padding)[0] for m in (model, plain))
        seen = torch.ones_like(pad) if padding is None else ~pad
        assert (got - want)[seen].abs().max() < 1e-12
    assert abs(model(idx, idx)[1] - plain(idx, idx)[1]) < 1e-12
    prompts = [[1, 2, 3], [4]]
    assert model.complete(prompts, 20, temperature=0) == plain.complete(prompts, 20, temperature=0, use_cache=False)


def test_a_slot_is_a_token_of_thoughtbubbles():
    """The same weights in a Thoughtbubbles model whose vocabulary has the pauses, on a row with the pauses written out."""
    model = breathing(W=3)
    config = ThoughtbubblesConfig(vocab_size=13, block_size=24, n_layer=3, n_head=2, n_embd=16, fork_layers=(0, 2),
                                  kappa=1.5, merge='residual')
    bubbles = Thoughtbubbles(config).double()
    state = {name: p for name, p in model.state_dict().items() if name in bubbles.state_dict()}
    state['wte.weight'] = state['lm_head.weight'] = torch.cat((model.wte.weight, model.pauses))
    bubbles.load_state_dict(state)
    idx = torch.randint(11, (2, 8))
    slots = torch.stack((idx, torch.full_like(idx, 11), torch.full_like(idx, 12)), dim=2).flatten(1)
    assert (model.every_slot(idx).flatten(1, 2) - bubbles.trunk(slots)).abs().max() < 1e-12
    assert bubbles.streams(slots)[2].size(1) == 36  # ceil(kappa * W * tokens)


def test_every_parameter_learns():
    model = breathing()
    idx = torch.randint(11, (4, 8))
    model(idx, idx)[1].backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())


def test_generation_rereads_the_text_with_all_slots_of_past_tokens():
    model = breathing(seed=5)
    torch.manual_seed(5)
    model.dont_know.weight.data.normal_()  # it pauses at some tokens
    text, slots = [1, 2], []
    for _ in range(6):
        answered = False
        for slot in range(2):
            ids = torch.tensor([[id for token in text[:-1] for id in (token, 11)] + [text[-1], 11][:slot + 1]])
            x = model.trunk(ids)[:, -1]
            z, k = model.logits(x), model.dont_know_logit(model.ln_f(x))
            if not answered and (slot == 1 or torch.sigmoid(k - z.logsumexp(-1)) <= 0.5):
                new, answered = int(z.argmax()), True
                slots.append(slot + 1)
        text.append(new)
    assert model.complete([[1, 2]], 6, temperature=0) == [text[2:]] and model.slots == [slots]
    assert set(slots) == {1, 2}
    assert model.complete([[5, 6, 7], [1, 2]], 6, temperature=0)[1] == text[2:]  # beside another row


def test_it_trains_resumes_and_samples(registered, run, tmp_path, capsys):
    settings = dict(method='breathing', fork_layers='1,2', W=2, max_iters=6, dropout=0.1)
    whole = run('whole', **settings)
    with interrupted(3):
        assert run('parts', **settings)['step'] == 4
    resumed = run('parts', init_from='resume', **settings)
    assert all(torch.equal(weight, resumed['model'][name]) for name, weight in whole['model'].items())
    capsys.readouterr()
    sample.main([f'--out_dir={tmp_path / "parts"}', '--prompt=12 plus', '--max_new_tokens=9', '--show', '--pace=all'])
    assert 'mean slots per token: 2.00' in capsys.readouterr().out
    assert load_checkpoint(str(tmp_path / 'parts' / 'ckpt.pt'))['method'] == 'breathing'


@pytest.mark.parametrize('settings', [dict(merge='probs'), dict(merge='rightmost'), dict(see_pauses=False)], ids=str)
def test_anything_else_is_refused(settings):
    with pytest.raises(UserError, match='works with residual and True alone'):
        breathing(**settings)
    with pytest.raises(UserError, match='rereads all slots'):
        breathing().complete([[1]], 2, skip_unused_pauses=True)
