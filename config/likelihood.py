"""How likely a model finds given continuations: log_likelihood, for every method.

Most models read a text in one pass: by trunk and logits, or every_slot and predictions (Catch Your Breath). One
that is not `plain` (Thoughtbubbles with forks) reads it anew up to each token by next_logits, as when it writes:
in one pass a continuation would take part in the choice of its own copies. One that answers questions (Reasoning
in Memory, Coconut) reads the context by prefill, as a question, with its memory or thoughts if any, then the rest.
"""
import sys

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from config import UserError
from config.measures import progress
from model import eval_mode, left_pad, text_start

AT_ONCE = 64  # positions whose logits exist at the same time


@torch.no_grad()
def log_likelihood(model, contexts, continuations, batch_size):
    """For each context and its continuation (lists of token ids): (log P(continuation | context) in nats, whether
    greedy decoding would write all of it). An empty continuation has (0.0, True).

    batch_size: rows of a forward pass. A context that leaves its continuation no room in block_size loses its
    beginning; stderr says how many did. Raises UserError for an empty context and for a continuation that is too
    long by itself."""
    # what is read at once: (number of the pair, tokens before, tokens to predict)
    read, items = read_once, fitting(model, contexts, continuations)
    if hasattr(model, 'prefill'):
        read = read_after_memory
    elif not getattr(model, 'plain', True):
        read = read_up_to_it
        items = [(i, context + continuation[:n], continuation[n:n + 1])
                 for i, context, continuation in items for n in range(len(continuation))]
    items.sort(key=lambda item: -len(item[1]) - len(item[2]))  # so that rows of a batch are of like length

    total = [0.0] * len(contexts)
    greedy = [True] * len(contexts)
    with eval_mode(model):
        for start in progress(range(0, len(items), batch_size), 'log-likelihood'):
            pairs, before, after = zip(*items[start:start + batch_size])
            targets = torch.tensor(sum(after, []), device=model.wte.weight.device)  # (n,), row by row
            owners = [i for i, tokens in zip(pairs, after) for _ in tokens]
            x, predict = read(model, before, after)  # (n, ...)
            for first in range(0, len(targets), AT_ONCE):
                some = slice(first, first + AT_ONCE)
                logits = predict(x[some])  # (AT_ONCE, V)
                log_p = logits.log_softmax(dim=-1).gather(1, targets[some, None])[:, 0]
                right = logits.argmax(dim=-1) == targets[some]
                for i, number, yes in zip(owners[some], log_p.tolist(), right.tolist()):
                    total[i] += number
                    greedy[i] &= yes
    return list(zip(total, greedy))


def fitting(model, contexts, continuations, warn=True):
    """(number, context, continuation) of the pairs that have a continuation, the context cut on the left to what
    block_size has room for: the last token is predicted, not read. Raises UserError."""
    c = model.config
    asks = hasattr(model, 'prefill')
    blocks, n_mem = c.layout if asks else (0, 0)
    memory = blocks * (n_mem + 2)
    items, n_cut = [], 0
    for i, (context, continuation) in enumerate(zip(contexts, continuations)):
        if not context:
            raise UserError(f'context {i + 1} is empty: give at least one token to predict from')
        left = c.block_size - memory - max(len(continuation) - 1, asks)  # prefill wants room for an answer
        if left < 1:
            raise UserError(f'continuation {i + 1} has {len(continuation)} tokens: it does not fit into block_size'
                            f' = {c.block_size}' + f' beside {memory} memory tokens' * bool(memory))
        n_cut += len(context) > left
        if continuation:
            items.append((i, list(context)[-left:], list(continuation)))
    if n_cut and warn:
        print(f'{n_cut} of {len(contexts)} contexts were cut on the left, to fit into block_size = {c.block_size}',
              file=sys.stderr)
    return items


# --- read: contexts and continuations of a batch -> (x, what turns x into logits). x (n, ...) has an entry for
# each token of the continuations, row by row; logits are (n,V) ---

def padded(rows, device):
    """Token lists -> (B, longest), filled up on the right, where no token of the text sees it."""
    return pad_sequence([torch.tensor(row, dtype=torch.long, device=device) for row in rows], batch_first=True)


def read_once(model, contexts, continuations):
    idx = padded([a + b[:-1] for a, b in zip(contexts, continuations)], model.wte.weight.device)
    has_slots = hasattr(model, 'every_slot')
    x = model.every_slot(idx) if has_slots else model.trunk(idx)
    x = torch.cat([x[r, len(a) - 1:len(a) + len(b) - 1] for r, (a, b) in enumerate(zip(contexts, continuations))])
    return x, model.predictions if has_slots else model.logits


def read_up_to_it(model, contexts, continuations):
    """Each continuation is a single token."""
    idx, pad = left_pad(contexts, model.wte.weight.device)
    if hasattr(model, 'every_slot'):  # Catch Your Breath on Thoughtbubbles
        return model.every_slot(idx, pad)[:, -1], model.predictions
    return model.next_logits(idx, pad, None), lambda logits: logits


def read_after_memory(model, questions, continuations):
    """As model.read would write them."""
    cache, pad, points = model.prefill(questions)
    end, x = points[-1]
    x = x[:, None]
    idx = padded([tokens[:-1] for tokens in continuations], x.device)
    if idx.size(1):
        positions = torch.arange(end, end + idx.size(1), device=x.device)[None]
        if pad is not None:
            positions = positions - text_start(pad)
            pad = F.pad(pad, (0, idx.size(1)))
        positions = positions.clamp(max=model.config.block_size - 1)  # what fills up a row may lie beyond
        x = torch.cat((x, model.trunk(idx, positions, pad=pad, cache=cache)), dim=1)

    def predict(x):
        logits = model.logits(x)
        logits[:, model.special.begin:model.special.end] = -torch.inf  # never drawn
        return logits
    return torch.cat([row[:len(tokens)] for row, tokens in zip(x, continuations)]), predict
