"""Text from a checkpoint alone, or from a published model:

    python sample.py --out_dir=out/tb_small --prompt="ROMEO:" --show
    python sample.py --init_from=gpt2 --prompt="The capital of France is" --temperature=0

--show colours every token by what the model spent on it, streams or slots. A model trained on records answers the
question in --prompt; --show then prints what is read after each memory block, with its probability. A training
config in place of --out_dir, as in python sample.py config/tb_small.py, tells where its run is. Thoughtbubbles
reads the text again for each new token; with --streaming it reads that token alone: faster, and nearly the same.
--over_training shows the prompt as each snapshot of a run reads it (train.py --snapshots keeps some).
"""
import inspect
import math
import os
import sys
from html import escape

import torch

import config
import train
from config import UserError
from config.checkpoint import snapshots
from config.files import write_file
from data import Tokenizer, UNIT, read_text
from data.records import blocks_text, encode_question
from train import METHODS, open_checkpoint

out_dir = 'out/run'  # the run whose checkpoint is read
checkpoint = ''  # instead: a checkpoint's path or a run's folder, such as out/tb_small/best.pt
init_from = ''  # instead: a published model: gpt2, org/name on the Hugging Face hub, or a folder
prompt = ''  # the text to continue or the question to answer; without it, a line break or a question of the data
prompt_file = ''  # a file with the text to continue instead
num_samples = 1  # continuations or answers
max_new_tokens = 300  # tokens per continuation; with show it may be 0: the prompt alone
temperature = 0.8  # 0 takes the likeliest token
top_k = 0  # draw from the k likeliest tokens only, 0 = all
top_p = 1.0  # draw from the likeliest tokens that together have this probability
stop = ''  # end a continuation at this token's text, instead of where the model ends it
seed = 1337  # of the draws
pace = 'model'  # Catch Your Breath: a token pauses as the model wants (model), never (first) or always (all)
threshold = 0.5  # Catch Your Breath at temperature 0: pause where P(don't know) is above it
skip_unused_pauses = False  # Catch Your Breath: leave pauses that no token took out of the context
streaming = False  # Thoughtbubbles: read each new token alone; faster, but copies that fell out never come back
n_blocks = 0  # Reasoning in Memory: memory blocks after the question, 0 = as trained
n_mem = 0  # Reasoning in Memory: memory tokens per block, 0 = as trained
show = False  # colour tokens by the streams or slots that the model spent on them
over_training = False  # the prompt alone, as each snapshot of out_dir reads or answers it, line under line
html = ''  # with show: a file to write the coloured text to as well, a page for the browser
device = 'auto'  # auto | cpu | cuda | cuda:1 | mps

# settings of every model; the others are those of its generate, or answers
GENERAL = {'out_dir', 'checkpoint', 'init_from', 'prompt', 'prompt_file', 'num_samples', 'seed', 'show', 'device',
           'over_training'}
OF_SNAPSHOTS = {'out_dir', 'prompt', 'prompt_file', 'seed', 'show', 'n_blocks', 'n_mem', 'device', 'over_training'}
# 256-colour backgrounds from least to most effort, each with a readable foreground
COLOURS = [(255, 16), (194, 16), (228, 16), (214, 16), (203, 16), (125, 231), (55, 231)]


def paint(text, e):
    """Text on the colour of an effort, for a terminal."""
    back, front = COLOURS[min(e, len(COLOURS)) - 1]
    lines = text.replace('\n', '\u21b5\n').split('\n')  # a line break has a colour too
    return '\n'.join(f'\033[48;5;{back}m\033[38;5;{front}m{line}\033[0m' if line else '' for line in lines)


def coloured(tokenizer, tokens, effort, unit, terminal):
    """Text with each token's effort as background and a legend; without a terminal, numbers after the text."""
    known = [e for e in effort if e is not None]
    mean = sum(known) / max(1, len(known))
    if not terminal:
        pairs = ' '.join(f'{tokenizer.decode([t])!r}:{"-" if e is None else e}' for t, e in zip(tokens, effort))
        return f'{tokenizer.decode(tokens)}\n{unit} per token: {pairs}\nmean {unit} per token: {mean:.2f}'

    text = ''.join(tokenizer.decode([t]) if e is None else paint(tokenizer.decode([t]), e)
                   for t, e in zip(tokens, effort))
    legend = ' '.join(paint(f' {e} ', e) for e in sorted(set(known)))
    return f'{text}\n{unit} per token: {legend}  mean {mean:.2f}'


def css(colour):
    """A terminal's colour, 16...255: a cube of 6 x 6 x 6 and shades of grey, as a page writes it."""
    levels = 0, 95, 135, 175, 215, 255
    rgb = [levels[(colour - 16) // n % 6] for n in (36, 6, 1)] if colour < 232 else 3 * [8 + 10 * (colour - 232)]
    return 'rgb({} {} {})'.format(*rgb)


PAGE = """<!DOCTYPE html>
<html><head><meta charset="utf-8"><title>{title}</title><style>
body {{ margin: 2em auto; max-width: 50em; padding: 0 1em; font: 17px/2.2 monospace }}
body, rt {{ background: white; color: black }}
p {{ white-space: pre-wrap; overflow-wrap: anywhere }}
h1, h2 {{ font-size: 110% }}
ruby {{ ruby-position: under }}
rt {{ font-size: 55%; line-height: 1; user-select: none }}
{colours}
</style></head><body>
<h1>{title}</h1>
{texts}
</body></html>
"""


def page(title, tokenizer, rows, effort, unit):
    """A web page of texts (token lists): under each token its effort, which is its background as well and what
    the pointer shows. No other file is needed."""
    def ruby(token, e):
        text = tokenizer.decode([token])
        if e is None:
            return escape(text)
        shown = escape(text.replace('\n', '\u21b5'))  # a line break has a colour too
        return (f'<ruby class="e{min(e, len(COLOURS))}" title="{escape(repr(text))}, {unit}: {e}">{shown}'
                f'<rt>{e}</rt></ruby>' + '\n' * text.count('\n'))

    texts = []
    for i, (row, numbers) in enumerate(zip(rows, effort), 1):
        known = [e for e in numbers if e is not None]
        mean = sum(known) / max(1, len(known))
        texts.append(f'<h2>{i} of {len(rows)}: {unit} per token, mean {mean:.2f}</h2>')
        texts.append('<p>' + ''.join(map(ruby, row, numbers)) + '</p>')
    colours = '\n'.join(f'.e{i} {{ background: {css(back)}; color: {css(front)} }}'
                        for i, (back, front) in enumerate(COLOURS, 1))
    return PAGE.format(title=escape(title), colours=colours, texts='\n'.join(texts))


def show_spent(paths, text):
    """What each snapshot spends on the tokens of a text, a line each."""
    rows = []
    for path in paths:
        _, saved, model = open_checkpoint(path, device)
        tokenizer = Tokenizer(saved['meta']['tokenizer'])
        ids = tokenizer.begin + tokenizer.encode(text)
        unit, (effort,) = model.spent([ids], [[]])
        rows.append((saved['step'], effort))
    digits = max(len(str(e)) for _, effort in rows for e in effort if e is not None)
    words = [tokenizer.decode([t]).replace('\n', '\u21b5').ljust(digits) for t in ids]
    between = '' if all(len(word) == 1 for word in words) else ' '
    print(f'{"step":>7s}  {between.join(words)}  mean {unit} per token')
    for step, effort in rows:
        known = [e for e in effort if e is not None]
        cells = [('-' if e is None else str(e)).ljust(len(word)) for e, word in zip(effort, words)]
        if config.is_terminal(sys.stdout):
            cells = [cell if e is None else paint(cell, e) for e, cell in zip(effort, cells)]
        print(f'{step:7d}  {between.join(cells)}  {sum(known) / len(known):.2f}')


def load_settings(script, argv):
    """As config.load, for a script that reads what a run has written."""
    of_training = config.script_settings(train.__file__)
    for config_class, *_ in METHODS.values():
        of_training.update(config.class_settings(config_class))
    return config.load(script, argv, of_training=of_training)


def open_model(path, device):
    """As train.open_checkpoint, and says on stderr what was read."""
    path, saved, model = open_checkpoint(path, device)
    loss = 'not evaluated yet'
    if math.isfinite(saved['best_val_loss']):
        loss = f'best validation loss {saved["best_val_loss"]:.4f} {UNIT[saved["meta"]["kind"]]}'
    print(f'{path}: {saved["method"]}, step {saved["step"]}, {loss}', file=sys.stderr)
    return path, saved, model


def main(argv):
    settings, _, given = load_settings(__file__, argv)
    globals().update(settings)
    config.check_range(settings, 'num_samples')
    config.check_range(settings, 'seed', 0, 2 ** 63)
    if init_from and {'checkpoint', 'out_dir'} & given.keys():
        raise UserError(f'init_from = {init_from!r}: give that, or checkpoint, or out_dir')
    kept = []
    if over_training:
        for name in given.keys() - OF_SNAPSHOTS:
            raise UserError(f'{name} = {settings[name]!r}: has no effect with over_training')
        kept = snapshots(out_dir)
    start = init_from or checkpoint or (kept[0] if kept else os.path.join(out_dir, 'ckpt.pt'))
    path, saved, model = open_model(start, device)
    tokenizer = Tokenizer(saved['meta']['tokenizer'])  # travels inside the checkpoint: no data set is needed
    is_question = saved['meta']['kind'] == 'records'
    generate = model.answers if is_question else model.generate
    config.check_range(settings, 'max_new_tokens', 0 if show and not is_question else 1)  # 0: the prompt alone

    # what is sampled, and how
    text = prompt
    if prompt_file:
        text = read_text(prompt_file)
    elif 'prompt' not in given:
        text = str(saved['meta'].get('example', '')) if is_question else tokenizer.start_text()
    known = settings.keys() & inspect.signature(generate).parameters.keys()
    text_only = set() if is_question else {'stop', 'html'}  # an answer ends by itself
    for name in given.keys() - known - GENERAL - text_only:
        raise UserError(f'{name} = {settings[name]!r}: {path} is a {saved["method"]} model without that setting')
    sampling = {name: settings[name] for name in known}
    torch.manual_seed(seed)

    # an answer
    if is_question:
        if not text.strip():
            raise UserError('prompt is empty: ask a question, such as --prompt="..."')
        if not {'prompt', 'prompt_file'} & given.keys():
            print(f'prompt: {text}', file=sys.stderr)
        if not {'temperature', 'top_k', 'top_p'} & given.keys():
            sampling['temperature'] = 0.0  # without another wish, the likeliest answer
        question = encode_question(tokenizer, text.strip())
        for path in kept:
            _, saved, model = open_checkpoint(path, device)
            read = model.answers([question], every_block=True, **sampling)
            print(f'step {saved["step"]}\n{blocks_text(read, tokenizer)}')
        if kept:
            return
        for _ in range(num_samples):
            read = generate([question], every_block=show, **sampling)
            print(blocks_text(read, tokenizer) if show else tokenizer.decode(read[-1][0][0][0]).strip())
        return

    # or a continuation; a single one is written while it is made
    ids = tokenizer.begin + tokenizer.encode(text)
    stop_ids = tokenizer.encode(stop)
    if len(stop_ids) > 1:
        raise UserError(f'stop = {stop!r} is {len(stop_ids)} tokens: give the text of a single token')
    if (show or kept) and not model.spent([], []):
        name = 'over_training' if kept else 'show'
        raise UserError(f'{name} = True: this model spends the same on every token, there is nothing to show')
    if html and not show:
        raise UserError(f'html = {html!r}: the page has what --show=True colours, so add that')
    if html and not os.path.isdir(os.path.dirname(html) or '.'):
        raise UserError(f'html = {html!r}: its folder is not there, make it first')
    if kept:
        if not ids:
            raise UserError('the prompt is empty: give at least one token')
        show_spent(kept, text)
        return
    at_once = num_samples == 1 and not show
    written = ''
    new = [[] for _ in range(num_samples)]
    stop_token = stop_ids[0] if stop_ids else tokenizer.end
    sampling.update(n_text=tokenizer.n_text, stop_token=stop_token)
    for step in generate([ids] * num_samples, **sampling):
        for row, token in zip(new, step):
            if token is not None and not token == stop_token == tokenizer.end:  # which is no text
                row.append(token)
        if at_once:
            so_far = text + tokenizer.decode(new[0])
            if not so_far.endswith('\ufffd'):  # a character whose bytes are not complete yet
                print(so_far[len(written):], end='', flush=True)
                written = so_far
    if at_once:
        print(so_far[len(written):])
        return
    unit, effort = model.spent([ids] * num_samples, new) if show else ('', [])
    for i, row in enumerate(new):
        if num_samples > 1:
            print(f'--- {i + 1} of {num_samples} ---')
        if show:
            print(coloured(tokenizer, ids + row, effort[i], unit, config.is_terminal(sys.stdout)))
        else:
            print(text + tokenizer.decode(row))
    if html:
        write_file(html, page(f'{path}, {saved["method"]}', tokenizer, [ids + row for row in new], effort, unit))
        print(f'written to {html}', file=sys.stderr)


if __name__ == '__main__':
    config.launch(main)
