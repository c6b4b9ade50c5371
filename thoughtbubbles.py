"""Thoughtbubbles (arXiv 2510.00219): between layers the model forks or drops residual streams, within a budget.

    tokens          h         e         y          kappa = 2: at most 6 streams for 3 tokens
    block 0         h         e         y          one stream per token: so far a plain GPT
    fork         h' h      e' e      y' y          every stream may put a copy on its left
    block 1      h' h      e' e      y' y          its score p scales what others read from it and its updates
    fork            h   e' e' e      y' y          the 6 best go on, a token's original always does
    block 2, 3      h   e' e' e      y' y
    merge           h   +--+--+      +--+          a token's streams, weighted by p, predict its successor
    position        0   1/3 2/3 1   1 1/2 2

The state between blocks is x (B,S,C), log_p (B,S) the log of each stream's cumulative score, and src (B,S) the
index of the token it belongs to. src never decreases along a row, and a token's original is its right-most stream.
"""
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from config import UserError, check_choice, check_range
from model import GPT, GPTConfig, causal_mask, mean_nll, text_start

MIN_LOG_SCORE = -20.0  # of a single fork or keep score: else a stream might look like padding
PAD = -1e4  # log_p of a stream that is padding: exp(PAD) is 0, so nobody attends to it and nothing updates it


@dataclass
class ThoughtbubblesConfig(GPTConfig):
    fork_layers: tuple = (1, 2)  # fork before these blocks, counted from 0; the paper: 3,7,11 at every size
    kappa: float = 2.0  # budget: ceil(kappa * tokens) streams; the paper: 2 or 4
    merge: str = 'probs'  # a token's streams predict as one: probs | residual | for ablations: logits | rightmost
    # p scales three things: a stream's key and its value, for those who attend to it, and the updates that it gets
    attenuate_attention: bool | str = True  # ablations: False = neither of the two, or one alone: keys | values
    gate_updates: bool = True  # False (ablation): a stream is updated in full whatever its p
    random_forks: bool = False  # True (ablation): which streams survive is drawn at random
    copies: int = 1  # baseline copy-N: repeat every input token; the paper's has fork_layers=() merge=rightmost
    # not in the paper; with 14, -14 and True a pretrained model starts as it was: originals nearly undimmed,
    # copies nearly silent
    keep_bias: float = 0.0  # added to the keep logit
    fork_bias: float = 0.0  # added to the fork logit
    undivided_scores: bool = False  # attention adds log p to q.k / sqrt(D), so that a silent copy is not heard

    shape = (*GPTConfig.shape, 'fork_layers', 'copies', 'keep_bias', 'fork_bias', 'undivided_scores')

    def __post_init__(self):
        super().__post_init__()
        for layer in self.fork_layers:
            if type(layer) is not int or not 0 <= layer < self.n_layer:
                raise UserError(f'fork_layers = {self.fork_layers}: {layer} is not a block of n_layer = '
                                f'{self.n_layer}; give whole numbers from 0 to {self.n_layer - 1}')
        if len(set(self.fork_layers)) < len(self.fork_layers):
            raise UserError(f'fork_layers = {self.fork_layers}: each layer may be named once')
        if not 1 <= self.kappa <= 1e6:
            raise UserError(f'kappa = {self.kappa}: must be at least 1, since every token keeps its original, and '
                            'at most 1e6')
        check_range(vars(self), 'keep_bias fork_bias', -1e6)
        check_choice(vars(self), 'merge', 'probs residual logits rightmost')
        if self.attenuate_attention not in (True, False, 'keys', 'values'):
            raise UserError(f'attenuate_attention = {self.attenuate_attention!r}: choose True, False, keys, '
                            'values')
        if self.fork_layers and self.merge == 'rightmost' and not (self.attenuate_attention or self.gate_updates):
            raise UserError('merge = rightmost, attenuate_attention = False, gate_updates = False: nothing is '
                            'left that the scores could learn from; change one of them')
        check_range(vars(self), 'copies')


def alive(log_p):
    """Which streams are not padding."""
    return log_p > PAD / 2


def is_original(src):
    """Which streams are the right-most ones of their token."""
    return F.pad(src[:, 1:] != src[:, :-1], (0, 1), value=True)


def select(log_p, src, scores, limit, random=False):
    """Which streams go on after a fork step (section 3 of the paper). log_p, src: (B,S). scores (B,S,2): logits
    of fork and keep. limit: how many go on, an int, or (B,) where rows are padded. Returns parent (B,n),
    is_fork (B,n) bool and the new log_p (B,n), in stream order."""
    a = F.logsigmoid(scores).clamp(min=MIN_LOG_SCORE)
    candidates = (log_p[..., None] + a).flatten(1)  # (B,2S): each copy to the left of its parent
    rank = torch.rand_like(candidates) if random else candidates.detach()
    rank = rank.masked_fill(~alive(log_p).repeat_interleave(2, dim=1), -math.inf)
    # each token's right-most candidate goes on always: its rank is forced, its score stays the learned one
    original = is_original(src)
    forced = torch.stack((torch.zeros_like(original), original), dim=-1).flatten(1)
    rank = rank.masked_fill(forced, math.inf)
    # a stable sort, not topk: at an exact tie, as of equal tokens before the first block, the earlier stream wins
    # (after a block equal tokens differ by rounding, which depends on device and batch)
    order = rank.sort(dim=1, descending=True, stable=True).indices
    n = limit if isinstance(limit, int) else int(limit.max())
    chosen, where = order[:, :n].sort(dim=1)
    log_p = candidates.gather(1, chosen)
    if not isinstance(limit, int):  # rows with a smaller limit are filled up with padding
        log_p = log_p.masked_fill(where >= limit[:, None], PAD)
    return chosen // 2, chosen % 2 == 0, log_p


def stream_positions(log_p, src, T):
    """Positions (B,S): the n streams of token i sit at i-1+1/n, ..., i, evenly spaced, the original on i."""
    counts = alive(log_p).long()
    n = torch.zeros(src.size(0), T, dtype=torch.long, device=src.device).scatter_add(1, src, counts)  # (B,T)
    before = (n.cumsum(1) - n).gather(1, src)  # streams of earlier tokens
    return src - 1 + (counts.cumsum(1) - before).to(log_p.dtype) / n.gather(1, src).clamp(min=1)


def token_logsumexp(values, src, T):
    """logsumexp over each token's streams: values (B,S) or (B,S,V) -> (B,T) or (B,T,V)."""
    index = src if values.dim() == 2 else src[..., None].expand_as(values)
    shape = (values.size(0), T, *values.shape[2:])
    top = torch.full(shape, -math.inf, dtype=values.dtype, device=values.device)
    top = top.scatter_reduce(1, index, values.detach(), 'amax')
    total = torch.zeros_like(top).scatter_add(1, index, (values - top.gather(1, index)).exp())
    return top + total.log()


def token_weights(log_p, src, T):
    """Log weights (B,S) of a token's streams for averaging: proportional to p, summing to 1 within the token."""
    return log_p - token_logsumexp(log_p, src, T).gather(1, src)


class Fork(nn.Module):
    """Scores every stream and adds the copies that win a place."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.ln = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.score = nn.Linear(config.n_embd, 2, bias=False)
        nn.init.normal_(self.score.weight, std=0.02)
        self.embedding = nn.Parameter(torch.randn(config.n_embd) * config.n_embd ** -0.5)

    def forward(self, x, log_p, src, limit):
        """x (B,S,C), log_p and src (B,S) -> the same for the streams that go on."""
        with torch.autocast(x.device.type, enabled=False):  # float32: scores multiply over layers and decide ties
            scores = self.score(self.ln(x.to(self.score.weight.dtype)))  # (B,S,2)
        scores[..., 0] += self.config.fork_bias
        scores[..., 1] += self.config.keep_bias
        parent, is_fork, log_p = select(log_p, src, scores, limit, self.config.random_forks)
        x = x.gather(1, parent[..., None].expand(-1, -1, x.size(2)))
        return x + is_fork[..., None] * self.embedding, log_p, src.gather(1, parent)


class Thoughtbubbles(GPT):
    def __init__(self, config):
        super().__init__(config)
        # created after the core, so that the core starts from the same weights as a plain GPT of the same seed
        self.forks = nn.ModuleDict({str(layer): Fork(config) for layer in sorted(config.fork_layers)})
        self.plain = not self.forks and config.copies == 1  # one stream per token: the plain GPT
        self.held = []  # streaming: for each row the streams of each token read
        self.normed = config.merge == 'logits' and not self.plain  # whether trunk's output has had the final norm
        for layer in self.layers:
            layer.attn.score_unit = config.head_width ** 0.5 if config.undivided_scores else 1.0
            if config.attenuate_attention == 'values':
                layer.attn.score_unit = 0.0
            elif config.attenuate_attention == 'keys':
                layer.attn.value_unit = 0.0

    def budget(self, tokens):
        return math.ceil(round(self.config.kappa * tokens, 6))  # 1.1 * 10 is not 11 in floating point

    def token_index(self, positions):
        return positions.ceil()

    def row_budgets(self, pad):
        return torch.tensor([self.budget(n) for n in (~pad).sum(1).tolist()], device=pad.device)  # (B,)

    def first_streams(self, idx, pad=None, past=0):
        """Before the blocks: x (B,S,C), log_p, src (B,S), and what to take from src, so that positions start at
        0 with the text. past: tokens before idx; pad (B,past+T)."""
        B, T = idx.shape
        self.check_length(past + T)
        src = torch.arange(T, device=idx.device).repeat_interleave(self.config.copies).expand(B, -1)  # (B,S)
        dtype = torch.promote_types(self.wte.weight.dtype, torch.float32)
        log_p = torch.zeros(src.shape, device=idx.device, dtype=dtype)
        offset = -past
        if pad is not None:
            log_p = log_p.masked_fill(pad.gather(1, past + src), PAD)
            offset = text_start(pad) - past
        return self.embed(idx.gather(1, src), (src - offset).clamp(min=0)), log_p, src, offset

    def streams(self, idx, pad=None):
        """Token ids (B,T) -> x (B,S,C), log_p (B,S), src (B,S) after the last block. pad: bool (B,T), True =
        padding. Raises UserError when the row does not fit into block_size."""
        T = idx.size(1)
        x, log_p, src, offset = self.first_streams(idx, pad)
        scored = pad is not None  # until the first fork every p is 1 and the block is the plain one
        for i, layer in enumerate(self.layers):
            if str(i) in self.forks:
                if pad is None:
                    limit = min(self.budget(T), 2 * src.size(1))
                else:  # padding goes on beside the budget
                    limit = torch.minimum(self.row_budgets(pad), 2 * alive(log_p).sum(1)) + pad.sum(1)
                x, log_p, src = self.forks[str(i)](x, log_p, src, limit)
                scored = True
            if i == 0 or str(i) in self.forks:
                mask = None
                if pad is not None and self.config.attenuate_attention in (False, 'values'):  # else log_p tells
                    mask = causal_mask(x.size(1), x.size(1), ~alive(log_p))
                views = self.views(x, stream_positions(log_p, src, T) - offset, mask)
            rope, mask = views[i in self.config.local_layers]
            x = layer(x, rope, mask, *self.scores(log_p)) if scored else layer(x, rope, mask)
        return x, log_p, src

    def scores(self, log_p):
        """What attention and the gate of a block get of log_p."""
        c = self.config
        return log_p if c.attenuate_attention else None, log_p.exp()[..., None] if c.gate_updates else None

    def trunk(self, idx, pad=None, **plain):
        """As GPT.trunk, where merge is not 'probs': a token's streams as one vector."""
        if self.plain:
            return super().trunk(idx, pad=pad, **plain)
        return self.merge_vectors(*self.streams(idx, pad, **plain), idx.size(1))

    def merge_vectors(self, x, log_p, src, T):
        """Where merge is not 'probs': streams x (B,S,C) -> one vector per token (B,T,C)."""
        weight = is_original(src)
        if self.config.merge == 'residual':
            weight = log_p.exp()
        elif self.config.merge == 'logits':  # the head is linear: the mean of logits is that of the mean input
            x = self.ln_f(x)
            weight = token_weights(log_p, src, T).exp()
        x = x * weight[..., None]
        merged = torch.zeros(len(x), T, x.size(2), dtype=x.dtype, device=x.device)
        return merged.scatter_add(1, src[..., None].expand_as(x), x)

    def logits(self, x):
        """As GPT.logits, but merged logits have had the final norm before."""
        y = self.lm_head(x if self.normed else self.ln_f(x))
        return y.to(torch.promote_types(y.dtype, torch.float32))

    def nll(self, x, targets):
        target_logit, lse = self.target_numbers(x if self.normed else self.ln_f(x), targets)
        return lse - target_logit

    def merge_probs(self, x, log_p, src, T):
        """merge='probs': streams x (B,S,C) -> log-probabilities (B,T,V), averaged over a token's streams."""
        log_w = token_weights(log_p, src, T)
        return token_logsumexp(self.logits(x).log_softmax(dim=-1) + log_w[..., None], src, T)

    def forward(self, idx, targets=None, pad=None):
        """As GPT.forward. With targets and merge='probs' only the target's probability is averaged."""
        if self.plain or self.config.merge != 'probs':
            return super().forward(idx, targets, pad)
        x, log_p, src = self.streams(idx, pad)
        T = idx.size(1)
        if targets is None:
            return self.merge_probs(x, log_p, src, T), None
        nll = self.nll(x, targets.gather(1, src))  # (B,S)
        return None, mean_nll(-token_logsumexp(token_weights(log_p, src, T) - nll, src, T), targets)

    # --- generation: which copies survive depends on the whole text ---

    def generate(self, prompts, max_new_tokens, temperature=1.0, top_k=0, top_p=1.0, stop_token=None,
                 use_cache=True, n_text=None, streaming=False):
        """As GPT.generate. The text is read again for each token, under its present budget; with streaming the
        new token alone is read (see config/streams.py). Raises UserError for that without use_cache."""
        if streaming and not use_cache:
            raise UserError('use_cache = False: streaming = True needs the cache')
        self.held = [[] for _ in prompts] if streaming else []
        return super().generate(prompts, max_new_tokens, temperature, top_k, top_p, stop_token,
                                use_cache and (streaming or self.plain), n_text)

    def next_logits(self, idx, pad, cache):
        """As GPT.next_logits, under the present budget; streaming where there is a cache."""
        if self.plain:
            return super().next_logits(idx, pad, cache)
        if cache is None:
            x, log_p, src = self.streams(idx, pad)
        else:
            if not cache:
                from config.streams import Streams  # which builds on this file
                cache.append(Streams(self, len(idx)))
            x, log_p, src = cache[0].feed(idx, pad)
        # only the last token's streams are decoded, at most n at the row's end
        last = src == idx.size(1) - 1
        if self.held:
            for held, n in zip(self.held, (last & alive(log_p)).sum(1).tolist()):
                held.append(n)
        n = int(last.sum(1).max())
        log_p = log_p[:, -n:].masked_fill(~last[:, -n:], PAD)
        if self.config.merge == 'probs':
            log_w = log_p.log_softmax(dim=1)
            return (self.logits(x[:, -n:]).log_softmax(dim=-1) + log_w[..., None]).logsumexp(dim=1)
        return self.logits(self.merge_vectors(x[:, -n:], log_p, torch.zeros_like(src[:, -n:]), 1)[:, 0])

    @torch.no_grad()
    def spent(self, prompts, new):
        """The streams that each token of prompts + new holds after the last block, in one pass over the last
        block_size tokens of the finished text; None before. If there are new tokens and the last call of generate
        was streaming: those of the prompt's last and each new token when it was read."""
        if self.plain:
            return None
        if self.held and any(new):
            return 'streams', [([None] * (len(p) - 1) + held + [None])[:len(p) + len(n)]
                               for p, n, held in zip(prompts, new, self.held)]
        numbers = []
        for prompt, continuation in zip(prompts, new):
            text = list(prompt) + list(continuation)
            idx = torch.tensor([text[-self.config.block_size:]], device=self.wte.weight.device)
            streams = self.streams(idx)[2][0].bincount(minlength=idx.size(1)).tolist()
            numbers.append([None] * (len(text) - len(streams)) + streams)
        return 'streams', numbers

    # --- cost ---

    def row_lengths(self):
        T = self.config.row_size
        S = T * self.config.copies
        lengths = []
        for i in range(self.config.n_layer):
            if str(i) in self.forks:
                S = min(self.budget(T), 2 * S)
            lengths.append(S)
        return lengths, S if self.config.merge == 'probs' else T
