"""The GPT core: a pre-norm decoder with rotary positions, one attention for every method, cached generation.

The methods build on four seams: `positions` (one float per stream), an attention `mask`, a per-key `log_p`, and a
KV cache. Nothing in this file knows which method uses them.
Shapes: B batch, T tokens, S streams (= T here), H heads, D head width, C = H * D width, V vocabulary.
"""
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from config import UserError, check_range


GREEDY = 1e-6  # below this temperature the likeliest token is taken: dividing by it might overflow


@dataclass
class GPTConfig:
    block_size: int = 64  # tokens of context
    vocab_size: int = 0  # 0: the size of the data's vocabulary
    n_layer: int = 4  # transformer blocks
    n_head: int = 4  # attention heads
    n_embd: int = 128  # width
    dropout: float = 0.0  # 0 for pretraining, 0.1 and more for fine-tuning
    bias: bool = False  # biases in Linear and LayerNorm, as GPT-2 has them
    learned_positions: bool = False  # GPT-2's absolute position embeddings instead of rotary positions
    rope_base: float = 10000.0  # longest rotary wavelength / 2 pi
    tie_weights: bool = True  # input embedding and output head share one matrix

    of_the_run = ()  # settings that a run does not take over from the checkpoint it starts from
    from_gpt = {}  # no settings: the defaults that differ when training starts from a plain GPT's checkpoint
    row_settings = ('block_size',)  # what the length of a row is the product of

    def __post_init__(self):
        check_range(vars(self), 'block_size n_layer n_head n_embd')
        check_range(vars(self), 'dropout', 0, 1)
        step = self.n_head * (1 if self.learned_positions else 2)  # rotary positions turn pairs of channels
        if self.n_embd % step:
            raise UserError(f'n_embd = {self.n_embd} is not divisible by n_head = {self.n_head}'
                            + ('' if self.learned_positions else ' into heads of even width')
                            + f': try n_embd = {max(step, self.n_embd // step * step)}')
        if self.rope_base <= 1:
            raise UserError(f'rope_base = {self.rope_base}: must be above 1')

    @property
    def row_size(self):
        """Positions in a full row of tokens."""
        return math.prod(getattr(self, name) for name in self.row_settings)


def rotate(x, rope):
    """Rotary embedding (RoFormer, 2104.09864): turn each pair (x1, x2) of x (B,H,S,D) by its position's angle."""
    cos, sin = rope  # each (B or 1, 1, S, D/2), float32: bfloat16 angles would blur positions
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x1 * sin + x2 * cos), dim=-1).to(x.dtype)


def causal_mask(queries, keys, pad=None, device=None):
    """Which keys each of the last `queries` positions sees: bool (B or 1, 1, queries, keys), True = attend.

    pad: bool (B, keys), True where a key is padding. Returns None where attention needs no mask tensor, that is
    for a whole unpadded row (fused causal attention) and for a single unpadded query (sees all).
    """
    if pad is None and queries in (1, keys):
        return None
    key = torch.arange(keys, device=device if pad is None else pad.device)
    query = key[keys - queries:, None]
    if pad is None:
        return (key <= query)[None, None]
    # a padding query sees itself, since the softmax over no key at all is nan
    return ((key <= query) & (~pad[:, None] | (key == query)))[:, None]


class KVCache:
    """One layer's keys (already rotated) and values, room for `capacity` positions of which `length` are filled."""

    def __init__(self, capacity):
        self.capacity, self.length = capacity, 0

    def append(self, k, v):
        """Add k, v (B,H,n,D); return all so far, (B,H,length,D) each."""
        if self.length == 0:
            self.k, self.v = (torch.empty(*t.shape[:2], self.capacity, t.size(3), dtype=t.dtype, device=t.device)
                              for t in (k, v))
        start, self.length = self.length, self.length + k.size(2)
        self.k[:, :, start:self.length], self.v[:, :, start:self.length] = k, v
        return self.k[:, :, :self.length], self.v[:, :, :self.length]


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.n_head, self.dropout = config.n_head, config.dropout
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x, rope=None, mask=None, log_p=None, cache=None):
        """x (B,S,C) -> (B,S,C).

        rope: cos and sin from GPT.rope, or None. mask: bool (B or 1,1,S,keys), or None for causal.
        log_p: (B,S), then logits are (q.k + log_p_key) / sqrt(D) and values exp(log_p) * v. cache: a KVCache.
        """
        B, S, C = x.shape
        D = C // self.n_head
        q, k, v = self.c_attn(x).view(B, S, 3, self.n_head, D).permute(2, 0, 3, 1, 4)  # each (B,H,S,D)
        if rope is not None:
            q, k = rotate(q, rope), rotate(k, rope)
        if log_p is not None:
            # the score rides in one more channel, q.1 * k.log_p: a bias tensor would be (B,H,S,S) and would
            # rule out the fused causal kernel. v grows along because the kernel wants equal widths.
            v = v * log_p.exp()[:, None, :, None].to(v.dtype)
            channel = log_p[:, None, :, None].expand(B, self.n_head, S, 1).to(k.dtype)
            q, k, v = F.pad(q, (0, 1), value=1.0), torch.cat((k, channel), dim=-1), F.pad(v, (0, 1))
        if cache is not None:
            k, v = cache.append(k, v)
        if mask is None:
            mask = causal_mask(S, k.size(2), device=x.device)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None and S == k.size(2),
                                           dropout_p=self.dropout if self.training else 0.0, scale=D ** -0.5)
        return self.resid_dropout(self.c_proj(y[..., :D].transpose(1, 2).reshape(B, S, C)))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        return self.dropout(self.c_proj(F.gelu(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x, rope=None, mask=None, log_p=None, gate=None, cache=None):
        """x (B,S,C) -> (B,S,C). gate (B,S,1) multiplies both residual updates; the rest goes to attention."""
        update = self.attn(self.ln_1(x), rope, mask, log_p, cache)
        x = x + (update if gate is None else gate * update)
        update = self.mlp(self.ln_2(x))
        return x + (update if gate is None else gate * update)


class GPT(nn.Module):
    sampling = ('temperature', 'top_k', 'top_p')  # what stream takes beside stop_token
    # a model that does not spend the same on every token names the unit, and has effort(prompts, new): for lists of
    # token lists what it spent on each token of prompts + new, a list of ints per row, None where it is not known
    effort_unit = None

    def __init__(self, config):
        super().__init__()
        self.config = config
        if config.vocab_size < 1:
            raise UserError(f'vocab_size = {config.vocab_size}: a model needs at least 1 token')
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.row_size, config.n_embd) if config.learned_positions else None
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_weights:
            self.lm_head.weight = self.wte.weight
        self.apply(self._init_weights)
        for name, p in self.named_parameters():  # GPT-2: keep the residual stream's variance level over depth
            if name.endswith('c_proj.weight'):
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * config.n_layer))

    @staticmethod
    def _init_weights(module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    # --- forward ---

    def rope(self, positions):
        """Rotary cos and sin, (B or 1, 1, S, D/2) each, for float positions (B or 1, S); None with learned ones."""
        if self.wpe is not None:
            return None
        D = self.config.n_embd // self.config.n_head
        dtype = torch.promote_types(self.wte.weight.dtype, torch.float32)
        exponent = torch.arange(0, D, 2, device=positions.device, dtype=dtype) / D
        angles = positions.to(dtype)[:, None, :, None] * self.config.rope_base ** -exponent
        return angles.cos(), angles.sin()

    def input_vectors(self, idx):
        """Ids (B,S) -> their embeddings (B,S,C)."""
        return self.wte(idx)

    def embed(self, idx, positions):
        """Token ids (B,S) at positions (B or 1, S) -> x (B,S,C)."""
        x = self.input_vectors(idx)
        if self.wpe is not None:
            x = x + self.wpe(positions.long())
        return self.drop(x)

    def logits(self, x):
        """Final norm and head, x (..., C) -> (..., V), in float32 or better: a bfloat16 softmax is too coarse."""
        y = self.lm_head(self.ln_f(x))
        return y.to(torch.promote_types(y.dtype, torch.float32))

    def encode(self, idx, positions=None, mask=None, pad=None, cache=None):
        """Token ids (B,T) -> the last block's output (B,T,C).

        positions: (B or 1, T), by default counting on from the cache, padding not counted. mask: see attention;
        by default causal. pad: bool (B, cached + T), True = padding. cache: from new_cache(), extended in place.
        Raises UserError when the row does not fit into block_size.
        """
        past = cache[0].length if cache else 0
        T = idx.size(1)
        if positions is None:
            if past + T > self.config.block_size:
                raise UserError(f'a row of {past + T} tokens is longer than block_size = {self.config.block_size}')
            positions = torch.arange(past, past + T, device=idx.device)[None]
            if pad is not None:
                positions = ((~pad).cumsum(1) - 1).clamp(min=0)[:, past:]
        if mask is None and pad is not None:
            mask = causal_mask(T, past + T, pad)
        x, rope = self.embed(idx, positions), self.rope(positions)
        for i, block in enumerate(self.blocks):
            x = block(x, rope, mask, cache=cache[i] if cache else None)
        return x

    def forward(self, idx, targets=None, pad=None):
        """idx (B,T), targets (B,T) with -1 = ignore -> logits (B,T,V), mean cross-entropy in nats (or None)."""
        logits = self.logits(self.encode(idx, pad=pad))
        if targets is None:
            return logits, None
        return logits, mean_nll(logits, targets)

    # --- generation ---

    def new_cache(self):
        """Empty KV caches, one per layer. A method that must reread the whole text returns None."""
        return [KVCache(self.config.row_size) for _ in self.blocks]

    def next_logits(self, idx, pad, cache):
        """Logits (B,V) of the token after the last one of idx (B,T); arguments as in encode."""
        return self.logits(self.encode(idx, pad=pad, cache=cache)[:, -1])

    @torch.no_grad()
    def stream(self, prompts, max_new_tokens, temperature=1.0, top_k=0, top_p=1.0, stop_token=None, use_cache=True,
               n_text=None):
        """Continue a batch of prompts, lists of token ids; yield after each step a list with every row's new token.

        A row that has produced stop_token yields None from then on. temperature 0 takes the likeliest token;
        top_k > 0 and top_p < 1 drop the unlikely ones. n_text: only ids below it, the tokenizer's, are drawn: the
        vocabulary may be larger. A text that outgrows block_size slides on: the row goes on from its last
        block_size / 2 tokens, so the cache is rebuilt once in block_size / 2 tokens and not at each.
        Raises UserError for an empty prompt and for sampling settings out of range.
        """
        check_sampling(prompts, temperature, top_k, top_p)
        was_training, device = self.training, self.wte.weight.device
        self.eval()
        rows, start, ended = [list(p) for p in prompts], [0] * len(prompts), [False] * len(prompts)
        cache = None
        try:
            for _ in range(max_new_tokens):
                for r, row in enumerate(rows):
                    if len(row) - start[r] > self.config.block_size:
                        start[r], cache = len(row) - max(1, self.config.block_size // 2), None
                if cache is None:
                    idx, pad = left_pad([row[s:] for row, s in zip(rows, start)], device)
                    cache = self.new_cache() if use_cache else None
                else:
                    idx = torch.tensor([[row[-1]] for row in rows], device=device)
                    pad = None if pad is None else F.pad(pad, (0, 1))
                logits = self.next_logits(idx, pad, cache)
                new = sample_token(logits[:, :n_text], temperature, top_k, top_p).tolist()
                for row, token in zip(rows, new):
                    row.append(token)  # an ended row is fed on as well, its output is only not shown
                yield [None if over else token for token, over in zip(new, ended)]
                ended = [over or token == stop_token for token, over in zip(new, ended)]
                if all(ended):
                    return
        finally:
            self.train(was_training)

    def generate(self, prompts, max_new_tokens, **sampling):
        """The new tokens of each prompt, a list of lists; a stop token is included. Arguments as in stream."""
        out = [[] for _ in prompts]
        for tokens in self.stream(prompts, max_new_tokens, **sampling):
            for row, token in zip(out, tokens):
                if token is not None:
                    row.append(token)
        return out

    # --- training ---

    def set_dropout(self, p):
        for module in self.modules():
            if isinstance(module, nn.Dropout):
                module.p = p
            elif isinstance(module, CausalSelfAttention):
                module.dropout = p

    def param_groups(self, weight_decay):
        """Matrices and embeddings decay, gains, biases and single vectors do not."""
        params = [p for p in self.parameters() if p.requires_grad]
        return [{'params': [p for p in params if p.dim() >= 2], 'weight_decay': weight_decay},
                {'params': [p for p in params if p.dim() < 2], 'weight_decay': 0.0}]

    def load_pretrained(self, state):
        """Start from another checkpoint's weights (a state dict), tensor by tensor of the same name.

        Where this model has more rows (a larger vocabulary), the further rows keep their initial values. Returns the
        names of tensors that the checkpoint does not have. Raises UserError where the shapes do not fit, or where
        a head of its own would have to share the embeddings' matrix.
        """
        tied = self.lm_head.weight is self.wte.weight and 'lm_head.weight' in state
        if tied and not torch.equal(state['lm_head.weight'], state['wte.weight']):
            raise UserError('tie_weights = True: the checkpoint to start from has a head of its own, which would '
                            'replace the embeddings; use tie_weights = False')
        own = self.state_dict()  # shares memory with the parameters
        for name, tensor in state.items():
            if name not in own or tensor.shape[1:] != own[name].shape[1:] or len(tensor) > len(own[name]):
                raise UserError(f'the checkpoint to start from has {name} {tuple(tensor.shape)}, this model has '
                                f'{tuple(own[name].shape) if name in own else "no such tensor"}')
            own[name][:len(tensor)] = tensor
        return [name for name in own if name not in state]

    def row_lengths(self):
        """Streams that each block, and the head, compute for a full row of block_size tokens: (list, int)."""
        return [self.config.block_size] * self.config.n_layer, self.config.block_size

    def flops_per_token(self):
        """FLOPs of forward and backward per input token of a full row, counted as in PaLM (2204.02311), appendix B."""
        in_blocks, in_head = self.row_lengths()
        block_params = sum(p.numel() for p in self.blocks[0].parameters())
        total = sum(6 * block_params * S + 12 * self.config.n_embd * S * S for S in in_blocks)
        return (total + 6 * self.lm_head.weight.numel() * in_head) / self.config.block_size

    def activation_bytes(self, rows, bytes_per_number=4):
        """Roughly what the blocks keep of a number of rows for the backward pass: 16 vectors (C) per position."""
        return rows * sum(self.row_lengths()[0]) * 16 * self.config.n_embd * bytes_per_number


def mean_nll(logits, targets):
    """Mean cross-entropy in nats of logits (B,T,V) over the targets (B,T) that are not -1; 0 where all are."""
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction='sum')
    return total / (targets >= 0).sum().clamp(min=1)


def check_sampling(prompts, temperature, top_k, top_p):
    if not prompts or not all(len(p) for p in prompts):
        raise UserError('the prompt is empty: give at least one token')
    for name, value, ok in [('temperature', temperature, temperature >= 0), ('top_k', top_k, top_k >= 0),
                            ('top_p', top_p, 0 < top_p <= 1)]:
        if not ok:
            raise UserError(f'{name} = {value}: temperature and top_k are 0 or more, top_p is in (0, 1]')


def left_pad(rows, device):
    """Token lists -> idx (B,T) and pad (B,T) bool, or None where all are of one length. Rows end together on the
    right, so that every row's next token is predicted at the last column."""
    T = max(map(len, rows))
    idx = torch.tensor([[0] * (T - len(row)) + row for row in rows], device=device)
    if all(len(row) == T for row in rows):
        return idx, None
    return idx, torch.tensor([[i < T - len(row) for i in range(T)] for row in rows], device=device)


def sample_token(logits, temperature, top_k=0, top_p=1.0):
    """One token per row of logits (B,V) -> (B,). At a tie the lower id comes first."""
    if temperature < GREEDY:
        return logits.argmax(dim=-1)
    logits = logits / temperature
    if top_k or top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        if top_k:
            ordered[:, top_k:] = -math.inf
        if top_p < 1:
            probs = ordered.softmax(dim=-1)
            ordered[probs.cumsum(dim=-1) - probs >= top_p] = -math.inf  # the mass before a token reaches top_p
        logits = logits.scatter(1, order, ordered)
    return torch.multinomial(logits.softmax(dim=-1), 1)[:, 0]
