"""Data sets: a folder with meta.json (tokenizer, source, counts) and train.bin / val.bin, ids in uint16 or uint32.

data/<name>/prepare.py makes them; of your own text --dataset=path/to/my.txt makes one of characters, in the folder
path/to/my.txt.data. This module holds what the prepare scripts share, the tokenizers, and the batches.
A batch is a pure function of (seed, step, row), so the same rows are drawn on any number of processes and a resumed
run goes on as if it had not stopped.
"""
import hashlib
import json
import os
import subprocess
import sys
import zlib
from contextlib import suppress

import numpy as np
import torch

from config import UserError
from config.files import write_file

ROOT = os.path.dirname(os.path.abspath(__file__))
ANEW = 'delete meta.json there and prepare the data set again'


# --- tokenizers ---

def distinct_texts(name, texts, longest):
    fit = isinstance(texts, list) and all(isinstance(text, str) and 0 < len(text) <= longest for text in texts)
    if not fit or len(set(texts)) < len(texts):
        raise UserError(f'the tokenizer is damaged: {name} = {str(texts)[:60]!r}: expected a list of distinct '
                        f'texts of at most {longest} characters')
    return texts


class Tokenizer:
    """Text <-> token ids, of meta.json's 'tokenizer': {'kind': 'char', 'chars': [...]} or {'kind': 'gpt2'}.

    An optional 'special' is a list of names of tokens that no text contains; their ids follow the text's: `special`
    is {name: id}. Ids below n_text are text; vocab_size counts all. Raises UserError for anything else.
    """

    def __init__(self, spec):
        if not isinstance(spec, dict) or spec.get('kind') not in ('char', 'gpt2'):
            raise UserError(f'tokenizer {str(spec)[:60]!r} is unknown: its kind is char or gpt2')
        self.kind = spec['kind']
        if self.kind == 'char':
            self.chars = distinct_texts('chars', spec.get('chars'), 1)
            self.ids = {ch: i for i, ch in enumerate(self.chars)}
            self.n_text = len(self.chars)
        else:
            import tiktoken  # only here: it fetches the vocabulary from the net at first use
            try:
                self.bpe = tiktoken.get_encoding('gpt2')
            except Exception as e:
                raise UserError(f'the gpt2 vocabulary could not be loaded ({type(e).__name__}): tiktoken downloads it '
                                'once; offline, set TIKTOKEN_CACHE_DIR to a folder that has it') from e
            self.n_text = self.bpe.n_vocab
        names = distinct_texts('special', spec.get('special', []), 100)
        self.special = {name: self.n_text + i for i, name in enumerate(names)}
        self.vocab_size = self.n_text + len(names)

    def encode(self, text):
        """Raises UserError for characters that the vocabulary lacks."""
        if self.kind == 'gpt2':
            return self.bpe.encode_ordinary(text)
        missing = dict.fromkeys(ch for ch in text if ch not in self.ids)  # in order, each once
        if missing:
            raise UserError(f'the tokenizer has no {", ".join(map(repr, missing))}: its {len(self.chars)} '
                            f'characters are {"".join(self.chars)!r}')
        return [self.ids[ch] for ch in text]

    def decode(self, ids):
        """Text of token ids. What is not text shows: a special token by its name, any other id as <128>, say."""
        names = {i: name for name, i in self.special.items()}
        parts = [None if 0 <= i < self.n_text else names.get(i, f'<{i}>') for i in ids]
        if self.kind == 'char':
            return ''.join(part or self.chars[i] for i, part in zip(ids, parts))
        # bytes, since a character may be spread over several tokens
        return b''.join(part.encode() if part else self.bpe.decode_single_token_bytes(i)
                        for i, part in zip(ids, parts)).decode('utf-8', errors='replace')

    def start_text(self):
        """A text of one token to begin with: a newline, or the first character of a vocabulary that has none."""
        return '\n' if self.kind == 'gpt2' or '\n' in self.ids else self.chars[0]


# --- writing a data set ---

def announce(folder, meta):
    """Before a data set's files are written: make its folder, take away a meta.json that would not fit them."""
    path = os.path.join(folder, 'meta.json')
    try:
        os.makedirs(folder, exist_ok=True)
        with suppress(FileNotFoundError):  # also where another run takes it away at the same time
            with open(path, encoding='utf-8', errors='replace') as f:
                same = f.read() == json.dumps(meta, indent=1)
            if not same:  # the same data another run may be reading already
                os.remove(path)
    except OSError as e:
        raise UserError(f'cannot write {folder}: {e.strerror}') from e


def read_text(path):
    """The text of a user's file, without the mark that may stand before UTF-8. Raises UserError."""
    try:
        with open(path, encoding='utf-8-sig') as f:
            return f.read()
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f'{path} is not there or is not UTF-8 text ({e})') from e


def sha256(text):
    return hashlib.sha256(text.encode('utf-8')).hexdigest()


def id_type(vocab_size):
    """The type that token ids are stored as."""
    return 'uint16' if vocab_size <= 2 ** 16 else 'uint32'


def write_text_dataset(folder, text, tokenizer_spec, source, val_fraction=0.1):
    """Encode text and write train.bin, val.bin and, last, meta.json: a folder with meta.json is complete."""
    if not text:
        raise UserError(f'{folder}: {source} is empty')
    tokenizer = Tokenizer(tokenizer_spec)
    n = int(len(text) * (1 - val_fraction))
    splits = {'train': tokenizer.encode(text[:n]), 'val': tokenizer.encode(text[n:])}
    crc32 = {'tokenizer': zlib.crc32(json.dumps(tokenizer_spec).encode())}
    dtype = id_type(tokenizer.vocab_size)
    contents = {split: np.array(ids, np.dtype(dtype).newbyteorder('<')).tobytes() for split, ids in splits.items()}
    for split, content in contents.items():
        crc32[split + '.bin'] = zlib.crc32(content)
    meta = {'kind': 'text', 'tokenizer': tokenizer_spec, 'vocab_size': tokenizer.vocab_size, 'dtype': dtype,
            'source': source, 'sha256': sha256(text), 'characters': len(text),
            'train_tokens': len(splits['train']), 'val_tokens': len(splits['val']), 'crc32': crc32}
    announce(folder, meta)
    for split, content in contents.items():
        write_file(os.path.join(folder, split + '.bin'), content)
    write_file(os.path.join(folder, 'meta.json'), json.dumps(meta, indent=1))
    print(f'{folder}: {meta["train_tokens"]:,} training and {meta["val_tokens"]:,} validation tokens, '
          f'vocabulary {meta["vocab_size"]}, from {source}')


# --- reading a data set ---

def is_path(name):
    return '/' in name or os.sep in name or name.endswith('.txt')


def dataset_folder(name):
    """The folder of a data set: of a bare name in data/, of a text beside it with .data added; or the path."""
    if not is_path(name):
        return os.path.join(ROOT, name)
    return name if os.path.isdir(name) else name + '.data'


def ensure_prepared(name, given=True):
    """Make a data set that has no meta.json, or whose text is another one by now: the text of a path, or a small
    one of data/ by its prepare.py. Raises UserError that names the way out.

    given: whether the user gave the name. One out of a checkpoint may be anybody's: for it nothing is run or
    written. A prepare.py behind a path is never run.
    """
    names = [d for d in sorted(os.listdir(ROOT)) if any(os.path.exists(os.path.join(ROOT, d, file))
                                                        for file in ('prepare.py', 'meta.json'))]
    if not isinstance(name, str) or not (is_path(name) or name in names):
        raise UserError(f'dataset = {name!r} is not in data/: there are {", ".join(names)}; your own text is '
                        'given by its path, such as ./my.txt')
    folder = dataset_folder(name)
    own, script = name + '.data' == folder, os.path.join(folder, 'prepare.py')
    source, may_make = name if own else os.path.join(folder, 'input.txt'), given and own
    if given and name in names and os.path.exists(script):
        with open(script, encoding='utf-8', errors='replace') as f:
            may_make = 'SMALL = True' in f.read()
    if os.path.exists(os.path.join(folder, 'meta.json')):
        known = read_meta(name).get('sha256')
        if not known or not os.path.isfile(source) or sha256(read_text(source)) == known:
            return
        print(f'{source} is not the text that {folder} was made of: '
              + ('it is prepared now' if may_make else 'the earlier text is used'), flush=True)
        if not may_make:
            return
    elif own and not os.path.isfile(source):
        raise UserError(f'dataset = {name!r}: there is no text and no folder of that name')
    elif not may_make:
        raise UserError(f'dataset = {name!r} is not prepared: ' + (
            f'run python {script} first' if name in names else f'add --dataset={name}' if own else
            'behind a path no prepare.py is run; run it yourself if you trust it, or give the path of a text'))
    if own:
        text = read_text(source)
        write_text_dataset(folder, text, {'kind': 'char', 'chars': sorted(set(text))}, os.path.basename(source))
    else:
        print(f'preparing {name}', flush=True)
        if subprocess.run([sys.executable, script]).returncode:
            raise UserError(f'dataset = {name!r}: python {script} failed, see above')


def read_meta(name):
    """meta.json of a data set. Raises UserError if it is missing, damaged or lacks a key."""
    path = os.path.join(dataset_folder(name), 'meta.json')
    try:
        with open(path, encoding='utf-8-sig') as f:
            meta = json.load(f)
        kind, size = meta['kind'], Tokenizer(meta['tokenizer']).vocab_size
    except FileNotFoundError:
        raise UserError(f'{path} is missing: the data set is not prepared') from None
    except UserError as e:
        raise UserError(f'{path}: {e}') from None
    except Exception as e:  # damaged JSON may hold anything
        raise UserError(f'{path} is damaged ({type(e).__name__}: {e}): {ANEW}') from e
    if not isinstance(meta.get('crc32', {}), dict):
        raise UserError(f'{path} is damaged (crc32 = {meta["crc32"]!r}): {ANEW}')
    if 'crc32' in meta and meta['crc32'].get('tokenizer') != zlib.crc32(json.dumps(meta['tokenizer']).encode()):
        raise UserError(f'{path} is damaged (checksum of the tokenizer): {ANEW}')
    if meta.get('vocab_size') != size:
        raise UserError(f'{path}: vocab_size = {meta.get("vocab_size")!r}, but its tokenizer has {size}: {ANEW}')
    return meta


def read_bin(path, meta, block_size):
    """Token ids of train.bin or val.bin as a memory map. The whole file is checked here, once, at disk speed.

    Raises UserError if the file is missing, of a length that does not fit, shorter than a block, has ids beyond
    the vocabulary, or is not the file that meta.json was written for.
    """
    try:
        size = os.path.getsize(path)
    except OSError:
        raise UserError(f'{path} is missing: {ANEW}') from None
    vocab_size, dtype = meta['vocab_size'], meta.get('dtype', 'uint16')  # older data sets do not say
    if dtype != id_type(vocab_size):
        raise UserError(f'{path}: dtype = {dtype!r} in meta.json, but {vocab_size} tokens need '
                        f'{id_type(vocab_size)}: {ANEW}')
    dtype = np.dtype(dtype).newbyteorder('<')
    if size % dtype.itemsize:
        raise UserError(f'{path}: {size} bytes is not a whole number of {dtype.name} tokens: {ANEW}')
    n = size // dtype.itemsize
    if n < block_size + 1:
        raise UserError(f'{path}: {n} tokens are fewer than block_size + 1 = {block_size + 1}: use a smaller '
                        'block_size or more data')
    tokens = np.memmap(path, dtype, mode='r')
    if os.environ.get('RANK', '0') != '0':
        return tokens  # of several processes the first one reads it all, and ends them all if something is wrong
    if int(tokens.max()) >= vocab_size:
        where = int((tokens >= vocab_size).argmax())
        raise UserError(f'{path}: token {where} has id {tokens[where]}, beyond the vocabulary of {vocab_size}: '
                        f'{ANEW}')
    check_crc32(path, tokens, meta)
    return tokens


def check_crc32(path, content, meta):
    """Raises UserError if a file's content (bytes or array) is not what meta.json was written for. A meta.json made by
    hand need not have checksums."""
    crc32 = meta.get('crc32', {}).get(os.path.basename(path))
    if crc32 is not None and zlib.crc32(content) != crc32:
        raise UserError(f'{path} is damaged or was changed (its checksum is not that in meta.json): {ANEW}, or '
                        'delete "crc32" from meta.json to use it as it is')


class TextBatches:
    """Rows of block_size tokens from a text. Training rows start anywhere; validation rows are spread evenly over
    val.bin without overlap and are always the same, so that the curves of different methods compare."""

    unit = 'nats per token'  # of the loss
    example = ''  # a prompt for sample.py, which needs none here

    def __init__(self, dataset, meta, config, seed, eval_rows, rows_per_step=1):
        if meta['kind'] != 'text':
            raise UserError(f'dataset = {dataset!r} holds {meta["kind"]}, but this method trains on plain text')
        self.T, self.seed, self.dropout = config.block_size, seed, config.dropout
        self.tokens = {split: read_bin(os.path.join(dataset_folder(dataset), split + '.bin'), meta, self.T)
                       for split in ('train', 'val')}
        spare = len(self.tokens['val']) - self.T - 1  # the last start at which a row and its targets fit
        n = min(eval_rows, spare // self.T + 1)
        self.val_starts = np.linspace(0, spare, n).astype(np.int64)
        self.tokenizer = Tokenizer(meta['tokenizer'])
        self.row_tokens = self.T
        self.epoch_steps = len(self.tokens['train']) / (rows_per_step * self.T)

    def stages(self, max_iters, learning_rate):
        """The run's stages as (name, steps, peak learning rate, dropout): here one."""
        return [('train', max_iters, learning_rate, self.dropout)]

    def train_batch(self, step, rows):
        """Rows (a list of row numbers within the step's batch) as (idx, targets), (rows,T) each."""
        starts = np.random.default_rng((self.seed, step)).integers(len(self.tokens['train']) - self.T, size=max(rows) + 1)
        return self._rows('train', starts[rows])

    def val_batch(self, rows, step=0):
        return self._rows('val', self.val_starts[rows])

    @property
    def n_val(self):
        return len(self.val_starts)

    def _rows(self, split, starts):
        windows = torch.from_numpy(self.tokens[split][starts[:, None] + np.arange(self.T + 1)].astype(np.int64))
        return windows[:, :-1], windows[:, 1:]

    def table(self, step, n=2):
        """The first n rows of a step's batch as text: token, position, label."""
        lines = []
        for row in zip(*(t.tolist() for t in self.train_batch(step, list(range(n))))):
            lines.append(f'{"token":>10} {"position":>8} {"label":>10}')
            lines += [f'{self.tokenizer.decode([a])!r:>10} {i:8} {self.tokenizer.decode([b])!r:>10}'
                      for i, (a, b) in enumerate(zip(*row))]
        return '\n'.join(lines)

    def report(self, model):
        """What a finished run prints: a sample of the model's text."""
        torch.manual_seed(self.seed)
        prompt = self.tokenizer.encode(self.tokenizer.start_text())
        new = model.generate([prompt], 200, temperature=0.8, n_text=self.tokenizer.n_text)[0]
        return 'a sample at temperature 0.8:\n' + self.tokenizer.decode(new)
