"""What a run needs, before it starts: python train.py config/tb_772m.py --plan=True --gpus=8 --gpu_memory=80

A step of the real code runs on fake tensors, which have a shape and no content, while their bytes are counted: so
this takes neither data nor weights, nor the memory that it counts.
"""
import math
import warnings
import weakref
from contextlib import nullcontext, suppress

import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

import data
from config import UserError
from config.machine import PEAK_FLOPS, checkpoint_blocks, flops_per_token, total_memory

USABLE = 0.92  # of a GPU's memory: the rest goes to its context, the allocator's gaps and the network
UTILISATION = 0.4  # of the bfloat16 peak, assumed
DISK = 1e9  # bytes per second that a save writes, assumed
KILLED_AFTER = 30  # seconds that torchrun leaves for the last save, without its --shutdown_timeout


class Memory(TorchDispatchMode):
    """Notes after each operation the bytes of all tensors that are alive. PyTorch's own MemTracker counts them,
    but takes minutes for a deep model: each operation updates the statistics of every module."""

    def __init__(self):
        super().__init__()
        self.known = WeakIdKeyDictionary()  # storages
        self.held = 0
        self.gradients = 0  # of these: of parameters
        self.history = []  # (held, gradients)

    def add(self, tensor):
        storage = tensor.untyped_storage()
        if storage not in self.known:
            self.known[storage] = storage.nbytes()
            self.held += storage.nbytes()
            weakref.finalize(storage, self.drop, storage.nbytes())

    def drop(self, size):
        self.held -= size

    def add_gradient(self, parameter):
        self.gradients += parameter.grad.nbytes

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, self.add, result)
        self.history.append((self.held, self.gradients))
        return result


def step_memory(method, config, rows, settings):
    """(parameters, those trained, history of a training step on one GPU with so many rows: after each operation
    the bytes held, and those of them that are parameters' gradients). method: an entry of train.METHODS."""
    from model import chunks  # which builds on this package
    _, model_class, batch_class = method
    half = settings['dtype'] != 'float32'
    memory = Memory()
    with FakeTensorMode(), warnings.catch_warnings(), memory:
        warnings.simplefilter('ignore')
        model = model_class(config)
        trained = [p for p in model.parameters() if p.requires_grad]
        for p in trained:
            p.register_post_accumulate_grad_hook(memory.add_gradient)
        if settings['checkpoint_blocks']:
            checkpoint_blocks(model)
        optimizer = torch.optim.AdamW(trained, foreach=False)
        batch = batch_class.largest(config, rows)
        for _ in range(2):  # at the second step AdamW's moments are there
            memory.history.clear()
            memory.gradients = 0
            with torch.autocast('cpu', torch.bfloat16) if half else nullcontext():
                try:
                    loss = model(*batch)[1]
                except DynamicOutputShapeException:
                    raise UserError('no plan for this method: its computation depends on the tokens') from None
            # inside the head, which it does not see: logits, their gradient, and in half precision a copy of each
            decoded = batch[1].numel() * model.row_lengths()[1] // config.block_size
            chunk = chunks(decoded, config.vocab_size)[0].stop
            memory.history.append((memory.held + chunk * config.vocab_size * (12 if half else 8), 0))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            del loss
    return sum(p.numel() for p in model.parameters()), sum(p.numel() for p in trained), memory.history


def needs(method, config, settings, gpus, usable):
    """What a training step needs on each of so many GPUs, of which `usable` bytes can be had: (parameters, those
    trained, {part: bytes}, the most rows that fit)."""
    rows = settings['batch_size']
    n, trained, history = step_memory(method, config, rows, settings)
    fixed = {'weights': 4 * n, 'gradients': 4 * trained,
             'AdamW': 8 * trained / (gpus if settings['shard_optimizer'] else 1)}
    # which operation holds most depends on the rows, so each one's bytes are extended to more rows by themselves
    more = step_memory(method, config, 2 * rows, settings)[2]
    total, most = 0, math.inf
    for (held, gradients), (held_later, _) in zip(history, more, strict=True):
        size = held - 8 * trained + fixed['AdamW']
        if gpus > 1:
            size += fixed['gradients'] - gradients  # DDP keeps room for them all the time
        total = max(total, size)
        if held_later > held:
            most = min(most, rows + math.floor((usable - size) / (held_later - held) * rows))
        elif size > usable:
            most = 0
    return n, trained, {**fixed, 'activations, logits, copies': total - sum(fixed.values())}, max(0, most)


def check_memory(method, model, settings, device, world):
    """Raises UserError if a training step cannot fit, before the system kills us in it. The step is planned only
    where a glance does not show that it fits easily."""
    have = total_memory(device)
    rows = settings['batch_size']
    # weights, gradients and AdamW; and about 16 vectors (C) per position that the blocks keep
    positions = rows * sum(model.row_lengths()[0])
    least = 16 * sum(p.numel() for p in model.parameters() if p.requires_grad)
    least += positions * 16 * model.config.n_embd * (4 if settings['dtype'] == 'float32' else 2)
    if have is None or least < have / 8:
        return
    try:
        *_, parts, most = needs(method, model.config, settings, world, have)
        need = sum(parts.values())
    except UserError:  # a method without a plan
        need, most = least, None
    if need > have:
        raise UserError(f'batch_size = {rows} rows of {model.config.row_size} positions: a step needs about '
                        f'{need / 1e9:.0f} GB, {device} has {have / 1e9:.0f} GB: '
                        + ('use fewer or shorter rows' if most is None else
                           f'{most} rows would fit; checkpoint_blocks and shard_optimizer take less'))


def make_plan(method_name, method, model_settings, settings):
    """The plan as text. method: an entry of train.METHODS. Raises UserError where the vocabulary is not known."""
    config, steps, why = what_runs(method, model_settings, settings)
    gpus = settings['gpus']
    rows = settings['batch_size']
    n, trained, parts, most = needs(method, config, settings, gpus, settings['gpu_memory'] * 1e9 * USABLE)
    tokens = steps * rows * settings['grad_accum'] * config.block_size
    with torch.device('meta'):
        flops = tokens * flops_per_token(method[1](config))
    hours = {name: flops / (gpus * rate * UTILISATION) / 3600 for name, rate in PEAK_FLOPS.items()}
    checkpoint = 4 * n + 8 * trained
    save = checkpoint / DISK
    lines = [
        f'{method_name}: {n:,} parameters, {trained:,} of them trained; {gpus} GPU{"s" if gpus > 1 else ""} of '
        f'{settings["gpu_memory"]:g} GB',
        f'memory of each GPU at {rows} rows of {config.row_size} positions, GB:',
        *(f'  {name:24s} {size / 1e9:7.2f}' for name, size in
          [*parts.items(), ('together', sum(parts.values()))]),
        f'largest batch_size that fits: {most}'
        + ('' if most else ': not even one row does; checkpoint_blocks and shard_optimizer take less'),
        f'disk: {checkpoint / 1e9:.1f} GB for ckpt.pt, {4 * n / 1e9:.1f} GB for best.pt; a save takes about '
        f'{save:.0f} s, of the {KILLED_AFTER} s that torchrun leaves after a signal'
        + (f': give it --shutdown_timeout={math.ceil(save / 30) * 60}' if save > KILLED_AFTER / 2 else ''),
        f'{steps:,} steps{why}, {tokens / 1e9:.3g}B tokens, {flops:.2e} FLOPs; hours at {UTILISATION:.0%} of the '
        'peak: ' + ', '.join(f'{name} {h:,.1f}' for name, h in hours.items()),
        f'attention: {kernel(config, settings)}',
        'not checked: the GPU\'s own kernels and their workspaces, the network, data, speed']
    return '\n'.join(lines)


def what_runs(method, model_settings, settings):
    """(model's configuration, steps, a remark on them), from the data set if it is prepared, else as stated."""
    config_class = method[0]
    meta = None
    with suppress(UserError):
        meta = data.read_meta(settings['dataset'])
    vocab_size = model_settings.get('vocab_size') or meta and meta['vocab_size']
    if not vocab_size:
        raise UserError(f'a plan needs vocab_size: dataset {settings["dataset"]!r} is not prepared, so state it')
    config = config_class(**{**model_settings, 'vocab_size': vocab_size})
    epoch_iters, why = 1000.0, ''
    if getattr(config, 'epochs', 0):
        if meta and meta['kind'] == 'records':
            epoch_iters = meta['train_rows'] / (settings['batch_size'] * settings['grad_accum'])
        else:
            why = ' (1,000 an epoch: the data set is not prepared)'
    last = config.stages(settings['max_iters'], settings['learning_rate'], epoch_iters)[-1]
    return config, last.first + last.iters, why


def kernel(config, settings):
    """Which fused kernel attention can take on a GPU. The flash kernel pads the width of a head, up to 256; the
    others want a multiple of 16 bytes, and a key for each query head, which model.py makes where it is not flash's
    turn."""
    half = settings['dtype'] != 'float32'
    width = config.head_width
    if getattr(config, 'fork_layers', ()):  # the score's channel, padded
        width += 8 - width % 8
    has_blocks = getattr(config, 'layout', (0, 0))[0] > 0
    masked = has_blocks or not getattr(config, 'see_pauses', True)
    masked = masked or bool(config.local_layers and config.window < config.row_size)
    if half and not masked and width <= 256:
        return 'causal: the flash kernel'
    if width % (8 if half else 4) or (half and not masked and config.kv_heads < config.n_head):
        return 'no fused kernel: it holds all positions times all positions'
    if half and masked:
        return 'a mask: the memory-efficient or the cuDNN kernel'
    return ('wide heads' if half else 'float32') + ': the memory-efficient kernel'
