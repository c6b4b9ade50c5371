"""What eval.py measures of models that answer questions, in the form of config/measures.py."""
import time
from functools import partial

import numpy as np
import torch

from config.measures import progress
from data import records
from data.records import row_tensors
from rim import build_row, memory_mask


def right_answers(model, on):
    """Records: how likely the right answer is, finer than whether it is given: -log P in nats after each block; of
    a model that writes steps, after the right ones."""
    c = model.config
    data = on.batches.data
    found = []
    for record, encoded in zip(*data.read('test', n=on.n_rows)):
        if not encoded.steps and 'cot' == getattr(c, 'train_on', ''):  # what it would write is not known
            continue
        readouts, _, n_mem = c.readouts(on.batches.names[-1], encoded)
        answer = len(encoded.answer) + 1  # with its end
        n_mem = on.n_mem or n_mem
        row = build_row(encoded.question, readouts, [1.0] * len(readouts), n_mem, on.batches.special)
        idx, targets, _, at, positions, *read_by = (t.to(model.wte.weight.device) for t in row_tensors([row]))
        x = model.trunk(idx, positions, *map(memory_mask, read_by))
        nll = model.nll(x.flatten(0, 1)[at], targets).view(len(readouts), -1)  # (K, tokens of a read-out)
        found.append(nll[:, -answer:].sum(dim=1))
    if not found:
        return {}
    found = torch.stack(found).double()  # (n,K)
    error = found.std(dim=0, correction=0) / len(found) ** 0.5
    return {'-log P(right answer)': [
        {'blocks': k, 'nats': mean, 'standard error': e}
        for k, (mean, e) in enumerate(zip(found.mean(dim=0).tolist(), error.tolist()), 1 if c.has_blocks else 0)]}


def answers(model, on):
    """Records: exact-match accuracy on the test split. One prefill of 2K blocks serves every number of blocks,
    since no block sees a later one; pass@8 draws eight answers at temperature 1."""
    questions = on.batches.data.test_records(on.n_rows)
    tokenizer = on.batches.tokenizer
    c = model.config
    blocks = 0
    if c.has_blocks:
        longest = max(len(records.encode_question(tokenizer, record.question)) for record in questions)
        blocks = max(c.n_blocks, min(2 * c.n_blocks, (c.block_size - longest - 8) // ((on.n_mem or c.n_mem) + 2)))
        if blocks < 2 * c.n_blocks:
            print(f'block_size = {c.block_size} has room for {blocks} blocks, not for {2 * c.n_blocks}')

    heard = []  # what model.answers says, batch by batch

    def ask(questions, **how):
        heard.append(model.answers(questions, **how))
        return heard[-1]

    def correct(**how):
        return records.score(partial(ask, n_mem=on.n_mem, **how), tokenizer, questions, on.batch_size)

    by_block = correct(n_blocks=blocks, every_block=True)  # (n, blocks)
    K = min(c.n_blocks, max(1, blocks))
    if blocks:
        sure, agrees = trust(heard, K)
    last = by_block[:, K - 1]
    steps = np.array([len(record.steps) for record in questions])
    # where stage 1 has the answer
    at_own_step = by_block[np.arange(len(steps)), steps.clip(1, max(1, blocks)) - 1]
    numbers = {'questions': len(questions), **with_error('accuracy', last),
               **with_error('pass@8 at temperature 1', correct(samples=8, temperature=1.0).any(1)),
               'accuracy by steps': [
                   {'steps': n, **with_error('accuracy', last[steps == n]),
                    'at the block of the last step': at_own_step[steps == n].mean().item() if blocks * n else None,
                    'questions': (steps == n).sum().item()} for n in np.unique(steps).tolist()]}
    if blocks:
        numbers.update(with_error('any block', by_block[:, :c.n_blocks].any(1)))
        if steps.any():  # a test set may have none
            numbers.update(with_error('block of the last step', at_own_step))
        numbers['accuracy by blocks'] = [
            {'blocks': k + 1, **with_error('accuracy', by_block[:, k]), **with_error('P(its answer)', sure[:, k]),
             **with_error(f'agrees with {K}', agrees[:, k])} for k in range(blocks)]
    return numbers


def with_error(name, values):
    """A mean over questions and its standard error."""
    values = np.asarray(values, dtype=float)
    error = (values.std() / len(values) ** 0.5).item()
    return {name: values.mean().item(), 'standard error' if name == 'accuracy' else f'error of {name}': error}


def trust(heard, K):
    """What tells which block to trust, (n,blocks) each: the probability of the answer that a block gives, and
    whether it is, token by token, that of block K. heard: of each batch what RiM.answers says of every block."""
    sure = [torch.stack([log_p for [(_, log_p)] in read], dim=1).exp().cpu() for read in heard]
    agrees = [[rows[r] == read[K - 1][0][0][r] for [(rows, _)] in read]
              for read in heard for r in range(len(read[0][0][0]))]
    return torch.cat(sure).double().numpy(), np.array(agrees)


def time_answer(model, tokenizer, question, n_mem):
    """Seconds from the question to the answer's first token, and to its end; written steps come before the
    answer."""
    tokens, times = [], []
    start = time.perf_counter()
    cache, pad, points = model.prefill([records.encode_question(tokenizer, question)], n_mem=n_mem)
    for token, *_ in model.read(cache, pad, points[-1], model.config.block_size):
        tokens.extend(token.tolist())
        times.append(time.perf_counter() - start)
    between = tokenizer.encode('\n')[-1], tokenizer.special['<end>']
    last = max((i for i, token in enumerate(tokens) if token not in between), default=0)
    first = max((i + 1 for i, token in enumerate(tokens[:last]) if token in between), default=0)
    return times[first], times[-1]


def answer_times(model, on):
    """Records: how long an answer takes, the medians of ten questions; all models answer each question in turn, so
    that a slow moment of the machine hits all."""
    questions = on.batches.data.test_records(min(10, on.n_rows))
    times = {path: [] for path in on.models}
    for record in progress([questions[0], *questions], 'times'):  # the first one twice, to warm up
        for path, other in on.models.items():
            n_mem = on.n_mem if other.config.has_blocks else 0
            times[path].append(time_answer(other, on.batches.tokenizer, record.question, n_mem))
    table = []
    for path, other in on.models.items():
        first, whole = (1e3 * torch.tensor(times[path][1:])).median(dim=0).values.tolist()
        table.append({'checkpoint': path, 'trained on': getattr(other.config, 'train_on', 'coconut'),
                      'ms to the first token': first, 'ms to the answer': whole})
    return {'times': table}


def block_states(model, on):
    """Reasoning in Memory: the output at the end of each memory block, for up to 100 questions, in the plane of
    its two principal components."""
    if not model.config.has_blocks:
        return {}
    questions = [records.encode_question(on.batches.tokenizer, record.question)
                 for record in on.batches.data.test_records(min(100, on.n_rows))]
    states = torch.stack([hidden for _, hidden in model.prefill(questions, n_mem=on.n_mem)[2]]).float()  # (K,n,C)
    K, n, C = states.shape
    states = states.view(K * n, C) - states.view(K * n, C).mean(dim=0)
    u, s, _ = torch.linalg.svd(states, full_matrices=False)
    x, y = ((u * s).T[:2] if min(u.shape) > 1 else states.new_zeros(2, K * n)).tolist()
    return {'variance in the two components': (s[:2].square().sum() / s.square().sum()).item(),
            'block states': [{'x': x[i], 'y': y[i], 'block': i // n + 1} for i in range(K * n)]}
