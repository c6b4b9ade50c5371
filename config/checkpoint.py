"""Checkpoints: all that sampling and resuming need, in plain containers and tensors; what a run takes from one."""
import os
import zipfile

import torch

from config import UserError
from config.files import whole_file

VERSION = 2
PARTS = {'method': str, 'model_config': dict, 'model': dict, 'meta': dict, 'step': int, 'settings': dict,
         'best_val_loss': float}
# what may change when a run is resumed, though not always bit for bit: max_iters bends the learning rate's cosine,
# dtype the rounding, and batch_size against grad_accum the dropout; anything else would make it another run
MAY_CHANGE = {'out_dir', 'init_from', 'show_batch', 'overwrite', 'max_iters', 'eval_interval', 'log_interval',
              'wandb_project', 'device', 'dtype', 'compile', 'threads', 'shard_optimizer', 'batch_size',
              'grad_accum'}


def first_line(error):
    return (str(error).strip() or 'no detail').splitlines()[0]


def save_checkpoint(path, checkpoint):
    """Write a checkpoint whole or not at all. Raises UserError."""
    with whole_file(path) as f:
        torch.save(checkpoint, f)


def load_checkpoint(path, mmap=False):
    """Read a checkpoint with weights_only=True, so that a hostile file cannot run code. mmap: leave the tensors
    on disk until they are used. Raises UserError."""
    if not os.path.isfile(path):
        raise UserError(f'checkpoint {path} is not there: train one first, or give --out_dir')
    try:
        with zipfile.ZipFile(path) as archive:  # torch.load does not look at the checksums
            if broken := archive.testzip():
                raise zipfile.BadZipFile(f'checksum of {broken}')
        checkpoint = torch.load(path, map_location='cpu', weights_only=True, mmap=mmap)
    except Exception as e:  # a garbled pickle raises nearly anything
        raise UserError(f'{path} is not a checkpoint, is damaged, or holds more than tensors and plain values '
                        f'({type(e).__name__}: {first_line(e)})') from e
    if not isinstance(checkpoint, dict) or type(checkpoint.get('version')) is not int:
        raise UserError(f'{path} is not a checkpoint of this project')
    if checkpoint['version'] != VERSION:
        raise UserError(f'{path} has layout {checkpoint["version"]}, this code reads layout {VERSION}')
    lacking = [name for name, kind in PARTS.items() if not isinstance(checkpoint.get(name), kind)]
    if not lacking and not isinstance(checkpoint['meta'].get('tokenizer'), dict):
        lacking = ['the tokenizer']
    if lacking:
        raise UserError(f'{path} lacks {lacking[0]}: it is not a checkpoint of this project or is damaged')
    if checkpoint['step'] < 0 or not all(isinstance(t, torch.Tensor) for t in checkpoint['model'].values()):
        raise UserError(f'{path} is damaged: step = {checkpoint["step"]}, or a weight is not a tensor')
    # without what a compiled or wrapped model puts before its names
    checkpoint['model'] = {str(name).replace('_orig_mod.', '').removeprefix('module.'): tensor
                           for name, tensor in checkpoint['model'].items()}
    return checkpoint


def load_weights(model, checkpoint, path):
    """Fill a model with the weights of a checkpoint made for the same configuration. Raises UserError."""
    try:
        model.load_state_dict(checkpoint['model'])
    except Exception as e:
        raise UserError(f'{path}: weights and configuration do not fit together ({first_line(e)})') from e


def load_optimizer(optimizer, state, path):
    """Load an optimizer's state and check its shapes, as the fused kernels do not. Raises UserError."""
    try:
        optimizer.load_state_dict(state)
        # .optim: this process's share of a sharded one
        for p, s in getattr(optimizer, 'optim', optimizer).state.items():
            if s and not (s['exp_avg'].shape == s['exp_avg_sq'].shape == p.shape and s['step'].numel() == 1):
                raise ValueError(f'a moment of shape {tuple(s["exp_avg"].shape)} for a weight of shape '
                                 f'{tuple(p.shape)}')
    except Exception as e:
        raise UserError(f'{path}: the optimizer does not fit the model ({first_line(e)})') from e


def starting_settings(start, path, names, given, meta):
    """The model settings that come with a checkpoint to start from: those of `names` that it has, without which
    its weights mean nothing, and its sizes. Raises UserError where settings `given` or the data (meta) differ."""
    saved = start['model_config']
    shape = {name: saved[name] for name in names if name in saved}
    for name, value in shape.items():
        if given.get(name, value) != value:
            raise UserError(f'{name} = {given[name]!r}: {path} has {value!r}; leave it out to start from that '
                            'checkpoint')
    # a model can go on only with the tokens that it knows; special ones may be added behind them
    old, new = ({k: v for k, v in m['tokenizer'].items() if k != 'special'} for m in (start['meta'], meta))
    if old != new:
        raise UserError('init_from: the checkpoint was trained with another tokenizer than the data set has')
    # behind plain text the vocabulary may be padded; records want their special tokens as the last ones
    padded = saved['vocab_size'] if meta['kind'] == 'text' else 0
    return {**shape, 'block_size': saved['block_size'], 'vocab_size': max(padded, meta['vocab_size'])}


def merge_resumed(settings, model_settings, given, checkpoint):
    """Settings of a resumed run: the saved ones, but for those given now. Returns (settings, the changes as text).
    Raises UserError for a change that would make it another run."""
    if not ({'optimizer', 'scaler', 'stage'} <= checkpoint.keys()
            and {'batch_size', 'grad_accum'} <= checkpoint['settings'].keys()):
        raise UserError('the checkpoint to resume lacks the optimizer or settings: start from its weights with '
                        '--init_from=CHECKPOINT')
    saved = {**checkpoint['settings'], **checkpoint['model_config']}
    now = {**settings, **model_settings}
    merged = {name: value if name in given else saved.get(name, value) for name, value in settings.items()}
    same_rows = saved['batch_size'] * saved['grad_accum'] == merged['batch_size'] * merged['grad_accum']
    changes = []
    for name in sorted(given):
        if name not in saved or now[name] == saved[name] or name == 'init_from':
            continue
        if name not in MAY_CHANGE or (name in ('batch_size', 'grad_accum') and not same_rows):
            raise UserError(f'{given[name]}: {name} = {now[name]!r}: the run to resume has {saved[name]!r}, and '
                            'to change it would make it another run; leave it out, or start anew with '
                            '--init_from=CHECKPOINT and another out_dir')
        changes.append(f'{name} = {now[name]!r} (was {saved[name]!r})')
    return merged, ', '.join(changes)
