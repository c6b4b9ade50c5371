"""What the tests share: small data sets, a tiny run, several processes."""
import contextlib
import functools
import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
import train
from config.checkpoint import load_checkpoint
from data.records import write_record_dataset
from data.text import write_text_dataset

METHOD_SETTINGS = [dict(method='gpt'), dict(method='thoughtbubbles', fork_layers='1,2'), dict(method='cyb', W=2)]
ROWS = [{'question': f'{a}+{b}?',
         'steps': [f'{a}+{b}={a + b}'] + [f'{a + b + i}+1={a + b + i + 1}' for i in range(n)],
         'answer': str(a + b + n)} for a in range(1, 6) for b in range(1, 5) for n in range(3)]
CHARACTERS = sorted('0123456789+=?\n')  # of ROWS
TEXT = ''.join(f'{i} plus {i % 7} is {i + i % 7}.\n' for i in range(200))[:3000]  # 18 characters


@pytest.fixture(autouse=True)
def reproducible(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(os, 'fsync', os.fstat)  # no test cuts the power, and waiting for the disk takes long


# --- data sets, each in a folder of its own, whose path is returned ---

def write_text(folder, text='abc\n' * 200):
    write_text_dataset(str(folder), text, {'kind': 'char', 'chars': sorted(set(text))}, 'a test')
    return str(folder)


def write_records(folder):
    """The rows above: 50 for training, 10 for validation and for testing."""
    rows = [tuple(row.values()) for row in ROWS]
    write_record_dataset(str(folder), {'train': rows[10:], 'val': rows[:10], 'test': rows[:10]},
                         {'kind': 'char', 'chars': CHARACTERS}, 'a test')
    return str(folder)


@pytest.fixture
def dataset(tmp_path):
    return write_text(tmp_path / 'text', TEXT)


# --- a run ---

def arguments(**settings):
    """The command line of a tiny run."""
    tiny = dict(device='cpu', n_layer=3, n_head=2, n_embd=16, block_size=16, batch_size=4, max_iters=4,
                warmup_iters=2, eval_interval=2, eval_rows=8, log_interval=1)
    return [f'--{name}={value}' for name, value in {**tiny, **settings}.items()]


@contextlib.contextmanager
def interrupted(step, number=signal.SIGTERM):
    """A signal arrives when the loop is in that step."""
    rate = train.learning_rate_at

    def learning_rate_at(stage, it):
        if it == step:
            signal.raise_signal(number)
        return rate(stage, it)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, 'learning_rate_at', learning_rate_at)
        yield


@contextlib.contextmanager
def without_reports():
    """Finished runs make no report, which takes longer than a tiny run. Gives a MonkeyPatch for more."""
    with pytest.MonkeyPatch.context() as patch:
        for _, model_class, _ in train.METHODS.values():
            patch.setattr(model_class, 'report', lambda self, batches: '')
        yield patch


@pytest.fixture
def run(tmp_path, dataset):
    """run(out, **settings) trains a tiny model in this process and returns its checkpoint; report=True: with the
    report of a finished run."""
    def run(out='run', report=False, **settings):
        with contextlib.nullcontext() if report else without_reports():
            train.main(arguments(**{'dataset': dataset, 'out_dir': tmp_path / out, **settings}))
        return load_checkpoint(str(tmp_path / out / 'ckpt.pt'))
    return run


def read_log(folder):
    with open(os.path.join(folder, 'log.jsonl'), encoding='utf-8') as f:
        return [json.loads(line) for line in f]  # a broken line would raise


# --- other processes ---

def apart(output, function, *arguments):
    """Start function(*arguments) in a process of its own, which adds what it prints to the file `output`. It is
    forked from a process that has the modules already, which take seconds."""
    context = multiprocessing.get_context('forkserver')
    context.set_forkserver_preload(['__main__', 'conftest', 'torch._dynamo', 'torch.distributed.optim'])
    process = context.Process(target=printing_to, args=(output, function, *arguments), daemon=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('PYTHONPATH', os.path.join(ROOT, 'tests'))  # there that process finds conftest
        process.start()
    return process


def printing_to(output, function, *arguments):
    for stream in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    function(*arguments)


def run_train(argv):
    sys.argv = ['train.py', *argv]
    runpy.run_path(os.path.join(ROOT, 'train.py'), run_name='__main__')


def torchrun(processes, script, *arguments, timeout=300):
    """(exit status, output). A run that hangs fails the test, its processes are killed."""
    command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={processes}',
               script, *arguments]
    started = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                               env={**os.environ, 'OMP_NUM_THREADS': '1'})
    try:
        output, _ = started.communicate(timeout=timeout)
        return started.returncode, output
    finally:
        if started.poll() is None:
            started.terminate()  # torchrun then ends its processes, by force after half a minute
            started.wait(60)


def train_as_one_of(port, number, rank, world, command, report, killed_in):
    """One of the processes of a run, which meet in a store under its number; what torchrun would set is set."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    store = dist.PrefixStore(f'run {number}', dist.TCPStore('localhost', port, is_master=False))
    dist.init_process_group = functools.partial(dist.init_process_group, store=store, rank=rank, world_size=world)
    with interrupted(killed_in, signal.SIGKILL), contextlib.nullcontext() if report else without_reports():
        train.main(command)


def train_on(processes, folder, jobs, timeout=300):
    """Train on several processes, one run after the other, each in at most `timeout` seconds. jobs: (command line,
    more) each; more may have report, whether the finished run makes its report, and killed_in, the step in which
    all of its processes are killed. Returns what they print. A run that fails or hangs fails the test, and its
    processes are killed."""
    store, output = dist.TCPStore('localhost', 0, is_master=True, wait_for_workers=False), folder / 'output'
    for number, (command, more) in enumerate(jobs):
        killed_in = more.get('killed_in')
        expected = 0 if killed_in is None else -signal.SIGKILL
        running = [apart(output, train_as_one_of, store.port, number, rank, processes, command,
                         more.get('report', False), killed_in) for rank in range(processes)]
        end = time.monotonic() + timeout
        while {p.exitcode for p in running} - {expected} == {None} and time.monotonic() < end:
            time.sleep(0.01)
        exits = [p.exitcode for p in running]
        for p in running:
            p.kill()
        assert exits == [expected] * processes, f'{" ".join(command)}\n{output.read_text("utf-8")[-4000:]}'
    return output.read_text('utf-8')
