"""The numbers of a checkpoint: python eval.py --out_dir=out/cyb_small

Prints them, and writes them to a JSON file and, where matplotlib is installed, a picture beside it.
"""
import os

import torch

import config
import data
from config import UserError
from config.curves import compare
from config.machine import set_threads
from config.measures import MEASURES, On, losses
from config.tables import print_numbers, write_numbers
from data.test_sets import read_test_set
from sample import load_settings, open_model
from train import METHODS

out_dir = 'out/run'  # the run whose checkpoint is read
checkpoint = ''  # instead: a checkpoint's path, a run's folder, or a published model as in train.py
dataset = ''  # the data set whose validation rows are read, empty: the one that the model was trained on
output = ''  # where to write, without ending; empty: eval beside ckpt.pt, stage1_eval beside stage1.pt
eval_rows = 512  # validation rows; records: as many test questions
slow_rows = 32  # of these, how many are read token by token where a measure needs that
kappa = 0.0  # Thoughtbubbles: streams per token, 0 = as trained
n_mem = 0  # Reasoning in Memory: memory tokens per block, 0 = as trained
test_set = ''  # records: a JSON or JSONL file of other test questions, with their answers; see data/README.md
beside = ''  # records: other runs or checkpoints, separated by commas, that answer the same questions in turn
curves = ''  # runs, separated by commas: their validation losses side by side, and nothing else
batch_size = 32  # rows at once
seed = 1337  # of all draws
device = 'auto'  # auto | cpu | cuda | cuda:1 | mps
threads = 0  # CPU threads, 0 = PyTorch's choice


@torch.no_grad()
def main(argv):
    settings, *_ = load_settings(__file__, argv)
    globals().update(settings)
    if curves:
        numbers, unit = compare(curves.split(','))
        print_numbers(numbers, unit)
        write_numbers(output or 'out/curves', numbers, f'validation loss in {unit}', **{'unit of loss': unit})
        return
    config.check_range(settings, 'eval_rows slow_rows batch_size')
    config.check_range(settings, 'seed', 0, 2 ** 63)
    set_threads(threads)
    path, saved, model = open_model(checkpoint or os.path.join(out_dir, 'ckpt.pt'), device)
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
    for measure in MEASURES.get(saved['method'], [losses]):
        numbers.update(measure(model, on))  # a later one may refine a number
    title = f'{saved["method"]}, {path} at step {saved["step"]}, {name}' + f', asked {test_set}' * bool(test_set)
    unit = data.UNIT[meta['kind']]
    print(title)
    print_numbers(numbers, unit)
    stem = os.path.splitext(path.rstrip('/'))[0]
    name_of_file = 'eval' if os.path.basename(stem) == 'ckpt' else os.path.basename(stem) + '_eval'
    if test_set:
        name_of_file += '_' + os.path.splitext(os.path.basename(test_set))[0]
    folder = os.path.dirname(path) if saved['settings'] else 'out'  # a published one's is not ours
    target = output or os.path.join(folder, name_of_file)
    about = {'checkpoint': path, 'method': saved['method'], 'step': saved['step'], 'dataset': name,
             'test set': test_set, 'unit of loss': unit, 'model_config': saved['model_config']}
    write_numbers(target, numbers, title, **about)


if __name__ == '__main__':
    config.launch(main)
