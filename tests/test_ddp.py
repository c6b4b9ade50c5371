"""Several processes compute what one would, and one that fails ends them all; test_registry.py tries two."""
import pytest
import torch

import train
from config.checkpoint import load_checkpoint
from conftest import (METHOD_SETTINGS, ROOT, arguments, read_log, torchrun, train_on, without_reports,
                      write_records)


@pytest.fixture
def command(tmp_path, dataset):
    """command(out, **settings): the command line of a tiny run."""
    def command(out, **settings):
        tiny = dict(dataset=dataset, batch_size=2, grad_accum=6, max_iters=6, warmup_iters=100, eval_interval=3,
                    eval_rows=9, dropout=0.1, threads=1, snapshots='2', out_dir=tmp_path / out)
        return arguments(**{**tiny, **settings})
    return command


def test_processes_compute_what_one_would(command, tmp_path):
    """Three against one, for every method, dropout included, the optimizer sharded but once, and a resume of what
    one process began. Weights agree to 1e-6, losses to 1e-5: rounding."""
    runs = {**{s['method']: s for s in METHOD_SETTINGS},
            'rim': dict(method='rim', dataset=write_records(tmp_path / 'records'), block_size=48, n_blocks=2,
                        max_iters=4, stage2_iters=2)}  # both of its stages
    with without_reports():
        for name, settings in runs.items():
            train.main(command(f'{name}-one', **settings))
        train.main(command('resumed', method='gpt', max_iters=3))
    pairs = [(f'{name}-one', f'{name}-three') for name in runs] + [('gpt-one', 'whole optimizer')]
    jobs = [(command(f'{name}-three', **settings, shard_optimizer=True), {}) for name, settings in runs.items()]
    # one process reports, the others wait
    jobs.append((command('whole optimizer', method='gpt'), {'report': True}))
    jobs.append((command('resumed', method='gpt', init_from='resume', shard_optimizer=True), {}))
    output = train_on(3, tmp_path, jobs)
    assert output.count('a sample at temperature') == 1, output
    for pair in pairs:
        for file in ('step_2.pt', 'ckpt.pt'):
            one, three = (load_checkpoint(str(tmp_path / name / file)) for name in pair)
            for key, weight in one['model'].items():
                assert (weight - three['model'][key]).abs().max() < 1e-6, (pair, key)
        for mine, theirs in zip(one['optimizer']['state'].values(), three['optimizer']['state'].values(),
                                strict=True):
            assert all(torch.allclose(mine[k], theirs[k], atol=1e-6) for k in mine)
        # each step once: only one process writes
        for a, b in zip(*(read_log(tmp_path / name) for name in pair), strict=True):
            key = 'val_loss' if 'val_loss' in a else 'train_loss'
            assert a['iter'] == b['iter'] and a[key] == pytest.approx(b[key], abs=1e-5)
    resumed = load_checkpoint(str(tmp_path / 'resumed' / 'ckpt.pt'))
    assert resumed['step'] == 6 and resumed['optimizer']['state'][0]['step'] == 6


def test_what_goes_wrong_in_one_process_ends_all(command, tmp_path):
    """First what is wrong in all of them, said once; then an error in one, where preparing the data takes longer than
    the processes wait for each other in a step."""
    driver = tmp_path / 'fails.py'
    driver.write_text(f'''
import datetime, functools, os, sys, time
sys.path.insert(0, {ROOT!r})
import config, data, train
import torch.distributed as dist
try:
    train.main([*sys.argv[1:], '--grad_accum=3'])
except config.UserError as e:
    config.complain(f'error: {{e}}')
draw = train.TextBatches.train_batch
def fail_on_rank_1(self, stage, it, rows):
    if it == 3 and os.environ['RANK'] == '1':
        raise config.UserError('train.bin vanished on this rank')
    return draw(self, stage, it, rows)
train.TextBatches.train_batch = fail_on_rank_1
dist.init_process_group = functools.partial(dist.init_process_group, timeout=datetime.timedelta(seconds=6))
data.ensure_prepared = lambda *_, **__: time.sleep(8)
config.launch(train.main)
''', encoding='utf-8')
    status, output = torchrun(2, str(driver), *command('fails'))
    assert output.count('error: grad_accum = 3 micro-batches cannot be shared out over 2 processes') == 1
    assert status == 1 and 'error: train.bin vanished on this rank' in output and 'step 0: val loss' in output
    assert 'connection to another process of this run broke' in output and '[rank0]: Traceback' not in output
