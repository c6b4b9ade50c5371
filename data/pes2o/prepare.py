"""peS2o (Soldaini and Lo, 2023), scientific papers, version 2: python data/pes2o/prepare.py

Streams it from the Hugging Face hub, tokenises it and writes about 84 GB; --input=DIR reads local files instead.
After an interruption the same command goes on. The settings are those of data/corpus.py.
"""
import os
import sys

FOLDER = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.normpath(FOLDER + '/../..'))  # the repository, for running this file by itself
import config
from data import corpus

FILES = 'datasets/allenai/peS2o/data/v2/train-*.json.gz'
TOKENS = 42e9  # about, of GPT-2's tokenizer


def main(argv):
    corpus.prepare(__file__, argv, FILES, TOKENS)


if __name__ == '__main__':
    config.launch(main)
