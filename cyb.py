"""Catch Your Breath (arXiv 2510.13879): the model may answer <don't know> and get a pause to go on thinking.

    W = 3 slots a token, . is a pause, ? is <don't know>
    reads     R  .  .    O  .  .    M  .  .
    says      ?  O       M          ?  ?  E          the first answer counts; the world may force one earlier

Every token is followed by W-1 pauses and so has W slots to answer in with the next token. The loss is over the
random slot S at which the output happens: the first where the model answers or the world stops it.

B batch, T tokens, W slots, C width, V vocabulary; z logits of the V tokens, k logit of <don't know>;
d = P(don't know), t = P(target | an answer) of a slot; omega: when the world stops; gamma: the discount of a slot.
"""
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from config import UserError, check_choice, check_range, check_sampling
from model import (GPT, GPTConfig, GREEDY, KVCache, causal_mask, eval_mode, mean_nll, sample_token,
                   text_start)


@dataclass
class CYBConfig(GPTConfig):
    W: int = 2  # slots per token: itself and W-1 pauses
    omega: str | tuple = 'last'  # when the world stops: last | uniform | first | geometric | W numbers
    gamma0: float = 1.0  # discount per slot, below 1 rewards early answers; in training alone
    d_init: float = 0.5  # P(don't know) before training; near 0, slot 2 would get hardly a gradient
    objective: str = 'cyb'  # cyb | tbys (baseline: cross-entropy in the last slot, no <don't know>)
    see_pauses: bool = True  # False: later tokens do not see a token's pauses and positions count tokens

    shape = (*GPTConfig.shape, 'W', 'see_pauses')

    def __post_init__(self):
        super().__post_init__()
        check_range(vars(self), 'W')
        if not 0 < self.gamma0 <= 1:
            raise UserError(f'gamma0 = {self.gamma0}: must be in (0, 1]')
        if not 0 < self.d_init < 1:
            raise UserError(f'd_init = {self.d_init}: must be between 0 and 1')
        check_choice(vars(self), 'objective', 'cyb tbys')
        stopping_distribution(self.omega, self.W)
        if self.objective == 'tbys' and (self.omega != 'last' or self.gamma0 != 1):
            raise UserError(f'omega = {self.omega}, gamma0 = {self.gamma0}: they have no effect with '
                            'objective = tbys')

    @property
    def row_size(self):
        return self.block_size * self.W


# --- when the world stops, when the model answers, and what that is worth ---

def stopping_distribution(omega, W):
    """The probabilities (W numbers, sum 1) that the world stops at slot 1...W, from a name or W numbers.
    geometric: each slot is half as likely as the one before. Raises UserError for anything else."""
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
    """log Pr(S = i) for slots i = 1...W, (..., W): the output happens where the model answers or the world
    stops. gap (..., W): logsumexp(z) - k, so that d = sigmoid(-gap); logsigmoid keeps log d and log(1-d) exact
    where d is next to 0 or 1. omega: W probabilities."""
    log_d = F.logsigmoid(-gap)
    log_answer = F.logsigmoid(gap)
    tiny = torch.finfo(gap.dtype).tiny
    n = max(i + 1 for i, w in enumerate(omega) if w > tiny)  # the world lets nobody past slot n
    reached = F.pad(log_d[..., :n - 1].cumsum(dim=-1), (1, 0))  # log prod_{j<i} d_j
    stops = []
    for i in range(n - 1):  # numbers, not tensors of them: copying one to a GPU waits for it
        remaining = math.fsum(omega[i:])  # R_i: the world has not stopped before slot i
        stop = math.log(remaining) + log_answer[..., i]
        if omega[i]:
            stop = torch.logaddexp(stop, math.log(omega[i]) + log_d[..., i])
        stops.append(stop)
    stops.append(torch.full_like(gap[..., 0], math.log(math.fsum(omega[n - 1:]))))  # slot n ends it: omega_n
    return F.pad(reached + torch.stack(stops, dim=-1), (0, len(omega) - n), value=-math.inf)


def cyb_loss(target_logit, dont_know, lse, omega, gamma):
    """-log sum_i Pr(S=i) gamma_i t_i in nats, (...), where t_i = exp(target_logit - lse) is the target's
    probability given that slot i answers. target_logit, dont_know, lse = logsumexp(z): (..., W). omega, gamma: W
    numbers."""
    stops = stop_log_probs(lse - dont_know, omega).unbind(dim=-1)
    discounted = torch.stack([stop + math.log(max(g, 1e-300)) for stop, g in zip(stops, gamma)], dim=-1)
    return -torch.logsumexp(discounted + (target_logit - lse), dim=-1)


class CYB(GPT):
    def __init__(self, config):
        super().__init__(config)
        # created after the core, so that the core starts from the same weights as a plain GPT of the same seed
        self.omega = stopping_distribution(config.omega, config.W)
        self.gamma = [config.gamma0 ** i for i in range(config.W)]
        self.slots = []  # that generate's new tokens took
        if config.W > 1:
            self.pauses = nn.Parameter(torch.randn(config.W - 1, config.n_embd) * 0.02)
        if config.objective == 'cyb':
            self.dont_know = nn.Linear(config.n_embd, 1)
            self._init_weights(self.dont_know)
            d = config.d_init  # before training logsumexp(z) is about log V
            nn.init.constant_(self.dont_know.bias, math.log(config.vocab_size * d / (1 - d)))

    # --- slots: pause j of a token has the id V + j - 1 ---

    def token_vectors(self, idx):
        """Ids (B,S), of pauses too -> their embeddings (B,S,C)."""
        V = self.config.vocab_size
        if self.config.W == 1:
            return super().token_vectors(idx)
        x = super().token_vectors(idx.masked_fill(idx >= V, 0))
        return torch.where((idx >= V)[..., None], self.pauses[(idx - V).clamp(min=0)], x)

    def token_index(self, positions):
        return positions // (self.config.W if self.config.see_pauses else 1)

    def slot_outputs(self, ids, index, slot, pad=None, cache=None):
        """Slots `slot` (0...W-1) of a row's tokens `index`, with their ids, (B,S) each -> the last block's
        output (B,S,C). Positions run on over the slots; where pauses stay unseen, a token has a plain GPT's and
        its pauses stand between it and the next one. pad: bool (B, cached + S). cache: KVCaches."""
        positions = index * self.config.W + slot
        if not self.config.see_pauses:
            positions = positions / self.config.W
        keys = ids.size(1) + (cache[0].length if cache else 0)
        mask = causal_mask(ids.size(1), keys, pad, ids.device)
        if self.config.W > 1 and not self.config.see_pauses and not cache:  # the rows drop pauses from a cache
            if mask is None:
                mask = torch.ones(keys, keys, dtype=torch.bool, device=ids.device).tril()
            # (B,1,query,key): first slots, and the token's own
            mask = mask & ((slot == 0)[:, None] | (index[:, None] == index[..., None]))[:, None]
        return self.trunk(ids, positions, mask, cache=cache)

    def every_slot(self, idx, pad=None):
        """Token ids (B,T) -> the last block's output in every slot (B,T,W,C). pad: bool (B,T), True = padding.
        Raises UserError when the row does not fit into block_size."""
        B, T = idx.shape
        W = self.config.W
        self.check_length(T * W)
        pauses = self.config.vocab_size + torch.arange(W - 1, device=idx.device)
        ids = torch.cat((idx[..., None], pauses.expand(B, T, W - 1)), dim=-1).flatten(1)  # (B,T*W)
        order = torch.arange(T * W, device=idx.device)[None]
        index = order // W
        if pad is not None:
            index = (index - text_start(pad)).clamp(min=0)
            pad = pad.repeat_interleave(W, dim=1)
        return self.slot_outputs(ids, index, order % W, pad).view(B, T, W, -1)

    def dont_know_logit(self, y):
        """k (...) of a slot's normed output y (..., C), never in half precision: d may be next to 0 or 1."""
        with torch.autocast(y.device.type, enabled=False):
            return self.dont_know(y.to(self.dont_know.weight.dtype))[..., 0]

    def predictions(self, x):
        """The last block's output in all slots of a token, (..., W, C) -> log sum_i Pr(S=i) p_i (..., V), the
        distribution of its answer over them; TBYS: the logits of the last slot."""
        if self.config.objective == 'tbys':
            return self.logits(x[..., -1, :])
        z = self.logits(x)  # (..., W, V)
        k = self.dont_know_logit(self.ln_f(x))  # (..., W)
        stops = stop_log_probs(z.logsumexp(dim=-1) - k, self.omega)
        return (z.log_softmax(dim=-1) + stops[..., None]).logsumexp(dim=-2)

    def forward(self, idx, targets=None, pad=None):
        """As GPT.forward, with the predictions above. In training mode the loss is discounted by gamma; else it is
        their negative log-likelihood, so that runs compare."""
        x = self.every_slot(idx, pad)  # (B,T,W,C)
        if targets is None:
            return self.predictions(x), None
        if self.config.objective == 'tbys':  # the last slot alone
            return None, mean_nll(self.nll(x[:, :, -1], targets), targets)
        y = self.ln_f(x)
        target_logit, lse = self.target_numbers(y, targets[..., None].expand(y.shape[:-1]))  # (B,T,W) each
        gamma = self.gamma if self.training else [1.0] * self.config.W
        return None, mean_nll(cyb_loss(target_logit, self.dont_know_logit(y), lse, self.omega, gamma), targets)

    # --- generation ---

    @torch.no_grad()
    def paced(self, rows, choose, pauses):
        """Let the rows (SlotRows) grow, each at its own pace, until the caller has ended all; yield after each
        pass a list with every row's (new token, its slots), None where it paused or has ended. choose: logits
        (B,V) -> B tokens. pauses: P(don't know) (B,) -> B bools."""
        with eval_mode(self):
            while any(rows.slots):
                x = rows.feed()
                logits = self.logits(x)
                d = torch.zeros_like(logits[:, 0])
                if self.config.objective == 'cyb':
                    d = torch.sigmoid(self.dont_know_logit(self.ln_f(x)) - logits.logsumexp(dim=-1))
                step = [None] * len(rows.tokens)
                for r, (new, pause) in enumerate(zip(choose(logits), pauses(d))):
                    if rows.slots[r] and not (pause and rows.used(r) < self.config.W):
                        step[r] = new, rows.used(r)
                yield step
                for r, answer in enumerate(step):
                    if rows.slots[r] and answer:
                        rows.answer(r, answer[0])
                    elif rows.slots[r]:
                        rows.pause(r)

    def generate(self, prompts, max_new_tokens, temperature=1.0, top_k=0, top_p=1.0, stop_token=None,
                 use_cache=True, n_text=None, pace='model', threshold=0.5, skip_unused_pauses=False):
        """As GPT.generate, each row at its own pace: a step is one forward pass, in which rows that pause yield
        None. self.slots then has for each row the slots that its new tokens took.

        pace: 'model' pauses with probability d, at temperature 0 where d > threshold; 'first' never; 'all' takes W
        slots always, as TBYS does, in one pass. top_k and top_p shape the answer alone. Pauses that a token did
        not take are fed along with the next one: the context is that of training, and no step is lost.
        skip_unused_pauses leaves them out, the prompt's as well. Raises UserError for an empty prompt and for
        settings out of range or without effect.
        """
        check_sampling(prompts, temperature, top_k, top_p)
        check_choice({'pace': pace}, 'pace', 'model first all')
        greedy = temperature < GREEDY
        tbys = self.config.objective == 'tbys'
        if not 0 <= threshold <= 1:
            raise UserError(f'threshold = {threshold}: must be in [0, 1]')
        if threshold != 0.5 and not (greedy and pace == 'model'):
            raise UserError(f'threshold = {threshold}: has an effect at temperature = 0 and pace = model alone')
        if pace == 'first' and tbys:
            raise UserError('pace = first: a TBYS model answers in its last slot alone')
        if skip_unused_pauses and not self.config.see_pauses:
            raise UserError('skip_unused_pauses = True: this model (see_pauses = False) leaves them out anyway')
        opening = self.config.W if pace == 'all' or tbys else 1
        rows = SlotRows(self, prompts, opening, not skip_unused_pauses, use_cache)
        self.slots = [[] for _ in prompts]

        def choose(logits):
            return sample_token(logits[:, :n_text], temperature, top_k, top_p).tolist()

        def pauses(d):
            if pace != 'model':
                return [False] * len(d)
            return (d > (threshold if greedy else torch.rand_like(d))).tolist()

        for step in self.paced(rows, choose, pauses) if max_new_tokens else ():
            for r, answer in enumerate(step):
                if answer:
                    self.slots[r].append(answer[1])
                    if answer[0] == stop_token or len(self.slots[r]) == max_new_tokens:
                        rows.end(r)
            yield [answer and answer[0] for answer in step]

    @torch.no_grad()
    def spent(self, prompts, new):
        """The slots that the last call of generate took for each new token, None for the prompts. Without new
        tokens those of the prompts, in one pass over their last block_size tokens, where d > 1/2 is a pause."""
        if self.config.objective != 'cyb' or self.config.W == 1:
            return None
        if any(new):
            return 'slots', [[None] * len(p) + slots[:len(n)] for p, n, slots in zip(prompts, new, self.slots)]
        taken = []
        for prompt in prompts:
            idx = torch.tensor([prompt[-self.config.block_size:]], device=self.wte.weight.device)
            y = self.ln_f(self.every_slot(idx))[0]  # (T,W,C)
            _, lse = self.target_numbers(y, idx[0, :, None].expand(y.shape[:-1]))  # any target: lse alone counts
            answers = self.dont_know_logit(y) <= lse
            answers[:, -1] = True
            taken.append([None] * (len(prompt) - len(y)) + (answers.long().argmax(dim=1) + 1).tolist())
        return 'slots', taken

    # --- training ---

    @torch.no_grad()
    def load_pretrained(self, state):
        """As GPT.load_pretrained. From a plain GPT, d is at most d_init at first."""
        plain = 'pauses' not in state and 'dont_know.weight' not in state
        if plain and 'wpe.weight' in state and self.config.see_pauses:  # a token's slots start where it was
            state = {**state, 'wpe.weight': state['wpe.weight'].repeat_interleave(self.config.W, dim=0)}
        new = super().load_pretrained(state)
        if 'pauses' in new:  # at the scale of the other inputs
            tokens = torch.arange(self.config.vocab_size, device=self.wte.weight.device)
            self.pauses *= super().token_vectors(tokens).std() / self.pauses.std()
        if 'dont_know.weight' in new:
            # k = mean(z) + log V + logit(d_init), and logsumexp(z) >= mean(z) + log V at any scale: d <= d_init
            self.dont_know.weight.copy_(self.lm_head.weight.mean(dim=0, keepdim=True))
        return new

    def row_lengths(self):
        S = self.config.row_size
        return [S] * self.config.n_layer, self.config.block_size if self.config.objective == 'tbys' else S


# --- machinery for generation: skip it at first ---

class SlotRows:
    """The texts of a batch while they grow, each at its own pace, over one KV cache. A pass feeds every row its
    pending slots, after padding where others have more; that takes up columns of the cache, which stay masked
    for the row. A row without slots has ended."""

    def __init__(self, model, prompts, opening=1, keep_unused=True, use_cache=True):
        """opening: slots that a new token gets without asking. keep_unused: feed the pauses that were not
        taken."""
        self.model = model
        self.use_cache = use_cache
        self.cache = None
        self.W = model.config.W
        self.opening = opening
        self.keep_unused = keep_unused and model.config.see_pauses  # unseen ones would serve nobody
        self.capacity = model.config.row_size * min(2, len(prompts))
        self.tokens = [list(prompt) for prompt in prompts]
        self.slots = []  # (token, slot) of all that a row holds
        self.columns = [[] for _ in prompts]  # where the cache has it, as far as it has been fed
        each = self.W if self.keep_unused else 1
        for r, prompt in enumerate(prompts):
            self.slots.append([(i, j) for i in range(len(prompt) - 1) for j in range(each)])
            self.slots[r] += [(len(prompt) - 1, j) for j in range(opening)]
            self.slide(r)

    def used(self, r):
        """Slots that row r's last token has taken so far."""
        return self.slots[r][-1][1] + 1

    def pause(self, r):
        token, slot = self.slots[r][-1]
        self.slots[r].append((token, slot + 1))

    def answer(self, r, new):
        """Row r goes on with the token `new`."""
        slots = self.slots[r]
        token, slot = slots[-1]
        if slot and not self.model.config.see_pauses:  # the last token's pauses have served
            self.pad[r, self.columns[r][-slot:]] = True
            del slots[-slot:], self.columns[r][-slot:]
        if self.keep_unused:
            slots += [(token, j) for j in range(slot + 1, self.W)]
        self.tokens[r].append(new)
        slots += [(token + 1, j) for j in range(self.opening)]
        self.slide(r)

    def slide(self, r):
        """A text that outgrows block_size goes on from its end, which is read anew."""
        start = len(self.tokens[r]) - self.model.config.kept(len(self.tokens[r]))
        if start:
            self.tokens[r] = self.tokens[r][start:]
            self.slots[r] = [(token - start, slot) for token, slot in self.slots[r] if token >= start]
            self.cache = None

    def end(self, r):
        """Row r has all that was wanted and takes no more room."""
        self.slots[r] = []
        self.columns[r] = []

    def feed(self):
        """The last block's output in the last slot of each row, (B,C); anything for a row that has ended."""
        device = self.model.wte.weight.device
        V = self.model.config.vocab_size
        n = max(len(s) - len(c) for s, c in zip(self.slots, self.columns))
        if self.cache is None or self.pad.size(1) + n > self.capacity:  # at the start, after a slide, or full
            self.pad = torch.zeros(len(self.slots), 0, dtype=torch.bool, device=device)
            self.cache = [KVCache(self.capacity) for _ in self.model.layers] if self.use_cache else None
            self.columns = [[] for _ in self.slots]
            n = max(map(len, self.slots))
        past = self.pad.size(1)
        batch = []  # per row and column: id, token, slot, whether it is padding
        for tokens, slots, columns in zip(self.tokens, self.slots, self.columns):
            pending = [(V + j - 1 if j else tokens[i], i, j, False) for i, j in slots[len(columns):]]
            batch.append([(0, 0, 0, True)] * (n - len(pending)) + pending)
            columns += range(past + n - len(pending), past + n)
        ids, index, slot, pad = torch.tensor(batch, device=device).unbind(dim=-1)  # (B,n) each
        self.pad = torch.cat((self.pad, pad.bool()), dim=1)
        return self.model.slot_outputs(ids, index, slot, self.pad if self.pad.any() else None, self.cache)[:, -1]
