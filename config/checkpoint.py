"""Checkpoints: all that sampling and resuming need, in plain containers and tensors; what a run takes from one."""
import os
import re
import zipfile
from dataclasses import fields

import torch

from config import UserError, need, on_hub
from config.files import whole_file

VERSION = 2
PARTS = {'method': str, 'model_config': dict, 'model': dict, 'meta': dict, 'step': int, 'settings': dict,
         'best_val_loss': float}
TOKEN_ROWS = ('wte.weight', 'lm_head.weight')  # a row per token of the vocabulary; mostly the same tensor
# with LoRA the token rows are frozen; the last of them, the special tokens', are parameters of their own
OWN_ROWS = {'special_in': 'wte.weight', 'special_out': 'lm_head.weight'}
LORA_SCALE = 2.0  # alpha / rank
# what may change when a run is resumed, though not always bit for bit: max_iters bends the learning rate's cosine,
# dtype the rounding, and batch_size against grad_accum the dropout; anything else would make it another run
MAY_CHANGE = {'out_dir', 'init_from', 'plan', 'gpus', 'gpu_memory', 'show_batch', 'overwrite', 'max_iters',
              'eval_interval', 'snapshots', 'log_interval', 'wandb_project', 'device', 'dtype', 'compile',
              'threads', 'checkpoint_blocks', 'shard_optimizer', 'batch_size', 'grad_accum'}


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


def snapshots(folder):
    """Paths of the snapshots that a run has kept, in the order of their steps. Raises UserError."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    steps = sorted(int(found[1]) for found in (re.fullmatch(r'step_(\d+)\.pt', name) for name in names) if found)
    if not steps:
        raise UserError(f'out_dir = {folder!r} has no step_N.pt: train with --snapshots=0,100,200, say')
    return [os.path.join(folder, f'step_{step}.pt') for step in steps]


def load_start(name):
    """The checkpoint to start from: a file, a run's folder, a published model's folder, or its name on the Hugging
    Face hub. Raises UserError."""
    from config.pretrained import read_folder  # which builds on this file
    folder = download(name) if on_hub(name) and not os.path.exists(name) else name
    own = os.path.join(folder, 'ckpt.pt')
    if os.path.exists(own) or not os.path.exists(os.path.join(folder, 'config.json')):
        return load_checkpoint(own if os.path.isdir(folder) else folder)
    try:
        return read_folder(folder)
    except UserError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError) as e:
        raise UserError(f'{folder}: its files do not fit together ({type(e).__name__}: {first_line(e)})') from e


def download(name, patterns=('*.json', '*.safetensors')):
    """The folder that a model of the Hugging Face hub was fetched into. Raises UserError."""
    hub = need('huggingface_hub', 'fetching a model')
    print(f'{name}: looking for it on the Hugging Face hub, or in its cache here', flush=True)
    try:
        return hub.snapshot_download(name, allow_patterns=list(patterns))
    except hub.errors.GatedRepoError as e:
        raise UserError(f'{name} is open only to those who accepted its licence: do that on its page at '
                        'huggingface.co, then run hf auth login') from e
    except hub.errors.RepositoryNotFoundError as e:
        raise UserError(f'{name} is not on the Hugging Face hub, or not for you: check the name, or run hf auth '
                        'login') from e
    except Exception as e:  # many kinds, of the hub and of the network
        raise UserError(f'{name} could not be fetched ({type(e).__name__}: {first_line(e)}): without a network, '
                        'give a folder that has it') from e


def load_weights(model, checkpoint, path):
    """Fill a model with the weights of a checkpoint made for the same configuration. Raises UserError."""
    try:
        model.load_state_dict(checkpoint['model'])
    except Exception as e:
        raise UserError(f'{path}: weights and configuration do not fit together ({first_line(e)})') from e


@torch.no_grad()
def copy_weights(model, state):
    """Start a model from another's weights (a state dict), tensor by tensor of the same name, adapters merged;
    returns the names of those that it lacks. Where the model has more rows (a larger vocabulary), the further
    ones are as random as before, at the scale of the others; of learned positions it may have fewer. Raises
    UserError where shapes do not fit, a head of its own would have to share the embeddings' matrix, or LoRA
    would leave rows untrained."""
    state = merge_adapters(state)
    weights = model.state_dict()  # shares memory with the parameters
    config = model.config
    tied = model.lm_head.weight is model.wte.weight and 'lm_head.weight' in state
    if tied and not torch.equal(state['lm_head.weight'], state['wte.weight']):
        raise UserError('tie_weights = True: the checkpoint to start from has a head of its own, which would '
                        'replace the embeddings; use tie_weights = False')
    if 'wpe.weight' in state:
        old = len(state['wpe.weight'])
        if config.lora_rank and old < config.row_size:
            raise UserError(f'block_size = {config.block_size}: the checkpoint to start from has {old} '
                            'positions, and with lora_rank no further ones are learned; leave block_size or '
                            'lora_rank out')
        state['wpe.weight'] = state['wpe.weight'][:config.row_size]
    for name, tensor in state.items():
        shape = weights[name].shape if name in weights else None
        if shape is None or tensor.shape[1:] != shape[1:] or len(tensor) > shape[0]:
            raise UserError(f'the checkpoint to start from has {name} {tuple(tensor.shape)}, this model has '
                            f'{"no such tensor" if shape is None else tuple(shape)}')
        if name in TOKEN_ROWS and len(tensor) < shape[0]:
            new = weights[name][len(tensor):]
            new *= tensor.std() / new.std()
        weights[name][:len(tensor)] = tensor
    return [name for name in weights if name not in state]


def merge_adapters(state):
    """A state dict without LoRA's adapters and rows of their own: both are put into the matrices."""
    state = dict(state)
    for name in [name for name in state if name.endswith('lora_b')]:
        matrix = name.replace('lora_b', 'weight')
        b, a = state.pop(name), state.pop(name.replace('lora_b', 'lora_a'))
        state[matrix] = state[matrix] + LORA_SCALE * b @ a
    for own, matrix in OWN_ROWS.items():
        if own in state:
            rows = state.pop(own)
            state[matrix] = torch.cat((state[matrix][:-len(rows)], rows))
    return state


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
    # behind plain text the vocabulary may be padded; records want their special tokens as the last ones
    padded = saved['vocab_size'] if meta['kind'] == 'text' else 0
    return {**shape, 'block_size': saved['block_size'], 'vocab_size': max(padded, meta['vocab_size'])}


def compared_to_start(start, config_class, settings, came):
    """Which of a run's model settings came with the checkpoint to start from, and which it changes, as text."""
    same, other = [], []
    for f in fields(config_class):
        value = settings.get(f.name, f.default)
        saved = start['model_config'].get(f.name, value)
        if f.name in came and value != f.default:
            same.append(f'{f.name} = {value}')
        if value != saved:
            other.append(f'{f.name} = {value} (was {saved})')
    return (f'settings that come with the start: {", ".join(same) or "nothing"}; other than there: '
            f'{", ".join(other) or "nothing"}')


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
