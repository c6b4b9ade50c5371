"""The pictures of README.md, each from a forward pass of a trained small model: python assets/draw.py"""
import html
import os
import sys
from unittest import mock

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # for running this file by itself
import torch

import config
import data.records
import thoughtbubbles as tb
from config.files import write_file
from rim import build_row, memory_mask
from train import load

out_dir = 'out/'  # the folder that holds the runs tb_small, cyb_small and rim_small
output = 'assets/'  # the folder that the pictures are written to
text = 'But, soft! what'  # what Thoughtbubbles and Catch Your Breath read
dataset = 'gsm_toy'  # where the problem for Reasoning in Memory comes from

WIDTH, LEFT = 800, 110  # in pixels: of a picture, and where what is drawn begins
STYLE = """
text {font: 13px sans-serif; fill: #1b1b1b; text-anchor: middle} .start {text-anchor: start}
.end {text-anchor: end} .bold {font-weight: bold} text.small {font-size: 10px} text.token {font: 16px monospace}
text.grey {fill: #767676} text.code {font: 12px monospace} .line, .frame {fill: none; stroke: #1b1b1b}
.faint {stroke: #9a9a9a} .dashed {stroke-dasharray: 3 2} .thick {stroke-width: 3px}
.panel {fill: #fff; stroke: #d0d0d0} .blank {fill: #fff; stroke: #1b1b1b} .blue {fill: #0b62a8}
.orange {fill: #d05a00} .question {fill: #bdbdbd} .memory {fill: #6aa5dc} .readout {fill: #b34700}
"""


def words(x, y, content, look=''):
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{look}">{html.escape(str(content))}</text>'


def box(x, y, width, height, look, opacity=1):
    corner = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {corner} class="{look}" fill-opacity="{opacity:.2f}"/>'


def line(x1, y1, x2, y2, look):
    return f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" class="line {look}"/>'


def picture(title, height, parts):
    """A whole SVG file, the parts on a white panel, which dark pages need."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" viewBox="0 0 {WIDTH} {height:.0f}">'
    return '\n'.join([head, f'<title>{title}</title><style>{STYLE}</style>',
                      box(0.5, 0.5, WIDTH - 1, height - 1, 'panel'), *parts, '</svg>\n'])


def sign(tokenizer, token):
    return tokenizer.decode([int(token)]).translate({32: '\u2423', 10: '\u21b5'})  # a space and a line break show


def stream(x, y, p, original):
    """A circle, or a square for a copy, the fuller the higher its score p."""
    if not original:
        return box(x - 5, y - 5, 10, 10, 'blank') + box(x - 5, y - 5, 10, 10, 'orange', p)
    circle = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6" class='
    return f'{circle}"blank"/>{circle}"blue" fill-opacity="{p:.2f}"/>'


def streams(model, tokenizer):
    """Thoughtbubbles: which streams each token of the text has in each block, and what they predict together."""
    idx = torch.tensor([tokenizer.encode(text)])
    T = idx.size(1)
    select, forks = tb.select, []  # which is watched while the model runs
    with mock.patch.object(tb, 'select', lambda *given: forks.append(select(*given)) or forks[-1]):
        p_next, likeliest = model(idx)[0][0].softmax(dim=-1).max(dim=-1)
    step = (WIDTH - LEFT - 20) / (T + 1)
    row, y = 54, 98
    log_p, src = torch.zeros(1, T), torch.arange(T)[None]
    lines, parts = [], []
    xs = []
    for i in range(model.config.n_layer):
        above = xs
        parents, copied = range(len(xs)), [False] * len(xs)
        if i in model.config.fork_layers:
            (parents,), (copied,), log_p = forks.pop(0)
            src = src[:, parents]
            parts.append(words(LEFT - 16, y - row / 2 + 4, 'fork', 'end grey'))
        xs = (LEFT + step * (tb.stream_positions(log_p, src, T)[0] + 1)).tolist()
        lines += [line(above[a], y - row, x, y, 'dashed' * int(copy)) for x, a, copy in zip(xs, parents, copied)]
        parts.append(words(LEFT - 16, y + 4, f'block {i}', 'end'))
        parts += [stream(*one) for one in zip(xs, [y] * len(xs), log_p[0].exp(), tb.is_original(src)[0])]
        y += row
    lines += [line(x, y - row, LEFT + step * (i + 1), y - 18, 'faint') for x, i in zip(xs, src[0].tolist())]
    for i in range(T):  # what is read above, what is predicted below
        x = LEFT + step * (i + 1)
        for at, token in (72, idx[0, i]), (y, likeliest[i]):
            parts.append(words(x, at, sign(tokenizer, token), 'token'))
        parts += [words(x, y + 17, f'{p_next[i]:.2f}'.lstrip('0'), 'small'), words(x, y + 36, i, 'small grey')]
    names = {'reads': 72, 'merge': y - 29, 'predicts': y, 'probability': y + 17, 'position': y + 36}
    parts += [words(LEFT - 16, at, name, 'end') for name, at in names.items()]
    key = [stream(LEFT, 28, 0, True), stream(LEFT + 146, 28, 0, False)]
    for x, note in (12, "a token's original"), (158, 'a copy, on its left'), (310, 'fill: its score p ='):
        key.append(words(LEFT + x, 32, note, 'start'))
    for x, p in (442, 0), (490, 0.25), (538, 0.5), (586, 0.75), (634, 1):
        key += [stream(LEFT + x, 28, p, True), words(LEFT + x + 10, 32, p, 'start small')]
    return picture('Thoughtbubbles: the streams of a sentence, block by block', y + 50, [*key, *lines, *parts])


def slots(model, tokenizer):
    """Catch Your Breath: which slot of each token of the text answers, with what, and how much each one doubts."""
    idx = torch.tensor([tokenizer.encode(text)])
    x = model.every_slot(idx)[0]  # (T,W,C)
    z = model.logits(x)
    doubts = (model.dont_know_logit(model.ln_f(x)) - z.logsumexp(dim=-1)).sigmoid().tolist()
    says = z.argmax(dim=-1)
    T, W = says.shape
    step = (WIDTH - LEFT - 14) / T
    side, row = 28, 58
    names = {'reads': 76, 'slot 1': 112, "P(don't know)": 134}
    names.update({f'slot {w + 1}, pause': 112 + row * w for w in range(1, W)})
    parts = [words(LEFT - 12, at, name, 'end') for name, at in names.items()]
    for i in range(T):
        answers = next((w for w in range(W - 1) if doubts[i][w] <= 0.5), W - 1)
        x = LEFT + step * i + (step - side) / 2
        parts.append(words(x + side / 2, 76, sign(tokenizer, idx[0, i]), 'token'))
        for w in range(W):
            y, d = 93 + row * w, doubts[i][w]
            if w < W - 1:
                parts.append(box(x, y + side * (1 - d), side, side * d, 'orange', 0.5))
                parts.append(words(x + side / 2, y + side + 13, f'{d:.2f}'.lstrip('0'), 'small'))
            frame, font = [('', ''), ('thick', 'bold'), ('faint dashed', 'grey')][(w >= answers) + (w > answers)]
            shown = '?' if w < answers else sign(tokenizer, says[i, w])
            parts += [box(x, y, side, side, 'frame ' + frame), words(x + side / 2, y + 20, shown, 'token ' + font)]
    key = [box(LEFT + 196, 28, 20, 10, 'orange', 0.5)]
    for x, frame, note in [(0, 'thick', 'answers, and with what'), (492, 'faint dashed', 'a pause not needed'),
                           (196, '', "fill: P(don't know), a pause above 1/2")]:
        key += [box(LEFT + x, 18, 20, 20, 'frame ' + frame), words(LEFT + x + 28, 32, note, 'start')]
    return picture('Catch Your Breath: the slots of a sentence', 84 + row * W, [*key, *parts])


def memory(model, first_stage, tokenizer, record):
    """Reasoning in Memory: a row of stage 1 and who sees whom in it; what the blocks say after each stage."""
    question = data.records.encode_question(tokenizer, record.question)
    steps = [tokenizer.encode(step) for step in record.steps]
    encoded = data.records.Encoded(question, steps, tokenizer.encode(record.answer), tokenizer.encode('\n'))
    readouts, weights, n_mem = model.config.readouts('stage1', encoded)
    row = build_row(question, readouts, weights, n_mem, model.special)
    sees = memory_mask(torch.tensor([data.records.read_by(row)]))[0, 0].tolist()
    sizes = [3 if kind == 'question' else 14 for kind in row.kind]
    edges = [LEFT + sum(sizes[:i]) for i in range(len(sizes) + 1)]  # of the matrix, across and down
    parts = [words(24, 30, record.question, 'start code'), words(LEFT - 8, 170, f'{len(question)} tokens', 'end')]
    pieces = list(zip(row.kind, row.block))
    firsts = [i for i, piece in enumerate(pieces) if piece not in pieces[:i]]
    for first, end in zip(firsts, [*firsts[1:], len(sizes)]):
        kind, block = pieces[first]
        step = f'step {block + 1}' if block < len(readouts) else 'answer'
        name = {'question': 'question', 'memory': f'block {block}', 'readout': step}[kind]
        place = f'translate({(edges[first] + edges[end]) / 2:.0f} {LEFT - 8}) rotate(-40)'
        parts.append(f'<g transform="{place}">{words(0, 0, name, "start")}</g>')
        for i, seen in enumerate(sees):  # a rectangle for what a row of the matrix sees of this piece
            width = edges[first + sum(seen[first:end])] - edges[first]
            parts += [box(edges[first], edges[i], width, sizes[i] - 0.5, kind)] if width else []
        parts.append(line(edges[end], LEFT, edges[end], edges[-1], 'faint'))
    for i in range(len(question), len(sizes)):
        y = edges[i] + 11
        parts.append(words(LEFT - 8, y, sign(tokenizer, row.tokens[i]), 'end code'))
        if row.weights[i]:
            parts.append(words(edges[i + 1] + 6, y, '\u2192 ' + sign(tokenizer, row.targets[i]), 'start code'))
    x, y = edges[-1] + 52, LEFT
    for kind, note in ('question', 'the question'), ('memory', 'a memory block'), ('readout', 'its own read-out'):
        parts += [box(x, y, 14, 14, kind), words(x + 22, y + 11, 'sees ' + note, 'start')]
        y += 22
    for stage, asked, n in [(1, first_stage, len(readouts)), (2, model, model.config.n_blocks)]:
        parts.append(words(x, y + 30, f'read after stage {stage}', 'start bold'))
        y += 32
        for k, [((answer,), log_p)] in enumerate(asked.answers([question], 8, n_blocks=n, every_block=True), 1):
            y += 20
            parts += [words(x, y, f'block {k}', 'start'), words(x + 58, y, tokenizer.decode(answer), 'start code'),
                      words(x + 118, y, f'{log_p.exp().item():.2f}', 'start small')]
    return picture('Reasoning in Memory: a row and who sees whom in it', max(y, edges[-1]) + 24, parts)


@torch.no_grad()
def main(argv):
    globals().update(config.load(__file__, argv)[0])
    starts = {'tb_small': '', 'cyb_small': '', 'rim_small': 'python train.py config/cot_small.py && '}
    for name, start in starts.items():
        if not os.path.exists(os.path.join(out_dir, name, 'ckpt.pt')):
            command = f'{start}python train.py config/{name}.py'
            raise config.UserError(f'{os.path.join(out_dir, name)} holds no run: make it with {command}')
    paths = [os.path.join(out_dir, name) for name in (*starts, 'rim_small/stage1.pt')]
    bubbles, breath, (model, tokenizer), (first_stage, _) = (load(path, 'cpu') for path in paths)
    data.ensure_prepared(dataset)
    problems = data.records.read_records(os.path.join(data.dataset_folder(dataset), 'val.jsonl'))
    record = min((r for r in problems if len(r.steps) == 3), key=lambda r: len(r.question))
    write_file(os.path.join(output, 'streams.svg'), streams(*bubbles))
    write_file(os.path.join(output, 'slots.svg'), slots(*breath))
    write_file(os.path.join(output, 'memory.svg'), memory(model, first_stage, tokenizer, record))
    print(f'written to {output}: streams.svg, slots.svg, memory.svg')


if __name__ == '__main__':
    config.launch(main)
