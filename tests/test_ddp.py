"""Several processes compute what one would, and one that fails ends them all."""
import json
import os
import random
import socket
import subprocess
import sys

import pytest
import torch

import train
from config.checkpoint import load_checkpoint
from test_rim import write_records
from test_train import METHOD_SETTINGS, read_log
from data.text import TextBatches

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def free_port():
    """A port below those that the system hands out, so that it is still free when the run gets to it."""
    while True:
        port = random.SystemRandom().randint(20000, 30000)
        with socket.socket() as s:
            if s.connect_ex(('localhost', port)):
                return port


def torchrun(processes, script, *arguments, timeout=300):
    """(exit status, output). A run that hangs fails the test, its processes are killed."""
    command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={processes}', script, *arguments]
    started = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                               env={**os.environ, 'OMP_NUM_THREADS': '1'})
    try:
        output, _ = started.communicate(timeout=timeout)
        return started.returncode, output
    finally:
        if started.poll() is None:
            started.terminate()  # torchrun then ends its processes, by force after half a minute
            started.wait(60)


@pytest.fixture
def arguments(tmp_path, dataset):
    """arguments(out, **settings): the command line of a tiny run."""
    def arguments(out, **settings):
        tiny = dict(dataset=dataset, device='cpu', n_layer=3, n_head=2, n_embd=16, block_size=16, batch_size=2, grad_accum=6,
                    max_iters=10, eval_interval=5, eval_rows=9, log_interval=1, dropout=0.1, threads=1, out_dir=str(tmp_path / out))
        return [f'--{name}={value}' for name, value in {**tiny, **settings}.items()]
    return arguments


def test_processes_compute_what_one_would(arguments, tmp_path):
    """2 and 3 processes against one, for every method, dropout included, on 3 with the optimizer sharded, and a resume
    on another number of processes. Weights agree to 1e-6, losses to 1e-5: rounding."""
    runs = {**{s['method']: s for s in METHOD_SETTINGS},
            'rim': dict(method='rim', dataset=write_records(tmp_path / 'records'), block_size=48, n_blocks=2, max_iters=6,
                        stage2_iters=4)}  # both of its stages
    for name, settings in runs.items():
        train.main(arguments(f'{name}1', **settings))
    for processes in (2, 3):
        jobs = [(arguments(f'{name}{processes}', **settings, shard_optimizer=processes == 3), free_port())
                for name, settings in runs.items()]
        if processes == 3:  # go on from the first half of a run on one process
            train.main(arguments('resumed', method='gpt', max_iters=5))
            jobs.append((arguments('resumed', method='gpt', max_iters=10, init_from='resume', shard_optimizer=True), free_port()))
        (tmp_path / 'jobs.json').write_text(json.dumps(jobs), encoding='utf-8')
        status, output = torchrun(processes, 'tests/ddp_driver.py', str(tmp_path / 'jobs.json'))
        assert status == 0, output
        for name in runs:
            one, many = (load_checkpoint(str(tmp_path / f'{name}{n}' / 'ckpt.pt')) for n in (1, processes))
            for key, weight in one['model'].items():
                assert (weight - many['model'][key]).abs().max() < 1e-6, (name, key)
            for mine, theirs in zip(one['optimizer']['state'].values(), many['optimizer']['state'].values(), strict=True):
                assert all(torch.allclose(mine[k], theirs[k], atol=1e-6) for k in mine)
            logs = [read_log(tmp_path / f'{name}{n}') for n in (1, processes)]
            for a, b in zip(*logs, strict=True):  # each step once: only one process writes
                key = 'val_loss' if 'val_loss' in a else 'train_loss'
                assert a['iter'] == b['iter'] and a[key] == pytest.approx(b[key], abs=1e-5)
    resumed = load_checkpoint(str(tmp_path / 'resumed' / 'ckpt.pt'))
    assert resumed['step'] == 10 and resumed['optimizer']['state'][0]['step'] == 10


def test_what_goes_wrong_in_one_process_ends_all(arguments, tmp_path):
    status, output = torchrun(2, 'train.py', *arguments('odd', grad_accum=3))
    assert status == 1 and output.count('grad_accum = 3 micro-batches cannot be shared out over 2 processes') == 1
    # preparing data takes longer than the processes wait for each other in a step
    driver = tmp_path / 'fails.py'
    driver.write_text(f'''
import datetime, functools, os, sys, time
sys.path.insert(0, {ROOT!r})
import config, data, train
import torch.distributed as dist
draw = TextBatches.train_batch
def fail_on_rank_1(self, *args):
    if 3 in args and os.environ['RANK'] == '1':
        raise config.UserError('train.bin vanished on this rank')
    return draw(self, *args)
TextBatches.train_batch = fail_on_rank_1
dist.init_process_group = functools.partial(dist.init_process_group, timeout=datetime.timedelta(seconds=6))
data.ensure_prepared = lambda *_, **__: time.sleep(8)
config.launch(train.main)
''', encoding='utf-8')
    status, output = torchrun(2, str(driver), *arguments('fails'))
    assert status == 1 and 'error: train.bin vanished on this rank' in output and 'step 0: val loss' in output
    assert 'connection to another process of this run broke' in output and '[rank0]: Traceback' not in output
