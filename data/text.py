"""Text: train.bin and val.bin, or the shards of a corpus, hold token ids one after the other; a row is a piece of
block_size tokens.

A batch is a pure function of (seed, iteration, row): the same rows are drawn on any number of processes, and a
resumed run goes on as if it had not stopped.
"""
import os

import numpy as np
import torch

from config import UserError
from data import ANEW, Tokenizer, check_crc32, dataset_folder, id_type, is_main, sha256, write_dataset


def write_text_dataset(folder, text, tokenizer_spec, source, val_fraction=0.1):
    """Encode text and write train.bin, val.bin and meta.json. Raises UserError."""
    if not text:
        raise UserError(f'{folder}: {source} is empty')
    tokenizer = Tokenizer(tokenizer_spec)
    n = int(len(text) * (1 - val_fraction))
    # one document: val begins inside of it, without a begin token
    splits = {'train': tokenizer.begin + tokenizer.encode(text[:n]), 'val': tokenizer.encode(text[n:])}
    dtype = id_type(tokenizer.vocab_size)
    contents = {split + '.bin': np.array(ids, np.dtype(dtype).newbyteorder('<')).tobytes()
                for split, ids in splits.items()}
    meta = {'kind': 'text', 'tokenizer': tokenizer_spec, 'vocab_size': tokenizer.vocab_size, 'dtype': dtype,
            'source': source, 'sha256': sha256(text), 'characters': len(text),
            'train_tokens': len(splits['train']), 'val_tokens': len(splits['val'])}
    write_dataset(folder, meta, contents)
    print(f'{folder}: {meta["train_tokens"]:,} training and {meta["val_tokens"]:,} validation tokens, '
          f'vocabulary {meta["vocab_size"]}, from {source}')


def read_bin(path, meta, block_size):
    """Token ids of train.bin or val.bin as a memory map; the file is checked here, once, at disk speed. Raises
    UserError if it is missing, of a length that does not fit, shorter than a block, has ids beyond the
    vocabulary, or is not what meta.json was written for."""
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
    if not is_main():
        return tokens  # of several processes the first one reads it all, and ends them all if something is wrong
    if int(tokens.max()) >= vocab_size:
        where = int((tokens >= vocab_size).argmax())
        raise UserError(f'{path}: token {where} has id {tokens[where]}, beyond the vocabulary of {vocab_size}: '
                        f'{ANEW}')
    check_crc32(path, tokens, meta)
    return tokens


class Split:
    """Token ids of a split, in one file or in shards, as one sequence."""

    def __init__(self, folder, split, meta, block_size):
        names = meta.get('shards', {}).get(split)
        paths = [os.path.join(folder, name) for name in names or [split + '.bin']]
        self.parts = [read_bin(path, meta, 0 if names else block_size) for path in paths]
        self.ends = np.cumsum([len(part) for part in self.parts])
        if len(self) < block_size + 1:
            raise UserError(f'{folder}: {len(self)} tokens of {split} are fewer than block_size + 1 = '
                            f'{block_size + 1}')

    def __len__(self):
        return int(self.ends[-1])

    def window(self, start, n):
        """Tokens start ... start + n - 1, which may lie in several files."""
        found = []
        while n:
            k = int(np.searchsorted(self.ends, start, side='right'))
            at = start - (self.ends[k] - len(self.parts[k]))
            found.append(self.parts[k][at:at + n])
            start += len(found[-1])
            n -= len(found[-1])
        return np.concatenate(found)


class TextBatches:
    """Rows of block_size tokens. Training rows start anywhere; validation rows are spread evenly over val.bin
    without overlap and are always the same, so that methods' curves compare."""

    def __init__(self, dataset, meta, config, seed, eval_rows, rows_per_step):
        if meta['kind'] != 'text':
            raise UserError(f'dataset = {dataset!r} holds {meta["kind"]}, but this method trains on plain text')
        self.T = config.block_size
        self.seed = seed
        self.tokenizer = Tokenizer(meta['tokenizer'])
        self.tokens = {split: Split(dataset_folder(dataset), split, meta, self.T) for split in ('train', 'val')}
        spare = len(self.tokens['val']) - self.T - 1  # the last start at which a row and its targets fit
        self.val_starts = np.linspace(0, spare, min(eval_rows, spare // self.T + 1)).astype(np.int64)
        self.epoch_iters = len(self.tokens['train']) / (rows_per_step * self.T)

    @staticmethod
    def largest(config, rows):
        """A batch of the largest shape, without content."""
        return torch.zeros(2, rows, config.block_size, dtype=torch.long).unbind()

    def train_batch(self, stage, it, rows):
        """Rows (a list of row numbers within the iteration's batch) as (idx, targets), (rows,T) each."""
        rng = np.random.default_rng((self.seed, it))
        starts = rng.integers(len(self.tokens['train']) - self.T, size=max(rows) + 1)
        return self.windows('train', starts[rows])

    def val_batch(self, stage, rows):
        """The validation rows among these numbers, as (idx, targets); None if there are none."""
        rows = [row for row in rows if row < len(self.val_starts)]
        return self.windows('val', self.val_starts[rows]) if rows else None

    def windows(self, split, starts):
        tokens = np.stack([self.tokens[split].window(start, self.T + 1) for start in starts])
        tokens = torch.from_numpy(tokens.astype(np.int64))
        return tokens[:, :-1], tokens[:, 1:]

    def table(self, stage, it, n=2):
        """The first n rows of a batch as text: token, position, label."""
        lines = []
        for row in zip(*(t.tolist() for t in self.train_batch(stage, it, list(range(n))))):
            lines.append(f'{"token":>10} {"position":>8} {"label":>10}')
            lines += [f'{self.tokenizer.decode([a])!r:>10} {i:8} {self.tokenizer.decode([b])!r:>10}'
                      for i, (a, b) in enumerate(zip(*row))]
        return '\n'.join(lines)
