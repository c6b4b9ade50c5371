"""Train any method: python train.py config/tb_small.py [--key=value ...], on one CPU or under torchrun.

The settings below are overridden by a config file and then by --key=value; --help prints them with those of the model.
"""
import json
import math
import os
import shlex
import signal
import sys
import time
from dataclasses import asdict, fields
from glob import escape, glob

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import config
import data
from config import UserError
from config.checkpoint import (VERSION, check_same_tokenizer, first_line, load_checkpoint, load_optimizer, make_start,
                               merge_resumed, read_log, save_checkpoint, starting_shape)
from config.machine import check_memory, choose_compile, choose_device, choose_dtype, peak_flops
from cyb import CYB, CYBConfig
from model import GPT, GPTConfig
from rim import RiM, RiMBatches, RiMConfig
from thoughtbubbles import Thoughtbubbles, ThoughtbubblesConfig

# what and where
method = 'gpt'  # a method of the registry below: gpt, thoughtbubbles, cyb or rim
dataset = 'shakespeare_char'  # a folder under data/, or a path with a slash
out_dir = 'out/run'  # checkpoints and log.jsonl
init_from = 'scratch'  # scratch | resume | auto (resume if there is something to resume) | a checkpoint to start from
start_config = ''  # the config file that makes init_from's checkpoint, run first, with this seed, where that is not there
overwrite = False  # let a run from scratch replace an earlier run in out_dir
seed = 1337  # of the weights, the batches and dropout
# batches
batch_size = 32  # rows in one micro-batch
grad_accum = 1  # micro-batches in one step, over all processes together
# optimisation
max_iters = 1500  # steps; of a method that trains in several stages see --help
learning_rate = 1e-3  # at its peak
min_lr = 1e-4  # at the end of the cosine
warmup_iters = 100  # steps of linear warm-up
weight_decay = 0.1  # on matrices and embeddings
beta1 = 0.9  # AdamW
beta2 = 0.99  # AdamW
grad_clip = 1.0  # largest gradient norm, 0 = unlimited
# evaluation and output
eval_interval = 250  # steps between evaluations; a checkpoint is written before each
eval_rows = 512  # validation rows, the same ones at each evaluation
eval_only = False  # evaluate and end
show_batch = False  # print the first rows of the first batch as a table
log_interval = 10  # steps between log lines
wandb_project = ''  # log to Weights & Biases under this name as well
# machine
device = 'auto'  # auto | cpu | cuda | cuda:1 | mps
dtype = 'auto'  # auto | float32 | bfloat16 | float16
compile = 'auto'  # torch.compile: auto | on | off
threads = 0  # CPU threads per process, 0 = PyTorch's choice
shard_optimizer = False  # share AdamW's state out over the processes (ZeRO stage 1) instead of copying it

# the only list of the methods: name -> (config class, model class, source of its batches)
METHODS = {
    'gpt': (GPTConfig, GPT, data.TextBatches),
    'thoughtbubbles': (ThoughtbubblesConfig, Thoughtbubbles, data.TextBatches),
    'cyb': (CYBConfig, CYB, data.TextBatches),
    'rim': (RiMConfig, RiM, RiMBatches),
}


def registered(checkpoint, path):
    """(config class, model class, batch source) of a checkpoint's method. Raises UserError if it is unknown."""
    if checkpoint['method'] not in METHODS:
        raise UserError(f'{path}: method {checkpoint["method"]!r} is unknown; there are {", ".join(METHODS)}')
    return METHODS[checkpoint['method']]


def build_model(checkpoint, path='checkpoint'):
    """The model of a checkpoint, on the CPU. Raises UserError if weights and configuration disagree."""
    config_class, model_class, _ = registered(checkpoint, path)
    try:
        model = model_class(config_class(**checkpoint['model_config']))
        model.load_state_dict(checkpoint['model'])
    except Exception as e:
        raise UserError(f'{path}: weights and configuration do not fit together ({first_line(e)})') from e
    return model


def learning_rate_at(step, steps, peak):
    """Step `step` of a stage of `steps`: linear warm-up to `peak`, then a cosine down to min_lr. A stage with another
    peak than learning_rate keeps min_lr's proportion to it."""
    if step < warmup_iters:
        return peak * (step + 1) / warmup_iters
    progress = (step - warmup_iters) / max(1, steps - warmup_iters)
    lowest = min_lr * peak / (learning_rate or 1.0)
    return lowest + 0.5 * (1 + math.cos(math.pi * min(1.0, progress))) * (peak - lowest)


def stage_at(stages, step):
    """(name, first step, steps, peak learning rate, dropout) of the stage that `step` belongs to; the run's end belongs
    to the last stage."""
    stages = [stage for stage in stages if stage[1]] or stages[:1]  # one without steps never begins
    first = 0
    for name, steps, peak, p in stages:
        if step < first + steps:
            break
        first += steps
    else:
        first -= steps
    return name, first, steps, peak, p


def main(argv):
    settings, model_settings, given = config.load(__file__, argv, {name: entry[0] for name, entry in METHODS.items()})
    ckpt_path, best_path, log_path = (os.path.join(settings['out_dir'], name)
                                      for name in ('ckpt.pt', 'best.pt', 'log.jsonl'))
    start = settings['init_from']
    if start not in ('scratch', 'resume', 'auto') and not settings['start_config'] and not os.path.exists(start):
        raise UserError(f'init_from = {start!r}: choose scratch, resume, auto or the path of a checkpoint that is there')
    resume = start == 'resume' or (start == 'auto' and os.path.exists(ckpt_path))
    checkpoint, changes = None, ''
    if resume:
        checkpoint = load_checkpoint(ckpt_path, settings['method'] if 'method' in given else None)
        settings, changes = merge_resumed(settings, model_settings, given, checkpoint)
    globals().update(settings)  # from here on `learning_rate` is the configured one
    config_class, model_class, batch_class = registered(checkpoint, ckpt_path) if resume else METHODS[method]
    config.check_range(settings, 'batch_size grad_accum eval_interval eval_rows log_interval')
    config.check_range(settings, 'max_iters learning_rate min_lr warmup_iters weight_decay grad_clip threads', 0)
    config.check_range(settings, 'beta1 beta2', 0, 1)
    config.check_range(settings, 'seed', 0, 2 ** 63)
    if min_lr > learning_rate:
        raise UserError(f'min_lr = {min_lr} is above learning_rate = {learning_rate}: lower it too')
    begun = [path for path in (ckpt_path, best_path, log_path) if os.path.exists(path) and os.path.getsize(path)]
    if start == 'auto' and start_config and not resume:
        raise UserError(f'init_from = auto: nothing to resume in {out_dir!r}, and this run starts from what {start_config} '
                        'trains; leave init_from out the first time')
    if begun and not resume and not eval_only and not overwrite:
        raise UserError(f'out_dir = {out_dir!r} holds a run already: --init_from=resume goes on with it, '
                        '--overwrite replaces it, --out_dir=... leaves it alone')
    if wandb_project:
        try:
            import wandb
        except ImportError:
            raise UserError('wandb_project is set, but wandb is not installed: pip install wandb') from None
    if (init_from in ('scratch', 'auto') or start_config) and not resume:
        config_class(**model_settings)  # says what is wrong with it before any data is prepared or a start is trained
        if eval_only and init_from in ('scratch', 'auto'):
            print(f'init_from = {init_from!r}: evaluating untrained weights')

    # processes: torchrun sets RANK, LOCAL_RANK and WORLD_SIZE
    ddp = 'RANK' in os.environ
    rank, world = int(os.environ.get('RANK', 0)), int(os.environ.get('WORLD_SIZE', 1))
    run_device, why_device = choose_device(device)
    if ddp:
        if run_device.startswith('cuda'):
            run_device, _ = choose_device(f'cuda:{os.environ["LOCAL_RANK"]}')
            torch.cuda.set_device(run_device)
        try:
            dist.init_process_group('nccl' if run_device.startswith('cuda') else 'gloo')
        except Exception as e:
            raise UserError(f'the processes could not connect ({first_line(e)})') from e
    is_main = rank == 0
    if grad_accum % world:
        raise UserError(f'grad_accum = {grad_accum} micro-batches cannot be shared out over {world} processes: '
                        f'use a multiple of {world}')
    say = print if is_main else lambda *_, **__: None
    if threads:
        torch.set_num_threads(threads)
    run_dtype, why_dtype = choose_dtype(dtype, run_device)
    run_compile, why_compile = choose_compile(compile, run_device)
    device_type = run_device.split(':')[0]
    autocast = torch.autocast(device_type, dtype=getattr(torch, run_dtype), enabled=run_dtype != 'float32')
    torch.set_float32_matmul_precision('high')  # TF32 where the GPU has it
    say(f'device {run_device} ({why_device}), {world} process{"es" if world > 1 else ""}; {run_dtype} ({why_dtype}); '
        f'compile {"on" if run_compile else "off"} ({why_compile})')

    # data
    if is_main:
        data.ensure_prepared(dataset)
        if start_config and not resume and init_from not in ('scratch', 'auto'):
            make_start(init_from, start_config, __file__,
                       {name: settings[name] for name in ('seed', 'device', 'dtype', 'compile', 'threads')})
    if ddp:
        dist.barrier()
    meta = data.read_meta(dataset)
    if resume:
        model_config = build_model(checkpoint, ckpt_path).config
        if checkpoint['meta'] != meta:
            raise UserError(f'dataset = {dataset!r} is not what {ckpt_path} was trained on: it was prepared anew since')
    else:
        if init_from not in ('scratch', 'auto'):  # the checkpoint to start from gives the core's shape
            checkpoint = load_checkpoint(init_from)
            shared = {f.name for f in fields(config_class if checkpoint['method'] == method else GPTConfig)}
            shape = starting_shape(checkpoint, init_from, model_settings, shared - set(config_class.of_the_run))
            if checkpoint['method'] == 'gpt':
                shape.update(config_class.from_gpt)
            # behind plain text the vocabulary may be padded; records want their special tokens as the last ones
            shape['vocab_size'] = max(shape['vocab_size'] if meta['kind'] == 'text' else 0, meta['vocab_size'])
            check_same_tokenizer(checkpoint['meta'], meta)
            taken = [f'{f.name} = {shape[f.name]}' for f in fields(config_class)
                     if shape.get(f.name, f.default) != f.default and f.name not in model_settings]
            say(f'settings that come with the start: {", ".join(taken) or "nothing"}')
            model_settings = {**shape, **model_settings}
        model_settings['vocab_size'] = model_settings.get('vocab_size') or meta['vocab_size']
        model_config = config_class(**model_settings)
    if model_config.vocab_size < meta['vocab_size']:
        raise UserError(f'vocab_size = {model_config.vocab_size}: dataset {dataset!r} has {meta["vocab_size"]} tokens')
    batches = batch_class(dataset, meta, model_config, seed, eval_rows, batch_size * grad_accum)
    stages = batches.stages(max_iters, learning_rate)
    total_iters = sum(steps for _, steps, _, _ in stages)

    # model and optimizer
    torch.manual_seed(seed)
    model = model_class(model_config)
    step, best_val_loss = 0, math.inf
    if resume:
        model = build_model(checkpoint, ckpt_path)
        step, best_val_loss = checkpoint['step'], checkpoint['best_val_loss']
        if os.path.exists(best_path):  # a crash after an evaluation leaves a best.pt that ckpt.pt does not know of
            best = load_checkpoint(best_path)
            if best['step'] <= step and best.get('stage') == checkpoint['stage']:
                best_val_loss = min(best_val_loss, best['best_val_loss'])
    elif checkpoint:
        new = model.load_pretrained(checkpoint['model'])
        say(f'starting from {init_from}, a {checkpoint["method"]} model; new: {", ".join(new) or "nothing"}')
    check_memory(model, batch_size, run_device, run_dtype)
    model.to(run_device)
    raw_model = model
    adamw = dict(lr=learning_rate, betas=(beta1, beta2), fused=True)

    def begin_stage(step):
        """The stage of `step` with its dropout, and an optimizer that knows nothing yet."""
        stage = stage_at(stages, step)
        raw_model.set_dropout(stage[-1])
        params = raw_model.param_groups(weight_decay)
        if ddp and shard_optimizer:
            from torch.distributed.optim import ZeroRedundancyOptimizer  # slow to import
            return stage, ZeroRedundancyOptimizer(params, torch.optim.AdamW, **adamw)
        return stage, torch.optim.AdamW(params, **adamw)
    (stage_name, stage_start, stage_steps, peak_lr, _), optimizer = begin_stage(step)
    if ddp:
        states = [None] * world
        dist.all_gather_object(states, (step, total_iters, meta))
        if any(state != states[0] for state in states):
            raise UserError(f'the processes disagree about step or data (steps {[s[0] for s in states]}): out_dir and the '
                            'data set must be folders that all nodes share')
    scaler = torch.amp.GradScaler(device_type, enabled=run_dtype == 'float16')
    if resume:
        if checkpoint['stage'] != [stage_name, stage_start]:
            raise UserError(f'max_iters = {max_iters}: the run to resume is in {checkpoint["stage"][0]} since step '
                            f'{checkpoint["stage"][1]}, and this would move it to {stage_name} since step {stage_start}')
        load_optimizer(optimizer, checkpoint['optimizer'], ckpt_path)
        if scaler.is_enabled() and checkpoint['scaler']:
            scaler.load_state_dict(checkpoint['scaler'])
        say(f'resuming {ckpt_path} at step {step}, best validation loss so far {best_val_loss:.4f}'
            + (f'; changed: {changes}' if changes else ''))
    if run_compile:
        model = torch.compile(model)
    if ddp:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)  # no second copy of the gradients
    checkpoint = None  # its tensors are not needed any more
    n_params = sum(p.numel() for p in raw_model.parameters())
    tokens_per_step = round(batch_size * grad_accum * batches.row_tokens)
    say(f'{method}: {n_params:,} parameters, {raw_model.flops_per_token() / 1e6:.1f} MFLOPs per token; '
        f'{dataset}: {tokens_per_step:,} tokens per step, {batches.epoch_steps:.0f} steps an epoch')
    if len(stages) > 1:
        say('stages: ' + ', '.join(f'{name} {steps} steps' for name, steps, _, _ in stages))
    if show_batch:
        say(batches.table(step))
    peak = world * peak_flops(run_device)

    # output
    log = None
    if is_main and not eval_only:
        try:
            os.makedirs(out_dir, exist_ok=True)
            for path in begun + glob(os.path.join(escape(out_dir), 'stage*.pt')) if overwrite and not resume else []:
                os.remove(path)
            kept = []
            if resume and os.path.exists(log_path):  # drop what came after the checkpoint: it is run again
                evaluated_again = step % eval_interval == 0 or step >= total_iters
                kept = [e for e in read_log(log_path) if e['iter'] < step or (
                    e['iter'] == step and not ('val_loss' in e and evaluated_again))]
            data.write_file(log_path, ''.join(json.dumps(e) + '\n' for e in kept))
            log = open(log_path, 'a', encoding='utf-8', buffering=1)
        except OSError as e:
            raise UserError(f'out_dir = {out_dir!r} cannot be written: {e.strerror}') from e
    if wandb_project and is_main:
        wandb.init(project=wandb_project, name=os.path.basename(out_dir), config={**settings, **asdict(model_config)})
    bar = tqdm(total=total_iters, initial=step, disable=not (is_main and sys.stderr.isatty() and not eval_only), unit='step')
    say_line = tqdm.write if not bar.disable else say

    def record(**entry):
        entry = {name: value if math.isfinite(value) else None for name, value in entry.items()}  # JSON has no nan
        if log:
            log.write(json.dumps(entry) + '\n')
        if wandb_project and is_main:
            wandb.log(entry, step=entry['iter'])

    def save(path):
        if ddp and shard_optimizer:
            optimizer.consolidate_state_dict(to=0)  # every process sends its share
        if is_main:
            log.flush()
            os.fsync(log.fileno())  # so that after a power cut the log reaches as far as the checkpoint
            save_checkpoint(path, {
                'version': VERSION, 'method': method, 'model_config': asdict(model_config), 'meta': meta,
                'model': raw_model.state_dict(), 'optimizer': optimizer.state_dict(), 'step': step,
                'stage': [stage_name, stage_start], 'total_iters': total_iters, 'best_val_loss': best_val_loss, 'settings': settings,
                'scaler': scaler.state_dict()})

    @torch.no_grad()
    def evaluate():
        """Mean loss over the fixed validation rows, shared out over the processes."""
        model.eval()
        total = torch.zeros(1, dtype=torch.float64)
        for first in range(rank * batch_size, batches.n_val, world * batch_size):
            rows = list(range(first, min(first + batch_size, batches.n_val)))
            torch.manual_seed(first)  # a model that draws at random draws the same at every evaluation
            with autocast:
                loss = raw_model(*(t.to(run_device) for t in batches.val_batch(rows, step)))[1]
            total += loss.item() * len(rows)
        model.train()
        if ddp:
            total = total.to(run_device if device_type == 'cuda' else 'cpu')
            dist.all_reduce(total)
        return total.item() / batches.n_val

    stop = []  # signals received; the second Ctrl-C stops at once

    def on_signal(number, _):
        if stop and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.append(number)
    handlers = {} if eval_only else {n: signal.signal(n, on_signal) for n in (signal.SIGINT, signal.SIGTERM)}

    # the loop
    model.train()
    clock, clock_step = time.perf_counter(), step
    while True:
        if step % eval_interval == 0 or step >= total_iters or eval_only:
            if not eval_only:
                if not all(p.isfinite().all() for p in raw_model.parameters()):
                    raise UserError(f'step {step}: a weight is not finite: training has diverged; {ckpt_path} is from before')
                save(ckpt_path)  # before the evaluation, so that a crash in it loses nothing
            val_loss = evaluate()
            if not math.isfinite(val_loss):
                raise UserError(f'step {step}: val loss {val_loss}: the model has diverged; {best_path} is the best before')
            say_line(f'step {step}: val loss {val_loss:.4f}')
            record(iter=step, val_loss=val_loss)
            if val_loss < best_val_loss and not eval_only:
                best_val_loss = val_loss
                save(best_path)
            clock, clock_step = time.perf_counter(), step
        if step >= total_iters or eval_only:
            break

        lr = learning_rate_at(step - stage_start, stage_steps, peak_lr)
        for group in optimizer.param_groups:
            group['lr'] = lr
        step_loss = torch.zeros(1, device=run_device)
        for micro in range(rank, grad_accum, world):
            rows = list(range(micro * batch_size, (micro + 1) * batch_size))
            batch = [t.to(run_device) for t in batches.train_batch(step, rows)]
            # dropout depends on (seed, step, micro-batch) alone: the same on any number of processes, and after a resume
            torch.manual_seed(((seed * 1_000_003 + step) * 1_000_003 + micro) % 2 ** 63)
            if ddp:  # gradients are exchanged once per step; must be set before the forward pass
                model.require_backward_grad_sync = micro + world >= grad_accum
            with autocast:
                loss = model(*batch)[1]
            scaler.scale(loss * world / grad_accum).backward()  # DDP averages over processes, hence * world
            step_loss += loss.detach() / grad_accum
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(raw_model.parameters(), grad_clip or math.inf)
        status = torch.cat((step_loss, step_loss.new_tensor([float(bool(stop))])))
        if ddp:
            dist.all_reduce(status)
        train_loss, stop_wanted = status.tolist()
        # float16 gradients may overflow: the scaler skips that step and lowers its scale
        overflow_only = scaler.is_enabled() and scaler.get_scale() >= 1
        if not math.isfinite(train_loss) or not (overflow_only or math.isfinite(norm)):
            raise UserError(f'step {step}: loss {train_loss}, gradient norm {norm.item()}: training has diverged; '
                            f'{ckpt_path} is from before; a lower learning_rate (now {learning_rate}) may help')
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        bar.update()
        if step % log_interval == 0 or step == total_iters:
            now = time.perf_counter()
            rate = tokens_per_step * (step - clock_step) / (now - clock)
            clock, clock_step = now, step
            entry = dict(iter=step, train_loss=train_loss, lr=lr, tokens_per_s=round(rate), grad_norm=norm.item())
            if peak:
                entry['mfu'] = rate * raw_model.flops_per_token() / peak
            record(**entry)
            bar.set_postfix(loss=f'{train_loss:.4f}', lr=f'{lr:.1e}', tokens_per_s=f'{rate:,.0f}')
            if bar.disable and step % (10 * log_interval) == 0:
                left = (total_iters - step) * tokens_per_step / rate
                say(f'step {step}: loss {train_loss:.4f}, lr {lr:.2e}, {rate:,.0f} tokens/s, {left / 60:.1f} min left',
                    flush=True)
        if step == stage_start + stage_steps and step < total_iters:
            save(os.path.join(out_dir, f'{stage_name}.pt'))
            if is_main and os.path.exists(best_path):  # losses of stages do not compare: the best of each is kept
                os.replace(best_path, os.path.join(out_dir, f'{stage_name}_best.pt'))
            best_val_loss = math.inf
            (stage_name, stage_start, stage_steps, peak_lr, _), optimizer = begin_stage(step)
            say_line(f'step {step}: {stage_name} begins, learning rate {peak_lr}')
        if stop_wanted and step < total_iters:
            save(ckpt_path)
            say_line(f'stopped by a signal after step {step}; go on with the same command and --init_from=resume')
            break

    bar.close()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    if step >= total_iters and not eval_only:
        save(ckpt_path)  # once more, now that the best loss is known
    if is_main and step >= total_iters and not eval_only:
        try:
            say(batches.report(raw_model))
        except Exception as e:  # a sample never fails a finished run
            say(f'no report: {type(e).__name__}: {first_line(e)}')
        script = os.path.relpath(os.path.join(os.path.dirname(__file__), 'sample.py'))
        command = ['python', script, f'--out_dir={out_dir}']
        if batches.example:
            command.append(f'--prompt={batches.example}')
        say(f'{ckpt_path} is the last model, {best_path} the best (val loss {best_val_loss:.4f}); '
            f'{shlex.join(command)} samples from it')
    if log:
        log.close()
    if ddp:
        # DDP's reducer must not be the last to hold the group: it would wait for gloo's thread without letting go of
        # Python's lock, which that thread may need to free the tensor of the last all_reduce
        model = None
        dist.barrier()
        dist.destroy_process_group()


if __name__ == '__main__':
    config.run(main)
