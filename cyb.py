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
from model import GPT, GPTConfig, GREEDY, KVCache, causal_mask, check_sampling, mean_nll, sample_token

CHUNK = 2 ** 22  # logits that the loss holds at once, or a 32nd of all of them if that is more


@dataclass
class CYBConfig(GPTConfig):
    W: int = 2  # slots per token: itself and W-1 pauses
    omega: str | tuple = 'last'  # when the world stops: last (never early) | uniform | first | geometric | W numbers
    gamma0: float = 1.0  # discount per slot, below 1 rewards early answers; in training alone
    d_init: float = 0.5  # P(don't know) before training; 1/(V+1), as of any output, leaves slot 2 hardly a gradient
    objective: str = 'cyb'  # cyb | tbys (baseline: cross-entropy in the last slot, no <don't know>)
    see_pauses: bool = True  # False: later tokens do not see a token's pauses and positions count tokens

    of_the_run = ('omega', 'gamma0', 'd_init', 'objective')
    from_gpt = {'see_pauses': False, 'd_init': 1e-4}  # slot 1 then starts as that GPT, and answers
    row_settings = ('block_size', 'W')

    def __post_init__(self):
        super().__post_init__()
        if self.W < 1:
            raise UserError(f'W = {self.W}: a token has at least 1 slot')
        if not 0 < self.gamma0 <= 1:
            raise UserError(f'gamma0 = {self.gamma0}: must be in (0, 1]')
        if not 0 < self.d_init < 1:
            raise UserError(f'd_init = {self.d_init}: must be between 0 and 1')
        if self.objective not in ('cyb', 'tbys'):
            raise UserError(f'objective = {self.objective!r}: choose cyb or tbys')
        stopping_distribution(self.omega, self.W)
        if self.objective == 'tbys' and (self.omega != 'last' or self.gamma0 != 1):
            raise UserError(f'omega = {self.omega}, gamma0 = {self.gamma0}: of no use to objective = tbys')


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
    if not all(isinstance(w, (int, float)) and 0 <= w <= 1 for w in omega):
        raise UserError(f'omega = {omega}: each must be a number from 0 to 1')
    if abs(sum(omega) - 1) > 1e-6:
        raise UserError(f'omega = {omega} sums to {sum(omega):.9g}: probabilities must sum to 1')
    return [w / sum(omega) for w in omega]


def stop_log_probs(gap, omega):
    """log Pr(S = i) for slots i = 1...W, (..., W): the output happens where the model answers or the world stops.

    gap (..., W): logsumexp(z) - k, so that d = sigmoid(-gap) is the probability of <don't know>; logsigmoid keeps
    log d and log(1-d) exact where d is next to 0 or 1. omega: W probabilities.
    """
    log_d, log_answer = F.logsigmoid(-gap), F.logsigmoid(gap)
    tiny = torch.finfo(gap.dtype).tiny
    n = max(i + 1 for i, w in enumerate(omega) if w > tiny)  # the world lets nobody past slot n
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
        step = max(1, CHUNK // (W * weight.size(0)), N // 32)
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
                if dtype == d_weight.dtype:
                    d_weight.addmm_(d_z.T, y_c)
                else:
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


class SlotRows:
    """The texts of a batch while they grow, each at its own pace, over one KV cache.

    A forward pass feeds every row the slots that it has pending, with padding on the left of those that have fewer;
    the padding takes up columns of the cache, which stay masked for that row.
    """

    def __init__(self, model, prompts, opening=1, keep_unused=True, use_cache=True):
        """opening: slots that a new token gets without asking. keep_unused: feed the pauses that were not taken."""
        self.model, self.use_cache, self.cache = model, use_cache, None
        self.W, self.block_size, self.hidden = model.config.W, model.config.block_size, not model.config.see_pauses
        self.opening, self.keep_unused = opening, keep_unused and not self.hidden  # hidden ones would serve nobody
        self.capacity = model.config.row_size * min(2, len(prompts))
        # slots: (token, slot) of all that a row holds; columns: where the cache has it, as far as it has been fed
        self.tokens, self.slots, self.columns = [list(p) for p in prompts], [[] for _ in prompts], [[] for _ in prompts]
        for r, prompt in enumerate(prompts):
            for i in range(len(prompt)):
                held = opening if i == len(prompt) - 1 else self.W if self.keep_unused else 1
                self.slots[r] += [(i, j) for j in range(held)]
            self.slide(r)

    def used(self, r):
        """Slots that row r's last token has taken so far."""
        return self.slots[r][-1][1] + 1

    def pause(self, r):
        token, slot = self.slots[r][-1]
        self.slots[r].append((token, slot + 1))

    def answer(self, r, new):
        """Row r goes on with the token `new`."""
        (token, slot), slots = self.slots[r][-1], self.slots[r]
        if self.hidden and slot:  # the last token's pauses have served
            self.pad[r, self.columns[r][-slot:]] = True
            del slots[-slot:], self.columns[r][-slot:]
        if self.keep_unused:
            slots += [(token, j) for j in range(slot + 1, self.W)]
        self.tokens[r].append(new)
        slots += [(token + 1, j) for j in range(self.opening)]
        self.slide(r)

    def slide(self, r):
        """A text that outgrows block_size goes on from its last block_size / 2 tokens, read anew."""
        if len(self.tokens[r]) > self.block_size:
            start = len(self.tokens[r]) - max(1, self.block_size // 2)
            self.tokens[r], self.cache = self.tokens[r][start:], None
            self.slots[r] = [(token - start, slot) for token, slot in self.slots[r] if token >= start]

    def end(self, r):
        self.slots[r], self.columns[r] = [], []

    def feed(self):
        """The last block's output in the last slot of each row, (B,C); for a row that has ended, anything."""
        device, V = self.model.wte.weight.device, self.model.config.vocab_size
        n = max(len(s) - len(c) for s, c in zip(self.slots, self.columns))
        if self.cache is None or self.pad.size(1) + n > self.capacity:
            self.pad = torch.zeros(len(self.slots), 0, dtype=torch.bool, device=device)
            self.cache = [KVCache(self.capacity) for _ in self.model.blocks] if self.use_cache else None
            self.columns, n = [[] for _ in self.slots], max(map(len, self.slots))
        past, fed = self.pad.size(1), []
        for tokens, slots, columns in zip(self.tokens, self.slots, self.columns):
            pending = [(V + j - 1 if j else tokens[i], i, j, False) for i, j in slots[len(columns):]]
            fed.append([(0, 0, 0, True)] * (n - len(pending)) + pending)
            columns += range(past + n - len(pending), past + n)
        ids, index, slot, pad = torch.tensor(fed, device=device).unbind(dim=-1)  # (B,n) each
        self.pad = torch.cat((self.pad, pad.bool()), dim=1)
        mask = causal_mask(n, past + n, self.pad if self.pad.any() else None, device)
        return self.model.encode(ids, self.model.positions(index, slot), mask, cache=self.cache)[:, -1]


class CYB(GPT):
    sampling = (*GPT.sampling, 'pace', 'threshold', 'skip_unused_pauses')

    def __init__(self, config):
        super().__init__(config)
        # created after the core, so that the core starts from the same weights as a plain GPT of the same seed
        self.omega = stopping_distribution(config.omega, config.W)
        self.gamma = [config.gamma0 ** i for i in range(config.W)]
        self.effort_unit = 'slots' if config.objective == 'cyb' and config.W > 1 else None
        if config.W > 1:
            self.pauses = nn.Parameter(torch.randn(config.W - 1, config.n_embd) * 0.02)
        if config.objective == 'cyb':
            self.dont_know = nn.Linear(config.n_embd, 1)
            self._init_weights(self.dont_know)
            # logsumexp(z) is about log V before training
            nn.init.constant_(self.dont_know.bias, math.log(config.vocab_size * config.d_init / (1 - config.d_init)))

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
        In training mode the loss is discounted by gamma; else it is their plain negative log-likelihood, so that
        runs compare.
        """
        x = self.encode_slots(idx, pad)
        if self.config.objective == 'tbys':
            logits = self.logits(x[:, :, -1])
            if targets is None:
                return logits, None
            return None, mean_nll(logits, targets)
        if targets is None:
            log_p, k = self.logits(x), self.dont_know_logit(self.ln_f(x))  # (B,T,W,V) and (B,T,W)
            stops = stop_log_probs(log_p.logsumexp(dim=-1) - k, self.omega)
            return (log_p.log_softmax(dim=-1) + stops[..., None]).logsumexp(dim=2), None
        y = self.ln_f(x).flatten(0, 1)
        gamma = self.gamma if self.training else [1.0] * self.config.W
        total = head_loss(y, self.dont_know_logit(y), self.lm_head.weight, targets.flatten(), self.omega, gamma,
                          torch.is_grad_enabled())
        return None, total / (targets >= 0).sum().clamp(min=1)

    # --- generation ---

    @torch.no_grad()
    def paced(self, rows, lengths, choose, pauses):
        """Let every row grow by its number of tokens, pausing at its own pace; yield after each forward pass a list
        with every row's (new token, slots taken), None where it paused or has ended.

        choose: logits (B,V) -> B tokens. pauses: probability of <don't know> (B,) -> B bools. A row whose number in
        the list `lengths` is set to 0 ends.
        """
        was_training = self.training
        self.eval()
        try:
            while any(lengths):
                x = rows.feed()
                logits = self.logits(x)
                d = torch.zeros_like(logits[:, 0])
                if self.config.objective == 'cyb':
                    d = torch.sigmoid(self.dont_know_logit(self.ln_f(x)) - logits.logsumexp(dim=-1))
                step = [None] * len(lengths)
                for r, (new, pause) in enumerate(zip(choose(logits), pauses(d))):
                    if lengths[r] and pause and rows.used(r) < self.config.W:
                        rows.pause(r)
                    elif lengths[r]:
                        step[r] = new, rows.used(r)
                        lengths[r] -= 1
                        if lengths[r]:
                            rows.answer(r, new)
                yield step
                for r, left in enumerate(lengths):
                    if not left:
                        rows.end(r)
        finally:
            self.train(was_training)

    def stream(self, prompts, max_new_tokens, temperature=1.0, top_k=0, top_p=1.0, stop_token=None, use_cache=True,
               n_text=None, pace='model', threshold=0.5, skip_unused_pauses=False):
        """As GPT.stream, each row at its own pace: a step is one forward pass, in which some rows yield None because
        they pause. Leaves the slots that each new token took in self.slots, a list of ints per row.

        pace: 'model' pauses with probability d, at temperature 0 where d > threshold; 'first' never pauses, 'all'
        takes W slots always, as TBYS does, in one forward pass. top_k and top_p shape the answer alone.
        By default the pauses that a token did not take are fed along with the next token, so that the context is
        that of training and no step is lost; skip_unused_pauses=True leaves them out, those of the prompt as well.
        Raises UserError for an empty prompt and for sampling settings out of range or without effect.
        """
        check_sampling(prompts, temperature, top_k, top_p)
        greedy, tbys = temperature < GREEDY, self.config.objective == 'tbys'
        if pace not in ('model', 'first', 'all'):
            raise UserError(f'pace = {pace!r}: choose model, first or all')
        if not 0 <= threshold <= 1:
            raise UserError(f'threshold = {threshold}: must be in [0, 1]')
        if threshold != 0.5 and not (greedy and pace == 'model'):
            raise UserError(f'threshold = {threshold}: acts at temperature = 0 and pace = model alone')
        if pace == 'first' and tbys:
            raise UserError('pace = first: a TBYS model answers in its last slot alone')
        if skip_unused_pauses and not self.config.see_pauses:
            raise UserError('skip_unused_pauses = True: this model (see_pauses = False) leaves them out anyway')
        opening = self.config.W if pace == 'all' or tbys else 1
        rows = SlotRows(self, prompts, opening, not skip_unused_pauses, use_cache)
        self.slots, left = [[] for _ in prompts], [max_new_tokens] * len(prompts)

        def choose(logits):
            return sample_token(logits[:, :n_text], temperature, top_k, top_p).tolist()

        def pauses(d):
            bound = threshold if greedy else torch.rand_like(d)
            return ((d > bound) & (pace == 'model')).tolist()
        for step in self.paced(rows, left, choose, pauses):
            for r, answer in enumerate(step):
                if answer:
                    self.slots[r].append(answer[1])
                    if answer[0] == stop_token:
                        left[r] = 0
            yield [answer and answer[0] for answer in step]

    def effort(self, prompts, new):
        """The slots that the last call of stream took for each new token, None for the prompts: a list per row."""
        return [[None] * len(p) + s[:len(n)] for p, n, s in zip(prompts, new, self.slots)]

    # --- training ---

    @torch.no_grad()
    def load_pretrained(self, state):
        """As GPT.load_pretrained. From a plain GPT, this one starts by answering at once."""
        paused, own = 'pauses' in state, 'dont_know.weight' in state
        known = len(state['pauses']) + 1 if paused else 1 if own else self.config.W
        if known != self.config.W:
            raise UserError(f'W = {self.config.W}: the checkpoint to start from has W = {known} slots per token')
        wpe = state.get('wpe.weight')
        if wpe is not None and self.config.see_pauses and not paused and not own:
            # running positions: each slot starts where its token was
            state = {**state, 'wpe.weight': wpe.repeat_interleave(self.config.W, dim=0)}
        new = super().load_pretrained(state)
        if 'dont_know.weight' in new:
            # k = mean(z) + log V + logit(d_init), and logsumexp(z) >= mean(z) + log V at any scale: d <= d_init
            self.dont_know.weight.copy_(self.lm_head.weight.mean(dim=0, keepdim=True))
        return new

    def row_lengths(self):
        S = self.config.row_size
        return [S] * self.config.n_layer, self.config.block_size if self.config.objective == 'tbys' else S
