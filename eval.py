"""The numbers of a checkpoint: python eval.py --out_dir=out/cyb_small

Prints them, and writes them to a JSON file and, where matplotlib is installed, a picture beside it. With tasks,
these are zero-shot accuracies alone: python eval.py --checkpoint=gpt2 --tasks=lambada,hellaswag,piqa,blimp
"""
import json
import os
import zlib

import torch

import config
import data
from config import UserError
from config.answering import answer_times, answers, block_states, right_answers
from config.checkpoint import snapshots
from config.curves import compare
from config.files import write_file
from config.likelihood import fitting, log_likelihood
from config.machine import autocast, choose_device, choose_dtype, set_threads
from config.measures import On, fixed_budget, losses, prefixes, skipping, slots, streams
from config.paths import paths
from config.tables import formatted, print_numbers, write_numbers
from data import zeroshot
from data.test_sets import read_test_set
from sample import load_settings, open_model
from train import METHODS

out_dir = 'out/run'  # the run whose checkpoint is read
checkpoint = ''  # instead: a checkpoint's path, a run's folder, or a published model as in train.py
dataset = ''  # the data set whose validation rows are read, empty: the one that the model was trained on
tasks = ''  # instead: zero-shot tasks, such as lambada,hellaswag,piqa,arc_easy,arc_challenge,blimp
form = 'ours'  # of the tasks' texts: ours | harness (as lm-evaluation-harness has them)
output = ''  # where to write, without ending; empty: eval or zeroshot beside ckpt.pt, stage1_eval beside stage1.pt
eval_rows = 512  # validation rows; records: as many test questions; tasks: rows of each file
slow_rows = 32  # of these, how many are read token by token where a measure needs that
kappa = 0.0  # Thoughtbubbles: streams per token, 0 = as trained
n_mem = 0  # Reasoning in Memory: memory tokens per block, 0 = as trained
test_set = ''  # records: a JSON or JSONL file of other test questions, with their answers; see data/README.md
beside = ''  # records: other runs or checkpoints, separated by commas, that answer the same questions in turn
over_training = False  # every snapshot of out_dir in turn, which train.py --snapshots keeps
curves = ''  # runs, separated by commas: their validation losses side by side, and nothing else
batch_size = 32  # rows at once
seed = 1337  # of all draws
device = 'auto'  # auto | cpu | cuda | cuda:1 | mps
dtype = 'auto'  # auto (as in train.py: half precision on a GPU) | float32 | bfloat16 | float16
threads = 0  # CPU threads, 0 = PyTorch's choice


# a method that is not here: losses
MEASURES = {'thoughtbubbles': [losses, prefixes, fixed_budget, streams, paths], 'cyb': [losses, slots, skipping],
            'rim': [losses, right_answers, answer_times, answers, block_states],
            'coconut': [losses, right_answers, answer_times, answers]}


def output_path(path, saved, kind):
    """Where the results for a checkpoint go, without ending."""
    stem = os.path.splitext(path.rstrip('/'))[0]
    name = kind if os.path.basename(stem) == 'ckpt' else os.path.basename(stem) + '_' + kind
    folder = os.path.dirname(path) if saved['settings'] else 'out'  # a published one's is not ours
    target = output or os.path.join(folder, name)
    os.makedirs(os.path.dirname(target) or '.', exist_ok=True)
    return target


def weights_crc32(model):
    """Tells the weights apart from others."""
    crc32 = 0
    for p in model.parameters():
        crc32 = zlib.crc32(p.detach().cpu().flatten().view(torch.uint8).numpy(), crc32)
    return crc32


def zero_shot(path, saved, model, dtype_name):
    """Print the numbers of each task, and of each paradigm of BLiMP. The JSON file is written after each; what it
    has of the same checkpoint, file, rows and form is not computed again."""
    # all texts first: what is wrong with them is said before the work begins
    tokenizer = data.Tokenizer(saved['meta']['tokenizer'])
    plan = []
    for name in zeroshot.files_of(tasks):
        rows, crc32 = zeroshot.read(name, eval_rows, form)
        ids = zeroshot.encode(tokenizer, rows, form, name)
        try:
            fitting(model, *ids, warn=False)
        except UserError as e:
            raise UserError(f'tasks = {name}: {e}') from None
        plan.append(({'task': name, 'form': form, 'rows': len(rows), 'crc32': crc32}, rows, ids))

    # what is there already
    target = output_path(path, saved, 'zeroshot') + '.json'
    about = {'checkpoint': path, 'method': saved['method'], 'step': saved['step'], 'dtype': dtype_name,
             'weights crc32': weights_crc32(model)}  # a run trained anew may have the same path and step
    earlier = config.read_json(target)
    if any(earlier.get(key) != value for key, value in about.items()):
        earlier = {}
    results = earlier.get('results', [])
    if not all({'task', 'form', 'numbers'} <= dict(old).keys() for old in results):
        raise UserError(f'{target} is damaged: delete it, and all tasks are run anew')

    def keep(result):
        results[:] = [old for old in results if (old['task'], old['form']) != (result['task'], form)] + [result]
        write_file(target, json.dumps({**about, 'results': results}, indent=1))

    print(f'{saved["method"]}, {path} at step {saved["step"]}')
    shown = {}
    for which, rows, (contexts, continuations) in plan:
        result = next((old for old in results if which.items() <= old.items()), None)
        known = ', known from before' * bool(result)
        if not result:
            found = log_likelihood(model, contexts, continuations, batch_size)
            result = {**which, 'numbers': zeroshot.score(rows, found)}
            keep(result)
        print_task(result, known)
        shown[which['task']] = result
    paradigms = [result for name, result in shown.items() if name.startswith('blimp/')]
    if len(paradigms) > 1:
        mean = zeroshot.mean_of([result['numbers'] for result in paradigms])
        result = {'task': 'blimp', 'form': form, 'rows': sum(result['rows'] for result in paradigms),
                  'paradigms': len(paradigms), 'numbers': mean}
        keep(result)
        print_task(result, f', mean of {len(paradigms)} paradigms')
    for word, meaning in zeroshot.MEANING.items():
        print(f'{word}: {meaning}')
    print(f'written to {target}')


def print_task(result, remark):
    print(f'{result["task"]} (form: {result["form"]}, {result["rows"]} rows{remark})')
    for name, number in result['numbers'].items():
        note = number['note'] and '  ' + number['note']
        print(f'    {name:12s}{formatted(number["value"]):>10s} ± {formatted(number["standard error"])}{note}')


@torch.no_grad()
def main(argv):
    settings, _, given = load_settings(__file__, argv)
    globals().update(settings)
    measured = 'dataset', 'beside', 'n_mem', 'kappa', 'test_set'  # what the measures alone need
    idle, when = ('form',), 'without tasks'
    if tasks:
        idle, when = (*measured, 'slow_rows'), 'with tasks'
    if curves:
        idle, when = (*measured, 'out_dir', 'checkpoint', 'tasks', 'form'), 'with curves'
    for name in idle:
        if name in given:
            raise UserError(f'{name} = {settings[name]!r}: has no effect {when}')
    if over_training:
        for name in {'checkpoint', 'output', 'curves'} & given.keys():
            raise UserError(f'{name} = {settings[name]!r}: has no effect with over_training')
        for path in snapshots(out_dir):
            main([*argv, f'--checkpoint={path}', '--over_training=False'])
            print()
        return
    if curves:
        numbers, unit = compare(curves.split(','))
        print_numbers(numbers, unit)
        write_numbers(output or 'out/curves', numbers, f'validation loss in {unit}', **{'unit of loss': unit})
        return
    config.check_range(settings, 'eval_rows slow_rows batch_size')
    config.check_choice(settings, 'form', 'ours harness')
    config.check_range(settings, 'seed', 0, 2 ** 63)
    set_threads(threads)
    device_name, _ = choose_device(device)
    dtype_name, _ = choose_dtype(dtype, device_name)
    path, saved, model = open_model(checkpoint or os.path.join(out_dir, 'ckpt.pt'), device)
    if tasks:
        with autocast(device_name, dtype_name):
            zero_shot(path, saved, model, dtype_name)
        return
    if (n_mem or beside or test_set) and saved['meta']['kind'] != 'records':
        raise UserError(f'n_mem, beside, test_set: {path} is a {saved["method"]} model, they are for models of '
                        'records')
    if kappa and not getattr(model, 'forks', None):
        raise UserError(f'kappa = {kappa}: {path} is a {saved["method"]} model, which has no budget of streams')
    if kappa:
        saved['model_config']['kappa'] = kappa
        model.config.kappa = kappa
        model.config.__post_init__()  # refuses what cannot be

    # the data: those that the model was trained on, unless others are named
    name = dataset or saved['settings'].get('dataset')
    if not name:
        raise UserError(f'{path} was trained on no data set of ours: give --dataset or --tasks')
    data.ensure_prepared(name, given=bool(dataset))
    rows_of, meta = data.read_with(name, saved['meta']['tokenizer'], given=bool(dataset))
    batches = METHODS[saved['method']][2](rows_of, meta, model.config, seed, eval_rows, batch_size)
    if test_set:
        batches.data.dataset, batches.data.test_set = test_set, read_test_set(test_set)
    stage = model.config.stages(1, 0.0, 1)[-1]  # validation rows as in the last stage

    def rows(n):
        found = (batches.val_batch(stage, list(range(i, min(n, i + batch_size)))) for i in range(0, n, batch_size))
        return [[t.to(model.wte.weight.device) for t in batch] for batch in found if batch]

    models = {checkpoint or out_dir: model}
    for other in filter(None, beside.split(',')):
        _, other_saved, models[other] = open_model(other, device)
        if other_saved['meta']['tokenizer'] != meta['tokenizer']:
            raise UserError(f'beside: {other} was not trained on records with the tokenizer of {name!r}')

    # the numbers
    torch.manual_seed(seed)
    on = On(rows(eval_rows), rows(min(eval_rows, slow_rows)), batches, models, eval_rows, n_mem, batch_size)
    numbers = {}
    with autocast(device_name, dtype_name):
        for measure in MEASURES.get(saved['method'], [losses]):
            numbers.update(measure(model, on))  # a later one may refine a number
    title = f'{saved["method"]}, {path} at step {saved["step"]}, {name}' + f', asked {test_set}' * bool(test_set)
    unit = data.UNIT[meta['kind']]
    print(title)
    print_numbers(numbers, unit)
    kind = '_'.join(['eval', os.path.splitext(os.path.basename(test_set))[0]]).rstrip('_')
    about = {'checkpoint': path, 'method': saved['method'], 'step': saved['step'], 'dataset': name,
             'test set': test_set, 'unit of loss': unit, 'dtype': dtype_name,
             'model_config': saved['model_config']}
    write_numbers(output_path(path, saved, kind), numbers, title, **about)


if __name__ == '__main__':
    config.launch(main)
