"""GSM8K (Cobbe et al., 2110.14168): grade school word problems with written solutions, as records.

python data/gsm8k/prepare.py downloads train.jsonl and test.jsonl (5 MB); --input=DIR reads them from there. The
steps are a solution's <<...>> marks, the answer its #### line. The last val_rows training rows become val.
"""
import os
import sys
from collections import Counter

FOLDER = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.normpath(FOLDER + '/../..'))  # the repository, for running this file by itself
if not os.path.exists(os.path.normpath(FOLDER + '/../records.py')):
    sys.exit(f'error: {FOLDER} is not in data/ of the repository: move it there')
import config
from data import records

input = ''  # a folder with train.jsonl and test.jsonl, downloaded if none is given
val_rows = 500  # training rows kept for validation

URL = 'https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data/'


def main(argv):
    settings = config.load(__file__, argv)[0]
    splits, left_out = {}, Counter()
    for split in ('train', 'test'):
        rows = []
        name = split + '.jsonl'
        path = os.path.join(settings['input'], name)
        for where, entry in records.parse_jsonl(records.read_source(name, settings['input'], URL + name), path):
            for key in ('question', 'answer'):
                if not isinstance(entry.get(key), str):
                    raise config.UserError(f'{where}: {key} = {entry.get(key)!r}: expected text')
            solution, _, answer = entry['answer'].rpartition('####')
            rows.append((entry['question'], records.marked_steps(solution), answer))
        splits[split] = records.usable_rows(rows, split, left_out, path)
    train, val = records.hold_out(splits['train'], settings['val_rows'], 'train.jsonl')
    splits = {'train': train, 'val': val, 'test': splits['test']}
    records.write_record_dataset(FOLDER, splits, {'kind': 'gpt2'}, settings['input'] or URL, left_out)


if __name__ == '__main__':
    config.launch(main)
