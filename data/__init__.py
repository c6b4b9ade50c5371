"""Data sets: a folder with meta.json (kind, tokenizer, source, counts) and its files.

data/<name>/prepare.py makes one, and --dataset=path/to/my.txt one of your own text. There are two kinds: text
(text.py) and records (records.py). This file has what they share.
"""
import hashlib
import http.client
import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
import zlib
from contextlib import suppress
from itertools import groupby

from config import UserError
from config.files import write_file
from data.bpe import gpt2_tokens, json_tokens, same_tokens

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
    """Text <-> token ids, of meta.json's 'tokenizer': {'kind': 'char', 'chars': [...]}, {'kind': 'gpt2'}, or a
    published model's {'kind': 'json', 'json': the text of its tokenizer.json, 'begin': [ids before a document],
    'end': the id after one, 'rows': how many ids the model has}. 'special', if there, names tokens that no text
    contains. Their ids follow the text's: `special` is {name: id}. Ids below n_text are text; vocab_size counts
    all. Raises UserError."""

    def __init__(self, spec):
        kinds = {'char': Characters, 'gpt2': gpt2_tokens, 'json': json_tokens}
        if not isinstance(spec, dict) or spec.get('kind') not in kinds:
            raise UserError(f'tokenizer {str(spec)[:60]!r} is unknown: its kind is char, gpt2 or json')
        self.text = kinds[spec['kind']](spec)  # has encode, decode and n
        self.n_text = min(self.text.n, spec.get('rows', self.text.n))  # rows: of a model that lacks the last ones
        self.begin = spec.get('begin', [])  # what a document opens with; a row from inside of one does not
        # what ends one, None if nothing does
        self.end = spec.get('end', getattr(self.text, 'end', None))
        valid = isinstance(self.begin, list) and all(type(i) is int for i in self.begin)
        if not valid or self.begin and not 0 <= min(self.begin) <= max(self.begin) < self.n_text:
            raise UserError(f'the tokenizer is damaged: begin = {self.begin!r}: expected a list of ids')
        bos = spec.get('bos')  # a published model's token of this name, where no document opens with one
        self.bos = bos if type(bos) is int and 0 <= bos < self.n_text else None
        names = distinct_texts('special', spec.get('special', []), 100)
        self.special = {name: self.n_text + i for i, name in enumerate(names)}
        self.vocab_size = self.n_text + len(names)

    def encode(self, text):
        """Ids of a text, never of its special tokens. Raises UserError for characters that the vocabulary
        lacks."""
        return self.text.encode(text)

    def decode(self, ids):
        """Text of token ids; what is not text shows: a special token's name, any other id as <128>, say."""
        names = {i: name for name, i in self.special.items()}
        parts = []
        for is_text, some in groupby(ids, lambda i: 0 <= i < self.n_text):
            parts += [self.text.decode(list(some))] if is_text else [names.get(i, f'<{i}>') for i in some]
        return ''.join(parts)

    def start_text(self):
        """A token's text to begin with: a newline, or the first character where there is none."""
        return '\n' if not isinstance(self.text, Characters) or '\n' in self.text.ids else self.text.chars[0]


class Characters:
    """A token per character."""

    def __init__(self, spec):
        self.chars = distinct_texts('chars', spec.get('chars'), 1)
        self.ids = {ch: i for i, ch in enumerate(self.chars)}
        self.n = len(self.chars)

    def encode(self, text):
        missing = dict.fromkeys(ch for ch in text if ch not in self.ids)  # in order, each once
        if missing:
            raise UserError(f'the tokenizer has no {", ".join(map(repr, missing))}: its {len(self.chars)} '
                            f'characters are {"".join(self.chars)!r}')
        return [self.ids[ch] for ch in text]

    def decode(self, ids):
        return ''.join(self.chars[i] for i in ids)


# --- writing a data set ---

def id_type(vocab_size):
    """The type that token ids are stored as."""
    return 'uint16' if vocab_size <= 2 ** 16 else 'uint32'


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


def download(url):
    """The file at an address, as a temporary one to read bytes from. Raises UserError."""
    print(f'downloading {url}', flush=True)
    try:
        file = tempfile.TemporaryFile()
        with urllib.request.urlopen(url, timeout=60) as response:
            shutil.copyfileobj(response, file)
    except (OSError, http.client.HTTPException) as e:
        raise UserError(f'{url} cannot be read ({e}): give a folder that has the files with --input=DIR') from e
    file.seek(0)
    return file


def download_packages(packages, folder, *options):
    """Fetch Python packages (name==version) into a folder, by pip; they are not installed, and what they need is
    not fetched. Raises UserError."""
    print(f'downloading the packages {", ".join(packages)}', flush=True)
    pip = subprocess.run([sys.executable, '-m', 'pip', 'download', '--quiet', '--no-deps', *options, '--dest',
                          folder, *packages], capture_output=True, text=True)
    if pip.returncode:
        reason = [f'status {pip.returncode}', *pip.stderr.split('\n')]
        reason = [line for line in reason if line.strip()][-1]
        raise UserError(f'pip could not download packages ({reason}): give a folder that has them with '
                        '--input=DIR')


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
    names = [d for d in sorted(os.listdir(ROOT)) if d != 'zeroshot'  # tasks, no data set
             and any(os.path.exists(os.path.join(ROOT, d, file)) for file in ('prepare.py', 'meta.json'))]
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


def read_with(name, spec, given=True):
    """(data set, its meta) of a prepared data set as a model reads it that has a tokenizer, `spec`, or None.
    Records are text, and are encoded when they are read. Plain text is encoded anew, into a folder in its own;
    this needs the text itself. Raises UserError. given: as in ensure_prepared."""
    meta = read_meta(name)
    if spec is None:
        return name, meta
    special = {'special': meta['tokenizer']['special']} if meta['kind'] == 'records' else {}
    spec = {**{key: value for key, value in spec.items() if key != 'special'}, **special}
    if spec == {key: value for key, value in meta['tokenizer'].items() if special or key != 'special'}:
        return name, meta
    ours, theirs = Tokenizer(meta['tokenizer']), Tokenizer(spec)
    if meta['kind'] == 'text' and ours.end == theirs.end and same_tokens(ours.text, theirs.text):
        return name, meta
    if meta['kind'] == 'records':
        return name, {**meta, 'tokenizer': spec, 'vocab_size': Tokenizer(spec).vocab_size}
    folder = dataset_folder(name)
    target = os.path.join(folder, f'tokens_{tokenizer_crc32({"tokenizer": spec}):08x}')
    try:
        known = read_meta(target)
        if known.get('sha256') == meta.get('sha256') and known['tokenizer'] == spec:
            return target, known
    except UserError:
        pass  # not there, or damaged: it is made now
    source = folder.removesuffix('.data') if folder.endswith('.txt.data') else os.path.join(folder, 'input.txt')
    if meta.get('shards') and not os.path.isfile(source):
        raise UserError(f'dataset = {name!r} was encoded with another tokenizer than the model has: prepare it '
                        'anew; --tokenizer names the model to its prepare.py')
    if not given or not os.path.isfile(source):
        raise UserError(f'dataset = {name!r} was prepared anew since, or with another tokenizer than the model '
                        'has: ' + (f'{source}, the text to encode with that, is not there' if given else
                           f'add --dataset={name} to encode its text with that'))
    text = read_text(source)
    if meta.get('sha256') != sha256(text):
        raise UserError(f'{source} has changed since dataset = {name!r} was prepared: prepare it, and start, anew')
    print(f'encoding {source} with the tokenizer of the model', flush=True)
    from data.text import write_text_dataset  # which builds on this file
    write_text_dataset(target, text, spec, os.path.basename(source))
    return target, read_meta(target)


def check_crc32(path, content, meta):
    """Raises UserError if a content (bytes or array) is not what meta.json was written for. One made by hand
    need not have checksums."""
    crc32 = meta.get('crc32', {}).get(os.path.basename(path))
    if crc32 is not None and zlib.crc32(content) != crc32:
        raise UserError(f'{path} is damaged or was changed (its checksum is not that in meta.json): {ANEW}, or '
                        'delete "crc32" from meta.json to use it as it is')
