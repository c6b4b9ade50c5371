"""Compares methods fairly: each at its own best learning rate and over several seeds, and the plain GPT also with
as many FLOPs as each of the others.

    python -m config.compare --configs=config/gpt_small.py,config/tb_small.py --plan=True     the hours, first
    python -m config.compare --configs=config/gpt_small.py,config/tb_small.py --parallel=2    goes on after a stop

The search runs each config at several rates with one seed; the rate of the least final validation loss is then run
with others. keep is off by default: a comparison is a hundred runs, and from its settings each can be made again.
"""
import contextlib
import functools
import itertools
import json
import math
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections import namedtuple

import torch

import bench
import config
import data
import train
from config import UserError
from config.checkpoint import load_start, starting_settings
from config.files import read_log, write_file
from config.machine import choose_device, flops_per_token, set_threads
from config.tables import formatted, print_numbers

configs = ''  # separated by commas, the plain GPT first; settings may follow a file: "config/cyb_small.py --W=4"
out_dir = 'out/compare'  # compare.json and a folder for each run; one comparison at a time writes there
extra = ''  # settings of all runs, such as "--max_iters=2000 --dataset=my.txt"
rates = 5  # learning rates of the search, the config's own in the middle; one more beyond an edge that is best
factor = 2.0  # between neighbouring rates
search_seed = 1  # of the search
seeds = 5  # runs at the best rate, with the seeds after search_seed
equal_flops = 'both'  # plain GPTs with as many FLOPs as the others: both | steps (more of them) | width | none
parallel = 1  # runs at a time, each on one CPU thread
keep = False  # keep ckpt.pt of finished runs, to go on with them; best.pt, a third of its size, stays anyway
plan = False  # print the number of runs and the hours, and end

ROUNDS = 3  # of timed steps
# text: config file and settings, as given; changed: other settings than train.py's own; batch: one of mid-training
Run = namedtuple('Run', 'name text settings config changed steps flops batch')


# --- what is compared ---

@functools.cache
def opened(dataset, init_from):
    """(checkpoint to start from or None, data set, its meta), as a run has them."""
    data.ensure_prepared(dataset)
    if init_from in ('scratch', 'auto'):
        return None, *data.read_with(dataset, None)
    start = {**load_start(init_from), 'model': None, 'optimizer': None}  # its settings alone matter here
    return start, *data.read_with(dataset, start['meta']['tokenizer'])


def read_run(text):
    """The run that train.py makes of a config file and settings. Raises UserError."""
    path, *arguments = shlex.split(text)
    classes = {name: entry[0] for name, entry in train.METHODS.items()}
    settings, given, _ = config.load(train.__file__, [path, *shlex.split(extra), *arguments], classes)
    start, rows_of, meta = opened(settings['dataset'], settings['init_from'])
    config_class, model_class, batch_class = train.METHODS[settings['method']]
    if start:
        given = {**starting_settings(start, settings['init_from'], config_class.shape, given, meta), **given}
    model_config = config_class(**{'vocab_size': meta['vocab_size'], **given})
    rows = settings['batch_size'] * settings['grad_accum']
    batches = batch_class(rows_of, meta, model_config, 1, settings['eval_rows'], rows)
    stages = model_config.stages(settings['max_iters'], settings['learning_rate'], batches.epoch_iters)
    steps = stages[-1].first + stages[-1].iters
    half = steps // 2
    batch = batches.train_batch(train.stage_at(stages, half), half, list(range(settings['batch_size'])))
    with torch.device('meta'):
        flops = steps * rows * model_config.block_size * flops_per_token(model_class(model_config))
    name = ' '.join([os.path.basename(path).removesuffix('.py'), *(word.lstrip('-') for word in arguments)])
    own = config.script_settings(train.__file__)
    changed = {key: value for key, value in settings.items() if value != own[key].default and key != 'out_dir'}
    return Run(re.sub(r'[^\w.,=-]+', '_', name), text, settings, model_config,
               json.loads(json.dumps({**changed, **given})), steps, flops, batch)


def controls(plain, flops):
    """The plain GPT with so many FLOPs: by more steps, and by the width that comes nearest."""
    found = []
    # rounded up, in its favour, to tenths of its own: methods that cost nearly the same then share a control
    more = math.ceil(10 * flops / plain.flops - 1e-6) / 10
    flops = more * plain.flops
    if equal_flops in ('both', 'steps'):
        epochs = getattr(plain.config, 'epochs', 0) * more
        setting = f'--epochs={epochs:.4g}' if epochs else f'--max_iters={plain.steps * more:.0f}'
        found.append(read_run(f'{plain.text} {setting}'))
    if equal_flops in ('both', 'width') and plain.settings['init_from'] == 'scratch':  # other weights have a width
        step = plain.config.n_head * (1 if plain.config.learned_positions else 2)
        nearest = plain
        for n_embd in itertools.count(plain.config.n_embd + step, step):
            wider = read_run(f'{plain.text} --n_embd={n_embd}')
            if abs(wider.flops - flops) >= abs(nearest.flops - flops):
                break
            nearest = wider
        found.append(nearest)
    return [run for run in found if run.flops != plain.flops]


def read_runs():
    """({name: run}, [(name, name of what it is measured against)]). Raises UserError."""
    if not configs.strip():
        raise UserError('configs is empty: name files, as in --configs=config/gpt_small.py,config/tb_small.py')
    texts = re.split(r',(?=[^,=]*\.py\b)', configs)  # at commas before a file: settings may hold others
    plain, *others = [read_run(text) for text in texts]
    runs = {run.name: run for run in [plain, *others]}
    if len(runs) <= len(others):
        raise UserError(f'configs = {configs!r}: two runs would have the same name')
    if plain.settings['method'] != 'gpt' and getattr(plain.config, 'train_on', '') != 'sft':
        raise UserError(f'configs: {plain.text} stands first and is no plain GPT (method = gpt; with questions, '
                        'train_on = sft)')
    pairs = []
    for run in others:
        for name in ('dataset', 'eval_rows', 'block_size', 'vocab_size'):
            own, first = ({**r.settings, **vars(r.config)}[name] for r in (run, plain))
            if own != first:
                raise UserError(f'configs: {name} = {own!r} in {run.text}, {first!r} in {plain.text}: '
                                'their losses do not compare')
        if getattr(run.config, 'train_on', '') == 'cot':
            raise UserError(f'configs: the loss of {run.text} counts written steps: it does not compare')
        same = controls(plain, run.flops) if run.settings['method'] != 'gpt' else []
        runs.update({control.name: control for control in same})
        pairs += [(run.name, other.name) for other in [plain, *same]]
    return runs, pairs + [(name, plain.name) for name in list(runs)[1 + len(others):]]


# --- which runs of it there are, and what came out ---

def rate_at(run, k):
    return float(f'{run.settings["learning_rate"] * factor ** k:.3g}')


def best_rate(run, results):
    """(rate, whether it is the least or the largest tried) of the search so far; no rate, None, if all failed."""
    losses = {r['rate']: r.get('loss', math.inf) for r in results.values()
              if r['run'] == run.name and r['seed'] == search_seed}
    best = min(losses, key=losses.get, default=None)
    if losses.get(best, math.inf) == math.inf:
        return None, True
    return best, len(losses) > 1 and best in (min(losses), max(losses))


def jobs_of(phase, run, results):
    """The (rate, seed) of a run: of the search, beyond its edge where that is best, at the best rate."""
    half = rates // 2
    best, _ = best_rate(run, results)
    if phase == 'search':
        return [(rate_at(run, k), search_seed) for k in range(-half, half + 1)]
    if phase == 'edge':
        ends = {rate_at(run, k): k for k in (-half, half) if half}
        return [(rate_at(run, ends[best] + ends[best] // half), search_seed)] if best in ends else []
    return [(best, search_seed + i) for i in range(1, seeds + 1) if best]


def final_losses(run, results):
    """{seed: loss} at the best rate."""
    best = jobs_of('seeds', run, results)
    return {str(r['seed']): r['loss'] for r in results.values()
            if r['run'] == run.name and (r['rate'], r['seed']) in best and 'loss' in r}


def mean_and_error(values):
    """(mean, its standard error), None for what so few values do not have."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return statistics.mean(values) if values else None, error


def paired(a, b):
    """The differences a - b of two {seed: number}, by seed."""
    return [a[seed] - b[seed] for seed in a if seed in b]


# --- runs of train.py ---

def command(run, rate, seed, folder):
    """train.py at this rate; its other rates keep their proportion."""
    path, *arguments = shlex.split(run.text)
    known = {**run.settings, **vars(run.config)}
    own = {name: known[name] * rate / known['learning_rate']
           for name in ('min_lr', 'stage2_learning_rate') if name in known}
    own.update(learning_rate=rate, seed=seed, out_dir=folder)
    if os.path.exists(os.path.join(folder, 'ckpt.pt')):
        own['init_from'] = 'resume'
    return [sys.executable, train.__file__, path, '--threads=1', *shlex.split(extra), *arguments,
            *(f'--{name}={value}' for name, value in own.items())]


def start(words, output):
    """A child that prints into a file. In its own session: Ctrl-C reaches it through us alone, and so once."""
    with open(output, 'ab') as f:
        return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=f, stderr=f, start_new_session=True)


def outcome(run, status, folder):
    """{'loss': the final validation loss} of a run that has ended, or {'failed': the last line it printed}."""
    path = os.path.join(folder, 'log.jsonl')
    log = read_log(path) if status == 0 and os.path.exists(path) else []
    losses = [entry['val_loss'] for entry in log if entry['iter'] == run.steps and 'val_loss' in entry]
    if losses:
        return {'loss': losses[-1]}
    with open(os.path.join(folder, 'output.txt'), encoding='utf-8', errors='replace') as f:
        return {'failed': [f'ended with status {status}', *filter(str.strip, f.read().splitlines())][-1]}


def train_all(jobs, results, write):
    """Make those of [(run, rate, seed)] whose loss is not known, `parallel` at a time, and write each result as it
    comes. On Ctrl-C the children save and end."""
    named = {f'{run.name}_lr={rate:g}_seed={seed}': (run, rate, seed) for run, rate, seed in jobs}
    waiting = [name for name in named if 'loss' not in results.get(name, {})]
    running = {}  # {name: process}
    try:
        while waiting or running:
            while waiting and len(running) < parallel:
                name = waiting.pop(0)
                folder = os.path.join(out_dir, name)
                os.makedirs(folder, exist_ok=True)
                running[name] = start(command(*named[name], folder), os.path.join(folder, 'output.txt'))
            time.sleep(0.2)
            for name in [name for name, process in running.items() if process.poll() is not None]:
                run, rate, seed = named[name]
                found = outcome(run, running.pop(name).returncode, os.path.join(out_dir, name))
                results[name] = {'run': run.name, 'rate': rate, 'seed': seed, **found}
                write()
                (word, value), = found.items()
                print(f'{name}: {word} {formatted(value)}; {len(waiting) + len(running)} to go', flush=True)
                if 'loss' in found and not keep:
                    with contextlib.suppress(FileNotFoundError):
                        os.remove(os.path.join(out_dir, name, 'ckpt.pt'))
    finally:  # an interruption leaves some
        for process in running.values():
            process.send_signal(signal.SIGINT)
        for process in running.values():
            process.wait()


# --- tables ---

def print_hours(runs, results):
    """The runs to come and their hours, from a few steps, timed in turn: a slow moment of the machine hits all."""
    set_threads(1)
    times = {name: [] for name in runs}
    for name, run in [*runs.items()] * ROUNDS:
        bench.device = choose_device(run.settings['device'])[0]
        step = bench.build(run.settings['method'], batch=run.batch, **vars(run.config))[1]
        step()  # the first one is slow
        times[name].append(bench.seconds(step) * run.settings['grad_accum'])
    table = []
    for name, run in runs.items():
        s = run.settings
        seconds = statistics.median(times[name])
        left = rates + seeds - sum(r['run'] == name and 'loss' in r for r in results.values())
        evaluation = s['eval_rows'] / s['batch_size'] / s['grad_accum'] / 3  # in steps: forward is a third of one
        steps = run.steps + (run.steps // s['eval_interval'] + 1) * evaluation
        table.append({'run': name, 'steps': run.steps, 'seconds': seconds, 'runs': max(0, left),
                      'hours': max(0, left) * steps * seconds / 3600})
    print_numbers({'to come': table}, '')
    n, hours = (sum(row[column] for row in table) for column in ('runs', 'hours'))
    print(f'\n{n} runs, about {hours / parallel:.2f} hours with {parallel} at a time; one more run where the best '
          'rate is at the edge. seconds: of a step, in float32 and not compiled')


def print_results(runs, pairs, results):
    losses, differences = [], []
    values = {name: final_losses(run, results) for name, run in runs.items()}
    plain = next(iter(runs.values()))
    for name, run in runs.items():
        rate, at_edge = best_rate(run, results)
        loss, error = mean_and_error([*values[name].values()])
        losses.append({'run': name, 'steps': run.steps, 'width': run.config.n_embd,
                       'FLOPs': run.flops / plain.flops, 'rate': rate and f'{rate:g}',
                       'edge': 'yes' if at_edge else 'no', 'seeds': len(values[name]), 'loss': loss,
                       'error': error})
    for name, other in pairs:
        by_seed = paired(values[name], values[other])
        difference, error = mean_and_error(by_seed)
        differences.append({'run': name, 'minus': other, 'seeds': len(by_seed), 'difference': difference,
                            'error': error})
    print_numbers({'losses': losses, 'differences': differences}, '')
    print('\nFLOPs: of the whole run, over those of the first. edge: is the best rate the least or the largest '
          'tried? error: standard error of the mean. difference: below 0 where run is better than minus')
    for name, result in results.items():
        if 'failed' in result:
            print(f'{name} failed: {result["failed"]}')


def main(argv):
    globals().update(config.load(__file__, argv)[0])
    config.check_range(globals(), 'rates seeds parallel')
    config.check_range(globals(), 'search_seed', 0)
    config.check_range(globals(), 'factor', 1.1)
    config.check_choice(globals(), 'equal_flops', 'both steps width none')
    if rates % 2 == 0:
        raise UserError(f'rates = {rates}: give an odd number, so that the config\'s own is in the middle')
    runs, pairs = read_runs()
    path = os.path.join(out_dir, 'compare.json')
    saved = {'from': '', 'settings': {}, 'results': {}, 'values': {}, **config.read_json(path)}
    results = saved['results']
    for name, run in runs.items():
        known = saved['settings'].setdefault(name, run.changed)
        if known != run.changed:
            other = min(key for key in known | run.changed if known.get(key) != run.changed.get(key))
            raise UserError(f'{path} has {name} with {other} = {known.get(other)!r}, now it is '
                            f'{run.changed.get(other)!r}: choose another out_dir')
    print_hours(runs, results)
    if plan:
        return

    def write():
        saved['values'].update({name: final_losses(run, results) for name, run in runs.items()})
        os.makedirs(out_dir, exist_ok=True)
        write_file(path, json.dumps(saved, indent=1))

    own = [word for word in argv if not word.startswith('--out_dir')]
    command = shlex.join(['python', '-m', 'config.compare', *own])
    saved['from'] = '; '.join(dict.fromkeys([*filter(None, saved['from'].split('; ')), command]))
    write()  # from now on its settings are known
    for phase in ('search', 'edge', 'seeds'):
        train_all([(run, *job) for run in runs.values() for job in jobs_of(phase, run, results)], results, write)
    print_results(runs, pairs, results)
    print(f'\nwritten to {path}')


if __name__ == '__main__':
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the children as Ctrl-C does
    config.launch(main)
