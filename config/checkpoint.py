"""Checkpoints: all that sampling and resuming need, in plain containers and tensors, written whole or not at all."""
import json
import os
import signal
import subprocess
import sys
import zipfile

import torch

from config import UserError

VERSION = 1
# what may change when a run is resumed, though not always bit for bit: max_iters bends the learning rate's cosine, dtype
# the rounding, and batch_size against grad_accum the dropout; anything else would make it another run
HARMLESS = {'out_dir', 'init_from', 'start_config', 'show_batch', 'overwrite', 'max_iters', 'eval_interval', 'eval_only',
            'log_interval', 'wandb_project', 'device', 'dtype', 'compile', 'threads', 'shard_optimizer', 'batch_size',
            'grad_accum'}


def first_line(error):
    return (str(error).strip() or 'no detail').splitlines()[0]


def save_checkpoint(path, checkpoint):
    """Write to a temporary file and rename it, so that `path` is whole at every moment."""
    try:
        with open(path + '.tmp', 'wb') as f:
            torch.save(checkpoint, f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(path + '.tmp', path)
    except (OSError, RuntimeError) as e:  # torch's zip writer turns a full disk into a RuntimeError
        if os.path.exists(path + '.tmp'):
            os.remove(path + '.tmp')
        raise UserError(f'cannot write {path}: {e}; the file of the last save is untouched') from e


def load_checkpoint(path, expected_method=None):
    """Read a checkpoint with weights_only=True, so that a hostile file cannot run code. Raises UserError."""
    if not os.path.isfile(path):
        raise UserError(f'checkpoint {path} is not there: train one first, or give --out_dir')
    try:
        with zipfile.ZipFile(path) as archive:  # torch.load does not look at the checksums
            broken = archive.testzip()
        if broken:
            raise zipfile.BadZipFile(f'checksum of {broken}')
        checkpoint = torch.load(path, map_location='cpu', weights_only=True)
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
    if expected_method and checkpoint['method'] != expected_method:
        raise UserError(f'{path} is a {checkpoint["method"]} model, not {expected_method}')
    if not isinstance(checkpoint['meta'].get('tokenizer'), dict):
        raise UserError(f'{path} lacks the tokenizer: it is no checkpoint of this project or is damaged')
    # names as a compiled or wrapped model has them
    checkpoint['model'] = {str(name).replace('_orig_mod.', '').removeprefix('module.'): tensor
                           for name, tensor in checkpoint['model'].items()}
    return checkpoint


def read_log(path):
    """The entries of log.jsonl; a line that a crash left broken is passed over."""
    entries = []
    with open(path, encoding='utf-8', errors='replace') as f:
        for line in f:
            try:
                entries.append(json.loads(line))
            except ValueError:
                print(f'{path}: passing over a broken line')
    return [e for e in entries if isinstance(e, dict) and type(e.get('iter')) is int]


def merge_resumed(settings, model_settings, given, checkpoint):
    """Settings of a resumed run: the saved ones, and of those given now the harmless ones; another one is refused.

    Returns (settings, the harmless changes as text).
    """
    if not ({'optimizer', 'scaler', 'stage'} <= checkpoint.keys()
            and {'batch_size', 'grad_accum'} <= checkpoint['settings'].keys()):
        raise UserError('the checkpoint to resume lacks the optimizer or settings: start from its weights with '
                        '--init_from=CHECKPOINT')
    saved = {**checkpoint['settings'], **checkpoint['model_config']}
    now = {**settings, **model_settings}
    changed = [name for name in sorted(given) if name in saved and now[name] != saved[name] and name != 'init_from']
    rows = [s['batch_size'] * s['grad_accum'] for s in (saved, {**saved, **{name: now[name] for name in given}})]
    for name in changed:
        if name not in HARMLESS or (name in ('batch_size', 'grad_accum') and rows[0] != rows[1]):
            raise UserError(f'{given[name]}: {name} = {now[name]!r}: the run to resume has {saved[name]!r}, and to change '
                            'it would make it another run; leave it out, or start anew with --init_from=CHECKPOINT and '
                            'another out_dir')
    merged = {name: saved.get(name, value) if name not in given else value for name, value in settings.items()}
    return merged, ', '.join(f'{name} = {now[name]!r} (was {saved[name]!r})' for name in changed)


def load_optimizer(optimizer, state, path):
    """Load an optimizer's state after a look at its shapes, which the fused kernels do not check. Raises UserError."""
    try:
        optimizer.load_state_dict(state)
        for p, s in getattr(optimizer, 'optim', optimizer).state.items():  # .optim: this process's share of a sharded one
            if s and not (s['exp_avg'].shape == s['exp_avg_sq'].shape == p.shape and s['step'].numel() == 1):
                raise ValueError(f'a moment of shape {tuple(s["exp_avg"].shape)} for a weight of shape {tuple(p.shape)}')
    except Exception as e:
        raise UserError(f'{path}: the optimizer does not fit the model ({first_line(e)})') from e


def starting_shape(checkpoint, path, given, shared):
    """Model settings of a run that starts from a checkpoint: its own, as far as they are among `shared` names.

    Raises UserError for a given one that would misread the weights.
    """
    shape = {name: value for name, value in checkpoint['model_config'].items() if name in shared}
    for name in ('n_layer', 'n_head', 'n_embd', 'bias', 'learned_positions', 'rope_base', 'tie_weights'):
        if name not in shape:
            raise UserError(f'{path} lacks the setting {name}: it is damaged or of an older version')
        if name in given and given[name] != shape[name]:
            raise UserError(f'{name} = {given[name]!r}: {path} has {shape[name]!r}; leave it out to start from that checkpoint')
    return shape


def check_same_tokenizer(old, new):
    """A model can go on only with the tokens that it knows; special tokens may be added behind them."""
    old, new = ({k: v for k, v in meta['tokenizer'].items() if k != 'special'} for meta in (old, new))
    if old != new:
        raise UserError('init_from: the checkpoint was trained with another tokenizer than the data set has')


def make_start(path, start_config, script, settings):
    """Let script (train.py) run start_config with these settings, which writes the checkpoint `path`, unless that is
    there and, as a run's last, finished. Raises UserError if that run fails or is stopped."""
    stopped = []

    def finished():
        checkpoint = load_checkpoint(os.path.join(os.path.dirname(path), 'ckpt.pt'))
        return checkpoint['step'] >= checkpoint.get('total_iters', 0)
    if os.path.exists(path) and (os.path.basename(path) != 'ckpt.pt' or finished()):
        return
    state = 'not finished' if os.path.exists(path) else 'not there'
    print(f'init_from = {path!r} is {state} yet: training it with {start_config}', flush=True)
    env = {k: v for k, v in os.environ.items() if k not in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE')}
    settings = {'init_from': 'auto', 'out_dir': os.path.dirname(path), **settings}
    child = subprocess.Popen([sys.executable, os.path.abspath(script), start_config,
                              *(f'--{name}={value}' for name, value in settings.items())], env=env)

    def on_signal(number, _):
        stopped.append(number)
        if number == signal.SIGTERM:
            child.terminate()
    # at either signal the child saves and ends, and this process waits: Ctrl-C reaches it by itself, SIGTERM is passed on
    handlers = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    failed = child.wait()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    if failed:
        raise UserError(f'start_config = {start_config!r}: that run did not end well, see above')
    if stopped or not finished():
        raise UserError(f'start_config = {start_config!r}: that run was stopped; the same command goes on with it')
    print(f'{path} is made, now the run itself', flush=True)
