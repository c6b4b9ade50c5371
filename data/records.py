"""Records: problems with written steps, as data/gsm_toy, gsm8k and gsm8k_aug make them.

train.jsonl, val.jsonl and test.jsonl hold an object a line, {"question": text, "steps": ["7-2=5", ...], "answer":
"5"}; meta.json says kind 'records' and names the tokenizer with its special tokens.
"""
import json
import math
import os
import re
from collections import Counter, namedtuple
from fractions import Fraction

import numpy as np
import torch
from tqdm import tqdm

from config import UserError
from data import Tokenizer, check_crc32, dataset_folder, download, is_main, read_text, write_dataset

Encoded = namedtuple('Encoded', 'question steps answer newline')  # token ids; steps: a list of them
Record = namedtuple('Record', 'question steps answer where')  # where: file and line, for messages
Row = namedtuple('Row', 'tokens kind block positions targets weights')  # a training row: lists, an entry per token
QUESTION = 'question'
MEMORY = 'memory'
READOUT = 'readout'
SPECIAL = ['<b>', '<m>', '</b>', '<end>']  # a memory block's begin, memory tokens and end; the end of a read-out
Special = namedtuple('Special', 'begin mem close end')  # their ids
# an exponent has few digits: 1e999999999 would fill the memory
UNSIGNED = r'(?=\.?\d)(?:\d{1,3}(?:[ ,]\d{3})+|\d*)(?:\.\d+)?(?:[eE][+-]?\d{1,3})?'
NUMBER = re.compile(rf'\$?([+-]?)\$?({UNSIGNED}(?:/[+-]?{UNSIGNED})?)(?: ?%)?\.?')
PLAIN = str.maketrans('\u2010\u2011\u2012\u2013\u2014\u2212\u00a0\u2009\u202f', '------   ')  # dashes and spaces
MARK = re.compile(r'(?<!<)<<([^<>=]+=[^<>=]+)>>(?!>)')
THOUSANDS = re.compile(r'(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])')


# --- numbers ---

def plain_number(text):
    """A number without thousands' commas, $, % and plus: '$1,234.' -> '1234'; None if the text is not a number."""
    match = NUMBER.fullmatch(text.strip().translate(PLAIN))
    if match:
        sign, digits = match.groups()
        return sign.strip('+') + re.sub('[ ,]', '', digits)


def parse_number(text):
    """The Fraction that a text such as '1,234', '-3', '$5.0', '1e5' or '1/2' writes, or None."""
    over, _, under = (plain_number(text) or '').partition('/')
    try:
        return Fraction(over) / Fraction(under or 1)
    except (ArithmeticError, ValueError):  # nothing there, a division by 0, more digits than Python reads
        return None


def same_number(a, b):
    """Whether two results of parse_number agree: within a relative 1e-6 where one is not a whole number."""
    if a is None or b is None:
        return False
    if a.denominator == b.denominator == 1:
        return a == b
    return abs(a - b) <= max(abs(a), abs(b)) / 10 ** 6


# --- writing ---

def read_source(name, folder, url):
    """Text of the source file `name`, from a folder or, where this is '', downloaded. Raises UserError."""
    if folder:
        return read_text(os.path.join(folder, name))
    with download(url) as file:
        try:
            return file.read().decode('utf-8-sig')
        except UnicodeDecodeError as e:
            raise UserError(f'{url} is not UTF-8 text ({e}): give a folder with the files by --input=DIR') from e


def marked_steps(text):
    """The calculations marked in a solution as <<48/2=24>>, without spaces, $ and thousands' commas; None if a
    mark is broken: it must have one = and no < or >."""
    rest = MARK.sub(' ', text)
    if '<<' in rest or '>>' in rest:
        return None
    steps = [re.sub(r'[\s$]', '', step) for step in MARK.findall(text)]
    # in max(100,200) the comma parts two numbers
    return [step if re.search(r'[A-Za-z]\(', step) else THOUSANDS.sub(lambda m: m[0].replace(',', ''), step)
            for step in steps]


def usable_rows(rows, split, left_out, path):
    """Rows (question, steps, answer) that can be learned from; `left_out` counts the others. Test problems need no
    steps. Raises UserError if no row of the file `path` is left."""
    usable = []
    for question, steps, answer in rows:
        if not question.strip():
            left_out[f'{split}: the question is empty'] += 1
        elif parse_number(answer) is None:
            left_out[f'{split}: the answer is not a number'] += 1
        elif steps is None:
            left_out[f'{split}: a mark << >> is broken'] += 1
        elif not steps and split != 'test':
            left_out[f'{split}: no step is marked'] += 1
        else:
            usable.append((question.strip(), steps, plain_number(answer)))
    if not usable:
        reasons = ', '.join(reason for reason in left_out if reason.startswith(split))
        raise UserError(f'{path} holds no record' + (f' that can be used ({reasons})' if reasons else ''))
    return usable


def hold_out(rows, n, path):
    """(rows for train, the last n for val). Raises UserError if there are too few."""
    if len(rows) < 2:
        raise UserError(f'{path} holds one record that can be used: train and val need one each')
    if not 0 < n < len(rows):
        raise UserError(f'val_rows = {n}: must be at least 1 and less than the {len(rows)} rows of {path}')
    return rows[:-n], rows[-n:]


def write_record_dataset(folder, splits, tokenizer_spec, source, left_out=None):
    """Write {split: [(question, steps, answer)]} as JSONL, and meta.json. left_out: {reason: count} of the
    source's other rows, printed and kept there. Raises UserError if a split is empty, has a character that the
    tokenizer lacks, or is not text."""
    tokenizer_spec = {**tokenizer_spec, 'special': SPECIAL}
    tokenizer = Tokenizer(tokenizer_spec)
    meta = {'kind': 'records', 'tokenizer': tokenizer_spec, 'vocab_size': tokenizer.vocab_size, 'source': source,
            'example': min((row[0] for row in splits.get('val', ())), key=len, default=''),  # for sample.py to ask
            'left_out': left_out or {}}
    contents = {}  # all are encoded before anything is written
    for split, rows in splits.items():
        if not rows:
            raise UserError(f'{folder}: no row for {split} was found in {source}')
        lines = []
        for question, steps, answer in rows:
            tokenizer.encode('\n'.join([question, *steps, answer]))
            line = json.dumps({'question': question, 'steps': steps, 'answer': answer}, ensure_ascii=False)
            try:
                lines.append(line.encode('utf-8') + b'\n')
            except UnicodeEncodeError as e:  # JSON can hold half of a character, a file cannot
                raise UserError(f'{source}: {split}, question {question[:60]!r} is not text ({e})') from None
        contents[split + '.jsonl'] = b''.join(lines)
        meta[split + '_rows'] = len(rows)
        meta[split + '_steps'] = sum(len(steps) for _, steps, _ in rows)
    write_dataset(folder, meta, contents)
    for split, rows in splits.items():
        counts = sorted(Counter(len(steps) for _, steps, _ in rows).items())
        print(f'{split}: {len(rows):,} rows, {meta[split + "_steps"]:,} steps; rows by number of steps: '
              + ', '.join(f'{steps}: {n:,}' for steps, n in counts))
    for reason, n in meta['left_out'].items():
        print(f'left out: {n:,} rows, {reason}')
    print(f'{folder}: vocabulary {meta["vocab_size"]}, from {source}')


# --- reading ---

def parse_jsonl(text, path):
    """Yield (place, object) of each JSONL line that is not blank. Raises UserError that names a broken line."""
    for n, line in enumerate(text.split('\n'), 1):
        if line.strip():
            where = f'{path} line {n}'
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError) as e:
                raise UserError(f'{where} is not JSON ({e}): fix or remove that line') from None
            yield where, check_object(entry, where)


def check_object(entry, where):
    if not isinstance(entry, dict):
        raise UserError(f'{where} is {str(entry)[:40]!r}, not an object {{"question": ...}}')
    return entry


def check_record(entry, where, need_steps=True):
    """An object as a Record. Raises UserError naming the field at fault."""
    check_object(entry, where)
    for name in ('question', 'answer'):
        if not isinstance(entry.get(name), str) or not entry[name].strip():
            raise UserError(f'{where}: {name} = {entry.get(name)!r}: a record needs a text there')
    steps = entry.get('steps')
    valid = isinstance(steps, list) and all(isinstance(step, str) and step.strip() for step in steps)
    if not valid or (need_steps and not steps):
        raise UserError(f'{where}: steps = {steps!r}: a record needs a list of at least one step such as "7-2=5"')
    return Record(entry['question'], steps, entry['answer'], where)


def read_records(path, need_steps=True, meta={}):
    """All records of a JSONL file. need_steps=False admits empty steps, for a test split. meta: of the data
    set. Raises UserError if the file is missing, empty or not what meta was written for, or a line is not a
    record."""
    try:
        with open(path, 'rb') as f:
            content = f.read()
        text = content.decode('utf-8-sig')
    except FileNotFoundError:
        raise UserError(f'{path} is missing: run prepare.py in that folder') from None
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f'{path} cannot be read: {e}') from e
    found = [check_record(entry, where, need_steps) for where, entry in parse_jsonl(text, path)]
    if not found:
        raise UserError(f'{path} holds no record: run prepare.py again')
    check_crc32(path, content, meta)
    return found


# --- batches ---

def special_ids(vocab_size):
    """The last ids of the vocabulary. Raises UserError if they leave no room for text."""
    if vocab_size <= len(SPECIAL):
        raise UserError(f'vocab_size = {vocab_size}: there must be room for {", ".join(SPECIAL)} and for text')
    return Special(*range(vocab_size - len(SPECIAL), vocab_size))


def encode_question(tokenizer, question):
    return tokenizer.begin + tokenizer.encode(question + '\n')  # the newline ends the question


def epoch_order(lengths, rows_per_step, rng, window=32):
    """Row numbers of one epoch's batches, (iterations, rows_per_step): each once, rows of similar length
    together. The rows are shuffled, sorted by length within windows of `window` batches and cut into batches,
    which are shuffled. What the last batch lacks is taken from the epoch's first rows."""
    iters = -(-len(lengths) // rows_per_step)
    order = np.resize(rng.permutation(len(lengths)), iters * rows_per_step)
    for first in range(0, len(order), window * rows_per_step):
        part = order[first:first + window * rows_per_step]
        order[first:first + len(part)] = part[np.argsort(lengths[part], kind='stable')]
    return rng.permutation(order.reshape(iters, rows_per_step))


def pad_rows(rows, before, fill):
    """Lists of numbers -> tensor (B,S), row r after before[r] times `fill`; S is a multiple of 8: few sizes."""
    S = max(n + len(row) for n, row in zip(before, rows))
    out = np.full((len(rows), S + -S % 8), fill, np.float32 if isinstance(fill, float) else np.int64)
    for r, row in enumerate(rows):
        out[r, before[r]:before[r] + len(row)] = row
    return torch.from_numpy(out)


def read_by(row):
    """Of each token of a row the block that it reads out, 0 for question and blocks."""
    return [block if kind == READOUT else 0 for block, kind in zip(row.block, row.kind)]


def row_tensors(rows, align=False):
    """Rows as idx (B,S), targets, weights and at (n,), positions (B,S) and, where they have blocks, read_by (B,S),
    -1 for padding. at: where something is learned, as b*S+s. align: let all questions end in the same column."""
    questions = [row.kind.count(QUESTION) for row in rows]
    before = [max(questions) - n if align else 0 for n in questions]  # columns of padding
    idx = pad_rows([row.tokens for row in rows], before, 0)
    targets = pad_rows([row.targets for row in rows], before, -1).flatten()
    weights = pad_rows([row.weights for row in rows], before, 0.0).flatten()
    positions = pad_rows([row.positions for row in rows], before, 0)
    at = ((targets >= 0) & (weights > 0)).nonzero()[:, 0]
    batch = idx, targets[at], weights[at], at, positions
    if not any(MEMORY in row.kind for row in rows):
        return batch
    return *batch, pad_rows([read_by(row) for row in rows], before, -1)


def table(rows, sees, tokenizer):
    """Rows as text: token, position, kind, block, columns it sees, label, weight. sees: a mask (S,S) per row."""
    def show(i):
        text = tokenizer.decode([i])
        return repr(text) if i < tokenizer.n_text else text
    lines = []
    for row, row_sees in zip(rows, sees):
        lines.append('column    token position     kind block  sees                    label weight')
        for i, (token, kind, block, position, target, weight, visible) in enumerate(zip(*row, row_sees)):
            seen = [c for c, yes in enumerate(visible) if yes]
            edges = [c for c in seen if c - 1 not in seen or c + 1 not in seen]  # ends of the ranges that are seen
            ranges = ''.join(f'{c}' + ('-' if c + 1 in seen else ' ') for c in edges)
            label = f'{show(target):>8} {weight:.3f}' if weight else ''
            lines.append(f'{i:6} {show(token):>8} {position:8} {kind:>8} {block:5}  {ranges:20} {label}'.rstrip())
    return '\n'.join(lines)


# --- a data set in memory ---

class RecordData:
    """The records of train and val that fit, as they are and encoded; the others are counted. longest: Encoded
    -> the positions that it takes. Raises UserError if the data set is plain text, its tokenizer lacks the
    special tokens, or no record is left."""

    def __init__(self, dataset, meta, config, longest):
        if meta['kind'] != 'records':
            raise UserError(f'dataset = {dataset!r} holds {meta["kind"]}, but this method trains on records of '
                            'question, steps and answer, such as gsm_toy')
        self.tokenizer = Tokenizer(meta['tokenizer'])
        if list(self.tokenizer.special) != SPECIAL:
            raise UserError(f'dataset = {dataset!r}: its tokenizer lacks the special tokens {", ".join(SPECIAL)}: '
                            'run its prepare.py again')
        if config.vocab_size != self.tokenizer.vocab_size:
            raise UserError(f'vocab_size = {config.vocab_size}: the special tokens are the last ids, '
                            f'so it must be that of {dataset!r}, {self.tokenizer.vocab_size}')
        self.dataset = dataset
        self.meta = meta
        self.config = config
        self.longest = longest
        self.newline = self.tokenizer.encode('\n')
        self.test_set = None  # other test records
        self.records = {}
        self.encoded = {}
        self.told = set()  # splits of which was said what is left out
        for split in ('train', 'val'):
            self.records[split], self.encoded[split] = self.read(split, config.max_steps)

    def read(self, split, max_steps=math.inf, n=None):
        """(records, the same encoded) of the first n of a split, those that fit. A test split's need no steps."""
        path = os.path.join(dataset_folder(self.dataset), split + '.jsonl')
        found = (self.test_set or read_records(path, split != 'test', self.meta))[:n]
        if split != 'train':
            gold_answers(found)  # refuses one that cannot be compared now, not after the run
        fitting, left_out = [], Counter()
        for record in found:
            try:
                encoded = Encoded(encode_question(self.tokenizer, record.question),
                                  [self.tokenizer.encode(step) for step in record.steps],
                                  self.tokenizer.encode(record.answer), self.newline)
            except UserError as e:
                raise UserError(f'{record.where}: {e}') from None
            if len(record.steps) > max_steps:
                left_out[f'they have more steps than max_steps = {max_steps}'] += 1
            elif self.longest(encoded) > self.config.block_size:
                left_out[f'they do not fit into block_size = {self.config.block_size}'] += 1
            else:
                fitting.append((record, encoded))
        for why, count in left_out.items() if is_main() and split not in self.told else ():
            print(f'{self.dataset}: {count:,} of {len(found):,} {split} records are left out, {why}')
        self.told.add(split)
        if not fitting:
            raise UserError(f'dataset = {self.dataset!r}: no {split} record is left; raise block_size or '
                            'max_steps')
        return [list(part) for part in zip(*fitting)]

    def test_records(self, n):
        """Of the first n test records those that fit."""
        return self.read('test', n=n)[0]


class Epochs:
    """Which records an iteration trains on: each once in an epoch, those of similar length together."""

    def __init__(self, lengths, rows_per_step, seed):
        self.lengths = np.array(lengths)
        self.rows_per_step = rows_per_step
        self.seed = seed
        self.iters = -(-len(lengths) // rows_per_step)  # iterations in an epoch
        self.epoch = None  # whose order is known

    def numbers(self, it, rows):
        """The records of these rows within an iteration's batch."""
        epoch, within = divmod(it, self.iters)
        if self.epoch != epoch:
            self.epoch = epoch
            self.order = epoch_order(self.lengths, self.rows_per_step, np.random.default_rng((self.seed, epoch)))
        return self.order[within, rows]


# --- scoring: the model is asked in batches; an answer is what its read-out's last line says ---

def gold_answers(records):
    """The records' answers as Fractions. Raises UserError, with its place, for one that is not a number."""
    numbers = [parse_number(record.answer) for record in records]
    for record, number in zip(records, numbers):
        if number is None:
            raise UserError(f'{record.where}: answer = {record.answer!r} is not a number: accuracy compares '
                            'numbers')
    return numbers


def score(ask, tokenizer, records, batch_size=32):
    """Which answers are right: bool (n, blocks), where any of several samples may be right. ask: questions
    (token lists) -> by block and by sample (token lists, anything), see RiM.answers. As no block sees a later
    one, column k-1 is what a model with k blocks answers, also with more than trained."""
    gold = gold_answers(records)
    correct = {}
    order = sorted(range(len(records)), key=lambda i: len(records[i].question))  # little padding
    for first in tqdm(range(0, len(order), batch_size), 'answers', disable=None, leave=False):
        part = order[first:first + batch_size]
        read = ask([encode_question(tokenizer, records[i].question) for i in part])
        for r, i in enumerate(part):
            said = [[tokenizer.decode(rows[r]).strip().split('\n')[-1] for rows, _ in samples] for samples in read]
            correct[i] = [any(same_number(parse_number(text), gold[i]) for text in texts) for texts in said]
    return np.array([correct[i] for i in range(len(records))])


def accuracy_text(ask, tokenizer, records):
    """How many answers are right: in all, by steps, by block."""
    correct = score(ask, tokenizer, records)  # (n, blocks)
    steps = np.array([len(record.steps) for record in records])
    by_steps = ', '.join(f'{n}: {correct[steps == n, -1].mean():.1%}' for n in np.unique(steps))
    lines = [f'accuracy on {len(records)} validation records: {correct[:, -1].mean():.1%}',
             f'by number of steps: {by_steps}']
    if correct.shape[1] > 1:
        by_block = ', '.join(f'{k}: {a:.1%}' for k, a in enumerate(correct.mean(0), 1))
        lines.append(f'by block: {by_block}; any block: {correct.any(1).mean():.1%}')
    first = records[0]
    read = ask([encode_question(tokenizer, first.question)])
    return '\n'.join([*lines, first.question, blocks_text(read, tokenizer), f'right: {first.answer}'])


def blocks_text(read, tokenizer):
    """What a model read out (see score) after one question, block by block, and with what probability."""
    return '\n'.join(f'{"block" if len(read) > 1 else "answer"} {k}: {tokenizer.decode(rows[0]).strip()}  '
                     f'(probability {log_p[0].exp().item():.3f})' for k, [(rows, log_p), *_] in enumerate(read, 1))
