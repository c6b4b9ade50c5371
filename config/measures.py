"""What eval.py measures: (model, on) -> {name: number or table}; a table is a list of dicts of the same keys."""
import math
import time
from collections import namedtuple
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from tqdm import tqdm

from cyb import SlotRows, cyb_loss, stop_log_probs, stopping_distribution
from data import records
from data.records import row_tensors
from rim import build_row, memory_mask
from thoughtbubbles import is_original

NAMED = 8  # tokens that pause longest, and as many that pause shortest
# a bar on stderr, on a terminal alone
progress = partial(tqdm, disable=None, leave=False)
# rows: validation batches; slow: the first slow_rows rows of them; batches: where they come from; models: path ->
# model, this one and those beside it; n_rows, n_mem, batch_size: as set
On = namedtuple('On', 'rows slow batches models n_rows n_mem batch_size')


def losses(model, on):
    """The validation loss; for text its perplexity and how often the likeliest token is right."""
    numbers = loss_of(model, on.rows)
    if len(on.rows[0]) == 2:  # idx, targets
        correct = [(torch.cat([part.argmax(dim=-1) for part in predictions(model, idx)]) == targets).double().mean()
                   for batch in progress(on.rows, 'accuracy') for idx, targets in zip(*batch)]
        numbers['perplexity'] = perplexity(numbers['loss'])
        numbers['accuracy'] = (sum(correct) / len(correct)).item()
    return numbers


def predictions(model, idx, at_once=64):
    """What a text model says after each token of a row idx (T,): logits or log-probabilities (n,V) of a few tokens
    at a time, since those of all may be too large."""
    row, T = idx[None], len(idx)
    if hasattr(model, 'every_slot'):
        x, predict = model.every_slot(row)[0], model.predictions
    elif getattr(model, 'plain', True) or model.config.merge != 'probs':
        x, predict = model.trunk(row)[0], model.logits
    else:
        streams, log_p, src = model.streams(row)
        x = torch.arange(T, device=idx.device)

        def predict(tokens):
            here = torch.isin(src[0], tokens)
            first = tokens[0]
            return model.merge_probs(streams[:, here], log_p[:, here], src[:, here] - first, len(tokens))[0]
    for part in x.split(at_once):
        yield predict(part)


def perplexity(loss):
    return math.exp(min(loss, 700))


def loss_of(model, rows):
    n = sum(len(batch[0]) for batch in rows)
    total = sum(model(*batch)[1].item() * len(batch[0]) for batch in progress(rows, 'losses'))
    return {'rows': n, 'loss': total / n}


def prefixes(model, on):
    """Which copies survive may depend on later tokens. What that is worth: the loss when every token is predicted
    from a row that ends before it, as in generation, and by streaming, against one pass over the whole row."""
    prefixes = streaming = count = 0
    for idx, targets in on.slow:
        cache = []
        for t in progress(range(idx.size(1)), 'prefixes'):
            logits = model.next_logits(idx[:, :t + 1], None, None)
            prefixes += F.cross_entropy(logits, targets[:, t], reduction='sum').item()
            logits = model.next_logits(idx[:, t:t + 1], None, cache)
            streaming += F.cross_entropy(logits, targets[:, t], reduction='sum').item()
        count += targets.numel()
    n, loss = loss_of(model, on.slow).values()
    numbers = {'in one pass': loss, 'by prefixes': prefixes / count, 'by streaming': streaming / count}
    return {'slow rows': n, **{f'loss {how}': nats for how, nats in numbers.items()},
            **{f'perplexity {how}': perplexity(nats) for how, nats in numbers.items()}}


def slot_numbers(model, idx, targets):
    """Of the N tokens with a target: log t, logsumexp(z) - k (TBYS: None) and whether the target is the likeliest
    token, all (N,W). The logits exist for a few tokens at a time."""
    counted = targets >= 0
    y = model.ln_f(model.every_slot(idx))[counted]  # (N,W,C)
    target = targets[counted][:, None].expand(y.shape[:-1])
    target_logit, lse = model.target_numbers(y, target)
    likeliest = torch.cat([model.lm_head(part).argmax(dim=-1) for part in y.split(64)])
    gap = (lse - model.dont_know_logit(y)).cpu().double() if model.config.objective == 'cyb' else None
    return (target_logit - lse).cpu().double(), gap, (likeliest == target).cpu()


def correlation(x, y):
    """Pearson's r of two vectors and its two-sided p-value, by the normal limit of the t statistic (n is large);
    None, None where one is constant. A row's tokens are not independent, so p is somewhat too small."""
    x = x - x.mean()
    y = y - y.mean()
    scale = (x.norm() * y.norm()).item()
    if scale == 0 or len(x) < 3:
        return None, None
    r = (x @ y).item() / scale
    return r, math.erfc(abs(r) * math.sqrt((len(x) - 2) / max(1e-300, 1 - r * r) / 2))


def calibration(d, gain):
    """What the next slot gains where the model says d, a table of up to ten ranges of d; d and gain (N,)."""
    bins = []
    for low in range(10):
        inside = (d * 10).long().clamp(max=9) == low
        n = int(inside.sum())
        if n:
            error = gain[inside].std(correction=0) / math.sqrt(n)
            bins.append({"P(don't know)": d[inside].mean().item(), 'gain of the next': gain[inside].mean().item(),
                         'standard error': error.item(), 'tokens': n})
    return bins


def slots(model, on):
    """Catch Your Breath: what every slot knows, when the model stops, and whether it pauses where that helps."""
    # what every slot knows
    W = model.config.W
    log_t, gap, correct = zip(*(slot_numbers(model, *batch) for batch in progress(on.rows, 'slots')))
    log_t = torch.cat(log_t)
    correct = torch.cat(correct).double()
    table = [{'slot': i + 1, 'loss if forced': -log_t[:, i].mean().item(),
              'accuracy if forced': correct[:, i].mean().item()} for i in range(W)]
    if gap[0] is None:
        return {'slots': table}

    # when the model stops
    gap = torch.cat(gap)
    never_early = stopping_distribution('last', W)  # as in generation
    stops = stop_log_probs(gap, never_early).exp()  # (N,W)
    # log_t is normalised: lse = 0, k = -gap
    loss, paced_loss = (cyb_loss(log_t, -gap, torch.zeros_like(gap), omega, [1.0] * W).mean().item()
                        for omega in (model.omega, never_early))
    expected = (stops * torch.arange(1, W + 1)).sum(dim=1)  # slots per token

    # whether it pauses where that helps
    d = torch.sigmoid(-gap[:, :-1])  # (N,W-1)
    gain = log_t.exp().diff(dim=1)  # (N,W-1)
    # pooled within the slots, whose means alone could turn its sign
    r, p = correlation(*((t - t.mean(dim=0)).flatten() for t in (d, gain)))
    for i, row in enumerate(table):
        row['stops here'] = stops[:, i].mean().item()
        row["P(don't know)"] = torch.sigmoid(-gap[:, i]).mean().item()
        row['gain of the next'] = gain[:, i].mean().item() if i < W - 1 else None
        row['r(d, gain)'], row['p'] = correlation(d[:, i], gain[:, i]) if i < W - 1 else (None, None)

    # after which tokens
    token = torch.cat([idx[targets >= 0] for idx, targets in on.rows]).cpu()
    count = torch.bincount(token)
    mean = torch.bincount(token, weights=expected) / count
    common = (count >= min(10, int(count.max()))).nonzero()[:, 0]  # rarer tokens say little
    order = common[mean[common].argsort(descending=True, stable=True)].tolist()
    named = [{'token': repr(on.batches.tokenizer.decode([t])), 'slots taken': mean[t].item(),
              'seen': count[t].item()} for t in order[:NAMED] + order[NAMED:][-NAMED:]]
    rows = torch.cat([idx for idx, _ in on.rows]).tolist()
    places = [divmod(i, len(rows[0])) for i in expected.topk(min(NAMED, len(expected))).indices.tolist()]
    context = [{'slots taken': expected[r * len(rows[0]) + i].item(),
                'after': repr(on.batches.tokenizer.decode(rows[r][max(0, i - 11):i + 1]))} for r, i in places]
    return {'loss': loss, 'perplexity': perplexity(loss), 'loss at its own pace': paced_loss,
            'perplexity at its own pace': perplexity(paced_loss),
            'accuracy at its own pace': (stops * correct).sum(dim=1).mean().item(),
            'slots per token': expected.mean().item(), 'r(d, gain) within slots': r, 'p': p, 'slots': table,
            **{f'calibration of slot {i + 1}': calibration(d[:, i], gain[:, i]) for i in range(W - 1)},
            'tokens that pause longest and shortest': named, 'where it pauses longest': context}


def skipping(model, on):
    """Catch Your Breath: the loss of the answers if the model pauses where d > 1/2, with the unused pauses in the
    context, as in training, and without them."""
    numbers = {}
    if model.config.objective != 'cyb' or not model.config.see_pauses:
        return numbers
    for skip in (False, True):
        nll, used = [], []
        for idx, targets in on.slow:
            B, T = idx.shape
            rows = SlotRows(model, idx[:, :1].tolist(), keep_unused=not skip)
            done = torch.zeros(B, dtype=torch.long, device=idx.device)  # tokens that each row has answered
            every = torch.arange(B, device=idx.device)
            padded = F.pad(targets, (0, 1))  # the last column is for rows that have ended
            row_nll = torch.zeros(B, T + 1, device=idx.device)

            def true_token(logits):  # a token's last forward pass, which answers, writes its loss last
                row_nll[every, done] = F.cross_entropy(logits, padded[every, done], reduction='none')
                return padded[every, done].tolist()

            for step in progress(model.paced(rows, true_token, lambda d: (d > 0.5).tolist()), 'skipping'):
                for r, answer in enumerate(step):
                    if answer:
                        used.append(answer[1])
                        done[r] += 1
                        if done[r] == T:
                            rows.end(r)
            nll.append(row_nll[:, :T].double())
        name = 'without unused pauses' if skip else 'where d > 1/2'
        numbers[f'loss {name}'] = torch.cat(nll).mean().item()
        numbers[f'slots {name}'] = sum(used) / len(used)
    return numbers


def fixed_budget(model, on):
    """Thoughtbubbles: the loss by prefixes if the budget does not grow with the text, but is that of a full row
    from the first token on."""
    if not model.forks:
        return {}
    budget = model.budget(model.config.block_size)
    model.budget = lambda tokens: budget  # hides the method
    loss = prefixes(model, on)['loss by prefixes']
    del model.budget
    return {'loss by prefixes, fixed budget': loss, 'perplexity by prefixes, fixed budget': perplexity(loss)}


class Watch(TorchFunctionMode):
    """While it is active and a Thoughtbubbles model reads a row: what each block reads. `blocks` has for each
    (the share of its attention that an original gives to its own copies, the mean over heads and originals with
    copies, None where there are none; streams per token; mean p)."""

    def __init__(self, model, tokens):
        super().__init__()
        self.log_p = torch.zeros(tokens * model.config.copies)  # before the first fork
        self.src = torch.arange(tokens).repeat_interleave(model.config.copies)
        self.blocks = []
        self.hooks = [fork.register_forward_hook(self.forked) for fork in model.forks.values()]

    def forked(self, fork, inputs, output):
        _, (self.log_p,), (self.src,) = output

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.scaled_dot_product_attention:
            q, k, _ = args  # (1,H,S,D)
            original = is_original(self.src[None])[0]
            # with values (S,T) that say whose copy a stream is, attention gives each query's weight on every
            # token's copies
            copy_of = F.one_hot(self.src) * ~original[:, None]
            weight = function(q, k, copy_of.to(q).expand(1, k.size(1), -1, -1), **kwargs)  # (1,H,S,T)
            share = weight[0, :, original].diagonal(dim1=1, dim2=2)[:, copy_of.any(dim=0)]
            self.blocks.append((share.mean().item() if share.numel() else None,
                                len(self.src) / int(original.sum()), self.log_p.exp().mean().item()))
        return function(*args, **(kwargs or {}))

    def __exit__(self, *error):
        for hook in self.hooks:
            hook.remove()
        return super().__exit__(*error)


def streams(model, on):
    """Thoughtbubbles: whether the streams go where the model is uncertain, and what each block has of them."""
    if model.plain:
        return {}
    entropy, held, blocks = [], [], []
    for idx in progress([idx for batch in on.rows for idx in batch[0]], 'streams'):
        with Watch(model, len(idx)) as watch:
            entropy += [torch.distributions.Categorical(logits=part).entropy().cpu().double()
                        for part in predictions(model, idx)]
        held.append(watch.src.bincount(minlength=len(idx)).cpu().double())
        blocks.append(watch.blocks)
    entropy, held = torch.cat(entropy), torch.cat(held)
    r, p = correlation(entropy, held)
    bins = [{'entropy': entropy[part].mean().item(), 'streams per token': held[part].mean().item(),
             'standard error': (held[part].std(correction=0) / len(part) ** 0.5).item(), 'tokens': len(part)}
            for part in entropy.argsort().chunk(10)]
    table = []
    for i, rows in enumerate(zip(*blocks)):
        share, count, score = ([n for n in column if n is not None] for column in zip(*rows))
        table.append({'block': i,
                      'attention of originals to their copies': sum(share) / len(share) if share else None,
                      'streams per token': sum(count) / len(count), 'mean p': sum(score) / len(score)})
    return {'r(entropy, streams)': r, 'p': p, 'streams by entropy of the prediction': bins,
            'streams by block': table}


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


# a method that is not here: losses
MEASURES = {'thoughtbubbles': [losses, prefixes, fixed_budget, streams], 'cyb': [losses, slots, skipping],
            'rim': [losses, right_answers, answer_times, answers, block_states],
            'coconut': [losses, right_answers, answer_times, answers]}
