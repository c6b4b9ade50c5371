"""GSM8K (Cobbe et al., 2110.14168): grade school word problems with written solutions, as records.

python data/gsm8k/prepare.py downloads train.jsonl and test.jsonl (5 MB); --input=DIR reads them from there. The steps
are a solution's <<...>> marks, the answer its #### line. The last val_rows training rows become val.
"""
import os
import sys
from collections import Counter

FOLDER = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(os.path.dirname(FOLDER)))  # the repository, for running this file by itself
import config  # noqa: E402
from data import records  # noqa: E402

input = ''  # a folder with train.jsonl and test.jsonl, downloaded if none is given
val_rows = 500  # training rows kept for validation

URL = 'https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data/'


def main(argv):
    settings = config.load(__file__, argv)[0]
    splits, left_out = {}, Counter()
    for split in ('train', 'test'):
        name, rows = split + '.jsonl', []
        text = records.read_source(name, settings['input'], URL + name)
        for where, entry in records.parse_jsonl(text, os.path.join(settings['input'], name)):
            for key in ('question', 'answer'):
                if not isinstance(entry.get(key), str):
                    raise config.UserError(f'{where}: {key} = {entry.get(key)!r}: expected text')
            solution, _, answer = entry['answer'].rpartition('####')
            rows.append((entry['question'], records.marked_steps(solution), answer))
        splits[split] = records.usable_rows(rows, split, left_out)
    n = settings['val_rows']
    if not 0 < n < len(splits['train']):
        raise config.UserError(f'val_rows = {n}: must be at least 1 and less than the {len(splits["train"])} training rows')
    splits = {'train': splits['train'][:-n], 'val': splits['train'][-n:], 'test': splits['test']}
    records.write_record_dataset(FOLDER, splits, {'kind': 'gpt2'}, settings['input'] or URL, left_out)


if __name__ == '__main__':
    config.launch(main)
