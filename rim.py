"""Reasoning in Memory (arXiv 2605.30343): thought happens in fixed memory blocks, read in one forward pass.

    row        question [b m m /b] step 2 [b m m /b] step 3 [b m m /b] answer
    sees       question <- block 1 <----- block 2 <----- block 3        a read-out is seen by nobody else
    stage 1    read-outs are the next written steps and the answer; the early ones fade away
    stage 2    every read-out is the answer
    asked      question [b m m /b][b m m /b][b m m /b] -> answer        one pass, nothing written

A memory block is <b>, M times <m>, </b>; a read-out is what is predicted after a block. The baselines are here
too: direct answers (sft), written steps (cot), blocks without stage 1 (pause), and Coconut (arXiv 2412.06769) at
the end. Shapes: B rows, S tokens of a row, C width, V vocabulary, K memory blocks, M memory tokens a block.
"""
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from config import UserError, check_choice, check_range, check_sampling
from config.checkpoint import OWN_ROWS, merge_adapters
from config.lora import OwnRows
from data import records
from data.records import MEMORY, QUESTION, READOUT, Row
from model import (GPT, GPTConfig, KVCache, Stage, causal_mask, eval_mode, left_pad,
                   sample_token, text_start)

# --- rows ---

def build_row(question, readouts, weights, n_mem, special, question_weight=0.0):
    """One training row: question, block 1, read-out 1, block 2, read-out 2, ... question, readouts: token ids and
    lists of them. weights: one per read-out, of each of its tokens and its end. question_weight: of each of the
    question's. n_mem: M, or None for no blocks: then the one read-out follows the question, as in plain
    fine-tuning. A read-out of weight 0 is left out, since no other token sees it."""
    memory = [] if n_mem is None else memory_block(special, n_mem)
    n, m = len(question), len(memory)
    row = Row(tokens=list(question), kind=[QUESTION] * n, block=[0] * n, positions=list(range(n)),
              targets=question[1:] + [-1], weights=[question_weight] * (n - 1) + [0.0])
    position = n  # read-outs do not count: a block goes on where the last block ended
    for k, (readout, weight) in enumerate(zip(readouts, weights), 1):
        readout = readout if weight else []
        row.tokens.extend(memory + readout)
        row.kind.extend([MEMORY] * m + [READOUT] * len(readout))
        row.block.extend([k] * (m + len(readout)))
        row.positions.extend(range(position, position + m + len(readout)))
        row.targets.extend([-1] * m)
        row.weights.extend([0.0] * m)
        position += m
        if readout:  # the token before it, </b>, predicts its first token; its own last token predicts the end
            row.targets[-1] = readout[0]
            row.weights[-1] = weight
            row.targets.extend(readout[1:] + [special.end])
            row.weights.extend([weight] * len(readout))
    return row


def memory_block(special, n_mem):
    return [special.begin] + [special.mem] * n_mem + [special.close]


def stage1_weights(n_steps, progress, anneal):
    """lambda_t for t = 1..T: how much read-out t counts at progress s/S of stage 1, from 0 to 1."""
    if anneal == 'none':
        return [1.0] * n_steps
    fade_after = [t / n_steps if anneal == 'relative' else 1.0 for t in range(1, n_steps + 1)]
    return [max(0.0, 1.0 - progress / at) for at in fade_after]


def stage2_weights(n_blocks):
    """alpha_k for k = 1..K: later blocks count more, all of them together 1."""
    return [2 * k / (n_blocks * (n_blocks + 1)) for k in range(1, n_blocks + 1)]


def memory_mask(read_by):
    """Who sees whom: read_by (B,S), the block that a token reads out, 0 for question and blocks, -1 for padding ->
    bool (B,1,S,S), True = attend. Everybody sees question and blocks before it, and what shares its read-out."""
    # padding sees padding, since the softmax over no key at all is nan
    shared = (read_by[:, None, :] == 0) | (read_by[:, None, :] == read_by[:, :, None])
    return shared.tril()[:, None]


# --- stages: how a record (records.Encoded) becomes read-outs and their weights ---

def written(c, record, progress):
    """Chain of thought: the steps, a line each, and the answer."""
    return [lines(record, record.steps) + record.answer], [1.0]


def direct(c, record, progress):
    """The answer follows the question."""
    return [record.answer], [1.0]


def stepwise(c, record, progress):
    """Stage 1: the block of step t is read out as step t + 1, the last one as the answer."""
    return [*record.steps[1:], record.answer], stage1_weights(len(record.steps), progress, c.anneal)


def repeated(c, record, progress):
    """Stage 2: every block is read out as the answer."""
    return [record.answer] * c.n_blocks, stage2_weights(c.n_blocks)


def lines(record, steps):
    return [token for step in steps for token in step + record.newline]


STAGES = {'rim': {'stage1': stepwise, 'stage2': repeated}, 'pause': {'pause': repeated},
          'sft': {'sft': direct}, 'cot': {'cot': written}}


def iterations(epochs, epoch_iters, otherwise):
    return max(1, round(epochs * epoch_iters)) if epochs else otherwise


@dataclass
class MemoryConfig(GPTConfig):
    n_blocks: int = 8  # K, memory blocks in stage 2 and at inference; coconut: stages
    n_mem: int = 2  # M, memory tokens per block; coconut: thoughts that each stage adds
    epochs: float = 0.0  # above 0: passes over the training records in place of max_iters (rim: of stage 1)
    max_steps: int = 16  # training records with more steps are left out and counted
    train_question: bool = False  # train the question's tokens as well, with weight 1

    answer_tokens = 32  # at most, unless told otherwise

    def __post_init__(self):
        super().__post_init__()
        check_range(vars(self), 'n_blocks n_mem max_steps')
        check_range(vars(self), 'epochs', 0)


@dataclass
class RiMConfig(MemoryConfig):
    train_on: str = 'rim'  # rim | pause (blocks without stage 1) | sft (direct answer) | cot (written steps)
    anneal: str = 'relative'  # how read-outs fade in stage 1: relative (the earliest first) | uniform | none
    stage2_iters: int = 1000  # rim: steps of stage 2; max_iters are those of stage 1
    stage2_epochs: float = 0.0  # above 0: passes over the records in place of stage2_iters
    stage2_learning_rate: float = 3e-4  # peak in stage 2, lower than in stage 1
    stage2_dropout: float = 0.1  # in stage 2, more than in stage 1

    def __post_init__(self):
        super().__post_init__()
        check_choice(vars(self), 'train_on', ' '.join(STAGES))
        check_choice(vars(self), 'anneal', 'relative uniform none')
        check_range(vars(self), 'stage2_iters stage2_epochs stage2_learning_rate', 0)
        check_range(vars(self), 'stage2_dropout', 0, 1)

    @property
    def has_blocks(self):
        return not {written, direct} & {*STAGES[self.train_on].values()}

    def stages(self, max_iters, learning_rate, epoch_iters):
        first = iterations(self.epochs, epoch_iters, max_iters)
        second = iterations(self.stage2_epochs, epoch_iters, self.stage2_iters)
        plan = [(0, first, learning_rate, self.dropout),
                (first, second, self.stage2_learning_rate, self.stage2_dropout)]
        return [Stage(name, *part) for name, part in zip(STAGES[self.train_on], plan)]

    def readouts(self, stage, record, progress=0.0):
        """(read-outs, their weights, M or None for no blocks) of a record in the stage so named."""
        readouts, weights = STAGES[self.train_on][stage](self, record, progress)
        return readouts, weights, self.n_mem if self.has_blocks else None

    @property
    def answer_tokens(self):
        return self.block_size if self.train_on == 'cot' else 32  # steps are long

    @property
    def layout(self):
        """(K, M) of the memory after a question, as trained."""
        return (self.n_blocks, self.n_mem) if self.has_blocks else (0, 0)


# --- the model ---

class RiM(OwnRows, GPT):  # with LoRA the special tokens are trained beside the adapters
    def __init__(self, config):
        super().__init__(config)
        self.special = records.special_ids(config.vocab_size)
        if config.lora_rank:
            self.own_rows(self.special.begin)

    def load_pretrained(self, state):
        """As GPT's, but what pads a plain GPT's vocabulary gives way to the special tokens."""
        state = merge_adapters(state)
        for name in OWN_ROWS.values():
            if len(state.get(name, ())) > self.config.vocab_size:
                state[name] = state[name][:self.special.begin]
        return super().load_pretrained(state)

    def forward(self, idx, targets=None, weights=None, at=None, positions=None, read_by=None):
        """idx (B,S) -> (logits (B,S,V), None). With targets, weights and at, the places b*S+s that predict them,
        (n,) each: (None, weighted nll in nats, summed over a row, mean over rows). positions (B,S): by default
        0..S-1. read_by (B,S): see memory_mask; by default causal."""
        x = self.trunk(idx, positions, None if read_by is None else memory_mask(read_by))
        if targets is None:
            return self.logits(x), None
        nll = self.nll(x.flatten(0, 1)[at], targets)  # the head is computed only where something is learned
        return None, (nll * weights).sum() / len(idx)

    # --- inference ---

    def prefill(self, questions, n_blocks=0, n_mem=0):
        """Read questions (token lists) and memory blocks in one pass; n_blocks, n_mem: K and M, 0 = as trained.
        Returns (cache, pad, points): points has, for each block or where there are none for the question, the
        cache's length at its end and the output (B,C) from which an answer is read. Raises UserError if they do
        not fit into block_size."""
        c = self.config
        if n_blocks < 0 or n_mem < 0 or (n_blocks or n_mem) and not c.has_blocks:
            problem = 'must be at least 1' if c.has_blocks else 'this model has no memory blocks'
            raise UserError(f'n_blocks = {n_blocks}, n_mem = {n_mem}: {problem}')
        block = memory_block(self.special, n_mem or c.layout[1])
        memory = block * (n_blocks or c.layout[0])
        longest = max(map(len, questions))
        if longest + len(memory) + 1 > c.block_size:
            raise UserError(f'a question of {longest} tokens with {len(memory)} memory tokens leaves no room for '
                            f'an answer in block_size = {c.block_size}')
        idx, pad = left_pad([list(q) + memory for q in questions], self.wte.weight.device)
        # room for padding too, so that an answer is as long beside others as alone
        cache = [KVCache(c.block_size + longest - min(map(len, questions))) for _ in self.layers]
        x = self.trunk(idx, pad=pad, cache=cache)
        ends = range(longest, idx.size(1) + 1, len(block))
        return cache, pad, [(end, x[:, end - 1]) for end in ends[1:] or ends]

    @torch.no_grad()
    def read(self, cache, pad, point, max_new_tokens, temperature=0.0, top_k=0, top_p=1.0):
        """Decode a read-out at one of prefill's points; yield for each token (ids (B,), log-probabilities (B,),
        goes_on (B,) bool: whether that row's read-out reaches this token). <b>, <m> and </b> are never drawn:
        probabilities are those among text and <end>. The cache is cut back to the point: read later blocks
        before earlier ones."""
        end, x = point
        for layer_cache in cache:
            layer_cache.length = end
        goes_on = torch.ones(len(x), dtype=torch.bool, device=x.device)
        position = torch.full_like(goes_on, end, dtype=torch.long)  # (B,), the next
        if pad is not None:
            pad = pad[:, :end]
            position = (~pad).sum(dim=1)
        last = self.config.block_size - 1
        for _ in range(max_new_tokens):
            logits = self.logits(x)
            logits[:, self.special.begin:self.special.end] = -torch.inf
            token = sample_token(logits, temperature, top_k, top_p)
            yield token, logits.log_softmax(dim=-1).gather(1, token[:, None])[:, 0], goes_on
            goes_on = goes_on & (token != self.special.end) & (position < last)
            if not goes_on.any():
                return
            pad = None if pad is None else F.pad(pad, (0, 1))
            at = position.clamp(max=last)[:, None]  # rows that have ended are fed as well
            x = self.trunk(token[:, None], at, pad=pad, cache=cache)[:, -1]
            position = position + 1

    @torch.no_grad()
    def answers(self, questions, max_new_tokens=0, temperature=0.0, top_k=0, top_p=1.0, n_blocks=0, n_mem=0,
                every_block=False, samples=1):
        """Read-outs of questions (token lists): for each block (every_block) or the last one, for each sample,
        (token lists without the end token, log-probabilities (B,)). One prefill serves all."""
        check_sampling(questions, temperature, top_k, top_p)
        sampling = max_new_tokens or self.config.answer_tokens, temperature, top_k, top_p
        read = []
        with eval_mode(self):
            cache, pad, points = self.prefill(questions, n_blocks, n_mem)
            for point in points[::-1] if every_block else points[-1:]:  # the last block first, see read
                read.append([])
                for _ in range(samples):
                    rows = [[] for _ in questions]
                    total = 0.0
                    for token, log_p, goes_on in self.read(cache, pad, point, *sampling):
                        total += log_p * goes_on
                        for row, t, yes in zip(rows, token.tolist(), goes_on.tolist()):
                            if yes and t != self.special.end:
                                row.append(t)
                    read[-1].append((rows, total))
        return read[::-1]

    def report(self, batches):
        """Accuracy on validation records, block by block, and an example."""
        ask = partial(self.answers, every_block=True)
        return records.accuracy_text(ask, batches.tokenizer, batches.val_records)


# --- batches ---

class RiMBatches:
    """Rows as the stage wants them, a pure function of (seed, stage, iteration, row). Raises UserError as
    records.RecordData does."""
    align = False  # whether all questions of a batch end in the same column

    def __init__(self, dataset, meta, config, seed, eval_rows, rows_per_step):
        self.config = config
        self.special = records.special_ids(config.vocab_size)
        self.names = [stage.name for stage in config.stages(1, 0.0, 1)]
        self.data = records.RecordData(dataset, meta, config, self.longest)
        self.tokenizer = self.data.tokenizer
        self.val_records = self.data.records['val'][:eval_rows]
        lengths = [self.sizes(encoded)[0][0] for encoded in self.data.encoded['train']]
        self.epochs = records.Epochs(lengths, rows_per_step, seed)
        self.epoch_iters = self.epochs.iters

    @staticmethod
    def largest(config, rows):
        """A full batch, without content; half is learned."""
        idx = torch.zeros(rows, config.block_size, dtype=torch.long)
        at = torch.zeros(idx.numel() // 2, dtype=torch.long)
        return idx, at, at.float(), at, idx, *([idx] if config.layout[0] else [])

    def sizes(self, encoded):
        """For each stage, (tokens of a record's row at first, positions that it takes)."""
        sizes = []
        for stage in self.names:
            readouts, _, n_mem = self.config.readouts(stage, encoded)
            n = len(encoded.question)
            block = 0 if n_mem is None else n_mem + 2
            ends = [n + block * k + len(readout) for k, readout in enumerate(readouts, 1)]
            sizes.append((n + block * len(readouts) + sum(map(len, readouts)), max(ends)))
        return sizes

    def longest(self, encoded):
        """The most positions that a record takes; without steps, when it is asked."""
        sizes = self.sizes(encoded)
        return max(positions for _, positions in (sizes if encoded.steps else sizes[-1:]))

    def train_rows(self, stage, it, numbers):
        """The rows of these numbers within an iteration's batch."""
        progress = (it - stage.first) / max(1, stage.iters)
        rows = []
        for i in self.epochs.numbers(it, numbers):
            encoded = self.data.encoded['train'][i]
            readouts, weights, n_mem = self.config.readouts(stage.name, encoded, progress)
            rows.append(build_row(encoded.question, readouts, weights, n_mem, self.special,
                                  float(self.config.train_question)))
        return rows

    def val_row(self, stage, encoded):
        """The last read-out alone counts: the answer's, in every stage (cot: with the steps)."""
        readouts, _, n_mem = self.config.readouts(stage, encoded)
        return build_row(encoded.question, readouts, [0.0] * (len(readouts) - 1) + [1.0], n_mem, self.special)

    def train_batch(self, stage, it, rows):
        return records.row_tensors(self.train_rows(stage, it, rows), self.align)

    def val_batch(self, stage, rows):
        rows = [self.val_row(stage.name, self.data.encoded['val'][i]) for i in rows if i < len(self.val_records)]
        return records.row_tensors(rows, self.align) if rows else None

    def table(self, stage, it, n=2):
        """The first n rows of a batch as text."""
        rows = self.train_rows(stage, it, list(range(n)))
        sees = [memory_mask(torch.tensor([records.read_by(row)]))[0, 0].tolist() for row in rows]
        return records.table(rows, sees, self.tokenizer)


# --- Coconut: thoughts are hidden states that are fed back, in place of the first written steps ---

@dataclass
class CoconutConfig(MemoryConfig):
    """Stage j of K has j*M thoughts in place of the first j steps, the last stage in place of all."""
    has_blocks = False  # their number is fixed by training

    def stages(self, max_iters, learning_rate, epoch_iters):
        iters = iterations(self.epochs, epoch_iters, max_iters)
        edges = [iters * j // self.n_blocks for j in range(self.n_blocks + 1)]
        return [Stage(f'stage{j}', edges[j - 1], edges[j] - edges[j - 1], learning_rate, self.dropout)
                for j in range(1, self.n_blocks + 1)]

    def readouts(self, stage, record, progress=0.0):
        replaced = int(stage.removeprefix('stage'))
        steps = record.steps[replaced:] if replaced < self.n_blocks else []
        return [lines(record, steps) + record.answer], [1.0], replaced * self.n_mem

    @property
    def layout(self):
        return 1, self.n_blocks * self.n_mem


class Coconut(RiM):
    not_compiled = 'each thought reads a longer cache'

    def trunk(self, idx, positions=None, mask=None, pad=None, cache=None):
        """As GPT.trunk, but in place of a <m> the model reads its last hidden state at the token before: one
        pass per thought, with gradients through all. The <m> of all rows must stand in the same columns."""
        S = idx.size(1)
        thoughts = (idx[0] == self.special.mem).nonzero()[:, 0].tolist() if S > 1 else []
        if not thoughts:
            return super().trunk(idx, positions, mask, pad, cache)
        pad = torch.zeros_like(idx, dtype=torch.bool) if pad is None else pad
        if positions is None:
            positions = (torch.arange(S, device=idx.device) - text_start(pad)).clamp(min=0)
        if mask is None:
            mask = causal_mask(S, S, pad)
        cache = cache or [KVCache() for _ in self.layers]
        edges = [0, *thoughts, thoughts[-1] + 1, S]
        outputs = []
        for first, last in zip(edges, edges[1:]):
            at = positions[:, first:last]
            if first in thoughts:
                x = self.ln_f(outputs[-1][:, -1:])  # the state that the head would have read
                x = x if self.wpe is None else x + self.wpe(at)
            else:
                x = self.embed(idx[:, first:last], at)
            x = self.run_blocks(x, at, mask[:, :, first:last, :last], cache)
            outputs.append(x)
        return torch.cat(outputs, dim=1)


class CoconutBatches(RiMBatches):
    align = True

    def val_row(self, stage, encoded):
        return super().val_row(self.names[-1], encoded)  # all thoughts and the answer, in every stage
