"""Catch Your Breath (arXiv 2510.13879): the model may answer <don't know> and get a pause to go on thinking.

Every token is followed by W-1 pauses and so has W slots, in which the model may answer with the next token. The loss
is over the random slot S at which the output happens: the first where the model answers or the world stops it.
Shapes: B batch, T tokens, W slots, C width, V vocabulary; z logits of the V tokens, k logit of <don't know>.
"""
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from config import UserError
from model import GPT, GPTConfig, causal_mask

CHUNK = 2 ** 23  # logits that training holds at once


@dataclass
class CYBConfig(GPTConfig):
    W: int = 2  # slots per token: itself and W-1 pauses
    omega: str | tuple = 'last'  # when the world stops: last (never early) | uniform | first | geometric | W numbers
    gamma0: float = 1.0  # discount per slot, below 1 rewards early answers
    objective: str = 'cyb'  # cyb | tbys (baseline: cross-entropy in the last slot, no <don't know>)
    see_pauses: bool = True  # False: later tokens do not see a token's pauses and positions count tokens

    # what differs by default when training starts from a plain GPT: slot 1 must go on being that GPT
    from_plain = {'see_pauses': False}

    def __post_init__(self):
        super().__post_init__()
        if self.W < 1:
            raise UserError(f'W = {self.W}: a token has at least 1 slot')
        if not 0 < self.gamma0 <= 1:
            raise UserError(f'gamma0 = {self.gamma0}: must be in (0, 1]')
        if self.objective not in ('cyb', 'tbys'):
            raise UserError(f'objective = {self.objective!r}: choose cyb or tbys')
        stopping_distribution(self.omega, self.W)

    @property
    def row_size(self):
        return self.block_size * self.W


def stopping_distribution(omega, W):
    """The probabilities (W numbers, sum 1) that the world stops at slot 1...W, from a name or from W numbers.

    geometric: each slot is half as likely as the one before. Raises UserError for anything else.
    """
    named = {'last': [0.0] * (W - 1) + [1.0], 'uniform': [1 / W] * W, 'first': [1.0] + [0.0] * (W - 1),
             'geometric': [0.5 ** w / (2 - 2 * 0.5 ** W) for w in range(W)]}
    if isinstance(omega, str):
        if omega not in named:
            raise UserError(f'omega = {omega!r}: choose {", ".join(named)} or give W = {W} numbers')
        return named[omega]
    if len(omega) != W:
        raise UserError(f'omega = {omega} has {len(omega)} numbers: give one for each of the W = {W} slots')
    if not all(0 <= w < math.inf for w in omega):
        raise UserError(f'omega = {omega}: probabilities are 0 or more')
    if abs(sum(omega) - 1) > 1e-6:
        raise UserError(f'omega = {omega} sums to {sum(omega):.6g}: probabilities must sum to 1')
    return [w / sum(omega) for w in omega]


def stop_log_probs(gap, omega):
    """log Pr(S = i) for slots i = 1...W, (..., W): the output happens where the model answers or the world stops.

    gap (..., W): logsumexp(z) - k, so that d = sigmoid(-gap) is the probability of <don't know>; logsigmoid keeps
    log d and log(1-d) exact where d is next to 0 or 1. omega: W probabilities.
    """
    log_d, log_answer = F.logsigmoid(-gap), F.logsigmoid(gap)
    n = max(i + 1 for i, w in enumerate(omega) if w > 0)  # the world lets nobody past slot n
    reached = F.pad(log_d[..., :n - 1].cumsum(dim=-1), (1, 0))  # log prod_{j<i} d_j
    remaining = [math.fsum(omega[i:]) for i in range(n)]  # R_i: the world has not stopped before slot i
    log_remaining, log_omega = (gap.new_tensor(p).log() for p in (remaining, omega))
    stops = torch.logaddexp(log_remaining[:-1] + log_answer[..., :n - 1], log_omega[:n - 1] + log_d[..., :n - 1])
    stops = torch.cat((stops, log_remaining[-1].expand_as(gap[..., :1])), dim=-1)  # at slot n both end it: omega_n
    return F.pad(reached + stops, (0, len(omega) - n), value=-math.inf)


def cyb_loss(target_logit, dont_know, lse, omega, gamma):
    """-log sum_i Pr(S=i) gamma_i t_i in nats, (...), where t_i = exp(target_logit - lse) is the target's probability
    given that slot i answers.

    target_logit, dont_know, lse = logsumexp(z): (..., W) each. omega, gamma: W numbers each.
    """
    log_t = target_logit - lse
    return -torch.logsumexp(stop_log_probs(lse - dont_know, omega) + lse.new_tensor(gamma).log() + log_t, dim=-1)


class HeadLoss(torch.autograd.Function):
    """Sum of cyb_loss over tokens, from what the head reads; only a chunk of the N*W*V logits exists at any time.

    A sum's gradient is known as soon as its terms are, so it is taken chunk by chunk in the forward pass: the logits
    are neither kept for the backward pass nor computed a second time. With p = softmax(z) the chain rule is
    dL/dz_v = dL/dlse * p_v + dL/dtarget_logit * [v = target].
    """

    @staticmethod
    def forward(ctx, y, dont_know, weight, targets, omega, gamma, with_gradient):
        """y (N,W,C), dont_know (N,W) float, weight (V,C), targets (N,) with -1 = ignore -> scalar."""
        N, W, C = y.shape
        kind = y.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        w, total = weight.to(dtype), dont_know.new_zeros(())
        if with_gradient:
            d_y, d_k, d_weight = torch.empty_like(y), torch.empty_like(dont_know), torch.zeros_like(weight)
        step = max(1, CHUNK // (W * weight.size(0)))
        with torch.autocast(kind, enabled=False):
            for start in range(0, N, step):
                chunk = slice(start, start + step)
                y_c, counted = y[chunk].flatten(0, 1).to(dtype), targets[chunk] >= 0
                z = (y_c @ w.T).to(dont_know.dtype)  # (n*W, V)
                target = targets[chunk].clamp(min=0).repeat_interleave(W)[:, None]
                numbers = [z.gather(1, target).view(-1, W), dont_know[chunk], z.logsumexp(dim=1).view(-1, W)]
                with torch.set_grad_enabled(with_gradient):
                    numbers = [t.detach().requires_grad_(with_gradient) for t in numbers]
                    loss = torch.where(counted, cyb_loss(*numbers, omega, gamma), 0.0).sum()
                total += loss.detach()
                if not with_gradient:
                    continue
                d_target, d_k[chunk], d_lse = torch.autograd.grad(loss, numbers)
                z.sub_(numbers[2].detach().view(-1, 1)).exp_().mul_(d_lse.view(-1, 1))
                z.scatter_add_(1, target, d_target.view(-1, 1))
                d_z = z.to(dtype)
                d_y[chunk] = (d_z @ w).view(-1, W, C)
                d_weight += d_z.T @ y_c
        if with_gradient:
            ctx.save_for_backward(d_y, d_k, d_weight)
        return total

    @staticmethod
    def backward(ctx, grad):
        return *(grad * d for d in ctx.saved_tensors), None, None, None, None


@torch.compiler.disable  # the inner gradient is beyond torch.compile, which goes on before and after
def head_loss(*args):
    return HeadLoss.apply(*args)


class CYB(GPT):
    def __init__(self, config):
        super().__init__(config)
        # created after the core, so that the core starts from the same weights as a plain GPT of the same seed
        self.omega = stopping_distribution(config.omega, config.W)
        self.gamma = [config.gamma0 ** i for i in range(config.W)]
        if config.W > 1:
            self.pauses = nn.Parameter(torch.randn(config.W - 1, config.n_embd) * 0.02)
        if config.objective == 'cyb':
            self.dont_know = nn.Linear(config.n_embd, 1)
            self._init_weights(self.dont_know)

    # --- slots: pause j of a token has the id V + j - 1 ---

    def input_vectors(self, idx):
        """Ids (B,S), of pauses too -> their embeddings (B,S,C)."""
        V = self.config.vocab_size
        if self.config.W == 1:
            return super().input_vectors(idx)
        x = super().input_vectors(idx.masked_fill(idx >= V, 0))
        return torch.where((idx >= V)[..., None], self.pauses[(idx - V).clamp(min=0)], x)

    def positions(self, index, slot):
        """Where slot 0...W-1 of token 0, 1, ... of a row stands: positions run on over the slots; where pauses stay
        unseen, the token keeps a plain GPT's position and its pauses stand between it and the next one."""
        position = index * self.config.W + slot
        return position if self.config.see_pauses else position / self.config.W

    def encode_slots(self, idx, pad=None):
        """Token ids (B,T) -> the last block's output in every slot (B,T,W,C). pad: bool (B,T), True = padding.

        Raises UserError when the row does not fit into block_size.
        """
        (B, T), W = idx.shape, self.config.W
        if T > self.config.block_size:
            raise UserError(f'a row of {T} tokens is longer than block_size = {self.config.block_size}')
        pauses = self.config.vocab_size + torch.arange(W - 1, device=idx.device)
        ids = torch.cat((idx[..., None], pauses.expand(B, T, W - 1)), dim=-1).flatten(1)  # (B,T*W)
        order = torch.arange(T * W, device=idx.device)
        index, slot, starts = order // W, order % W, 0
        if pad is not None:
            starts = pad.long().cumprod(dim=1).sum(dim=1, keepdim=True)  # tokens of padding before the text
            pad = pad.repeat_interleave(W, dim=1)
        mask = causal_mask(T * W, T * W, pad, idx.device)
        if not self.config.see_pauses and W > 1:
            seen = (slot == 0) | (index == index[:, None])  # (query, key): first slots, and the token's own
            mask = seen & (order <= order[:, None] if mask is None else mask)
        positions = self.positions((index[None] - starts).clamp(min=0), slot)
        return self.encode(ids, positions, mask).view(B, T, W, -1)

    def dont_know_logit(self, y):
        """k (...) from the normed output y (..., C) of a slot, never in half precision: d may be next to 0 or 1."""
        with torch.autocast(y.device.type, enabled=False):
            return self.dont_know(y.to(self.dont_know.weight.dtype))[..., 0]

    def forward(self, idx, targets=None, pad=None):
        """idx (B,T), targets (B,T) with -1 = ignore -> (predictions (B,T,V), None) or (None, mean loss in nats).

        The predictions are log sum_i Pr(S=i) p_i, the distribution of the answer over all slots, up to a constant.
        """
        x = self.encode_slots(idx, pad)
        if self.config.objective == 'tbys':
            logits = self.logits(x[:, :, -1])
            if targets is None:
                return logits, None
            return None, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        if targets is None:
            log_p, k = self.logits(x), self.dont_know_logit(self.ln_f(x))  # (B,T,W,V) and (B,T,W)
            stops = stop_log_probs(log_p.logsumexp(dim=-1) - k, self.omega)
            return (log_p.log_softmax(dim=-1) + stops[..., None]).logsumexp(dim=2), None
        y = self.ln_f(x).flatten(0, 1)
        total = head_loss(y, self.dont_know_logit(y), self.lm_head.weight, targets.flatten(), self.omega, self.gamma,
                          torch.is_grad_enabled())
        return None, total / (targets >= 0).sum().clamp(min=1)

    def row_lengths(self):
        S = self.config.row_size
        return [S] * self.config.n_layer, self.config.block_size if self.config.objective == 'tbys' else S
