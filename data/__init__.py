"""Data sets: a folder with meta.json (tokenizer, source, counts) and train.bin / val.bin, token ids in uint16.

data/<name>/prepare.py makes them; this module holds what the prepare scripts share, the tokenizers, and the batches.
A batch is a pure function of (seed, step, row), so the same rows are drawn on any number of processes and a resumed
run goes on as if it had not stopped.
"""
import hashlib
import json
import os
import subprocess
import sys
import zlib

import numpy as np
import torch

from config import UserError

ROOT = os.path.dirname(os.path.abspath(__file__))


# --- tokenizers ---

class Tokenizer:
    """Text <-> token ids, built from meta.json's 'tokenizer': {'kind': 'char', 'chars': ...} or {'kind': 'gpt2'}.

    An optional 'special' is a list of names of tokens that no text contains; their ids follow the text's: `special`
    is {name: id}. vocab_size counts them in.
    """

    def __init__(self, spec):
        if not isinstance(spec, dict) or spec.get('kind') not in ('char', 'gpt2'):
            raise UserError(f'tokenizer {spec!r} is unknown: its kind is char or gpt2')
        self.kind = spec['kind']
        if self.kind == 'char':
            self.chars = spec['chars']
            self.ids = {ch: i for i, ch in enumerate(self.chars)}
            self.vocab_size = len(self.chars)
        else:
            import tiktoken  # only here: it fetches the vocabulary from the net at first use
            try:
                self.bpe = tiktoken.get_encoding('gpt2')
            except Exception as e:
                raise UserError(f'the gpt2 vocabulary could not be loaded ({type(e).__name__}): tiktoken downloads it '
                                'once; offline, set TIKTOKEN_CACHE_DIR to a folder that has it') from e
            self.vocab_size = self.bpe.n_vocab
        self.special = {name: self.vocab_size + i for i, name in enumerate(spec.get('special', []))}
        self.vocab_size += len(self.special)

    @property
    def n_text(self):
        """How many ids are text: the first ones."""
        return self.vocab_size - len(self.special)

    def start_text(self):
        """What a text begins with where no prompt is given."""
        return '\n' if self.kind == 'gpt2' or '\n' in self.ids else self.chars[0]

    def encode(self, text):
        """Raises UserError for characters that the vocabulary lacks."""
        if self.kind == 'gpt2':
            return self.bpe.encode_ordinary(text)
        missing = sorted(set(text) - set(self.ids))
        if missing:
            raise UserError(f'the tokenizer has no {"".join(missing)!r}: its {len(self.chars)} characters are '
                            f'{"".join(self.chars)!r}')
        return [self.ids[ch] for ch in text]

    def decode(self, ids):
        """Text of token ids. Special tokens, and ids beyond the vocabulary, are no text and are left out."""
        ids = [i for i in ids if i < self.vocab_size - len(self.special)]
        return self.bpe.decode(ids) if self.kind == 'gpt2' else ''.join(self.chars[i] for i in ids)


# --- writing a data set ---

def write_file(path, content):
    """Write bytes or text so that the file is either whole or not there: to a temporary name, then renamed."""
    mode, options = ('wb', {}) if isinstance(content, bytes) else ('w', {'encoding': 'utf-8', 'newline': '\n'})
    temporary = f'{path}.{os.getpid()}.tmp'  # runs that start together may prepare the same data set
    try:
        with open(temporary, mode, **options) as f:
            f.write(content)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except OSError as e:
        raise UserError(f'cannot write {path}: {e.strerror}') from e
    finally:
        if os.path.exists(temporary):
            os.remove(temporary)


def announce(folder, meta):
    """Before the files of a data set are written: take away a meta.json that would not fit them."""
    path = os.path.join(folder, 'meta.json')
    if os.path.exists(path):
        with open(path, encoding='utf-8', errors='replace') as f:
            if f.read() == json.dumps(meta, indent=1):  # the same data: another run may be reading it already
                return
        os.remove(path)


def write_text_dataset(folder, text, tokenizer_spec, source, val_fraction=0.1):
    """Encode text and write train.bin, val.bin and, last, meta.json: a folder with meta.json is complete."""
    tokenizer = Tokenizer(tokenizer_spec)
    n = int(len(text) * (1 - val_fraction))
    splits = {'train': tokenizer.encode(text[:n]), 'val': tokenizer.encode(text[n:])}
    crc32 = {'tokenizer': zlib.crc32(json.dumps(tokenizer_spec).encode())}
    contents = {split: np.array(ids, dtype='<u2').tobytes() for split, ids in splits.items()}
    for split, content in contents.items():
        crc32[split + '.bin'] = zlib.crc32(content)
    meta = {'kind': 'text', 'tokenizer': tokenizer_spec, 'vocab_size': tokenizer.vocab_size, 'source': source,
            'sha256': hashlib.sha256(text.encode('utf-8')).hexdigest(), 'characters': len(text),
            'train_tokens': len(splits['train']), 'val_tokens': len(splits['val']), 'crc32': crc32}
    announce(folder, meta)
    for split, content in contents.items():
        write_file(os.path.join(folder, split + '.bin'), content)
    write_file(os.path.join(folder, 'meta.json'), json.dumps(meta, indent=1))
    print(f'{folder}: {meta["train_tokens"]:,} training and {meta["val_tokens"]:,} validation tokens, '
          f'vocabulary {meta["vocab_size"]}, from {source}')


# --- reading a data set ---

def dataset_folder(name):
    """The folder of a data set: a name under data/, or any path."""
    return name if '/' in name or os.sep in name else os.path.join(ROOT, name)


def ensure_prepared(name):
    """Run a small data set's prepare.py if its meta.json is missing. Raises UserError that names the way out."""
    folder = dataset_folder(name)
    if os.path.exists(os.path.join(folder, 'meta.json')):
        return
    script = os.path.join(folder, 'prepare.py')
    if not os.path.exists(script):
        names = sorted(d for d in os.listdir(ROOT) if os.path.exists(os.path.join(ROOT, d, 'prepare.py')))
        raise UserError(f'dataset = {name!r}: {folder} has neither meta.json nor prepare.py; there are {", ".join(names)}')
    with open(script, encoding='utf-8') as f:
        small = 'SMALL = True' in f.read()
    if not small:
        raise UserError(f'dataset = {name!r} is not prepared and is large: run python {script} first')
    print(f'preparing {name}', flush=True)
    if subprocess.run([sys.executable, script]).returncode:
        raise UserError(f'dataset = {name!r}: python {script} failed, see above')


def read_meta(name):
    """meta.json of a data set. Raises UserError if it is missing, damaged or lacks a key."""
    path = os.path.join(dataset_folder(name), 'meta.json')
    try:
        with open(path, encoding='utf-8') as f:
            meta = json.load(f)
        kind, size = meta['kind'], Tokenizer(meta['tokenizer']).vocab_size
    except FileNotFoundError:
        raise UserError(f'{path} is missing: run prepare.py in that folder') from None
    except UserError:
        raise
    except Exception as e:  # damaged JSON may hold anything
        raise UserError(f'{path} is damaged ({type(e).__name__}: {e}): run prepare.py again') from e
    if not isinstance(meta.get('crc32', {}), dict):
        raise UserError(f'{path} is damaged (crc32 = {meta["crc32"]!r}): run prepare.py again')
    if 'crc32' in meta and meta['crc32'].get('tokenizer') != zlib.crc32(json.dumps(meta['tokenizer']).encode()):
        raise UserError(f'{path} is damaged (checksum of the tokenizer): run prepare.py again')
    if meta.get('vocab_size') != size:
        raise UserError(f'{path}: vocab_size = {meta.get("vocab_size")!r}, but its tokenizer has {size}: run prepare.py again')
    return meta


def read_bin(path, meta, block_size):
    """Token ids of train.bin or val.bin as a memory map. The whole file is checked here, once, at disk speed.

    Raises UserError if the file is missing, of odd length, shorter than a block, has ids beyond the vocabulary, or is
    not the file that meta.json was written for.
    """
    try:
        size = os.path.getsize(path)
    except OSError:
        raise UserError(f'{path} is missing: run prepare.py in that folder') from None
    if size % 2:
        raise UserError(f'{path}: {size} bytes is no whole number of uint16 tokens: run prepare.py again')
    if size // 2 < block_size + 1:
        raise UserError(f'{path}: {size // 2} tokens are fewer than block_size + 1 = {block_size + 1}: '
                        'use a smaller block_size or more data')
    tokens = np.memmap(path, dtype='<u2', mode='r')
    if os.environ.get('RANK', '0') != '0':
        return tokens  # of several processes the first one reads it all, and ends them all if something is wrong
    vocab_size = meta['vocab_size']
    if int(tokens.max()) >= vocab_size:
        where = int((tokens >= vocab_size).argmax())
        raise UserError(f'{path}: token {where} has id {tokens[where]}, beyond the vocabulary of {vocab_size}: '
                        'run prepare.py again')
    check_crc32(path, tokens, meta)
    return tokens


def check_crc32(path, content, meta):
    """Raises UserError if a file's content (bytes or array) is not what meta.json was written for. A meta.json made by
    hand need not have checksums."""
    crc32 = meta.get('crc32', {}).get(os.path.basename(path))
    if crc32 is not None and zlib.crc32(content) != crc32:
        raise UserError(f'{path} is damaged or was changed (its checksum is not that in meta.json): run prepare.py again, '
                        'or delete "crc32" from meta.json to use it as it is')


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
