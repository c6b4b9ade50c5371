"""The GPT core: a pre-norm decoder, one attention for every method, one head, cached generation.

Shapes: B batch, T tokens, S streams (= T here), H heads, D head width, C width, V vocabulary.

A method is a config class, a model class and a source of batches. It may override:

    config   shape            the settings that weights mean nothing without: they come with a checkpoint
             row_size         positions in a row of block_size tokens
             stages           the parts of a run, each with its learning rate and dropout
    model    token_vectors    token ids -> input vectors
             trunk            token ids -> what the last block says, one vector per token
             forward          token ids and targets -> predictions or the loss
             next_logits      the prediction after the last token of a growing text
             generate         the loop around it
             spent            what the model spent on each token, where that is not the same for all
             load_pretrained  another model's weights -> this one
             row_lengths      positions that each block computes, for the cost
             token_index      positions -> the tokens that they belong to
             report           what a finished run shows
    batches  train_batch      (stage, iteration, rows) -> tensors for forward
             val_batch        (stage, rows) -> the same for validation
             epoch_iters      iterations in a pass over the data
             table            the first rows as text

Attention has four seams: positions (a float per stream), a mask, a per-key log_p, a KV cache. Nothing in this file
knows which method uses them.
"""
import contextlib
import math
from collections import namedtuple
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F

from config import UserError, check_choice, check_range, check_sampling
from config.checkpoint import copy_weights
from config.lora import add_adapters

GREEDY = 1e-6  # below this temperature the likeliest token is taken: dividing by it might overflow

Stage = namedtuple('Stage', 'name first iters peak_lr dropout')  # first: the iteration that it begins with


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
    rope_base: float = 10000.0  # above every rotary wavelength / 2 pi
    tie_weights: bool = True  # input embedding and output head share one matrix
    # what published models have too; config/pretrained.py sets it
    n_kv_head: int = 0  # key/value heads, each shared by n_head / n_kv_head query heads; 0 = n_head
    head_dim: int = 0  # width of a head, 0 = n_embd / n_head
    n_hidden: int = 0  # width inside the MLP, 0 = 4 n_embd
    activation: str = 'gelu'  # in the MLP: gelu | gelu_tanh | silu
    gated: bool = False  # MLP: activation(gate) * up in place of activation(up)
    rms_norm: bool = False  # RMSNorm in place of LayerNorm
    norm_eps: float = 1e-5  # added to the variance in a norm
    qk_norm: bool = False  # norms of queries and keys (Gemma 3)
    second_norms: bool = False  # norms of what attention and MLP say, too (Gemma 3)
    scale_embedding: bool = False  # embeddings times sqrt(n_embd) (Gemma)
    rope_frequencies: tuple = ()  # radians per position, where they are not rope_base^(-2i/D), i < D/2 (Llama 3)
    local_layers: tuple = ()  # blocks, counted from 0, whose attention reaches back `window` tokens (Gemma 3)
    window: int = 0  # of local_layers, the token itself included
    local_rope_base: float = 10000.0  # their rope_base
    lora_rank: int = 0  # above 0: the core stays as it is, but for adapters of this rank

    shape = ('n_layer', 'n_head', 'n_embd', 'bias', 'learned_positions', 'rope_base', 'tie_weights', 'n_kv_head',
             'head_dim', 'n_hidden', 'activation', 'gated', 'rms_norm', 'norm_eps', 'qk_norm', 'second_norms',
             'scale_embedding', 'rope_frequencies', 'local_layers', 'window', 'local_rope_base')

    def __post_init__(self):
        check_range(vars(self), 'block_size n_layer n_head n_embd')
        check_range(vars(self), 'dropout', 0, 1)
        check_range(vars(self), 'n_kv_head head_dim n_hidden window norm_eps', 0)
        check_choice(vars(self), 'activation', 'gelu gelu_tanh silu')
        half = self.head_width // 2
        for wrong, name, expected in [
                (self.rope_base <= 1, 'rope_base', 'must be above 1'),
                (self.local_rope_base <= 1, 'local_rope_base', 'must be above 1'),
                (self.n_head % self.kv_heads, 'n_kv_head', f'n_head = {self.n_head} is not a multiple of it'),
                (self.head_dim % 2, 'head_dim', 'give an even number'),
                (len(self.rope_frequencies) not in (0, half), 'rope_frequencies', f'give {half} numbers'),
                (not {*self.local_layers} <= {*range(self.n_layer)}, 'local_layers', 'give blocks, from 0 on'),
                (self.local_layers and not self.window, 'window', 'local_layers need at least 1')]:
            if wrong:
                raise UserError(f'{name} = {getattr(self, name)}: {expected}')
        step = self.n_head * (1 if self.learned_positions else 2)  # rotary positions turn pairs of channels
        if self.n_embd % step and not self.head_dim:
            raise UserError(f'n_embd = {self.n_embd} is not divisible by n_head = {self.n_head}'
                            + ('' if self.learned_positions else ' into heads of even width')
                            + f': try n_embd = {max(step, self.n_embd // step * step)}')
        if not 0 <= self.lora_rank <= self.n_embd:
            raise UserError(f'lora_rank = {self.lora_rank}: must be from 0 to n_embd = {self.n_embd}')

    @property
    def row_size(self):
        return self.block_size

    @property
    def head_width(self):
        return self.head_dim or self.n_embd // self.n_head

    @property
    def kv_heads(self):
        return self.n_kv_head or self.n_head

    def stages(self, max_iters, learning_rate, epoch_iters):
        return [Stage('train', 0, max_iters, learning_rate, self.dropout)]

    def kept(self, n):
        """How many of a text's n tokens stay as context: all, or half a window where they no longer fit, so
        that the next ones have room."""
        return n if n <= self.block_size else max(1, self.block_size // 2)


# --- attention ---

def rotate(x, rope):
    """Rotary embedding (2104.09864): turn each pair (x_i, x_{i+D/2}) of x (B,H,S,D) by its position's angle."""
    cos, sin = rope  # each (B or 1, 1, S, D), float32: bfloat16 angles would blur positions
    return (x * cos + x.roll(x.size(-1) // 2, dims=-1) * sin).to(x.dtype)


def causal_mask(queries, keys, pad=None, device=None):
    """Which keys each of the last `queries` positions sees: bool (B or 1, 1, queries, keys), True = attend.
    pad: bool (B, keys), True = padding. None where attention needs no mask: for a whole unpadded row (fused
    kernel) and a single unpadded query (sees all)."""
    if pad is None and queries in (1, keys):
        return None
    key = torch.arange(keys, device=device if pad is None else pad.device)
    query = key[keys - queries:, None]
    if pad is None:
        return (key <= query)[None, None]
    # a padding query sees itself: the softmax over no key is nan
    return ((key <= query) & (~pad[:, None] | (key == query)))[:, None]


def text_start(pad):
    """Columns of padding before the text: pad (B,S) bool, True = padding -> (B,1)."""
    return pad.long().cumprod(dim=1).sum(dim=1, keepdim=True)


class KVCache:
    """A layer's keys (rotated) and values: room for `capacity` positions, `length` of them filled. Capacity 0:
    copied at every step, so that gradients flow through it."""

    def __init__(self, capacity=0):
        self.capacity = capacity
        self.length = 0

    def append_index(self, index):
        """Before append: add the new keys' tokens (B,n); return those of all so far, (B,length+n)."""
        self.index = torch.cat((self.index[:, :self.length], index), dim=1) if self.length else index
        return self.index

    def append(self, k, v):
        """Add k, v (B,H,n,D); return all so far, (B,H,length,D) each."""
        past, self.length = self.length, self.length + k.size(2)
        if not self.capacity:
            self.k = torch.cat((self.k, k), dim=2) if past else k
            self.v = torch.cat((self.v, v), dim=2) if past else v
            return self.k, self.v
        if past == 0:
            B, H, _, D = k.shape
            self.k = k.new_empty(B, H, self.capacity, D)
            self.v = v.new_empty(B, H, self.capacity, D)
        self.k[:, :, past:self.length] = k
        self.v[:, :, past:self.length] = v
        return self.k[:, :, :self.length], self.v[:, :, :self.length]


class RMSNorm(nn.RMSNorm):
    def forward(self, x):
        return super().forward(x.to(self.weight.dtype))  # autocast leaves this to us


def norm(config, width, wanted=True):
    if not wanted:
        return nn.Identity()
    if config.rms_norm:
        return RMSNorm(width, config.norm_eps)
    return nn.LayerNorm(width, config.norm_eps, bias=config.bias)


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        D = config.head_width
        self.heads = config.n_head, config.kv_heads, config.kv_heads  # of q, k, v
        self.score_unit = self.value_unit = 1.0  # of log_p beside q.k, and in p * v
        self.c_attn = nn.Linear(config.n_embd, sum(self.heads) * D, bias=config.bias)
        self.c_proj = nn.Linear(config.n_head * D, config.n_embd, bias=config.bias)
        self.q_norm = norm(config, D, config.qk_norm)
        self.k_norm = norm(config, D, config.qk_norm)
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x, rope=None, mask=None, log_p=None, cache=None):
        """x (B,S,C) -> (B,S,C). rope: cos and sin, or None. mask: bool (B or 1,1,S,keys), or None for causal.
        log_p: (B,S), then logits are (q.k + log_p_key) / sqrt(D) and values exp(log_p) * v. cache: a KVCache."""
        B, S, _ = x.shape
        qkv = self.c_attn(x).view(B, S, sum(self.heads), -1).transpose(1, 2)
        q, k, v = qkv.split(self.heads, dim=1)  # (B,H,S,D), each with its own H
        D = q.size(-1)
        q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = rotate(q, rope), rotate(k, rope)
        if log_p is not None:
            # the score rides in one more channel, q.1 * k.log_p: a bias would be (B,H,S,S) and rule out the fused
            # causal kernel, which wants equal widths, on CUDA multiples of 8: v grows along
            more = 8 - D % 8 if x.is_cuda else 1
            v = v * (self.value_unit * log_p).exp()[:, None, :, None].to(v.dtype)
            channel = F.pad(log_p[:, None, :, None], (0, more - 1)).expand(B, k.size(1), S, more)
            q = F.pad(q, (0, more), value=self.score_unit)
            k = torch.cat((k, channel.to(k.dtype)), dim=-1)
            v = F.pad(v, (0, more))
        if cache is not None:
            k, v = cache.append(k, v)
        if mask is None:
            mask = causal_mask(S, k.size(2), device=x.device)
        if q.is_cuda and (mask is not None or q.dtype == torch.float32):  # kernels that want equally many heads
            k, v = (t.repeat_interleave(q.size(1) // k.size(1), dim=1) for t in (k, v))
        causal = mask is None and (cache is None or S > 1)
        dropout = self.resid_dropout.p if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, dropout_p=dropout,
                                           scale=D ** -0.5, enable_gqa=q.size(1) > k.size(1))
        return self.resid_dropout(self.c_proj(y[..., :D].transpose(1, 2).reshape(B, S, -1)))


ACTIVATIONS = {'gelu': F.gelu, 'gelu_tanh': partial(F.gelu, approximate='tanh'), 'silu': F.silu}


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        hidden = config.n_hidden or 4 * config.n_embd
        self.gated = config.gated
        self.activation = ACTIVATIONS[config.activation]
        self.c_fc = nn.Linear(config.n_embd, hidden * (2 if config.gated else 1), bias=config.bias)
        self.c_proj = nn.Linear(hidden, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        if self.gated:
            gate, up = self.c_fc(x).chunk(2, dim=-1)
            return self.dropout(self.c_proj(self.activation(gate) * up))
        return self.dropout(self.c_proj(self.activation(self.c_fc(x))))


class Block(nn.Module):
    mlp_class = MLP  # in another one c_proj must be the last layer

    def __init__(self, config):
        super().__init__()
        self.ln_1 = norm(config, config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = norm(config, config.n_embd)
        self.mlp = self.mlp_class(config)
        self.post_1 = norm(config, config.n_embd, config.second_norms)
        self.post_2 = norm(config, config.n_embd, config.second_norms)

    def forward(self, x, rope=None, mask=None, log_p=None, gate=None, cache=None):
        """x (B,S,C) -> (B,S,C). gate (B,S,1) multiplies both residual updates; the rest goes to attention."""
        update = self.post_1(self.attn(self.ln_1(x), rope, mask, log_p, cache))
        x = x + (update if gate is None else gate * update)
        update = self.post_2(self.mlp(self.ln_2(x)))
        return x + (update if gate is None else gate * update)


# --- the head where targets are known: only a chunk of the N*V logits exists at any time ---
# Two numbers per position serve every loss. torch.compile does not look into these operators: it would unroll the
# loop, anew for each length.

def chunks(N, V):
    """Slices of N positions with 4M logits each, but at least 256 positions: small products are slow."""
    n = max(256, 2 ** 22 // V)
    return [slice(start, min(start + n, N)) for start in range(0, N, n)]


@torch.library.custom_op('adaptive::head_numbers', mutates_args=())
def head_numbers(y: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, dtype: torch.dtype
                 ) -> tuple[torch.Tensor, torch.Tensor]:
    """With z = y W^T in `dtype`: the target's z and logsumexp(z), (N,) each, in float32 at least. y (N,C),
    weight (V,C), targets (N,) in 0...V-1."""
    target_logit, lse = head_numbers_shapes(y, weight, targets, dtype)
    w = weight.to(dtype)
    for rows in chunks(len(y), len(weight)):
        z = (y[rows].to(dtype) @ w.T).to(lse.dtype)  # (n,V)
        target_logit[rows] = z.gather(1, targets[rows, None])[:, 0]
        lse[rows] = z.logsumexp(dim=1)
    return target_logit, lse


@head_numbers.register_fake
def head_numbers_shapes(y, weight, targets, dtype):
    number = torch.promote_types(y.dtype, torch.float32)
    return y.new_empty(y.shape[:1], dtype=number), y.new_empty(y.shape[:1], dtype=number)


@torch.library.custom_op('adaptive::head_gradients', mutates_args=())
def head_gradients(y: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, dtype: torch.dtype,
                   lse: torch.Tensor, d_target: torch.Tensor, d_lse: torch.Tensor, frozen: bool
                   ) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of y and weight from those of the two numbers; logits are computed again. With p = softmax(z),
    dL/dz_v = dL/dlse * p_v + dL/dtarget_logit * [v = target]. frozen: weight needs none."""
    d_y, d_weight = head_gradients_shapes(y, weight, targets, dtype, lse, d_target, d_lse, frozen)
    d_weight.zero_()
    w = weight.to(dtype)
    for rows in chunks(len(y), len(weight)):
        y_rows = y[rows].to(dtype)
        d_z = (y_rows @ w.T).to(lse.dtype).sub_(lse[rows, None]).exp_().mul_(d_lse[rows, None])
        d_z = d_z.scatter_add_(1, targets[rows, None], d_target[rows, None]).to(dtype)
        d_y[rows] = (d_z @ w).to(y.dtype)
        if frozen:
            continue
        if dtype == weight.dtype:
            d_weight.addmm_(d_z.T, y_rows)
        else:
            d_weight += d_z.T @ y_rows
    return d_y, d_weight


@head_gradients.register_fake
def head_gradients_shapes(y, weight, targets, dtype, lse, d_target, d_lse, frozen):
    return torch.empty_like(y), weight.new_empty(0 if frozen else weight.shape)


def keep_for_backward(ctx, inputs, output):
    y, weight, targets, ctx.dtype = inputs
    ctx.save_for_backward(y, weight, targets, output[1])


def head_backward(ctx, d_target, d_lse):
    y, weight, targets, lse = ctx.saved_tensors
    frozen = not ctx.needs_input_grad[1]
    d_y, d_weight = head_gradients(y, weight, targets, ctx.dtype, lse, d_target, d_lse, frozen)
    return d_y, None if frozen else d_weight, None, None


head_numbers.register_autograd(head_backward, setup_context=keep_for_backward)


def mean_nll(nll, targets):
    """Mean of nll (B,T) over the targets (B,T) that are not -1; 0 where all are."""
    counted = targets >= 0
    return torch.where(counted, nll, 0.0).sum() / counted.sum().clamp(min=1)


# --- the model ---

@contextlib.contextmanager
def eval_mode(model):
    """A block of code without dropout; then the mode is as before."""
    if not model.training:  # switching costs a tenth of an answer
        yield
        return
    model.eval()
    try:
        yield
    finally:
        model.train()


class GPT(nn.Module):
    block_class = Block

    def __init__(self, config):
        super().__init__()
        self.config = config
        if config.vocab_size < 1:
            raise UserError(f'vocab_size = {config.vocab_size}: a model needs at least 1 token')
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.embedding_scale = config.n_embd ** 0.5 if config.scale_embedding else 1.0
        self.wpe = nn.Embedding(config.row_size, config.n_embd) if config.learned_positions else None
        self.register_buffer('frequencies', torch.tensor(config.rope_frequencies), persistent=False)
        self.drop = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(self.block_class(config) for _ in range(config.n_layer))
        self.ln_f = norm(config, config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_weights:
            self.lm_head.weight = self.wte.weight
        self.apply(self._init_weights)
        for name, p in self.named_parameters():  # GPT-2: keep the residual stream's variance level
            if name.endswith('c_proj.weight'):
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * config.n_layer))
        if config.lora_rank:  # what a method adds to the core is trained as well
            add_adapters(self, config.lora_rank)

    @staticmethod
    def _init_weights(module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    # --- forward ---

    def rope(self, positions, local=False):
        """rotate's cos and sin, (B or 1, 1, S, D) each, of float positions (B or 1, S); None with learned ones."""
        if self.wpe is not None:
            return None
        c = self.config
        dtype = torch.promote_types(self.wte.weight.dtype, torch.float32)
        exponent = torch.arange(0, c.head_width, 2, device=positions.device, dtype=dtype) / c.head_width
        frequency = (c.local_rope_base if local else c.rope_base) ** -exponent
        if c.rope_frequencies and not local:
            frequency = self.frequencies
        angles = positions.to(dtype)[:, None, :, None] * frequency
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)

    def token_index(self, positions):
        """Positions (B or 1, S) -> the index of each one's token: a window counts tokens."""
        return positions

    def views(self, x, positions, mask=None, cache=None):
        """(rope, mask) for blocks that reach back to the beginning, and for those of local_layers."""
        c = self.config
        whole = self.rope(positions), mask
        if not c.local_layers:
            return whole, whole
        query = self.token_index(positions).expand(len(x), -1)
        key = cache[0].append_index(query) if cache else query
        if key.size(1) > c.window:
            if mask is None:  # causal
                S, keys = query.size(1), key.size(1)
                mask = torch.ones(S, keys, dtype=torch.bool, device=x.device).tril(keys - S)
            mask = mask & (query[:, :, None] - key[:, None] < c.window)[:, None]
        return whole, (self.rope(positions, local=True), mask)

    def token_vectors(self, idx):
        """Ids (B,S) -> their embeddings (B,S,C)."""
        x = self.wte(idx)
        return x if self.embedding_scale == 1 else x * self.embedding_scale

    def embed(self, idx, positions):
        """Token ids (B,S) at positions (B or 1, S) -> x (B,S,C)."""
        x = self.token_vectors(idx)
        if self.wpe is not None:
            x = x + self.wpe(positions.long())
        return self.drop(x)

    def check_length(self, positions):
        """Raises UserError where so many positions do not fit into a row."""
        c = self.config
        if positions > c.row_size:
            tokens = -(-positions * c.block_size // c.row_size)
            raise UserError(f'a row of {tokens} tokens is longer than block_size = {c.block_size}')

    def trunk(self, idx, positions=None, mask=None, pad=None, cache=None):
        """Token ids (B,T) -> the last block's output (B,T,C). Raises UserError when the row does not fit into
        block_size.

        positions: (B or 1, T), by default counted on from the cache, without padding before the text. mask: as in
        attention. pad: bool (B, cached + T), True = padding. cache: KVCaches, extended in place.
        """
        past = cache[0].length if cache else 0
        T = idx.size(1)
        if positions is None:
            self.check_length(past + T)
            positions = torch.arange(past, past + T, device=idx.device)[None]
            if pad is not None:
                positions = (positions - text_start(pad)).clamp(min=0)
        if mask is None and pad is not None:
            mask = causal_mask(T, past + T, pad)
        return self.run_blocks(self.embed(idx, positions), positions, mask, cache)

    def run_blocks(self, x, positions, mask=None, cache=None):
        views = self.views(x, positions, mask, cache)
        for i, layer in enumerate(self.layers):
            rope, seen = views[i in self.config.local_layers]
            x = layer(x, rope, seen, cache=cache[i] if cache else None)
        return x

    def logits(self, x):
        """Final norm and head, x (..., C) -> (..., V), in float32 at least: a bfloat16 softmax is too coarse."""
        y = self.lm_head(self.ln_f(x))
        return y.to(torch.promote_types(y.dtype, torch.float32))

    def target_numbers(self, y, targets, V=None):
        """Where targets (...) are known, -1 = none: the target's logit and the logsumexp of all logits, (...)
        each, from y (..., C) after the final norm. V: of the first V tokens alone."""
        weight = self.lm_head.weight[:V] if V else self.lm_head.weight
        kind = y.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        numbers = head_numbers(y.flatten(0, -2), weight, targets.flatten().clamp(min=0), dtype)
        return [number.view(targets.shape) for number in numbers]

    def nll(self, x, targets):
        """-log P(target) in nats, (...), from the last block's output x (..., C)."""
        target_logit, lse = self.target_numbers(self.ln_f(x), targets)
        return lse - target_logit

    def forward(self, idx, targets=None, pad=None):
        """idx (B,T), targets (B,T) with -1 = ignore -> (predictions (B,T,V), None) or (None, mean loss in
        nats)."""
        x = self.trunk(idx, pad=pad)
        if targets is None:
            return self.logits(x), None
        return None, mean_nll(self.nll(x, targets), targets)

    # --- generation ---

    def next_logits(self, idx, pad, cache):
        """Logits (B,V) of the token after the last one of idx (B,T); pad as in trunk. cache: None, or a list
        that is filled at the first call: from then on idx has the new tokens alone. A method that leaves it
        empty gets the whole text each time."""
        if cache is not None and not cache:
            cache.extend(KVCache(self.config.row_size) for _ in self.layers)
        return self.logits(self.trunk(idx, pad=pad, cache=cache)[:, -1])

    @torch.no_grad()
    def generate(self, prompts, max_new_tokens, temperature=1.0, top_k=0, top_p=1.0, stop_token=None,
                 use_cache=True, n_text=None):
        """Continue prompts, lists of token ids; yield after each step a list of each row's new token, None from
        its stop_token on.

        temperature 0 takes the likeliest token; top_k > 0 and top_p < 1 drop the unlikely ones; ids from n_text
        on, which the tokenizer lacks, are never drawn. A text that outgrows block_size slides on, see
        GPTConfig.kept. Raises UserError for an empty prompt and for sampling settings out of range.
        """
        check_sampling(prompts, temperature, top_k, top_p)
        device = self.wte.weight.device
        rows = [list(prompt) for prompt in prompts]
        start = [0] * len(rows)  # where each row's window begins
        ended = [False] * len(rows)
        cache = None
        with eval_mode(self):
            for _ in range(max_new_tokens):
                # slide
                for r, row in enumerate(rows):
                    n = len(row) - start[r]
                    if n > self.config.kept(n):
                        start[r] = len(row) - self.config.kept(n)
                        cache = None
                # read the windows, or the last tokens
                if not cache:
                    idx, pad = left_pad([row[s:] for row, s in zip(rows, start)], device)
                    cache = [] if use_cache else None
                else:
                    idx = torch.tensor([[row[-1]] for row in rows], device=device)
                    pad = None if pad is None else F.pad(pad, (0, 1))
                logits = self.next_logits(idx, pad, cache)
                new = sample_token(logits[:, :n_text], temperature, top_k, top_p).tolist()
                for row, token in zip(rows, new):
                    row.append(token)  # an ended row is fed too, but not shown
                yield [None if over else token for token, over in zip(new, ended)]
                ended = [over or token == stop_token for token, over in zip(new, ended)]
                if all(ended):
                    return

    def complete(self, prompts, max_new_tokens, **sampling):
        """The new tokens of each prompt, a stop token included. Arguments as in generate."""
        out = [[] for _ in prompts]
        for tokens in self.generate(prompts, max_new_tokens, **sampling):
            for row, token in zip(out, tokens):
                if token is not None:
                    row.append(token)
        return out

    def spent(self, prompts, new):
        """What was spent on each token of prompts + new (lists of token lists): (unit, for each row a list of
        ints, None where not known); None for a model that spends the same on all."""
        return None

    def report(self, batches):
        """What a finished run shows, as text: here a sample."""
        tokenizer = batches.tokenizer
        prompt = tokenizer.begin + tokenizer.encode(tokenizer.start_text())
        new = self.complete([prompt], 200, temperature=0.8, n_text=tokenizer.n_text, stop_token=tokenizer.end)[0]
        return 'a sample at temperature 0.8:\n' + tokenizer.decode(new)

    # --- training ---

    def set_dropout(self, p):
        for module in self.modules():
            if isinstance(module, nn.Dropout):
                module.p = p

    def param_groups(self, weight_decay):
        """Tensors of two dimensions decay; gains and biases do not."""
        trained = [p for p in self.parameters() if p.requires_grad]
        decaying = [p for p in trained if p.dim() >= 2]
        others = [p for p in trained if p.dim() < 2]
        return [{'params': decaying, 'weight_decay': weight_decay}, {'params': others, 'weight_decay': 0.0}]

    def load_pretrained(self, state):
        """Start from another checkpoint's weights (a state dict); returns the names of those that it lacks. See
        config.checkpoint.copy_weights."""
        return copy_weights(self, state)

    def row_lengths(self):
        """Positions that each block, and the head, compute for a full row of block_size tokens: (list, int)."""
        return [self.config.block_size] * len(self.layers), self.config.block_size


def left_pad(rows, device):
    """Token lists -> idx (B,T) and pad (B,T) bool, or None where all are of one length. Rows end on the right:
    every next token is predicted at the last column."""
    missing = [max(map(len, rows)) - len(row) for row in rows]
    idx = torch.tensor([[0] * n + row for n, row in zip(missing, rows)], device=device)
    if not any(missing):
        return idx, None
    return idx, torch.arange(idx.size(1), device=device) < torch.tensor(missing, device=device)[:, None]


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
