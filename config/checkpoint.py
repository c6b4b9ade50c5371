"""Checkpoints: all that sampling and resuming need, in plain containers and tensors, written whole or not at all."""
import os
import zipfile

import torch

from config import UserError
from config.files import whole_file

VERSION = 2


def first_line(error):
    return (str(error).strip() or 'no detail').splitlines()[0]


def save_checkpoint(path, checkpoint):
    """Write a checkpoint whole or not at all. Raises UserError."""
    with whole_file(path) as f:
        torch.save(checkpoint, f)


def load_checkpoint(path, mmap=False):
    """Read a checkpoint with weights_only=True, so that a hostile file cannot run code. Raises UserError.

    mmap: leave the tensors on disk until they are used, for one who wants a number.
    """
    if not os.path.isfile(path):
        raise UserError(f'checkpoint {path} is not there: train one first, or give --out_dir')
    try:
        with zipfile.ZipFile(path) as archive:  # torch.load does not look at the checksums
            broken = archive.testzip()
        if broken:
            raise zipfile.BadZipFile(f'checksum of {broken}')
        checkpoint = torch.load(path, map_location='cpu', weights_only=True, mmap=mmap)
    except Exception as e:  # a garbled pickle raises nearly anything
        raise UserError(f'{path} is no checkpoint, is damaged, or holds more than tensors and plain values '
                        f'({type(e).__name__}: {first_line(e)})') from e
    if not isinstance(checkpoint, dict) or type(checkpoint.get('version')) is not int:
        raise UserError(f'{path} is not a checkpoint of this project')
    if checkpoint['version'] != VERSION:
        raise UserError(f'{path} has layout {checkpoint["version"]!r}, this code reads layout {VERSION}')
    parts = dict(method=str, model_config=dict, model=dict, meta=dict, step=int, settings=dict, best_val_loss=float)
    for name, kind in parts.items():
        if not isinstance(checkpoint.get(name), kind):
            raise UserError(f'{path} lacks {name}: it is no checkpoint of this project or is damaged')
    if checkpoint['step'] < 0 or not all(isinstance(weight, torch.Tensor) for weight in checkpoint['model'].values()):
        raise UserError(f'{path} is damaged: step = {checkpoint["step"]}, or a weight is no tensor')
    if not isinstance(checkpoint['meta'].get('tokenizer'), dict):
        raise UserError(f'{path} lacks the tokenizer: it is no checkpoint of this project or is damaged')
    # names as a compiled or wrapped model has them
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
    """Load an optimizer's state after a look at its shapes, which the fused kernels do not check. Raises UserError."""
    try:
        optimizer.load_state_dict(state)
        for p, s in getattr(optimizer, 'optim', optimizer).state.items():  # .optim: this process's share of a sharded one
            if s and not (s['exp_avg'].shape == s['exp_avg_sq'].shape == p.shape and s['step'].numel() == 1):
                raise ValueError(f'a moment of shape {tuple(s["exp_avg"].shape)} for a weight of shape {tuple(p.shape)}')
    except Exception as e:
        raise UserError(f'{path}: the optimizer does not fit the model ({first_line(e)})') from e


def starting_shape(checkpoint, path, given, names):
    """Of the model settings of a checkpoint to start from the ones that its weights mean nothing without: those of `names`
    that it has. Raises UserError for a given one that is another."""
    saved = checkpoint['model_config']
    for name in names:
        if name in saved and given.get(name, saved[name]) != saved[name]:
            raise UserError(f'{name} = {given[name]!r}: {path} has {saved[name]!r}; leave it out to start from that checkpoint')
    return {name: saved[name] for name in names if name in saved}


def check_same_tokenizer(old, new):
    """A model can go on only with the tokens that it knows; special tokens may be added behind them."""
    old, new = ({k: v for k, v in meta['tokenizer'].items() if k != 'special'} for meta in (old, new))
    if old != new:
        raise UserError('init_from: the checkpoint was trained with another tokenizer than the data set has')
