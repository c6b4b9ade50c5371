"""Corpora of many documents: read one after the other, tokenised by several processes, written in shards.

A split is train_00000.bin, train_00001.bin, ...: each document's tokens and the end-of-text token, one document
after the other. progress.json says how far this has come; after a crash the same command goes on from there, and
the files are the same, byte for byte, as without it, whatever the number of processes. meta.json comes last.
"""
import gzip
import json
import os
import random
import shutil
import zlib
from contextlib import nullcontext
from glob import escape, glob
from itertools import islice
from multiprocessing import get_context

import numpy as np
from tqdm import tqdm

import config
from config import UserError, check_range, need, read_json
from config.files import write_file
from data import Tokenizer, id_type, tokenizer_crc32

input = ''  # local files in place of the download: a file or folder of .parquet, .jsonl, .json.gz or .txt
column = 'text'  # what a row of .parquet or .jsonl calls its text
tokenizer = 'gpt2'  # gpt2, or the published model whose tokenizer is taken: org/name on the hub, or a folder
processes = 0  # that tokenise, 0 = one per CPU
val_fraction = 0.0005  # of the documents kept for validation
seed = 2357  # of that choice
shard_tokens = 100_000_000  # a shard ends with the document that reaches this

KINDS = ('.parquet', '.jsonl', '.json', '.jsonl.gz', '.json.gz', '.txt')
BATCH = 64  # documents that a process tokenises at a time
PIECE = 100_000  # characters of a .txt in a document, at least
BYTES_PER_TOKEN = 3  # of text, at least, in most languages


# --- documents ---

def local_files(path):
    found = sorted(glob(os.path.join(escape(path), '**'), recursive=True)) if os.path.isdir(path) else [path]
    files = [file for file in found if os.path.isfile(file) and file.endswith(KINDS)]
    if not files:
        raise UserError(f'input = {path!r} has no file that ends in {", ".join(KINDS)}')
    return files


def remote_files(pattern):
    """The names of a data set's files on the Hugging Face hub."""
    hub = need('huggingface_hub', 'downloading a corpus')
    need('datasets', 'downloading a corpus')
    try:
        files = [f'hf://{name}' for name in sorted(hub.HfFileSystem().glob(pattern))]
    except Exception as e:  # many kinds, of the hub and of the network
        raise UserError(f'{pattern} could not be listed ({type(e).__name__}): without a network, give local files '
                        'with --input=DIR') from e
    if not files:
        raise UserError(f'{pattern} names no file on the hub')
    return files


def documents(files, column, first_file=0, first=0):
    """Yield (number of the file, number of the document in it, text) from a place on."""
    for f in range(first_file, len(files)):
        for n, text in enumerate(texts_of(files[f], column)):
            if not isinstance(text, str):
                raise UserError(f'{files[f]}, document {n}: its {column} is {type(text).__name__}, not text; the '
                                'name of the text is set by --column')
            if (f, n) >= (first_file, first) and text.strip():
                yield f, n, text


def texts_of(file, column):
    if file.endswith('.txt'):
        yield from pieces(file)
    elif file.endswith('.parquet') or '://' in file:
        kind = 'parquet' if file.endswith('.parquet') else 'json'
        try:
            rows = need('datasets', 'reading parquet').load_dataset(kind, data_files=file, split='train',
                                                                   streaming=True)
            for row in rows:
                yield row.get(column)
        except UserError:
            raise
        except Exception as e:
            raise UserError(f'{file} cannot be read ({type(e).__name__}: {e})') from e
    else:
        try:
            with (gzip.open if file.endswith('.gz') else open)(file, 'rt', encoding='utf-8') as lines:
                for line in lines:
                    row = json.loads(line)
                    yield row.get(column) if isinstance(row, dict) else None
        except (OSError, ValueError, EOFError) as e:
            raise UserError(f'{file} cannot be read as a JSON object a line ({e})') from e


def pieces(file):
    """A .txt in documents that end with the line that fills them: it may be larger than memory."""
    try:
        with open(file, encoding='utf-8-sig') as lines:
            piece, size = [], 0
            for line in lines:
                piece.append(line)
                size += len(line)
                if size >= PIECE:
                    yield ''.join(piece)
                    piece, size = [], 0
            yield ''.join(piece)
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f'{file} is not there or is not UTF-8 text ({e})') from e


# --- tokens ---

def start_process(spec):
    global encoder
    encoder = Tokenizer(spec)


def encode(batch):
    """Documents -> (number of the file, of the document, ids) of each."""
    dtype = np.dtype(id_type(encoder.vocab_size)).newbyteorder('<')
    return [(f, n, np.array(encoder.begin + encoder.encode(text) + [encoder.end], dtype)) for f, n, text in batch]


def encoded(files, state, spec, column, processes):
    """Yield rounds of encoded documents, in order; what is read ahead is bounded."""
    read = documents(files, column, *state['next'])
    if processes == 1:
        start_process(spec)
    several = processes > 1
    with get_context('spawn').Pool(processes, start_process, (spec,)) if several else nullcontext() as pool:
        while some := list(islice(read, 4 * processes * BATCH)):
            batches = [some[i:i + BATCH] for i in range(0, len(some), BATCH)]
            yield [document for batch in (pool.map if pool else map)(encode, batches) for document in batch]


# --- writing ---

def write_corpus(folder, files, spec, expected_tokens=None, *, column, processes, val_fraction, seed,
                 shard_tokens):
    """Write the shards of train and val, and meta.json. Raises UserError."""
    tokenizer = Tokenizer(spec)
    if tokenizer.end is None:
        raise UserError('the tokenizer has no end-of-text token to put between documents')
    dtype = id_type(tokenizer.vocab_size)
    about = {'files': files, 'tokenizer': tokenizer_crc32({'tokenizer': spec}), 'column': column,
             'val_fraction': val_fraction, 'seed': seed, 'shard_tokens': shard_tokens}
    os.makedirs(folder, exist_ok=True)
    progress = os.path.join(folder, 'progress.json')
    state = read_json(progress) or {'about': about, 'next': [0, 0], 'documents': 0,
                                    'shards': {'train': [], 'val': []}}
    if state['about'] != about:
        raise UserError(f'{progress} is of a preparation with other files or settings: delete it to begin anew')
    size = np.dtype(dtype).itemsize
    done = sum(tokens for shards in state['shards'].values() for _, tokens, _ in shards)
    check_disk(folder, files, expected_tokens, done, size)
    cut_back(folder, state, size)

    bar = tqdm(desc='tokens', initial=done, total=expected_tokens, unit='', unit_scale=True, disable=None)
    for some in encoded(files, state, spec, column, processes):
        new = {}
        for f, n, ids in some:
            split = 'val' if random.Random(f'{seed} {f} {n}').random() < val_fraction else 'train'
            shards = state['shards'][split]
            if not shards or shards[-1][1] >= shard_tokens:
                shards.append([f'{split}_{len(shards):05d}.bin', 0, 0])
            shard = shards[-1]
            content = ids.tobytes()
            new.setdefault(shard[0], []).append(content)
            shard[1] += len(ids)
            shard[2] = zlib.crc32(content, shard[2])
            bar.update(len(ids))
        state['documents'] += len(some)
        state['next'] = [f, n + 1]
        for name, contents in new.items():
            append(os.path.join(folder, name), contents)
        write_file(progress, json.dumps(state))
    bar.close()

    for split, shards in state['shards'].items():
        if not shards:
            raise UserError(f'{folder}: no document fell to {split}: the corpus is small, change val_fraction')
    shards = {split: [name for name, *_ in shards] for split, shards in state['shards'].items()}
    counts = {split + '_tokens': sum(tokens for _, tokens, _ in shards)
              for split, shards in state['shards'].items()}
    crc32 = {name: crc for shards in state['shards'].values() for name, _, crc in shards}
    write_file(os.path.join(folder, 'meta.json'), json.dumps({
        'kind': 'text', 'tokenizer': spec, 'vocab_size': tokenizer.vocab_size, 'dtype': dtype, 'source': files[0],
        'documents': state['documents'], 'val_fraction': val_fraction, 'seed': seed, **counts, 'shards': shards,
        'crc32': {'tokenizer': tokenizer_crc32({'tokenizer': spec}), **crc32}}, indent=1))
    os.remove(progress)
    print(f'{folder}: {state["documents"]:,} documents, {counts["train_tokens"]:,} training and '
          f'{counts["val_tokens"]:,} validation tokens in {len(crc32)} shards')


def append(path, contents):
    try:
        with open(path, 'ab') as f:
            f.writelines(contents)
            f.flush()
            os.fsync(f.fileno())
    except OSError as e:
        raise UserError(f'cannot write {path}: {e.strerror}; the same command goes on from here') from e


def check_disk(folder, files, expected_tokens, done, size):
    """Raises UserError where the disk is too small for what is still to be written, as far as that can be told."""
    if expected_tokens is None:
        local = sum(os.path.getsize(file) * (3 if file.endswith(('.gz', '.parquet')) else 1) for file in files)
        expected_tokens = local / BYTES_PER_TOKEN
    need_bytes = (expected_tokens - done) * size
    free = shutil.disk_usage(folder).free
    if need_bytes > free:
        raise UserError(f'{folder}: about {need_bytes / 1e6:,.0f} MB will be written, but the disk has '
                        f'{free / 1e6:,.0f} MB free')


def cut_back(folder, state, size):
    """Files as long as progress.json says: what a crash left behind it is written again."""
    known = {name: tokens * size for shards in state['shards'].values() for name, tokens, _ in shards}
    for path in glob(os.path.join(escape(folder), '*_[0-9][0-9][0-9][0-9][0-9].bin')):
        if os.path.basename(path) not in known:
            os.remove(path)
    for name, length in known.items():
        path = os.path.join(folder, name)
        if not os.path.isfile(path) or os.path.getsize(path) < length:
            raise UserError(f'{path} is shorter than progress.json says: delete progress.json to begin anew')
        os.truncate(path, length)


def check_not_prepared(folder):
    if os.path.exists(os.path.join(folder, 'meta.json')):
        raise UserError(f'{folder}/meta.json is there: the corpus is prepared; delete it to prepare it anew')


def prepare(script, argv, pattern, tokens):
    """main of a prepare.py: the corpus whose files on the hub fit a pattern, of about so many GPT-2 tokens."""
    settings = config.load(__file__, argv)[0]
    check_range(settings, 'processes seed', 0)
    check_range(settings, 'val_fraction', 0, 1)
    check_range(settings, 'shard_tokens')
    folder = os.path.dirname(os.path.abspath(script))
    path, name = settings.pop('input'), settings.pop('tokenizer')
    settings['processes'] = settings['processes'] or os.cpu_count()
    spec = {'kind': 'gpt2'}
    if name != 'gpt2':
        from config.checkpoint import download  # the files of a tokenizer are those of a model
        from data.bpe import published_spec
        source = name if os.path.isdir(name) else download(name, ['*.json'])
        c = read_json(os.path.join(source, 'config.json'))
        c.update((name, value) for name, value in c.get('text_config', {}).items() if value is not None)
        spec = published_spec(source, c.get('eos_token_id'), c.get('bos_token_id'))  # as a run reads it
    files = local_files(path) if path else remote_files(pattern)
    check_not_prepared(folder)
    write_corpus(folder, files, spec, None if path else tokens, **settings)
