"""What guards a run and changes none of its numbers: settings, processes, one run per folder, resuming,
checkpoints, the log, signals, and what is refused. train.py has the rest."""
import json
import math
import os
import shlex
import signal
import sys
import time
from dataclasses import asdict
from datetime import timedelta
from glob import escape, glob
from textwrap import shorten

import torch
import torch.distributed as dist
from tqdm import tqdm

import config
import data
from config import UserError, check_choice, check_range, need
from config.checkpoint import (VERSION, compared_to_start, first_line, load_checkpoint, load_optimizer, load_start,
                               load_weights, merge_resumed, save_checkpoint, starting_settings)
from config.files import read_log, write_file
from config.machine import (autocast, choose_compile, choose_device, choose_dtype, flops_per_token, peak_flops,
                            set_threads)
from config.plan import check_memory

SLOW_SAVE = 20  # seconds; torchrun kills its processes 30 seconds after it has passed a signal on


class Run:
    """One training run: its settings, processes and folder. Raises UserError for what does not fit together.

    rank, world: this process and their number. is_main: whether it prints and writes. resume: whether the run
    goes on from its checkpoint.
    """

    def __init__(self, script, argv, methods):
        self.ddp = 'RANK' in os.environ  # torchrun sets RANK, LOCAL_RANK and WORLD_SIZE
        self.rank = int(os.environ.get('RANK', 0))
        self.world = int(os.environ.get('WORLD_SIZE', 1))
        self.is_main = self.rank == 0
        self.say = print if self.is_main else lambda *_, **__: None
        self.start = None  # the checkpoint to go on with, or to start from
        self.lock = None
        self.log_file = self.wandb = None
        self.signals = []  # received so far
        self.handlers = {}  # what signals did before

        # which settings hold
        classes = {name: entry[0] for name, entry in methods.items()}
        settings, self.model_settings, given = config.load(script, argv, classes, self.method_to_resume)
        self.changes = ''
        if self.resume:
            if settings['method'] != self.start['method']:
                raise UserError(f'{self.start_path} is a {self.start["method"]} model, not {settings["method"]}')
            settings, self.changes = merge_resumed(settings, self.model_settings, given, self.start)
        self.settings = settings
        self.method = methods[settings['method']]
        self.out_dir = settings['out_dir']
        # a data set's script is run for a name that the user gave, never for one that came out of a checkpoint
        self.dataset_given = 'dataset' in given or not self.resume
        check_settings(settings, self.world)
        if not self.resume and (settings['init_from'] in ('scratch', 'auto') or settings['plan']):
            classes[settings['method']](**self.model_settings)  # refuses what is wrong before anything is written
        if settings['plan']:
            return
        self.choose_machine()
        if self.is_main and not settings['show_batch']:
            self.take_folder()

    def method_to_resume(self, settings):
        """The method of the checkpoint to resume, which is read here; None for another run."""
        start = settings['init_from']
        self.resume = False
        if settings['plan']:  # which needs no weights
            return None
        self.start_path = os.path.join(settings['out_dir'], 'ckpt.pt')
        self.resume = start == 'resume' or (start == 'auto' and os.path.exists(self.start_path))
        if self.resume:
            self.start = load_checkpoint(self.start_path)
            return self.start['method']
        if start not in ('scratch', 'auto'):
            self.start_path = start
            if not os.path.exists(start) and not config.on_hub(start):
                hint = 'choose scratch, resume, auto, the path of a checkpoint or a published model'
                maker = f'config/{os.path.basename(os.path.dirname(start))}.py'  # runs are named after it
                if os.path.exists(os.path.join(config.ROOT, maker)):
                    hint = f'make it with python train.py {maker}'
                raise UserError(f'init_from = {start!r} is not there: {hint}')

    def choose_machine(self):
        """Device, precision and compiler with their reasons; the processes meet."""
        s = self.settings
        self.device, why_device = choose_device(s['device'])
        if self.ddp and self.device.startswith('cuda'):
            self.device, _ = choose_device(f'cuda:{os.environ["LOCAL_RANK"]}')
            torch.cuda.set_device(self.device)
        set_threads(s['threads'])
        self.dtype, why_dtype = choose_dtype(s['dtype'], self.device)
        self.compile, why_compile = choose_compile(s['compile'], self.device,
                                                   getattr(self.method[1], 'not_compiled', ''))
        self.device_type = self.device.split(':')[0]
        torch.set_float32_matmul_precision('high')  # TF32 where the GPU has it
        if self.ddp:
            try:
                dist.init_process_group('nccl' if self.device_type == 'cuda' else 'gloo')
            except Exception as e:
                raise UserError(f'the processes could not connect ({first_line(e)})') from e
            # preparing data and writing may take the main process longer than a step's timeout
            self.patient = dist.new_group(backend='gloo', timeout=timedelta(days=1))
        self.say(f'device {self.device} ({why_device}), {self.world} process{"es" if self.world > 1 else ""}; '
                 f'{self.dtype} ({why_dtype}); compile {"on" if self.compile else "off"} ({why_compile})')

    def autocast(self):
        return autocast(self.device, self.dtype)

    def wait(self):
        """Wait until every process is here, for as long as it takes."""
        if self.ddp:
            dist.barrier(group=self.patient)

    def take_folder(self):
        """Lock out_dir while this run lives: two runs in one folder would spoil each other's files."""
        try:
            os.makedirs(self.out_dir, exist_ok=True)
            self.lock = open(os.path.join(self.out_dir, '.lock'), 'w')
        except OSError as e:
            raise UserError(f'out_dir = {self.out_dir!r} cannot be written: {e.strerror}') from e
        try:
            import fcntl
            fcntl.lockf(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with this process, however that ends
        except BlockingIOError:
            self.lock.close()
            raise UserError(f'out_dir = {self.out_dir!r}: another run is writing there: wait for its end, or give '
                            'another --out_dir') from None
        except (ImportError, OSError) as e:
            print(f'{self.out_dir}: no locks on this system ({first_line(e)}): do not start a second run there')
        earlier = [path for name in ('*.pt', 'log.jsonl')
                   for path in glob(os.path.join(escape(self.out_dir), name)) if os.path.getsize(path)]
        if earlier and not self.resume and not self.settings['overwrite']:
            raise UserError(f'out_dir = {self.out_dir!r} holds a run already: --init_from=resume goes on with it, '
                            '--overwrite replaces it, --out_dir=... leaves it alone')
        self.remove('*.tmp')  # of runs that were killed while they wrote

    def remove(self, pattern):
        """The files of out_dir that fit a pattern."""
        for path in glob(os.path.join(escape(self.out_dir), pattern)):
            os.remove(path)

    # --- the start ---

    def open_data(self):
        """(data set, its meta) as the model to go on with reads it; made here where that is needed."""
        s = self.settings
        if self.is_main:
            data.ensure_prepared(s['dataset'], given=self.dataset_given)
        self.wait()
        for turn in (self.is_main, not self.is_main):  # the main process fetches and encodes, the others find it
            if turn and not self.resume and s['init_from'] not in ('scratch', 'auto'):
                self.start = load_start(self.start_path)
            if turn:
                spec = self.start and self.start['meta']['tokenizer']
                found = data.read_with(s['dataset'], spec, self.dataset_given)
            self.wait()
        return found

    def model_config(self, config_class, meta):
        """The model's configuration: as saved, as the weights to start from need it, or as set."""
        dataset = self.settings['dataset']
        if self.resume:
            if self.start['meta'] != meta:
                raise UserError(f'dataset = {dataset!r} is not what {self.start_path} was trained on: it was '
                                'prepared anew since')
            try:
                return config_class(**self.start['model_config'])
            except (TypeError, UserError) as e:
                raise UserError(f'{self.start_path}: its configuration does not fit this code '
                                f'({first_line(e)})') from e
        settings = self.model_settings
        if self.start:
            came = starting_settings(self.start, self.start_path, config_class.shape, settings, meta)
            settings = {**came, **settings}
            self.say(compared_to_start(self.start, config_class, settings, came))
        model_config = config_class(**{**settings, 'vocab_size': settings.get('vocab_size') or meta['vocab_size']})
        if model_config.vocab_size < meta['vocab_size']:
            raise UserError(f'vocab_size = {model_config.vocab_size}: dataset {dataset!r} has '
                            f'{meta["vocab_size"]} tokens')
        return model_config

    def load_into(self, model):
        """Fill the model with the weights to go on with; returns (iteration, best validation loss so far)."""
        it, best = 0, math.inf
        self.finished = self.resume and self.start.get('finished', False)
        if self.resume:
            load_weights(model, self.start, self.start_path)
            it, best = self.start['step'], self.start['best_val_loss']
            best_path = os.path.join(self.out_dir, 'best.pt')
            # after a crash best.pt may be newer than ckpt.pt
            if os.path.exists(best_path):
                saved = load_checkpoint(best_path, mmap=True)
                if saved['step'] <= it and saved.get('stage') == self.start['stage']:
                    best = min(best, saved['best_val_loss'])
        elif self.start:
            new = model.load_pretrained(self.start['model'])
            self.say(f'starting from {self.start_path}, a {self.start["method"]} model; '
                     f'new: {shorten(", ".join(new), 99) or "nothing"}')
        check_memory(self.method, model, {**self.settings, 'dtype': self.dtype}, self.device, self.world)
        return it, best

    def load_optimizer(self, optimizer, scaler, stage):
        """Fill the optimizer of a resumed run. Raises UserError if it belongs to another stage than this one."""
        if self.resume:
            name, first = self.start['stage']
            if (name, first) != (stage.name, stage.first):
                raise UserError(f'max_iters = {self.settings["max_iters"]}: the run to resume is in {name} since '
                                f'step {first}, and this would move it to {stage.name} since step {stage.first}')
            load_optimizer(optimizer, self.start['optimizer'], self.start_path)
            if scaler.is_enabled() and self.start['scaler']:
                scaler.load_state_dict(self.start['scaler'])
        self.start = None  # its tensors are not needed any more

    # --- while it runs ---

    def begin(self, model, meta, it, stages, epoch_iters, best_val_loss):
        """Say what begins; open the log and the progress bar, and listen to signals."""
        s = self.settings
        self.meta = meta
        self.model = model
        self.total_iters = stages[-1].first + stages[-1].iters
        self.peak = self.world * peak_flops(self.device)
        if self.ddp:
            states = [None] * self.world
            dist.all_gather_object(states, (it, self.total_iters, meta))
            if any(state != states[0] for state in states):
                raise UserError('the processes disagree about step or data (steps '
                                f'{[step for step, *_ in states]}): out_dir and the data set must be folders that '
                                'all nodes share')

        wrong = [step for step in s['snapshots'] if step not in range(self.total_iters + 1)]
        if wrong:
            raise UserError(f'snapshots = {s["snapshots"]}: {wrong[0]} is not a step of this run; give whole '
                            f'numbers from 0 to {self.total_iters}')

        # what begins
        if self.resume:
            self.say(f'resuming {self.start_path} at step {it}, best validation loss so far {best_val_loss:.4f}'
                     + (f'; changed: {self.changes}' if self.changes else ''))
        late = [n for n in s['snapshots'] if n < it and not os.path.exists(f'{self.out_dir}/step_{n}.pt')]
        if late:
            self.say(f'snapshots: too late for {late}, the run is at step {it}')
        self.say(f'{s["method"]}: {sum(p.numel() for p in model.parameters()):,} parameters, '
                 f'{flops_per_token(model) / 1e6:.1f} MFLOPs per token; {s["dataset"]}: '
                 f'{s["batch_size"] * s["grad_accum"]} rows per step, {epoch_iters:.0f} steps an epoch')
        if len(stages) > 1:
            self.say('stages: ' + ', '.join(f'{stage.name} {stage.iters} steps' for stage in stages))

        # where it is told
        if self.is_main:
            self.open_log(it)
        if s['wandb_project'] and self.is_main:
            import wandb
            self.wandb = wandb.init(project=s['wandb_project'], name=os.path.basename(self.out_dir),
                                    config={**s, **asdict(model.config)})
        self.bar = tqdm(total=self.total_iters, initial=it, unit='step',
                        disable=not (self.is_main and config.is_terminal(sys.stderr)))
        if not self.bar.disable:
            self.say = tqdm.write
        self.handlers = {n: signal.signal(n, self.on_signal) for n in (signal.SIGINT, signal.SIGTERM)}
        self.restart_clock()

    def open_log(self, it):
        """log.jsonl without what came after the checkpoint, since that is run again."""
        path = os.path.join(self.out_dir, 'log.jsonl')
        entries = []
        if not self.resume:
            self.remove('*.pt')  # of an earlier run, which --overwrite gives up
        elif os.path.exists(path):
            evaluated_again = it % self.settings['eval_interval'] == 0 or it >= self.total_iters
            entries = [e for e in read_log(path)
                       if e['iter'] < it or (e['iter'] == it and not ('val_loss' in e and evaluated_again))]
        write_file(path, ''.join(json.dumps(e) + '\n' for e in entries))
        self.log_file = open(path, 'a', encoding='utf-8', buffering=1)

    def on_signal(self, number, _):
        if self.signals and number == signal.SIGINT:  # the second Ctrl-C stops at once
            raise KeyboardInterrupt
        self.signals.append(number)

    def stop_agreed(self):
        """Whether any process has received a signal. All ask together."""
        return self.sum(torch.tensor([float(bool(self.signals))])).item() > 0

    def sum(self, tensor):
        """A small tensor, summed over the processes."""
        if self.ddp:
            tensor = tensor.to(self.device if self.device_type == 'cuda' else 'cpu')
            dist.all_reduce(tensor)
        return tensor

    def log(self, **entry):
        """One line of log.jsonl, and of Weights & Biases."""
        entry = {name: value if math.isfinite(value) else None for name, value in entry.items()}  # JSON has no nan
        if self.log_file:
            self.log_file.write(json.dumps(entry) + '\n')
        if self.wandb:
            self.wandb.log(entry, step=entry['iter'])

    def restart_clock(self):
        self.clock = time.perf_counter()
        self.iters = 0
        self.tokens = 0

    def count(self, tokens):
        """A step has been made, over so many tokens."""
        self.iters += 1
        self.tokens += tokens
        self.bar.update()

    def log_step(self, it, train_loss, lr, grad_norm):
        """Log a step; in a terminal the bar shows it, elsewhere a line."""
        seconds = time.perf_counter() - self.clock
        rate = self.tokens / seconds
        left = (self.total_iters - it) * seconds / self.iters / 60
        self.restart_clock()
        entry = dict(iter=it, train_loss=train_loss, lr=lr, tokens_per_s=round(rate), grad_norm=grad_norm)
        if self.peak:
            entry['mfu'] = rate * flops_per_token(self.model) / self.peak
        self.log(**entry)
        self.bar.set_postfix(loss=f'{train_loss:.4f}', lr=f'{lr:.1e}', tokens_per_s=f'{rate:,.0f}')
        if self.bar.disable:
            self.say(f'step {it}: loss {train_loss:.4f}, lr {lr:.2e}, {rate:,.0f} tokens/s, {left:.1f} min left',
                     flush=True)

    def save(self, name, state):
        """Write out_dir/name; `state` adds to what every checkpoint has. Returns the seconds it took."""
        start = time.perf_counter()
        if self.is_main:
            self.log_file.flush()
            os.fsync(self.log_file.fileno())  # so that after a power cut the log reaches as far as the checkpoint
            save_checkpoint(os.path.join(self.out_dir, name), {
                'version': VERSION, 'method': self.settings['method'], 'settings': self.settings,
                'meta': self.meta, 'model_config': asdict(self.model.config), 'model': self.model.state_dict(),
                'total_iters': self.total_iters, **state})
        self.wait()
        seconds = time.perf_counter() - start
        if seconds > SLOW_SAVE:
            self.say(f'{name} took {seconds:.0f} s to write: torchrun kills a run 30 s after a signal, before its '
                     f'last save; give torchrun --shutdown_timeout={round(10 * seconds)}')
        return seconds

    def close_stage(self, name):
        """Losses of stages do not compare, so the best model of each is left."""
        best = os.path.join(self.out_dir, 'best.pt')
        if self.is_main and os.path.exists(best):
            os.replace(best, os.path.join(self.out_dir, f'{name}_best.pt'))

    def say_finished(self, best_val_loss):
        command = ['python', os.path.relpath(os.path.join(config.ROOT, 'sample.py')), f'--out_dir={self.out_dir}']
        if self.meta.get('example'):  # a question, where the data have some
            command.append(f'--prompt={self.meta["example"]}')
        self.say(f'{self.out_dir}/ckpt.pt is the last model, {self.out_dir}/best.pt the best (val loss '
                 f'{best_val_loss:.4f}); {shlex.join(command)} samples from it')

    def close(self):
        if self.handlers:
            self.bar.close()
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        for file in (self.log_file, self.lock):
            if file:
                file.close()
        if self.ddp:
            self.wait()
            dist.destroy_process_group()


def check_settings(settings, world):
    """Raises UserError for a setting of train.py out of range or at odds with another."""
    check_range(settings, 'batch_size grad_accum eval_interval eval_rows log_interval gpus')
    check_range(settings, 'max_iters learning_rate min_lr warmup_iters weight_decay grad_clip gpu_memory', 0)
    check_range(settings, 'beta1 beta2 warmup_share', 0, 1)
    check_choice(settings, 'schedule', 'cosine constant')
    check_range(settings, 'seed', 0, 2 ** 63)
    if settings['min_lr'] > settings['learning_rate']:
        raise UserError(f'min_lr = {settings["min_lr"]} is above learning_rate = {settings["learning_rate"]}: '
                        'lower it too')
    if settings['grad_accum'] % world:
        raise UserError(f'grad_accum = {settings["grad_accum"]} micro-batches cannot be shared out over {world} '
                        f'processes: use a multiple of {world}')
    if settings['wandb_project']:
        need('wandb', 'wandb_project')
