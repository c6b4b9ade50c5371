"""Reasoning in Memory (arXiv 2605.30343): thought happens in fixed memory blocks that are read in one forward pass.

A memory block is <b>, M times <m>, </b>. A row is question, block 1, read-out 1, block 2, read-out 2, ...; the question
and the blocks never see a read-out, and a read-out sees only itself besides them. Stage 1 lets the read-out of block t
predict the next written step, stage 2 lets every read-out predict the answer. At inference nothing is written: question
and blocks are one prefill, and the answer is decoded after the last block.

The baselines share this file: direct answers, written steps, blocks without stage 1, and Coconut (arXiv 2412.06769).
Shapes: B rows, S tokens of a row, C width, V vocabulary, K memory blocks, M memory tokens per block.
"""
from collections import namedtuple
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from config import UserError, check_range
from data import records
from model import GPT, GPTConfig, KVCache, check_sampling, left_pad, sample_token

TRAIN_ON = ('rim', 'pause', 'sft', 'cot', 'coconut')
LORA_SCALE = 2.0  # alpha / rank
TOKEN_ROWS = ('wte.weight', 'lm_head.weight')  # one row per token of the vocabulary; mostly one and the same tensor


@dataclass
class RiMConfig(GPTConfig):
    train_on: str = 'rim'  # rim | pause (blocks without stage 1) | sft (direct answer) | cot (written steps) | coconut
    n_blocks: int = 8  # K, memory blocks in stage 2 and at inference
    n_mem: int = 2  # M, memory tokens per block
    anneal: str = 'relative'  # how read-outs fade in stage 1: relative (the earliest first) | uniform | none
    epochs: float = 0.0  # passes over the training records, above 0 it takes the place of max_iters; of stage 1 for rim
    stage2_iters: int = 1000  # rim: steps of stage 2; max_iters are those of stage 1
    stage2_epochs: float = 0.0  # rim: passes over the records in stage 2, above 0 it takes the place of stage2_iters
    stage2_learning_rate: float = 3e-4  # rim: peak in stage 2, lower than in stage 1
    stage2_dropout: float = 0.1  # rim: dropout in stage 2, more than in stage 1
    max_steps: int = 16  # training records with more steps are left out and counted
    train_question: bool = False  # train the question's tokens as well, with weight 1
    coconut_stages: int = 6  # coconut: stage j has thoughts in place of the first j steps, the last one in place of all
    thoughts_per_stage: int = 1  # coconut: thoughts that each stage adds
    lora_rank: int = 0  # above 0: train only adapters of this rank and the embeddings of the special tokens

    of_the_run = ('train_on', 'anneal', 'epochs', 'stage2_iters', 'stage2_epochs', 'stage2_learning_rate',
                  'stage2_dropout', 'max_steps', 'train_question')

    def __post_init__(self):
        super().__post_init__()
        if self.train_on not in TRAIN_ON:
            raise UserError(f'train_on = {self.train_on!r}: choose one of {", ".join(TRAIN_ON)}')
        if self.anneal not in ('relative', 'uniform', 'none'):
            raise UserError(f'anneal = {self.anneal!r}: choose relative, uniform or none')
        check_range(vars(self), 'n_blocks n_mem max_steps coconut_stages thoughts_per_stage')
        check_range(vars(self), 'epochs stage2_iters stage2_epochs stage2_learning_rate lora_rank', 0)
        check_range(vars(self), 'stage2_dropout', 0, 1)
        if self.lora_rank > self.n_embd:
            raise UserError(f'lora_rank = {self.lora_rank}: must be at most n_embd = {self.n_embd}, as no matrix '
                            'has a higher rank')


# --- rows ---

QUESTION, MEMORY, READOUT = 'question', 'memory', 'readout'
Row = namedtuple('Row', 'tokens kind block positions targets weights')  # lists of one entry per token


def build_row(question, readouts, weights, n_mem, special, question_weight=0.0):
    """One training row: question, block 1, read-out 1, block 2, read-out 2, ...

    question, readouts: token ids and lists of them. weights: one per read-out, for each of its tokens and its end
    token. n_mem: M, or None for no blocks: then the one read-out follows the question, as in plain fine-tuning.
    special: ids of <b>, <m>, </b>, <end>. question_weight: for each of the question's tokens.
    A read-out of weight 0 is left out, since no other token sees it.
    """
    begin, mem, close, end = special
    memory = [] if n_mem is None else [begin] + [mem] * n_mem + [close]
    row = Row(list(question), [QUESTION] * len(question), [0] * len(question), list(range(len(question))),
              question[1:] + [-1], [question_weight] * (len(question) - 1) + [0.0])
    position = len(question)  # read-outs do not count: a block goes on where the last block ended
    for k, (readout, weight) in enumerate(zip(readouts, weights), 1):
        readout = readout if weight else []
        row.tokens.extend(memory + readout)
        row.kind.extend([MEMORY] * len(memory) + [READOUT] * len(readout))
        row.block.extend([k] * len(memory + readout))
        row.positions.extend(range(position, position + len(memory + readout)))
        row.targets.extend([-1] * len(memory))
        row.weights.extend([0.0] * len(memory))
        position += len(memory)
        if readout:  # the token before it, </b>, predicts its first token; its own last token predicts the end
            row.targets[-1], row.weights[-1] = readout[0], weight
            row.targets.extend(readout[1:] + [end])
            row.weights.extend([weight] * len(readout))
    return row


def read_by(row):
    """For memory_mask: of each token of a row the block that it reads out, 0 for question and blocks."""
    return [block if kind == READOUT else 0 for block, kind in zip(row.block, row.kind)]


def stage1_weights(n_steps, progress, anneal):
    """lambda_t for t = 1..T: how much read-out t counts at progress s/S of stage 1, from 0 to 1."""
    if anneal == 'none':
        return [1.0] * n_steps
    fade_after = [t / n_steps if anneal == 'relative' else 1.0 for t in range(1, n_steps + 1)]
    return [max(0.0, 1.0 - progress / at) for at in fade_after]


def stage2_weights(n_blocks):
    """alpha_k for k = 1..K: later blocks count more, and all of them together 1."""
    return [2 * k / (n_blocks * (n_blocks + 1)) for k in range(1, n_blocks + 1)]


def memory_mask(readout):
    """Who sees whom: readout (B,S), the block that a token reads out, 0 for question and blocks, -1 for padding ->
    bool (B,1,S,S), True = attend. Everybody sees question and blocks before it, and what shares its read-out."""
    shared = (readout[:, None, :] == 0) | (readout[:, None, :] == readout[:, :, None])  # padding sees padding: no nan
    return shared.tril()[:, None]


# --- the model ---

class LoRALinear(nn.Linear):
    """weight + 2 B A with a frozen weight (arXiv 2106.09685). The sum is not stored: it would go stale."""

    def __init__(self, linear, rank):
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None)
        self.load_state_dict(linear.state_dict())
        self.lora_a = nn.Parameter(torch.randn(rank, self.in_features) * self.in_features ** -0.5)
        self.lora_b = nn.Parameter(torch.zeros(self.out_features, rank))

    def forward(self, x):
        return super().forward(x) + LORA_SCALE * F.linear(F.linear(x, self.lora_a), self.lora_b)


class GrowingCache(KVCache):
    """A KV cache that gradients flow through: it is copied at every step, where KVCache writes in place."""

    def append(self, k, v):
        if self.length:
            k, v = torch.cat((self.k, k), dim=2), torch.cat((self.v, v), dim=2)
        self.k, self.v, self.length = k, v, k.size(2)
        return k, v


class RiM(GPT):
    sampling = ('temperature', 'top_k', 'top_p', 'n_blocks', 'n_mem')

    def __init__(self, config):
        super().__init__(config)
        V = config.vocab_size
        if V <= len(records.SPECIAL):
            raise UserError(f'vocab_size = {V}: there must be room for {", ".join(records.SPECIAL)} behind the text')
        self.special = list(range(V - len(records.SPECIAL), V))  # the last ids of the vocabulary
        if config.lora_rank:
            for part in [part for block in self.blocks for part in (block.attn, block.mlp)]:
                for name, linear in list(part.named_children()):
                    if isinstance(linear, nn.Linear):
                        setattr(part, name, LoRALinear(linear, config.lora_rank))
            is_new = (torch.arange(V) >= self.special[0]).float()[:, None]
            for name, p in self.named_parameters():
                p.requires_grad = 'lora_' in name or name in TOKEN_ROWS
                if name in TOKEN_ROWS:
                    p.register_hook(lambda grad: grad * is_new.to(grad))

    def param_groups(self, weight_decay):
        groups = super().param_groups(weight_decay)
        if self.config.lora_rank:  # decay would move the embeddings that are not trained
            frozen = [p for name, p in self.named_parameters() if name in TOKEN_ROWS]
            groups[0]['params'] = [p for p in groups[0]['params'] if not any(p is f for f in frozen)]
            groups[1]['params'] += frozen
        return groups

    def load_pretrained(self, state):
        """As GPT's, but what pads a plain GPT's vocabulary gives way to the special tokens."""
        V, T, old = self.config.vocab_size, self.config.block_size, len(state.get('wpe.weight', ()))
        if self.config.lora_rank and 0 < old < T:
            raise UserError(f'block_size = {T}: the checkpoint to start from has {old} positions, and with lora_rank no '
                            'further ones are learned; leave block_size or lora_rank out')
        return super().load_pretrained({name: tensor[:self.special[0]] if name in TOKEN_ROWS and len(tensor) > V else tensor
                                        for name, tensor in state.items()})

    def forward(self, idx, targets=None, weights=None, positions=None, readout=None):
        """idx (B,S) -> (logits (B,S,V), None), or with targets (B,S), -1 = none, and weights (B,S): (None, loss), the
        weighted nll in nats summed over a row, mean over rows.

        positions (B,S), by default 0..S-1. readout (B,S): see memory_mask; by default causal. Coconut needs both.
        """
        mask = None if readout is None else memory_mask(readout)
        if self.config.train_on == 'coconut':
            x = self.encode_thoughts(idx, positions, mask, [GrowingCache(0) for _ in self.blocks])
        else:
            x = self.encode(idx, positions, mask)
        if targets is None:
            return self.logits(x), None
        trained = targets >= 0  # the head is computed only where something is learned
        nll = F.cross_entropy(self.logits(x[trained]), targets[trained], reduction='none')
        return None, (nll * weights[trained]).sum() / idx.size(0)

    def encode_thoughts(self, idx, positions, mask, cache):
        """Coconut: as encode, but in place of a <m> the model reads its own last hidden state at the token before.

        The <m> of all rows must stand in the same columns. One pass per thought; gradients flow through all of them.
        """
        thoughts = (idx[0] == self.special[1]).nonzero()[:, 0].tolist()
        edges = [0, *thoughts, thoughts[-1] + 1, idx.size(1)]
        outputs = []
        for first, last in zip(edges, edges[1:]):
            at = positions[:, first:last]
            if first in thoughts:
                x = self.ln_f(outputs[-1][:, -1:])  # the state that the head would have read
                x = x if self.wpe is None else x + self.wpe(at)
            else:
                x = self.embed(idx[:, first:last], at)
            rope = self.rope(at)
            for block, block_cache in zip(self.blocks, cache):
                x = block(x, rope, mask[:, :, first:last, :last], cache=block_cache)
            outputs.append(x)
        return torch.cat(outputs, dim=1)

    # --- inference ---

    def prefill(self, questions, n_blocks=0, n_mem=0):
        """Questions (token lists) and the memory blocks after them in one pass (Coconut: one more per thought).

        n_blocks, n_mem: K and M, 0 as trained. Returns (cache, pad, points): points has for each block the
        cache's length at its end and the hidden states there (B,C), from which an answer can be read; without blocks
        it is one point, the question's end. Raises UserError if question and blocks do not fit into block_size.
        """
        c = self.config
        if (n_blocks or n_mem) and c.train_on not in ('rim', 'pause'):
            raise UserError(f'n_blocks = {n_blocks}, n_mem = {n_mem}: a {c.train_on} model has no memory blocks')
        K, M = n_blocks or c.n_blocks, n_mem or c.n_mem
        if K < 1 or M < 1:
            raise UserError(f'n_blocks = {K}, n_mem = {M}: there must be at least 1 of each')
        if c.train_on == 'coconut':
            K, M = 1, c.coconut_stages * c.thoughts_per_stage
        begin, mem, close, _ = self.special
        memory = [] if c.train_on in ('sft', 'cot') else ([begin] + [mem] * M + [close]) * K
        longest = max(map(len, questions))
        if longest + len(memory) + 1 > c.block_size:
            raise UserError(f'a question of {longest} tokens' + (f' with {len(memory)} memory tokens' if memory else '')
                            + f' leaves no room for an answer in block_size = {c.block_size}')
        idx, pad = left_pad([list(q) + memory for q in questions], self.wte.weight.device)
        # room for the tokens of a row and the padding before it, so that an answer is as long beside others as alone
        cache = [KVCache(c.block_size + longest - min(map(len, questions))) for _ in self.blocks]
        if c.train_on == 'coconut':
            lead = 0 if pad is None else pad.sum(1, keepdim=True)
            positions = (torch.arange(idx.size(1), device=idx.device) - lead).clamp(min=0)
            mask = memory_mask(torch.zeros_like(idx) if pad is None else -pad.long())
            x = self.encode_thoughts(idx, positions.expand(idx.shape), mask, cache)
        else:
            x = self.encode(idx, pad=pad, cache=cache)
        ends = [longest + (M + 2) * k for k in range(1, K + 1)] if memory else [longest]
        return cache, pad, [(end, x[:, end - 1]) for end in ends]

    def read(self, cache, pad, point, max_new_tokens=32, temperature=0.0, top_k=0, top_p=1.0, on_token=None):
        """Decode a read-out at one of prefill's points: (token lists without the end token, log-probabilities (B,)).

        <b>, <m> and </b> are never drawn: the probabilities are those among text and <end>. The cache is cut back
        to the point. Blocks after it are overwritten, so read later blocks before earlier ones.
        on_token: called with each step's tokens (B,).
        """
        end, hidden = point
        for c in cache:
            c.length = end
        pad = None if pad is None else pad[:, :end]
        rows, total = [[] for _ in hidden], hidden.new_zeros(len(hidden))
        live, logits = torch.ones(len(hidden), dtype=torch.bool, device=hidden.device), self.logits(hidden)
        position = torch.full_like(live, end, dtype=torch.long) if pad is None else (~pad).sum(dim=1)  # (B,), the next
        last = self.config.block_size - 1
        for i in range(max_new_tokens):
            if i:
                pad = None if pad is None else F.pad(pad, (0, 1))
                at = (position + i - 1).clamp(max=last)[:, None]  # rows that have ended are fed on, their output unused
                logits = self.logits(self.encode(token[:, None], at, pad=pad, cache=cache)[:, -1])
            logits[:, self.special[0]:self.special[3]] = -torch.inf
            token = sample_token(logits, temperature, top_k, top_p)
            if on_token:
                on_token(token)
            total += logits.log_softmax(dim=-1).gather(1, token[:, None])[:, 0] * live
            live = live & (token != self.special[3])
            for row, t, goes_on in zip(rows, token.tolist(), live.tolist()):
                if goes_on:
                    row.append(t)
            live = live & (position + i < last)
            if not live.any():
                break
        return rows, total

    @torch.no_grad()
    def answers(self, questions, n_blocks=0, n_mem=0, every_block=False, samples=1, **sampling):
        """Read-outs of a batch of questions (token lists): a list with one entry per block read, the last block alone
        unless every_block, of a list per sample of what `read` returns. One prefill serves all of them."""
        check_sampling(questions, sampling.get('temperature', 0.0), sampling.get('top_k', 0), sampling.get('top_p', 1.0))
        if was_training := self.training:  # to switch takes a tenth of the time to a short answer
            self.eval()
        try:
            cache, pad, points = self.prefill(questions, n_blocks, n_mem)
            if self.config.train_on == 'cot':  # steps are long
                sampling = {'max_new_tokens': self.config.block_size, **sampling}
            points = points if every_block else points[-1:]
            # the last block first: reading one overwrites the cache behind it
            return [[self.read(cache, pad, point, **sampling) for _ in range(samples)] for point in points[::-1]][::-1]
        finally:
            if was_training:
                self.train()

    def ask(self, tokenizer, question, show=False, **sampling):
        """The answer to a question, as text; with show, what each block answers and with what probability."""
        read = self.answers([records.encode_question(tokenizer, question)], every_block=show, **sampling)

        def answer(rows):  # to one question; line breaks around it say nothing
            return tokenizer.decode(rows[0]).strip()
        if not show:
            return answer(read[-1][0][0])
        place = 'block' if self.config.train_on in ('rim', 'pause') else 'answer'
        return '\n'.join(f'{place} {k}: {answer(rows)}  (probability {log_p[0].exp().item():.3f})'
                         for k, [(rows, log_p)] in enumerate(read, 1))


# --- batches ---

class RiMBatches(records.RecordBatches):
    """Rows of a record data set, as the present stage and train_on want them."""

    def length(self, question, steps, answer):
        """The most positions that a record takes in any stage, and in inference."""
        c = self.config
        if c.train_on in ('cot', 'coconut'):
            thoughts = c.coconut_stages * c.thoughts_per_stage + 2 if c.train_on == 'coconut' else 0
            return len(question) + thoughts + sum(len(step) + 1 for step in steps) + len(answer)
        if c.train_on == 'sft':
            return len(question) + len(answer)
        return len(question) + max(len(steps), c.n_blocks) * (c.n_mem + 2) + max(map(len, [*steps, answer]))

    def tokens(self, question, steps, answer):
        """Tokens of a record's row as training begins: rows of about as many go together."""
        c = self.config
        if c.train_on == 'rim':
            return len(question) + len(steps) * (c.n_mem + 2) + sum(map(len, steps[1:])) + len(answer)
        if c.train_on == 'pause':
            return len(question) + c.n_blocks * (c.n_mem + 2 + len(answer))
        return self.length(question, steps, answer)

    def stages(self, max_iters, learning_rate):
        """The run's stages as (name, steps, peak learning rate, dropout)."""
        c = self.config
        steps = max(1, round(c.epochs * self.epoch_steps)) if c.epochs else max_iters
        if c.train_on == 'rim':
            second = max(1, round(c.stage2_epochs * self.epoch_steps)) if c.stage2_epochs else c.stage2_iters
            stages = [('stage1', steps, learning_rate, c.dropout),
                      ('stage2', second, c.stage2_learning_rate, c.stage2_dropout)]
        elif c.train_on == 'coconut':
            edges = [steps * j // c.coconut_stages for j in range(c.coconut_stages + 1)]
            stages = [(f'stage{j}', edges[j] - edges[j - 1], learning_rate, c.dropout) for j in range(1, len(edges))]
        else:
            stages = [(c.train_on, steps, learning_rate, c.dropout)]
        self.stage_list = stages
        return stages

    def row(self, question, steps, answer, step, validating=False):
        """The row of an encoded record at a step of the run. For validation the last read-out alone counts, and
        Coconut has all its thoughts: the loss is that of the answer in every stage, with cot of the steps too."""
        c, stage = self.config, 0
        while stage + 1 < len(self.stage_list) and step >= self.stage_list[stage][1]:
            step -= self.stage_list[stage][1]
            stage += 1
        if c.train_on == 'coconut' and validating:
            stage = c.coconut_stages - 1
        if c.train_on in ('sft', 'cot', 'coconut'):
            n_mem, replaced = None, len(steps) if c.train_on == 'sft' else 0
            if c.train_on == 'coconut':
                n_mem = (stage + 1) * c.thoughts_per_stage
                replaced = stage + 1 if stage + 1 < c.coconut_stages else len(steps)
            readouts, weights = [sum((s + self.newline for s in steps[replaced:]), []) + answer], [1.0]
        elif c.train_on == 'rim' and stage == 0:
            n_mem, readouts = c.n_mem, steps[1:] + [answer]
            weights = stage1_weights(len(steps), step / max(1, self.stage_list[0][1]), c.anneal)
        else:
            n_mem, readouts, weights = c.n_mem, [answer] * c.n_blocks, stage2_weights(c.n_blocks)
        if validating:
            weights = [0.0] * (len(readouts) - 1) + [1.0]
        special = self.special.values()
        return build_row(question, readouts, weights, n_mem, special, float(c.train_question and not validating))

    def batch(self, rows):
        """Rows as (idx, targets, weights, positions), each (B,S), and readout (B,S) where there are blocks."""
        questions = [row.kind.count(QUESTION) for row in rows]
        # coconut's thoughts must stand in the same columns, hence padding on the left as well
        lead = [max(questions) - n if self.config.train_on == 'coconut' else 0 for n in questions]
        tokens, targets, weights, positions = (
            records.pad_rows([getattr(row, name) for row in rows], lead, fill)
            for name, fill in [('tokens', 0), ('targets', -1), ('weights', 0.0), ('positions', 0)])
        targets = targets.masked_fill(weights == 0, -1)
        if self.config.train_on in ('sft', 'cot'):
            return tokens, targets, weights, positions
        return tokens, targets, weights, positions, records.pad_rows([read_by(row) for row in rows], lead, -1)

    def visible(self, row):
        """Whom each token of a row sees: lists of bools."""
        return memory_mask(torch.tensor([read_by(row)]))[0, 0].tolist()
