"""Interruption at any moment, damaged and hostile files: nothing is lost, nothing wrong is loaded in silence.

The slow ones run in a short form with a fixed seed; LONG_TESTS=1 runs the long form.
"""
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
import zipfile

import pytest
import torch

import data
import train
from config import UserError, machine
from config.checkpoint import load_checkpoint, save_checkpoint
from data import records
from model import GPTConfig
from conftest import METHOD_SETTINGS, ROOT, apart, arguments, read_log, run_train, write_records
from data.text import TextBatches

LONG = bool(os.environ.get('LONG_TESTS'))


@pytest.fixture
def start(tmp_path, dataset):
    """start(**settings): a process with a tiny run whose checkpoints are large enough to be hit while written;
    what it prints is in tmp_path/output."""
    def start(**settings):
        large = dict(dataset=dataset, n_layer=2, n_embd=128, batch_size=2, max_iters=100_000, eval_rows=2,
                     threads=1,
                     out_dir=tmp_path / 'run', init_from='auto')
        return apart(tmp_path / 'output', run_train, arguments(**{**large, **settings}))
    return start


def wait_for(path, seconds=60):
    end = time.monotonic() + seconds
    while not os.path.exists(path):
        assert time.monotonic() < end, f'{path} did not appear'
        time.sleep(0.01)


def test_kill_at_any_moment_leaves_a_loadable_checkpoint(start, tmp_path):
    """The run saves at every other step, so most kills hit a save or stand right beside one."""
    dice, path, reached = random.Random(1), str(tmp_path / 'run' / 'ckpt.pt'), -1
    for _ in range(200 if LONG else 4):
        run = start()
        wait_for(path)
        for _ in range(2):  # a resumed run first saves the step where it begins: a slow machine gets no further
            before = os.stat(path).st_mtime_ns
            while os.stat(path).st_mtime_ns == before and run.is_alive():
                time.sleep(0.005)
        time.sleep(dice.random() * 0.5)
        run.kill()
        run.join()
        output = (tmp_path / 'output').read_text()
        checkpoint = load_checkpoint(path)
        train.build_model(checkpoint)
        assert checkpoint['step'] >= reached, output  # nothing that was saved is lost
        reached = checkpoint['step']
    assert reached > 2
    # the log goes on over all these kills without a hole and without an entry twice
    finished = start(max_iters=reached + 5)
    finished.join(60)
    assert finished.exitcode == 0, (tmp_path / 'output').read_text()
    entries = [(e['iter'], 'val_loss' in e) for e in read_log(tmp_path / 'run')]
    assert entries == sorted(set(entries)) and {i for i, val in entries if not val} == set(range(1, reached + 6))
    assert {i for i, val in entries if val} == {*range(0, reached + 6, 2), reached + 5}


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_step_and_saves(start, tmp_path, number):
    run = start(eval_interval=10 ** 6)
    wait_for(tmp_path / 'run' / 'best.pt')
    time.sleep(0.3)
    os.kill(run.pid, number)
    run.join(60)
    output = (tmp_path / 'output').read_text()
    assert run.exitcode == 0 and '--init_from=resume' in output
    step = int(re.search(r'after step (\d+)', output)[1])
    assert load_checkpoint(str(tmp_path / 'run' / 'ckpt.pt'))['step'] == step > 0


def test_one_run_a_folder(start, run, tmp_path, monkeypatch, capsys):
    first = start()
    wait_for(tmp_path / 'run' / 'log.jsonl')
    with pytest.raises(UserError, match='another run is writing there'):
        run(overwrite=True)
    first.kill()  # however a run ends, the folder is free again
    first.join()
    (tmp_path / 'run' / 'ckpt.pt.123.tmp').touch()  # it was killed while it wrote
    run(overwrite=True)
    assert sorted(os.listdir(tmp_path / 'run')) == ['.lock', 'best.pt', 'ckpt.pt', 'log.jsonl']

    def no_locks(*_):
        raise OSError(95, 'Operation not supported')
    monkeypatch.setattr('fcntl.lockf', no_locks)
    capsys.readouterr()
    run(overwrite=True)
    assert 'no locks on this system' in capsys.readouterr().out


def test_a_symbolic_link_is_written_through(run, tmp_path):
    run()
    path = (tmp_path / 'run' / 'ckpt.pt').rename(tmp_path / 'elsewhere.pt')
    (tmp_path / 'run' / 'ckpt.pt').symlink_to(path)
    run(init_from='resume', max_iters=6)
    assert (tmp_path / 'run' / 'ckpt.pt').is_symlink() and load_checkpoint(str(path))['step'] == 6


def test_a_second_ctrl_c_stops_at_once(run, monkeypatch):
    draw = TextBatches.train_batch

    def twice(self, stage, it, rows):
        if it == 2:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return draw(self, stage, it, rows)
    monkeypatch.setattr(TextBatches, 'train_batch', twice)
    with pytest.raises(KeyboardInterrupt):
        run()


def test_a_full_disk_keeps_the_old_file(run, tmp_path, monkeypatch):
    run(max_iters=2)
    path = tmp_path / 'run' / 'ckpt.pt'
    before = path.read_bytes()

    def no_space(*_):
        raise OSError(28, 'No space left on device')
    monkeypatch.setattr(os, 'fsync', no_space)
    with pytest.raises(UserError, match='cannot write .*No space left'):
        save_checkpoint(str(path), {'new': 1})
    assert path.read_bytes() == before
    assert not list(path.parent.glob('*.tmp'))  # it would keep the disk full
    # a folder that is not there stands for one that is read-only
    with pytest.raises(UserError, match='cannot write'):
        save_checkpoint(str(tmp_path / 'nowhere' / 'ckpt.pt'), {})


def test_a_disk_that_fills_up_while_writing(run, tmp_path):
    """The system itself refuses to write more than 5,000 bytes to a file."""
    resource = pytest.importorskip('resource')  # not on Windows
    whole = run(max_iters=2)
    path = tmp_path / 'run' / 'ckpt.pt'
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
    try:
        with pytest.raises(UserError, match='cannot write .*ckpt.pt.* the file of the last save is untouched'):
            save_checkpoint(str(path), whole)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before and not list(path.parent.glob('*.tmp'))


def test_a_checkpoint_cut_anywhere_is_refused(run, tmp_path):
    run(max_iters=1)
    content, path = (tmp_path / 'run' / 'ckpt.pt').read_bytes(), tmp_path / 'cut.pt'
    for length in {*range(0, len(content), 1 if LONG else 499), *range(len(content) - 150, len(content))}:
        path.write_bytes(content[:length])
        with pytest.raises(UserError, match='cut.pt is not a checkpoint'):
            load_checkpoint(str(path))


@pytest.mark.parametrize('settings', METHOD_SETTINGS, ids=lambda s: s['method'])
def test_what_may_change_on_resume(run, capsys, settings):
    run(**settings, max_iters=4)
    again = dict(settings, init_from='resume')
    capsys.readouterr()
    assert run(**again, max_iters=6, eval_interval=3, batch_size=2, grad_accum=2)['step'] == 6
    said = capsys.readouterr().out
    for part in ('max_iters = 6 (was 4)', 'eval_interval = 3 (was 2)', 'batch_size = 2 (was 4)',
                 'grad_accum = 2 (was 1)'):
        assert part in said


def test_resume_needs_only_the_folder(run, tmp_path):
    run(method='thoughtbubbles', seed=9, max_iters=4)
    train.main(['--init_from=resume', f'--out_dir={tmp_path / "run"}', '--max_iters=5'])
    checkpoint = load_checkpoint(str(tmp_path / 'run' / 'ckpt.pt'))
    assert checkpoint['step'] == 5 and checkpoint['settings']['seed'] == 9
    assert checkpoint['method'] == 'thoughtbubbles'


def test_the_best_loss_never_gets_worse(run, tmp_path, monkeypatch):
    # validation losses by step; where a run goes on it evaluates once more
    said = iter([3.0, 1.5, 2.0] + [2.0, 2.5] + [2.5, 1.0, 1.25])
    monkeypatch.setattr(train, 'evaluate', lambda *_: next(said))
    run(max_iters=2, eval_interval=1)
    for its, best_step, best_loss in [(3, 1, 1.5), (5, 4, 1.0)]:
        last = run(init_from='resume', max_iters=its, eval_interval=1)
        best = load_checkpoint(str(tmp_path / 'run' / 'best.pt'))
        assert (best['step'], best['best_val_loss'], last['best_val_loss']) == (best_step, best_loss, best_loss)
        assert last['step'] == its and not torch.equal(best['model']['wte.weight'], last['model']['wte.weight'])
    assert [e['val_loss'] for e in read_log(tmp_path / 'run') if 'val_loss' in e] == [3.0, 1.5, 2.0, 2.5, 1.0,
                                                                                      1.25]


def test_half_precision_overflow_is_no_divergence(run, tmp_path, monkeypatch):
    """float16 on the CPU goes through the same scaler: it skips the step, lowers the scale and the run goes on."""
    backward, calls = torch.Tensor.backward, []

    def overflow_once(self, *args, **kwargs):
        calls.append(1)
        return backward(self * math.inf if len(calls) == 2 else self, *args, **kwargs)
    monkeypatch.setattr(torch.Tensor, 'backward', overflow_once)
    checkpoint = run(dtype='float16', max_iters=4)
    assert checkpoint['step'] == 4 and checkpoint['scaler']['scale'] == 2.0 ** 15  # halved once from 2^16
    assert all(weight.isfinite().all() for weight in checkpoint['model'].values())
    assert max(int(s['step']) for s in checkpoint['optimizer']['state'].values()) == 3  # one step was skipped


# --- damaged files ---

def test_names_of_a_compiled_or_wrapped_model_are_understood(run, tmp_path):
    whole = run()
    for prefix in ('_orig_mod.', 'module.', 'module._orig_mod.'):
        renamed = {**whole, 'model': {prefix + name: weight for name, weight in whole['model'].items()}}
        torch.save(renamed, tmp_path / 'wrapped.pt')
        model = train.build_model(load_checkpoint(str(tmp_path / 'wrapped.pt')))
        assert torch.equal(model.wte.weight, whole['model']['wte.weight'])


def test_a_run_killed_before_its_first_checkpoint_starts_over(run, tmp_path):
    (tmp_path / 'run').mkdir()
    for name in ('log.jsonl', 'ckpt.pt.tmp'):
        (tmp_path / 'run' / name).touch()
    assert run(init_from='auto')['step'] == 4


def test_weights_beyond_measure_are_not_called_a_model(run, tmp_path):
    with pytest.raises(UserError, match='val loss .*diverged'):
        run(learning_rate=1e30, warmup_iters=0, eval_interval=1, max_iters=2)
    losses = [e['val_loss'] for e in read_log(tmp_path / 'run') if 'val_loss' in e]
    assert all(loss is not None for loss in losses)


def test_a_best_loss_that_the_checkpoint_does_not_know_is_kept(run, tmp_path):
    """Killed right after the evaluation of step 4: best.pt is newer than what ckpt.pt knows."""
    run(max_iters=4)
    best = load_checkpoint(str(tmp_path / 'run' / 'best.pt'))
    # the rest of the run cannot beat it
    save_checkpoint(str(tmp_path / 'run' / 'best.pt'), {**best, 'best_val_loss': 0.5})
    resumed = run(max_iters=5, init_from='resume', eval_interval=100)
    assert resumed['best_val_loss'] == 0.5
    assert load_checkpoint(str(tmp_path / 'run' / 'best.pt'))['step'] == best['step']


def test_a_stage_leaves_its_last_and_its_best_model(run, tmp_path):
    settings = dict(method='rim', dataset=write_records(tmp_path / 'records'), block_size=48, n_blocks=2,
                    stage2_iters=3)
    run(max_iters=3, **settings)
    assert {'stage1.pt', 'stage1_best.pt', 'best.pt'} <= set(os.listdir(tmp_path / 'run'))
    run(max_iters=3, overwrite=True, train_on='sft', **settings)
    assert not {'stage1.pt', 'stage1_best.pt'} & set(os.listdir(tmp_path / 'run'))


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return len(a) == len(b) and all(map(same, a, b)) if isinstance(a, (list, tuple)) else a == b


def damaged(content, dice):
    """A truncation, flipped bytes, a stretch of zeros, or a missing stretch."""
    content, kind = bytearray(content), dice.randrange(4)
    at = dice.randrange(len(content))
    if kind == 0:
        return bytes(content[:at])
    if kind == 1:
        for _ in range(dice.randint(1, 4)):
            content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
    elif kind == 2:
        content[at:at + 64] = bytes(len(content[at:at + 64]))
    else:
        del content[at:at + dice.randint(1, 64)]
    return bytes(content)


def test_fuzzed_checkpoints_load_whole_or_say_one_line(run, tmp_path):
    whole = run(max_iters=1)
    content, dice = (tmp_path / 'run' / 'ckpt.pt').read_bytes(), random.Random(1)
    refused = 0
    for _ in range(3000 if LONG else 150):
        path = tmp_path / 'bad.pt'
        path.write_bytes(damaged(content, dice))
        try:
            checkpoint = load_checkpoint(str(path))
            train.build_model(checkpoint)
        except UserError as e:
            assert '\n' not in str(e) and 'bad.pt' in str(e)
            refused += 1
        else:
            assert same(checkpoint, whole)
    assert refused > 100


def test_fuzzed_pickles_with_right_checksums_never_raise_anything_else(run, tmp_path):
    """As if the damage had come before the checksum: the pickle itself is garbled."""
    run(max_iters=1)
    dice = random.Random(2)
    with zipfile.ZipFile(tmp_path / 'run' / 'ckpt.pt') as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    key = next(name for name in members if name.endswith('data.pkl'))
    for _ in range(3000 if LONG else 150):
        with zipfile.ZipFile(tmp_path / 'bad.pt', 'w') as archive:
            for name, content in members.items():
                archive.writestr(name, damaged(content, dice) if name == key else content)
        try:
            train.build_model(load_checkpoint(str(tmp_path / 'bad.pt')))
        except UserError as e:
            assert '\n' not in str(e)


def each_damage(path, dice):
    """The file is damaged anew at each turn, and whole again in the end."""
    with open(path, 'rb') as f:
        content = f.read()
    for turn in range(1001 if LONG else 61):
        with open(path, 'wb') as f:
            f.write(damaged(content, dice) if turn else content)
        yield turn
    with open(path, 'wb') as f:
        f.write(content)


def test_fuzzed_data_is_read_whole_or_named(dataset):
    dice, config = random.Random(3), GPTConfig(block_size=16)
    rows = TextBatches(dataset, data.read_meta(dataset), config, 1, 8, 2).train_batch(None, 0, [0, 1])
    chars = data.read_meta(dataset)['tokenizer']['chars']
    for name in ('train.bin', 'val.bin', 'meta.json'):
        for turn in each_damage(os.path.join(dataset, name), dice):
            try:
                batches = TextBatches(dataset, data.read_meta(dataset), config, 1, 8, 2)
            except UserError as e:
                assert turn and '\n' not in str(e) and dataset in str(e)
            else:
                assert all(torch.equal(a, b) for a, b in zip(batches.train_batch(None, 0, [0, 1]), rows))
                assert batches.tokenizer.text.chars == chars


def test_fuzzed_records_are_read_whole_or_named(tmp_path):
    dice, folder = random.Random(4), write_records(tmp_path / 'records')
    meta, path = data.read_meta(folder), os.path.join(folder, 'train.jsonl')
    whole = records.read_records(path, meta=meta)
    for turn in each_damage(path, dice):
        try:
            assert records.read_records(path, meta=meta) == whole
        except UserError as e:
            assert turn and '\n' not in str(e) and path in str(e)


# --- devices ---

def test_devices_are_chosen_or_refused_with_the_reason(monkeypatch):
    assert machine.choose_device('cpu') == ('cpu', 'as set')
    assert machine.choose_dtype('auto', 'cpu')[0] == 'float32'
    with monkeypatch.context() as m:
        m.setattr(torch.cuda, 'is_available', lambda: False)
        m.setattr(torch.backends.mps, 'is_available', lambda: True)
        assert machine.choose_device('auto') == ('mps', 'MPS is available')
        assert machine.choose_dtype('auto', 'mps')[0] == 'float32'
        with pytest.raises(UserError, match='mps is trained in float32'):
            machine.choose_dtype('bfloat16', 'mps')
    with monkeypatch.context() as m:
        m.setattr(torch.cuda, 'is_available', lambda: True)
        m.setattr(torch.cuda, 'device_count', lambda: 2)
        assert machine.choose_device('auto')[0] == 'cuda' and machine.choose_device('cuda:1')[0] == 'cuda:1'
        with pytest.raises(UserError, match='2 CUDA and'):
            machine.choose_device('cuda:2')
        for has, dtype in [(True, 'bfloat16'), (False, 'float16')]:
            m.setattr(torch.cuda, 'is_bf16_supported', lambda including_emulation, has=has: has)
            assert machine.choose_dtype('auto', 'cuda')[0] == dtype
        with pytest.raises(UserError, match='this GPU has none'):
            machine.choose_dtype('bfloat16', 'cuda')
    with monkeypatch.context() as m:
        m.setattr(machine.shutil, 'which', lambda _: None)
        assert machine.choose_compile('auto', 'cuda') == (False, 'no C++ compiler is installed')
        with pytest.raises(UserError, match='needs a C.. compiler'):
            machine.choose_compile('on', 'cpu')


def test_a_terminal_without_unicode(tmp_path):
    """Non-ASCII text under LC_ALL=C: a '?' on the screen, not a crash."""
    environment = {**os.environ, 'LC_ALL': 'C', 'PYTHONUTF8': '0', 'PYTHONCOERCECLOCALE': '0',
                   'PYTHONIOENCODING': ''}
    (tmp_path / 'my.txt').write_text('\u00e9\u03b1\u6f22\n' * 100, encoding='utf-8')
    done = subprocess.run([sys.executable, 'train.py', f'--dataset={tmp_path / "my.txt"}',
                           f'--out_dir={tmp_path / "run"}', '--max_iters=1',
                           '--n_layer=1', '--n_embd=8', '--n_head=2', '--block_size=8', '--threads=1'],
                          cwd=ROOT, env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert b'?' in done.stdout
