"""C4 (1910.10683), its English part: python data/c4/prepare.py

Streams it from the Hugging Face hub, tokenises it and writes about 320 GB; --input=DIR reads local files instead.
After an interruption the same command goes on. The settings are those of data/corpus.py.
"""
import os
import sys

FOLDER = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.normpath(FOLDER + '/../..'))  # the repository, for running this file by itself
import config
from data import corpus

FILES = 'datasets/allenai/c4/en/c4-train.*.json.gz'
TOKENS = 160e9  # about, of GPT-2's tokenizer


def main(argv):
    corpus.prepare(__file__, argv, FILES, TOKENS)


if __name__ == '__main__':
    config.launch(main)
