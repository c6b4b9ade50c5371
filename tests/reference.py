"""The three methods in slow motion: what they compute, and nothing about how to compute it fast.

How to read it: from top to bottom, before the product. There is one text, and of it one head, one stream, one slot
or one read-out at a time: no batches, padding, caches or chunks. A function takes the weights of a model of the
product (float64, rotary positions, no biases but that of <don't know>) and does with them what the papers say. The
tests demand the same numbers, to about 1e-10, of the product, which reads padded batches in one pass.

    the core               norm, rotated, attention, block, plain_gpt, logits         what every method stands on
    Thoughtbubbles         thoughtbubbles, forked                                     arXiv 2510.00219
                           streamed                                                   not in the paper
    Catch Your Breath      stopping, breath_loss, breath_slots, breath_text           arXiv 2510.13879
    Reasoning in Memory    memory, readout_logits, answer_by_rereading                arXiv 2605.30343

A text is a list of token ids. Shapes: T tokens, S streams (or slots, or tokens of a row), C width, H heads of
width D, V vocabulary, W slots of a token. `visible` is a function: visible(i, j) says whether i sees j.
"""
import itertools
import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F


# --- the core: a pre-norm transformer ---

def norm(ln, x):
    """LayerNorm without a bias: x (..., C) with mean 0 and variance 1, times a gain."""
    x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + ln.eps).sqrt() * ln.weight


def rotated(u, positions, base=10000.0):
    """RoFormer (2104.09864), section 3.2: pair i of row j of u (S,D) turns by the angle positions[j] base^(-2i/D).

    Pair i is made of channels i and D/2 + i. The product of two turned vectors depends on their distance alone.
    """
    D = u.shape[1]
    frequency = base ** (-torch.arange(D // 2, dtype=u.dtype) * 2 / D)
    angle = torch.tensor(positions, dtype=u.dtype)[:, None] * frequency  # (S,D/2)
    a, b = u.chunk(2, dim=1)
    return torch.cat((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), dim=1)


def attention(attn, x, positions, visible, key_score, value_score, base=10000.0):
    """Attention is All You Need (1706.03762), section 3.2, with the scores of Thoughtbubbles: x (S,C) -> (S,C).

    Query i weighs the keys j that it sees with softmax_j((q_i . k_j + key_score_j) / sqrt(D)) and adds up their
    values exp(value_score_j) v_j. positions: S numbers. The scores are (S,) logarithms, 0 in a plain transformer.
    """
    S, C = x.shape
    D = C // attn.heads[0]
    heads = []
    for h in range(attn.heads[0]):
        w_q, w_k, w_v = (w[h * D:(h + 1) * D] for w in attn.c_attn.weight.split(C))  # (D,C) each
        q = rotated(x @ w_q.T, positions, base)  # (S,D)
        k = rotated(x @ w_k.T, positions, base)
        v = value_score.exp()[:, None] * (x @ w_v.T)
        out = []
        for i in range(S):
            seen = [j for j in range(S) if visible(i, j)]
            weights = ((k[seen] @ q[i] + key_score[seen]) / math.sqrt(D)).softmax(0)
            out.append(weights @ v[seen])
        heads.append(torch.stack(out))  # (S,D)
    return torch.cat(heads, dim=1) @ attn.c_proj.weight.T


def block(layer, x, positions, visible, key_score, value_score, attention_gate, mlp_gate):
    """A transformer block: x (S,C) -> (S,C). exp(gate) multiplies its two updates; scores and gates are (S,)."""
    update = attention(layer.attn, norm(layer.ln_1, x), positions, visible, key_score, value_score)
    x = x + attention_gate.exp()[:, None] * update
    update = F.gelu(norm(layer.ln_2, x) @ layer.mlp.c_fc.weight.T) @ layer.mlp.c_proj.weight.T
    return x + mlp_gate.exp()[:, None] * update


def plain_gpt(model, x, positions, visible=lambda i, j: j <= i):
    """All blocks with scores of 0, the plain GPT: input vectors x (S,C) -> (S,C)."""
    none = torch.zeros(len(x), dtype=x.dtype)
    for layer in model.layers:
        x = block(layer, x, positions, visible, none, none, none, none)
    return x


def logits(model, x):
    """What the last block says, x (..., C) -> (..., V)."""
    return norm(model.ln_f, x) @ model.lm_head.weight.T


# --- Thoughtbubbles ---

def thoughtbubbles(model, tokens, detach=()):
    """Log-probabilities (T,V) of what follows each token.

    A stream is (x (C,), log_p, src): its vector, the log of its cumulative score, the index of its token. The
    score has five uses; `detach` names those that get no gradient, so that a test can take them apart.
    """
    c = model.config
    zero = torch.zeros((), dtype=torch.float64)
    streams = [(model.wte.weight[token], zero, i) for i, token in enumerate(tokens) for _ in range(c.copies)]
    for number, layer in enumerate(model.layers):
        if number in c.fork_layers:
            streams = forked(model.forks[str(number)], streams, math.ceil(c.kappa * len(tokens)))

        def score(use):
            log_p = torch.stack([stream[1] for stream in streams])
            return log_p.detach() if use in detach else log_p
        x = block(layer, torch.stack([stream[0] for stream in streams]), positions_of(streams), lambda i, j: j <= i,
                  *dimmed(c, score('logits'), score('values'), score('attention update'), score('mlp update')))
        streams = [(x[i], log_p, src) for i, (_, log_p, src) in enumerate(streams)]

    return torch.stack([merged(model, streams, token, 'merge' in detach) for token in range(len(tokens))]).log()


def dimmed(c, keys, values, attention_update, mlp_update):
    """Which uses of log p act: all, but in the ablations."""
    return (keys * (c.attenuate_attention in (True, 'keys')), values * (c.attenuate_attention in (True, 'values')),
            attention_update * c.gate_updates, mlp_update * c.gate_updates)


def positions_of(streams):
    """The n streams of token i sit at i-1+1/n, ..., i."""
    positions = []
    for at, (_, _, src) in enumerate(streams):
        siblings = [j for j, stream in enumerate(streams) if stream[2] == src]
        positions.append(src - 1 + (siblings.index(at) + 1) / len(siblings))
    return positions


def merged(model, streams, token, detach=False):
    """What the token's streams predict together: probabilities (V)."""
    own = [stream for stream in streams if stream[2] == token]
    p = torch.stack([log_p.detach() if detach else log_p for _, log_p, _ in own]).exp()
    if model.config.merge == 'probs':  # every stream predicts; the average of the predictions counts
        each = [logits(model, x).softmax(0) for x, _, _ in own]
        return sum(w * q for w, q in zip(p / p.sum(), each))
    if model.config.merge == 'residual':  # one vector predicts, the sum of the streams
        return logits(model, sum(w * x for w, (x, _, _) in zip(p, own))).softmax(0)
    if model.config.merge == 'logits':  # an ablation: the average of the logits counts
        return sum(w * logits(model, x) for w, (x, _, _) in zip(p / p.sum(), own)).softmax(0)
    return logits(model, own[-1][0]).softmax(0)  # 'rightmost', an ablation: the original alone


def forked(fork, streams, budget):
    """The fork step: every stream may put a copy on its left; the `budget` best go on, in their order."""
    both = candidates(fork, streams)
    best_first = sorted(range(len(both)), key=lambda i: (not both[i][1], -both[i][0][1].item()))
    return [both[i][0] for i in sorted(best_first[:budget])]


def candidates(fork, streams):
    """Each stream's copy and the stream itself: (stream, whether it goes on whatever its score)."""
    both = []
    for i, (x, log_p, src) in enumerate(streams):
        z = fork.score.weight @ norm(fork.ln, x)  # logits of fork and keep
        a_fork, a_keep = (-torch.log(1 + torch.exp(-logit)) for logit in (z[0], z[1] + fork.config.keep_bias))
        original = i + 1 == len(streams) or streams[i + 1][2] != src  # the right-most stream of its token
        both.append(((x + fork.embedding, log_p + a_fork.clamp(min=-20), src), False))
        both.append(((x, log_p + a_keep.clamp(min=-20), src), original))
    return both


def streamed(model, tokens, prompt):
    """Log-probabilities of what follows the first `prompt` tokens, which are read at once, and of what follows each
    further token, which is read alone: (T - prompt + 1, V).

    At a fork the new candidates and the streams held so far compete for ceil(kappa t) places, t being the length of
    the text so far. Whatever falls out, and whatever stems from it, is no longer seen. No stream is computed twice:
    each block knows all streams as they once entered it, with their positions of that time and with their life, of
    which each fork begins a new one.
    """
    c = model.config
    known = [[] for _ in model.layers]  # per block: (x, log_p, src, position, life)

    def lives(life):
        return life is None or not life.ended and lives(life.parent)
    predictions = []
    for t in range(prompt, len(tokens) + 1):
        new = range(0 if t == prompt else t - 1, t)
        streams = [(model.wte.weight[tokens[i]], torch.zeros((), dtype=torch.float64), i)
                   for i in new for _ in range(c.copies)]
        own = [None] * len(streams)  # their lives
        for number, layer in enumerate(model.layers):
            if number in c.fork_layers:
                both = candidates(model.forks[str(number)], streams)
                born = [SimpleNamespace(parent=own[i // 2], ended=False, rank=(not forced, -stream[1].item()))
                        for i, (stream, forced) in enumerate(both)]
                rivals = [life for *_, life in known[number] if lives(life)] + born
                for life in sorted(rivals, key=lambda life: life.rank)[math.ceil(c.kappa * t):]:
                    life.ended = True
                streams = [stream for (stream, _), life in zip(both, born) if not life.ended]
                own = [life for life in born if not life.ended]
            known[number] += [(*stream, at, life) for stream, at, life in zip(streams, positions_of(streams), own)]
            x, log_p, _, positions, _ = zip(*(entry for entry in known[number] if lives(entry[-1])))
            score = torch.stack(log_p)
            x = block(layer, torch.stack(x), positions, lambda i, j: j <= i, *dimmed(c, score, score, score, score))
            streams = [(x[i - len(streams)], log_p, src) for i, (_, log_p, src) in enumerate(streams)]
        predictions.append(merged(model, streams, t - 1))
    return torch.stack(predictions).log()


# --- Catch Your Breath ---

def stopping(d, omega):
    """Pr(S = i) for slots i = 1...W, from all that may happen. The output happens in the first slot in which the
    model answers or the world stops. d (W): P(<don't know>) in each slot. omega (W): P(the world stops there)."""
    W = len(d)
    stops = [0.0] * W
    for world in range(W):
        for answers in itertools.product([False, True], repeat=W):  # whether the model would answer in each slot
            probability = omega[world] * math.prod(1 - d[i] if answers[i] else d[i] for i in range(W))
            first = next(i for i in range(W) if answers[i] or i == world)
            stops[first] = stops[first] + probability
    return stops


def breath_loss(z, k, target, omega, gamma):
    """-log sum_i Pr(S=i) gamma_i t_i of one token, in nats: z (W,V) logits of tokens, k (W) of <don't know>."""
    d = [torch.cat((z[i], k[i:i + 1])).softmax(0)[-1] for i in range(len(z))]
    t = [z[i].softmax(0)[target] for i in range(len(z))]  # P(target) given that slot i answers
    return -torch.log(sum(stop * g * right for stop, g, right in zip(stopping(d, omega), gamma, t)))


def breath_slots(model, tokens, taken=None):
    """What every slot says: z (T,W,V) and k (T,W). taken: how many slots of each token later tokens see, by
    default all. With see_pauses=False they see the first alone; pauses stand between their token and the next."""
    W, running = model.config.W, model.config.see_pauses
    slots = [(token, slot) for token in range(len(tokens)) for slot in range(W)]

    def visible(i, j):
        (token, slot), (other, its_slot) = slots[i], slots[j]
        if other == token:
            return its_slot <= slot
        return other < token and its_slot < ((taken[other] if taken else W) if running else 1)
    x = torch.stack([model.pauses[slot - 1] if slot else model.wte.weight[tokens[token]] for token, slot in slots])
    positions = [token * W + slot if running else token + slot / W for token, slot in slots]
    y = plain_gpt(model, x, positions, visible)
    k = norm(model.ln_f, y) @ model.dont_know.weight[0] + model.dont_know.bias
    return logits(model, y).view(len(tokens), W, -1), k.view(len(tokens), W)


def breath_text(model, prompt, n, threshold=0.5, skip=False):
    """The greedy text: yield n times (token, slots that it took).

    The model pauses where d > threshold, as long as slots remain. The pauses that a token did not take are part of
    the text, as in training; with skip they are left out. A text that outgrows block_size goes on from its last
    block_size / 2 tokens.
    """
    W, T = model.config.W, model.config.block_size
    tokens = list(prompt)
    taken = [1 if skip else W] * (len(prompt) - 1)
    start = 0
    for _ in range(n):
        if len(tokens) - start > T:
            start = len(tokens) - T // 2
        z, k = breath_slots(model, tokens[start:], taken[start:] + [W])
        slot = 0
        while slot < W - 1 and torch.cat((z[-1, slot], k[-1, slot:slot + 1])).softmax(0)[-1] > threshold:
            slot += 1
        tokens.append(z[-1, slot].argmax().item())
        taken.append(slot + 1 if skip else W)
        yield tokens[-1], slot + 1


# --- Reasoning in Memory ---

def memory(model, blocks, n_mem):
    """The tokens of so many memory blocks: <b>, n_mem times <m>, </b> each."""
    begin, mem, close, _ = model.special
    return ([begin] + [mem] * n_mem + [close]) * blocks


def readout_logits(model, question, blocks_before, readout, n_mem=None):
    """A read-out in a sequence of its own: question, blocks_before blocks, read-out -> logits (S,V) at each token.

    Training puts all read-outs into one row, where none sees another: each must get these numbers there. The last
    </b> predicts the read-out's first token, its own last token predicts <end>. n_mem: M, by default as trained.
    """
    row = question + memory(model, blocks_before, model.config.n_mem if n_mem is None else n_mem) + readout
    return logits(model, plain_gpt(model, model.wte.weight[row], range(len(row))))


def answer_by_rereading(model, question, blocks, n_mem, limit):
    """The greedy answer after so many blocks, `limit` tokens at most: (tokens, log-probability with <end>).

    Everything is read again for each token. A memory block's tokens have no part in an answer.
    """
    begin, _, _, end = model.special
    answer, total = [], 0.0
    for _ in range(limit):
        z = readout_logits(model, question, blocks, answer, n_mem)[-1]
        z[begin:end] = -math.inf  # <b>, <m> and </b>
        log_p = z.log_softmax(0)
        token = log_p.argmax().item()
        total += log_p[token].item()
        if token == end:
            break
        answer.append(token)
    return answer, total
