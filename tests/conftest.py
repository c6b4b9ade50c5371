import os
import sys

import pytest
import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import data
import train
from config.checkpoint import load_checkpoint
from data.text import write_text_dataset


@pytest.fixture(autouse=True)
def reproducible():
    torch.manual_seed(0)


@pytest.fixture
def dataset(tmp_path):
    """A prepared data set of 3,000 characters: the path of its folder."""
    folder = tmp_path / 'text'
    folder.mkdir()
    text = ''.join(f'{i} plus {i % 7} is {i + i % 7}.\n' for i in range(200))[:3000]
    write_text_dataset(str(folder), text, {'kind': 'char', 'chars': sorted(set(text))}, 'a test')
    return str(folder)


@pytest.fixture
def run(tmp_path, dataset):
    """run(out, **settings) trains a tiny model, quickly, in this process, and returns its checkpoint."""
    def run(out='run', **settings):
        tiny = dict(dataset=dataset, device='cpu', n_layer=3, n_head=2, n_embd=16, block_size=16, batch_size=4, max_iters=4,
                    warmup_iters=2, eval_interval=2, eval_rows=8, log_interval=1, out_dir=str(tmp_path / out))
        train.main([f'--{name}={value}' for name, value in {**tiny, **settings}.items()])
        return load_checkpoint(str(tmp_path / out / 'ckpt.pt'))
    return run
