"""--plan: its memory against what a step takes; what it prints; what it refuses."""
import re

import pytest
import torch

import bench
import train
from config import UserError, machine
from config.plan import USABLE, kernel, step_memory
from conftest import write_text

SIZE = dict(vocab_size=3000, block_size=128, n_layer=2, n_head=4, n_embd=128)


@pytest.mark.parametrize('method, settings, checkpoint_blocks', [
    ('gpt', {}, False), ('gpt', {}, True), ('thoughtbubbles', dict(fork_layers=(0, 1)), True),
    ('thoughtbubbles', dict(fork_layers=(1,), merge='residual'), False), ('cyb', dict(W=2), False),
    ('cyb', dict(W=2, objective='tbys'), True), ('rim', {}, False), ('rim', dict(lora_rank=8), True)])
def test_the_memory_of_a_step_is_planned_within_a_tenth(method, settings, checkpoint_blocks, monkeypatch):
    monkeypatch.setattr(bench, 'device', 'cpu')
    entry = train.METHODS[method]
    config = entry[0](**SIZE, **settings)
    n, trained, history = step_memory(entry, config, 4, dict(dtype='float32', checkpoint_blocks=checkpoint_blocks))
    planned = max(held for held, _ in history)
    model = entry[1](config)
    optimizer = torch.optim.AdamW(model.param_groups(0.1), lr=1e-4, fused=True)
    if checkpoint_blocks:
        machine.checkpoint_blocks(model)
    batch = entry[2].largest(config, 4)

    def step():
        model(*batch)[1].backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()  # from here on AdamW's moments are there
    assert n == sum(p.numel() for p in model.parameters())
    measured = 4 * n + 8 * trained + bench.peak_memory(step)
    assert measured / 1.1 < planned < measured * 1.1


def test_the_largest_batch_fits_and_one_row_more_does_not(capsys):
    """Also where few rows say nothing, since AdamW's step then holds more than they do."""
    size = dict(vocab_size=2000, block_size=8, n_layer=2, n_embd=64)
    train.main(['--plan=True', '--gpus=1', '--gpu_memory=0.012', '--batch_size=1', '--dtype=float32',
                *(f'--{name}={value}' for name, value in size.items())])
    most = int(re.search('largest batch_size that fits: (.*)', capsys.readouterr().out)[1])
    settings = dict(dtype='float32', checkpoint_blocks=False)
    peaks = [max(held for held, _ in step_memory(train.METHODS['gpt'], train.GPTConfig(**size), rows, settings)[2])
             for rows in (1, 2, most, most + 1)]
    assert peaks[0] + 1000 > peaks[1] and peaks[1] < peaks[2] <= 0.012e9 * USABLE < peaks[3]


def test_a_plan_needs_neither_data_nor_weights(capsys, tmp_path):
    train.main(['config/tb_772m.py', '--plan=True', '--n_layer=3', '--fork_layers=1,2', '--n_embd=160', f'--out_dir={tmp_path}/x'])
    said = capsys.readouterr().out
    assert '75,000 steps, 2.46B tokens' in said and 'causal: the flash kernel' in said
    assert 'largest batch_size that fits: ' in said and not (tmp_path / 'x').exists()
    train.main(['config/rim_gpt2.py', '--plan=True', '--n_layer=2', '--n_embd=96', '--lora_rank=4', '--gpu_memory=0.1'])
    said = capsys.readouterr().out
    assert 'a mask: the memory-efficient or the cuDNN kernel' in said and '1,000 an epoch' in said
    assert 'largest batch_size that fits: 0: not even one row does' in said


def test_a_plan_reads_what_is_prepared(capsys, tmp_path):
    dataset = write_text(tmp_path / 'text')
    tiny = [f'--dataset={dataset}', '--plan=True', '--n_layer=2', '--n_embd=16']
    train.main(tiny)
    assert f'gpt: {2 * 12 * 16 * 16 + 4 * 16 + 16 + 4 * 16:,} parameters' in capsys.readouterr().out
    with pytest.raises(UserError, match='a plan needs vocab_size: dataset .* is not prepared'):
        train.main([*tiny, '--dataset=c4'])
    with pytest.raises(UserError, match='no plan for this method'):
        train.main([*tiny, '--method=coconut', '--vocab_size=30'])


@pytest.mark.parametrize('method, settings, half, float32', [
    ('gpt', {}, 'causal: the flash kernel', 'float32: the memory-efficient kernel'),
    ('gpt', dict(n_kv_head=1), 'causal: the flash kernel', 'float32: the memory-efficient kernel'),
    ('thoughtbubbles', {}, 'causal: the flash kernel', 'float32: the memory-efficient kernel'),
    ('thoughtbubbles', dict(head_dim=256), 'wide heads: ', 'float32: the memory-efficient kernel'),
    ('gpt', dict(head_dim=258, n_kv_head=1), 'no fused kernel', 'no fused kernel'),
    ('cyb', dict(see_pauses=False), 'a mask: ', 'float32: the memory-efficient kernel'),
    ('rim', dict(n_kv_head=1), 'a mask: ', 'float32: the memory-efficient kernel')])
def test_a_plan_names_the_kernel_that_the_widths_and_the_mask_allow(method, settings, half, float32):
    """As PyTorch chooses it; tests/gpu_check.py compares with a GPU."""
    config = train.METHODS[method][0](**{**SIZE, 'n_layer': 3, **settings})
    assert kernel(config, {'dtype': 'bfloat16'}).startswith(half)
    assert kernel(config, {'dtype': 'float32'}).startswith(float32)
