"""Zero-shot tasks: what a model knows without being trained for it, read off the log-likelihoods of given texts.

A row of a task is a context with choices, and the right one of them. The model chooses the continuation that it
finds likeliest. prepare.py makes the files: <task>.jsonl, and blimp/<paradigm>.jsonl for BLiMP's 67 paradigms.

There are two forms. "ours" gives the texts as they stand in the files. "harness" is lm-evaluation-harness's:
BLiMP's sentences follow a space and the tokenizer's BOS, HellaSwag's texts lose the marks of their source.
"""
import functools
import os
import re
import zlib
from collections import namedtuple
from glob import glob
from itertools import islice

import numpy as np

from config import UserError
from data import read_text
from data.records import parse_jsonl

FOLDER = os.path.dirname(os.path.abspath(__file__))
# context: a text; choices: texts with the space before them; right: the right one's number
Row = namedtuple('Row', 'context choices right')
BETWEEN = '<|endoftext|>'  # the token between two documents, where a vocabulary has it
MEANING = {'accuracy': 'share of rows whose right choice is likeliest; LAMBADA: which greedy decoding gets right',
           'normalised': 'the same after dividing log-likelihoods by the characters of the choice',
           'perplexity': 'exp of the mean -log P(word) in nats',
           'chance': 'no further than two standard errors from guessing'}


# --- a row of a file -> Row ---

def lambada(row, form):
    context, target = (row['context'], row['target']) if 'target' in row else row['text'].rsplit(' ', 1)
    return Row(context, [' ' + target], 0)


def hellaswag(row, form):
    context, endings = row['activity_label'] + ': ' + row['ctx'], row['endings']
    if form == 'harness':
        context = cleaned(f'{row["activity_label"]}: {row["ctx_a"]} {row["ctx_b"].capitalize()}')
        endings = map(cleaned, endings)
    return Row(context, [' ' + ending for ending in endings], int(row['label']))


def cleaned(text):
    """Without the marks of WikiHow, such as [header]; a [title] ends a sentence."""
    text = text.strip().replace(' [title]', '. ')
    return re.sub(r'\[.*?\]', '', text).replace('  ', ' ')


def piqa(row, form):
    return question(row['goal'], [row['sol1'], row['sol2']], int(row['label']))


def arc(row, form):
    asked, choices = row['question'], row.get('choices')
    if isinstance(asked, dict):  # as its authors write it
        choices = {key: [choice[key] for choice in asked['choices']] for key in ('text', 'label')}
        asked = asked['stem']
    return question(asked, choices['text'], choices['label'].index(row['answerKey']))


def question(text, choices, right):
    return Row('Question: ' + text + '\nAnswer:', [' ' + choice for choice in choices], right)


def blimp(row, form):
    space = ' ' * (form == 'harness')
    return Row('', [space + row['sentence_good'], space + row['sentence_bad']], 0)


# task -> how its rows are read, and what these must have
TASKS = {'lambada': (lambada, 'context and target, or text'),
         'hellaswag': (hellaswag, 'activity_label, ctx, endings, label'),
         'piqa': (piqa, 'goal, sol1, sol2, label'),
         'arc_easy': (arc, 'question, choices, answerKey'),
         'arc_challenge': (arc, 'question, choices, answerKey'),
         'blimp': (blimp, 'sentence_good, sentence_bad')}


# --- files ---

def files_of(tasks):
    """'piqa,blimp' -> ['piqa', 'blimp/adjunct_island', ...]: a paradigm may be named itself. Raises UserError
    where there is no such task or no file of it."""
    names = []
    tasks = [task.strip() for task in tasks.split(',')]
    for task in tasks:
        kind, slash, paradigm = task.partition('/')
        if kind not in TASKS or slash and kind != 'blimp' or not re.fullmatch(r'\w*', paradigm):
            raise UserError(f'tasks = {task!r}: there are {", ".join(TASKS)} and blimp/PARADIGM')
    for task in tasks:
        paths = [os.path.join(FOLDER, task + '.jsonl')]
        if task == 'blimp':
            paths = sorted(glob(os.path.join(FOLDER, 'blimp', '*.jsonl')))
        if not paths or not os.path.exists(paths[0]):
            raise UserError(f'{os.path.join(FOLDER, task)}{".jsonl" * (task != "blimp")} is missing: run python '
                            'data/zeroshot/prepare.py, which downloads it or takes --input=DIR')
        names += [os.path.relpath(path, FOLDER).removesuffix('.jsonl').replace(os.sep, '/') for path in paths]
    return [*dict.fromkeys(names)]


def read(name, n, form):
    """(the first n rows of a file, the crc32 of its text). Raises UserError for an empty file or a broken row."""
    path = os.path.join(FOLDER, name + '.jsonl')
    text = read_text(path)
    return rows_of(text, path, name, n, form), zlib.crc32(text.encode())


def rows_of(text, path, name, n=None, form='ours'):
    rows = [parse(name, entry, form, where) for where, entry in islice(parse_jsonl(text, path), n)]
    if not rows:
        raise UserError(f'{path} holds no row: give another file with python data/zeroshot/prepare.py --input=DIR')
    return rows


def parse(name, entry, form, where):
    """An object as a Row. Raises UserError, which says where it is from."""
    reader, fields = TASKS[name.partition('/')[0]]
    if form == 'harness':
        fields = fields.replace('ctx,', 'ctx_a, ctx_b,')
    try:
        row = reader(entry, form)
        if not 0 <= row.right < len(row.choices):
            raise ValueError(f'choice {row.right} of {len(row.choices)}')
        ''.join([row.context, *row.choices])  # a TypeError where one is no text
        return row
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise UserError(f'{where} is not a row of {name} ({type(e).__name__}: {e}): expected {fields}') from None


# --- ids, and what comes of their log-likelihoods ---

@functools.cache  # it decodes the whole vocabulary
def opening(tokenizer, form):
    """Ids before a text that has no context; a vocabulary of characters has none."""
    if tokenizer.begin:
        return tokenizer.begin
    if form == 'harness' and tokenizer.bos is not None:
        return [tokenizer.bos]
    between = [i for i in range(tokenizer.n_text) if tokenizer.decode([i]) == BETWEEN]
    return between or [i for i in [tokenizer.end] if i is not None]


def encode(tokenizer, rows, form, name):
    """The rows' choices one after the other as two lists of token ids: contexts, continuations. A context and its
    choice are encoded as one text, cut where the context's own ids would end. Where nothing stands before a bare
    sentence, its first token is the context. Raises UserError for what the tokenizer lacks."""
    first = opening(tokenizer, form) if any(not row.context for row in rows) else []
    contexts, continuations = [], []
    for n, row in enumerate(rows, 1):
        before = tokenizer.begin if row.context else first
        try:
            own = len(tokenizer.encode(row.context))
            for choice in row.choices:
                ids = before + tokenizer.encode(row.context + choice)
                cut = max(1, len(before) + own)
                contexts.append(ids[:cut])
                continuations.append(ids[cut:])
        except UserError as e:
            raise UserError(f'tasks = {name}, row {n}: {e}') from None
    return contexts, continuations


def score(rows, found):
    """The numbers of a task, {name: {value, standard error, note}}, of what log_likelihood found."""
    likelihoods = iter(found)
    right = []
    normalised = []
    nll = []
    for row in rows:
        log_p, greedy = zip(*islice(likelihoods, len(row.choices)))
        if len(log_p) == 1:
            right.append(greedy[0])
            nll.append(-log_p[0])
            continue
        right.append(np.argmax(log_p) == row.right)  # at a tie the first one
        per_character = [p / max(1, len(choice.removeprefix(' '))) for p, choice in zip(log_p, row.choices)]
        normalised.append(np.argmax(per_character) == row.right)
    chance = np.mean([1 / len(row.choices) for row in rows]) if normalised else 0.0
    numbers = {'accuracy': share(right, chance)}
    if nll:
        mean, error = np.mean(nll), np.std(nll) / len(nll) ** 0.5
        perplexity = float(np.exp(min(mean, 700)))
        numbers['perplexity'] = {'value': perplexity, 'standard error': perplexity * float(error), 'note': ''}
    elif rows[0].context:  # two sentences of BLiMP are compared as they are
        numbers['normalised'] = share(normalised, chance)
    return numbers


def share(right, chance):
    guessing = (chance * (1 - chance) / len(right)) ** 0.5  # the error of a guess; the other may be 0 by luck
    return number(np.mean(right), np.std(right) / len(right) ** 0.5, chance, guessing)


def number(value, error, chance, guessing=0.0):
    note = 'chance' if abs(value - chance) <= 2 * max(error, guessing) else ''
    return {'value': float(value), 'standard error': float(error), 'note': note}


def mean_of(numbers):
    """The mean accuracy over paradigms, from the numbers of each."""
    values = [found['accuracy']['value'] for found in numbers]
    errors = [found['accuracy']['standard error'] for found in numbers]
    return {'accuracy': number(np.mean(values), np.linalg.norm(errors) / len(errors), 0.5)}
