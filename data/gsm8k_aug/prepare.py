"""GSM8K-Aug (Deng et al., 2311.01460): 386 thousand generated problems in the manner of GSM8K, as records.

python data/gsm8k_aug/prepare.py downloads train, valid and test (100 MB); --input=DIR reads them from there, as
.txt with lines question||<<1+2=3>> <<3*4=12>> #### 12, or as .json, a list of objects or an object a line with
question, steps and answer. Without a train file the last tenth of valid is val and the rest train.
"""
import json
import os
import sys
from collections import Counter

FOLDER = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.normpath(FOLDER + '/../..'))  # the repository, for running this file by itself
if not os.path.exists(os.path.normpath(FOLDER + '/../records.py')):
    sys.exit(f'error: {FOLDER} is not in data/ of the repository: move it there')
import config
from data import records

input = ''  # a folder with train, valid and test as .txt or .json, downloaded if none is given

REPOSITORY = 'da03/Internalize_CoT_Step_by_Step/e06a32ee5e4cd117171daeb4755d2a97ece62761/data/gsm8k/'
URLS = {'train': 'https://media.githubusercontent.com/media/' + REPOSITORY,  # a Git LFS file
        'valid': 'https://raw.githubusercontent.com/' + REPOSITORY,
        'test': 'https://raw.githubusercontent.com/' + REPOSITORY}


def parse_lines(text, path):
    """Yield (question, steps, answer) of each line question||<<...>> <<...>> #### answer."""
    for n, line in enumerate(text.split('\n'), 1):
        if line.strip():  # || may stand in a question too: the last one before the first mark separates
            begin = line.find('<<') if '<<' in line else line.rfind('####')
            question, bars, _ = line[:begin].rpartition('||')
            solution, marks, answer = line[len(question):].rpartition('####')
            if not bars or not marks:
                raise config.UserError(f'{path} line {n}: {line[:60]!r} is not of the form '
                                       'question||<<1+2=3>> #### 3')
            yield question, records.marked_steps(solution), answer


def parse_json(text, path):
    """Yield the same of a JSON list of objects, or of one object a line; steps may stand in << >> or not."""
    if text.lstrip().startswith('['):
        try:
            entries = [(f'{path} entry {i}', entry) for i, entry in enumerate(json.loads(text), 1)]
        except (ValueError, RecursionError) as e:
            raise config.UserError(f'{path} is not JSON ({e})') from None
    else:
        entries = records.parse_jsonl(text, path)
    for where, entry in entries:
        record = records.check_record(entry, where, need_steps=False)
        steps = [f'<<{step}>>' if '<<' not in step else step for step in record.steps]
        yield record.question, records.marked_steps(' '.join(steps)), record.answer


def main(argv):
    settings = config.load(__file__, argv)[0]
    folder = settings['input']
    rows, left_out = {}, Counter()
    for split in ('train', 'valid', 'test'):
        is_json = folder and os.path.exists(os.path.join(folder, split + '.json'))
        name = split + ('.json' if is_json else '.txt')
        path = os.path.join(folder, name)
        if folder and split == 'train' and not os.path.exists(path):
            print(f'{path} is not there: valid is shared out to train and val')
            continue
        text = records.read_source(name, folder, URLS[split] + name)
        parse = parse_json if is_json else parse_lines
        rows[split] = records.usable_rows(parse(text, path), split, left_out, path)
    if 'train' not in rows:
        rows['train'], rows['valid'] = records.hold_out(rows['valid'], max(1, len(rows['valid']) // 10), 'valid')
    splits = {'train': rows['train'], 'val': rows['valid'], 'test': rows['test']}
    records.write_record_dataset(FOLDER, splits, {'kind': 'gpt2'}, folder or URLS['test'], left_out)


if __name__ == '__main__':
    config.launch(main)
