"""What eval.py measures: (model, on) -> {name: number or table}; a table is a list of dicts of the same keys."""
import math
from collections import namedtuple
from functools import partial

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from tqdm import tqdm

from cyb import SlotRows, cyb_loss, stop_log_probs, stopping_distribution
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
        said = [torch.cat([part.argmax(dim=-1) for part in predictions(model, idx)])
                for idx_of_batch, _ in progress(on.rows, 'accuracy') for idx in idx_of_batch]
        correct = torch.stack(said) == torch.cat([targets for _, targets in on.rows])
        numbers['perplexity'] = perplexity(numbers['loss'])
        numbers['accuracy'] = correct.double().mean().item()
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


def entropies(model, idx):
    """Entropy in nats of what is said after each token of a row idx (T,)."""
    return torch.cat([torch.distributions.Categorical(logits=part).entropy().cpu().double()
                      for part in predictions(model, idx)])


def perplexity(loss):
    return math.exp(min(loss, 700))


def loss_of(model, rows):
    n = sum(len(batch[0]) for batch in rows)
    total = sum(model(*batch)[1].item() * len(batch[0]) for batch in progress(rows, 'losses'))
    return {'rows': n, 'loss': total / n}


def prefixes(model, on):
    """Which copies survive may depend on later tokens. What that is worth: the loss when every token is predicted
    from a row that ends before it, as in generation, and by streaming, against one pass over the whole row."""
    reread = streamed = count = 0
    for idx, targets in on.slow:
        cache = []
        for t in progress(range(idx.size(1)), 'prefixes'):
            logits = model.next_logits(idx[:, :t + 1], None, None)
            reread += F.cross_entropy(logits, targets[:, t], reduction='sum').item()
            logits = model.next_logits(idx[:, t:t + 1], None, cache)
            streamed += F.cross_entropy(logits, targets[:, t], reduction='sum').item()
        count += targets.numel()
    n, loss = loss_of(model, on.slow).values()
    numbers = {'in one pass': loss, 'by prefixes': reread / count, 'by streaming': streamed / count}
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
    entropy = []
    held = []
    blocks = []
    for idx in progress([idx for batch in on.rows for idx in batch[0]], 'streams'):
        with Watch(model, len(idx)) as watch:
            entropy.append(entropies(model, idx))
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
