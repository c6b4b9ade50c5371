"""What the machine has: device, precision and compiler, each chosen or refused with the reason."""
import os
import shutil
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from config import UserError, check_choice

# bfloat16 peak of one device in FLOP/s, for model FLOPs utilisation
PEAK_FLOPS = {'A100': 312e12, 'H100': 989e12, 'H200': 989e12, 'B200': 2250e12, '4090': 165e12}


def choose_device(name):
    """(device, reason). Raises UserError if the named device is absent."""
    if name == 'auto':
        if torch.cuda.is_available():
            return 'cuda', 'CUDA is available'
        if torch.backends.mps.is_available():
            return 'mps', 'MPS is available'
        return 'cpu', 'neither CUDA nor MPS is available'
    kind, _, index = name.partition(':')
    present = {'cpu': 1, 'cuda': torch.cuda.device_count(), 'mps': int(torch.backends.mps.is_available())}
    if kind not in present or (index and not index.isdigit()):
        raise UserError(f'device = {name!r}: choose auto, cpu, cuda, cuda:N or mps')
    if int(index or 0) >= present[kind]:
        raise UserError(f'device = {name!r} is absent: this machine has {present["cuda"]} CUDA and '
                        f'{present["mps"]} MPS devices; --device=cpu always works')
    return name, 'as set'


def set_threads(n):
    """Let PyTorch use n CPU threads, 0 = its choice. Raises UserError above what the machine has."""
    if not 0 <= n <= os.cpu_count():
        raise UserError(f'threads = {n}: this machine has {os.cpu_count()}; 0 lets PyTorch choose')
    if n:
        torch.set_num_threads(n)


def choose_dtype(name, device):
    """(dtype name, reason). Raises UserError for a name or combination that does not exist."""
    check_choice({'dtype': name}, 'dtype', 'auto float32 bfloat16 float16')
    bf16 = device.startswith('cuda') and torch.cuda.is_bf16_supported(including_emulation=False)
    if name == 'bfloat16' and device.startswith('cuda') and not bf16:
        raise UserError('dtype = bfloat16: this GPU has none; use float16 or float32')
    if name not in ('auto', 'float32') and device == 'mps':
        raise UserError(f'dtype = {name!r}: mps is trained in float32 here')
    if name != 'auto':
        return name, 'as set'
    if not device.startswith('cuda'):
        return 'float32', f'half precision gains little on {device}'
    return ('bfloat16', 'the GPU has it') if bf16 else ('float16', 'the GPU has no bfloat16')


def autocast(device, dtype):
    """Matrix products in half precision, where that is what dtype names."""
    return torch.autocast(device.split(':')[0], dtype=getattr(torch, dtype), enabled=dtype != 'float32')


def choose_compile(name, device, never=''):
    """(use torch.compile, reason); never: why this method cannot be compiled. Raises UserError if it is wanted and
    cannot work."""
    check_choice({'compile': name}, 'compile', 'auto on off')
    compiler = next(filter(shutil.which, [os.environ.get('CXX', 'c++'), 'g++', 'clang++', 'cl']), None)
    if name == 'on' and never:
        raise UserError(f'compile = on: not with this method, {never}')
    if name == 'on' and not compiler:
        raise UserError('compile = on needs a C++ compiler: install one, or use --compile=off')
    if name != 'auto':
        return name == 'on', 'as set'
    if never:
        return False, never
    if not compiler:
        return False, 'no C++ compiler is installed'
    if not device.startswith('cuda'):
        return False, f'it takes minutes to start and gains little on {device}'
    try:
        import triton
    except ImportError:
        return False, 'Triton is not installed'
    return True, 'CUDA with Triton'


def send(batch, device):
    """Tensors on their way to the device; those in pinned memory come while we go on."""
    pinned = device.startswith('cuda')
    return [(t.pin_memory() if pinned else t).to(device, non_blocking=True) for t in batch]


def checkpoint_blocks(model):
    """Let each block keep its input alone and compute the rest again in the backward pass (1604.06174): less
    memory for a third more work, the same numbers, dropout included."""
    for layer in {*model.layers}:
        layer.forward = partial(recomputed, layer.forward)


def recomputed(forward, *inputs, cache=None, **named):
    if cache is not None or not torch.is_grad_enabled():  # a cache may not be filled twice
        return forward(*inputs, cache=cache, **named)
    return checkpoint(forward, *inputs, use_reentrant=False, **named)


def total_memory(device):
    """Bytes; None where that cannot be told."""
    if device.startswith('cuda'):
        return torch.cuda.get_device_properties(device).total_memory
    if device == 'cpu' and hasattr(os, 'sysconf'):
        return os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')


def flops_per_token(model):
    """FLOPs of forward and backward per token of a full row, as in PaLM (2204.02311), appendix B."""
    c = model.config
    in_blocks, in_head = model.row_lengths()
    # forward 2, gradient of the input 2, of the weight 2: not for what LoRA freezes
    in_block = sum(p.numel() * (6 if p.requires_grad else 4) for p in model.layers[0].parameters())
    total = sum(in_block * S + 12 * c.n_head * c.head_width * S * S for S in in_blocks)
    head = model.lm_head.weight
    return (total + head.numel() * (6 if head.requires_grad else 4) * in_head) / c.block_size


def peak_flops(device):
    """bfloat16 FLOP/s of the device, 0.0 where the list above does not have it."""
    name = torch.cuda.get_device_name(device) if device.startswith('cuda') else ''
    return next((flops for part, flops in PEAK_FLOPS.items() if part in name), 0.0)
