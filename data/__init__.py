"""Data sets: a folder with meta.json (kind, tokenizer, source, counts) and its files.

data/<name>/prepare.py makes one, and --dataset=path/to/my.txt one of your own text. There are two kinds: text
(text.py) and records (records.py). This file has what they share.
"""
import hashlib
import json
import os
import subprocess
import sys
import zlib
from contextlib import suppress

from config import UserError
from config.files import write_file

ROOT = os.path.dirname(os.path.abspath(__file__))
UNIT = {'text': 'nats per token', 'records': 'nats per record'}  # of a loss; a record's is summed over its tokens
ANEW = 'delete meta.json there and prepare the data set again'


# --- tokenizers ---

def distinct_texts(name, texts, longest):
    valid = isinstance(texts, list) and all(isinstance(text, str) and 0 < len(text) <= longest for text in texts)
    if not valid or len(set(texts)) < len(texts):
        raise UserError(f'the tokenizer is damaged: {name} = {str(texts)[:60]!r}: expected a list of distinct '
                        f'texts of at most {longest} characters')
    return texts


class Tokenizer:
    """Text <-> token ids, of meta.json's 'tokenizer': {'kind': 'char', 'chars': [...]} or {'kind': 'gpt2'}, and
    'special', if there, the names of tokens that no text contains. Their ids follow the text's: `special` is
    {name: id}. Ids below n_text are text; vocab_size counts all. Raises UserError."""

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
                raise UserError(f'the gpt2 vocabulary could not be loaded ({type(e).__name__}): tiktoken fetches '
                                'it once; offline, set TIKTOKEN_CACHE_DIR to a folder that has it') from e
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
        """Text of token ids; what is not text shows: a special token's name, any other id as <128>, say."""
        names = {i: name for name, i in self.special.items()}
        parts = [None if 0 <= i < self.n_text else names.get(i, f'<{i}>') for i in ids]
        if self.kind == 'char':
            return ''.join(part or self.chars[i] for i, part in zip(ids, parts))
        # bytes, since a character may be spread over several tokens
        return b''.join(part.encode() if part else self.bpe.decode_single_token_bytes(i)
                        for i, part in zip(ids, parts)).decode('utf-8', errors='replace')

    def start_text(self):
        """A token's text to begin with: a newline, or the first character where there is none."""
        return '\n' if self.kind == 'gpt2' or '\n' in self.ids else self.chars[0]


# --- writing a data set ---

def tokenizer_crc32(meta):
    return zlib.crc32(json.dumps(meta['tokenizer']).encode())


def write_dataset(folder, meta, contents):
    """Write files {name: bytes} and, last, meta.json with their checksums: a folder with meta.json is complete."""
    crc32 = {name: zlib.crc32(content) for name, content in contents.items()}
    meta_json = json.dumps({**meta, 'crc32': {'tokenizer': tokenizer_crc32(meta), **crc32}}, indent=1)
    path = os.path.join(folder, 'meta.json')
    try:  # a meta.json of other files goes; one of the same files may be in use by another run
        os.makedirs(folder, exist_ok=True)
        with suppress(FileNotFoundError):  # also where another run removes it at the same time
            with open(path, encoding='utf-8', errors='replace') as f:
                same = f.read() == meta_json
            if not same:
                os.remove(path)
    except OSError as e:
        raise UserError(f'cannot write {folder}: {e.strerror}') from e
    for name, content in contents.items():
        write_file(os.path.join(folder, name), content)
    write_file(path, meta_json)


def read_text(path):
    """The text of a user's file, in UTF-8 with or without a mark before it. Raises UserError."""
    try:
        with open(path, encoding='utf-8-sig') as f:
            return f.read()
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f'{path} is not there or is not UTF-8 text ({e})') from e


def is_main():
    """Whether this is the first of torchrun's processes, or the only one."""
    return os.environ.get('RANK', '0') == '0'


def sha256(text):
    return hashlib.sha256(text.encode('utf-8')).hexdigest()


# --- reading a data set ---

def is_path(name):
    return '/' in name or os.sep in name or name.endswith('.txt')


def dataset_folder(name):
    """The folder of a data set: of a bare name in data/, of a text beside it with .data added, else the path."""
    if not is_path(name):
        return os.path.join(ROOT, name)
    return name if os.path.isdir(name) else name + '.data'


def ensure_prepared(name, given=True):
    """Make a data set that has no meta.json, or whose text has changed: the text of a path, or a small one of
    data/ by its prepare.py. Raises UserError. given: whether the user gave the name. One out of a checkpoint
    may be anybody's: for it nothing is run or written. A prepare.py behind a path is never run."""
    names = [d for d in sorted(os.listdir(ROOT)) if any(os.path.exists(os.path.join(ROOT, d, file))
                                                        for file in ('prepare.py', 'meta.json'))]
    if not isinstance(name, str) or not (is_path(name) or name in names):
        raise UserError(f'dataset = {name!r} is not in data/: there are {", ".join(names)}; your own text is '
                        'given by its path, such as ./my.txt')

    # what it is made of, and whether this may be done here
    folder = dataset_folder(name)
    script = os.path.join(folder, 'prepare.py')
    is_text = folder == name + '.data'
    source = name if is_text else os.path.join(folder, 'input.txt')
    may_make = given and is_text
    if given and name in names and os.path.exists(script):
        with open(script, encoding='utf-8', errors='replace') as f:
            may_make = 'SMALL = True' in f.read()

    # whether that is needed
    if os.path.exists(os.path.join(folder, 'meta.json')):
        known = read_meta(name).get('sha256')
        if not known or not os.path.isfile(source) or sha256(read_text(source)) == known:
            return
        print(f'{source} is not the text that {folder} was made of: '
              + ('it is prepared now' if may_make else 'the earlier text is used'), flush=True)
        if not may_make:
            return
    elif is_text and not os.path.isfile(source):
        raise UserError(f'dataset = {name!r}: there is no text and no folder of that name')
    elif not may_make:
        hint = 'behind a path no prepare.py is run; run it yourself if you trust it, or give the path of a text'
        if is_text:
            hint = f'add --dataset={name}'
        elif name in names:
            hint = f'run python {script} first'
        raise UserError(f'dataset = {name!r} is not prepared: {hint}')

    # make it
    if is_text:
        from data.text import write_text_dataset  # which builds on this file
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
    if 'crc32' in meta and meta['crc32'].get('tokenizer') != tokenizer_crc32(meta):
        raise UserError(f'{path} is damaged (checksum of the tokenizer): {ANEW}')
    if meta.get('vocab_size') != size:
        raise UserError(f'{path}: vocab_size = {meta.get("vocab_size")!r}, but its tokenizer has {size}: {ANEW}')
    return meta


def check_crc32(path, content, meta):
    """Raises UserError if a content (bytes or array) is not what meta.json was written for. One made by hand
    need not have checksums."""
    crc32 = meta.get('crc32', {}).get(os.path.basename(path))
    if crc32 is not None and zlib.crc32(content) != crc32:
        raise UserError(f'{path} is damaged or was changed (its checksum is not that in meta.json): {ANEW}, or '
                        'delete "crc32" from meta.json to use it as it is')
