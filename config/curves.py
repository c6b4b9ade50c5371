"""Validation losses of several runs, side by side, over steps and over what they have seen."""
import os

from config import UserError
from config.checkpoint import load_checkpoint
from config.files import read_log
from data import UNIT


def read_run(folder):
    """(checkpoint, unit, [(step, seen, validation loss)]) of a run's folder; seen: tokens, or records, that it has
    been trained on by then. Raises UserError."""
    if not folder.strip():
        raise UserError('curves: a name is empty: give folders of runs, separated by commas')
    path = os.path.join(folder, 'log.jsonl')
    if not os.path.isfile(path):
        raise UserError(f'curves: {path} is not there: give folders of runs, separated by commas')
    losses = {entry['iter']: entry['val_loss'] for entry in read_log(path)  # the later one of a step counts
              if type(entry.get('val_loss')) in (int, float)}
    if not losses:
        raise UserError(f'curves: {path} holds no validation loss yet')
    saved = load_checkpoint(os.path.join(folder, 'ckpt.pt'), mmap=True)
    kind = saved['meta'].get('kind')
    rows = saved['settings'].get('batch_size', 0) * saved['settings'].get('grad_accum', 0)
    if kind not in UNIT or not rows:
        raise UserError(f'curves: {folder}/ckpt.pt does not tell its data or the rows of a step')
    seen = rows * (saved['model_config']['block_size'] if kind == 'text' else 1)  # a row is a record there
    return saved, UNIT[kind], [(step, step * seen, losses[step]) for step in sorted(losses)]


def validation_rows(saved):
    """What the validation rows of a checkpoint's run depend on."""
    return saved['meta'], saved['settings']['eval_rows'], saved['model_config']['block_size']


def compare(folders):
    """({name: a table}, unit of loss) of runs' folders. A run reaches a loss at the first evaluation that is no
    worse. The difference to the first run is known where both were evaluated on the same rows after as much data.
    Raises UserError for a run that cannot be read, or whose loss is not that of the first one's kind."""
    runs = {folder: read_run(folder) for folder in folders}
    saved, unit, first = runs[folders[0]]
    for folder, (other, other_unit, _) in runs.items():
        if other_unit != unit or other['meta']['tokenizer'] != saved['meta']['tokenizer']:
            raise UserError(f'curves: {folder} has losses in {other_unit}, {folders[0]} in {unit}, or its '
                            'tokenizer is another: they do not compare')
    what = unit.split()[-1] + 's'  # tokens or records
    goal = first[-1][2]
    summary = []
    for folder, (saved, _, points) in runs.items():
        step, share = next(((step, seen / max(1, first[-1][1])) for step, seen, loss in points if loss <= goal),
                           (None, None))
        summary.append({'run': folder, 'method': saved['method'], 'steps': points[-1][0], what: points[-1][1],
                        'best loss': min(loss for *_, loss in points), 'final loss': points[-1][2],
                        f'step with {goal:.4f}': step, f'share of the {what} of the first': share})
    tables = {'runs': summary}
    for i, axis in enumerate(['steps', what]):
        places = sorted({point[i] for *_, points in runs.values() for point in points})
        tables[f'loss over {axis}'] = [{axis: place} for place in places]
        for folder, (*_, points) in runs.items():
            loss_at = {point[i]: point[2] for point in points}
            for row in tables[f'loss over {axis}']:
                row[folder] = loss_at.get(row[axis])
    first, *others = folders
    paired = [folder for folder in others if validation_rows(runs[folder][0]) == validation_rows(runs[first][0])]
    tables[f'difference to {first} over {what}'] = [
        {what: row[what],
         **{folder: None if row[folder] is None else row[folder] - row[first] for folder in paired}}
        for row in tables[f'loss over {what}'] if paired and row[first] is not None]
    return tables, unit
