"""Streaming generation for Thoughtbubbles, which is not in the paper: a new token is read alone, beside what is
held of the text. thoughtbubbles.py reads all of it again, which is exact and slow."""
import math

import torch

from model import KVCache, causal_mask
from thoughtbubbles import PAD, alive, is_original, stream_positions


def held_columns(rank):
    """rank (B,m) -> the columns (B,n) of what is held, in order; then others, where a row holds less."""
    out = rank == -math.inf
    return out.long().argsort(dim=1, stable=True)[:, :int((~out).sum(dim=1).max())]


class StreamCache(KVCache):
    def keep(self, columns):
        """Give up all but columns (B,n)."""
        self.k, self.v = (t.take_along_dim(columns[:, None, :, None], dim=2) for t in (self.k, self.v))
        self.length = columns.size(1)
        if hasattr(self, 'index'):
            self.index = self.index.gather(1, columns)


class Streams:
    """A batch of growing texts. At a fork a new token's streams compete with those held so far for the present
    budget. What falls out, and what stems from it, is seen no more from that block on and never comes back; what
    it told others stays. Reading all again might revive it and computes all anew: nothing else differs.

    Between two forks a stream is a column: of rank (B,n), by which it competes, -inf if it is out or padding, and
    of parent (B,n), its column before the fork."""
    compact_every = 32  # tokens

    def __init__(self, model, rows):
        self.model = model
        self.tokens = 0  # read so far, padding included
        self.caches = [StreamCache() for _ in model.layers]
        self.starts = [0, *sorted(model.config.fork_layers), model.config.n_layer]  # blocks after a fork
        self.rank = [torch.empty(rows, 0, device=model.wte.weight.device) for _ in self.starts[1:]]
        self.parent = [rank.long() for rank in self.rank]

    def feed(self, idx, pad=None):
        """As Thoughtbubbles.streams: the prompts, then a token of each at a time. pad (B,tokens+T)."""
        model = self.model
        if self.tokens and self.tokens % self.compact_every == 0:
            self.compact()
        x, log_p, src, offset = model.first_streams(idx, pad, self.tokens)
        self.tokens += idx.size(1)
        budget = model.budget(self.tokens) if pad is None else model.row_budgets(pad)[:, None]
        level = 0
        self.rank[0] = torch.cat((self.rank[0], log_p.masked_fill(~alive(log_p), -math.inf)), dim=1)
        for i, layer in enumerate(model.layers):
            if str(i) in model.forks:
                level += 1
                x, log_p, src = self.fork(level, x, log_p, src, budget)
            if i in self.starts:
                out = self.rank[level] == -math.inf if level or pad is not None else None
                mask = causal_mask(x.size(1), self.rank[level].size(1), out, x.device)
                views = model.views(x, stream_positions(log_p, src, idx.size(1)) - offset, mask, self.caches[i:])
            rope, seen = views[i in model.config.local_layers]
            x = layer(x, rope, seen, *model.scores(log_p), self.caches[i])
        return x, log_p, src

    def fork(self, level, x, log_p, src, budget):
        """As Fork.forward, beside what is held. budget: an int or (B,1)."""
        fork = self.model.forks[str(self.starts[level])]
        above = self.rank[level - 1]
        first = above.size(1) - x.size(1)  # column of x
        held = self.rank[level].masked_fill((above == -math.inf).gather(1, self.parent[level]), -math.inf)
        x, log_p, src = fork(x, log_p, src, 2 * x.size(1))  # all candidates
        new = torch.rand_like(log_p) if fork.config.random_forks else log_p
        new = new.masked_fill(is_original(src), math.inf).masked_fill(~alive(log_p), -math.inf)
        rank = torch.cat((held, new), dim=1)
        place = rank.argsort(dim=1, descending=True, stable=True).argsort(dim=1)  # the earlier one wins a tie
        held, new = rank.masked_fill(place >= budget, -math.inf).tensor_split([held.size(1)], dim=1)
        chosen = held_columns(new).sort(dim=1).values
        self.rank[level] = torch.cat((held, new.gather(1, chosen)), dim=1)
        self.parent[level] = torch.cat((self.parent[level], first + chosen // 2), dim=1)
        x = x.take_along_dim(chosen[..., None], dim=1)
        return x, log_p.masked_fill(new == -math.inf, PAD).gather(1, chosen), src.gather(1, chosen)

    def compact(self):
        """Give up what fell out."""
        for level, rank in enumerate(self.rank):
            columns = held_columns(rank)
            self.rank[level] = rank.gather(1, columns)
            if level:
                self.parent[level] = place.gather(1, self.parent[level].gather(1, columns))
            place = (rank > -math.inf).cumsum(dim=1).sub(1).clamp(min=0)  # where a column is now, if it is
            for cache in self.caches[self.starts[level]:self.starts[level + 1]]:
                cache.keep(columns)
