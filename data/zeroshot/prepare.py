"""The files of the zero-shot tasks: LAMBADA, HellaSwag, PIQA, ARC, BLiMP.

python data/zeroshot/prepare.py downloads them from their authors (LAMBADA as OpenAI gave it to GPT-2; ARC's
archive has hundreds of MB), --tasks=piqa,blimp some of them. --input=DIR takes those that are there already, under
their authors' names or those of this script, BLiMP's in a folder blimp or beside the others.
"""
import fnmatch
import json
import os
import sys
import zipfile
from glob import escape, glob

FOLDER = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.normpath(FOLDER + '/../..'))  # the repository, for running this file by itself
if not os.path.exists(os.path.normpath(FOLDER + '/../records.py')):
    sys.exit(f'error: {FOLDER} is not in data/ of the repository: move it there')
import config
import data
from config.files import write_file
from data import zeroshot
from data.records import parse_jsonl

tasks = 'lambada,hellaswag,piqa,arc_easy,arc_challenge,blimp'  # which ones
input = ''  # a folder that has the files, downloaded if none is given

GITHUB = 'https://raw.githubusercontent.com/'
ARC = 'https://ai2-public-datasets.s3.amazonaws.com/arc/ARC-V1-Feb2018.zip'
# task -> address; of an archive, which files in it
SOURCES = {'lambada': ('https://openaipublic.blob.core.windows.net/gpt-2/data/lambada_test.jsonl', None),
           'hellaswag': (GITHUB + 'rowanz/hellaswag/master/data/hellaswag_val.jsonl', None),
           'piqa': ('https://yonatanbisk.com/piqa/data/valid.jsonl', None),
           'arc_easy': (ARC, '*/ARC-Easy-Test.jsonl'), 'arc_challenge': (ARC, '*/ARC-Challenge-Test.jsonl'),
           'blimp': ('https://github.com/alexwarstadt/blimp/archive/refs/heads/master.zip', '*/data/*.jsonl')}
LABELS = 'valid-labels.lst'  # of PIQA, beside its rows


def downloaded(task, archives):
    """{file: its text} of a task; archives: {address: those that are open already}."""
    url, members = SOURCES[task]
    if not members:
        urls = [url] + [os.path.dirname(url) + '/' + LABELS] * (task == 'piqa')
        return {u: data.download(u).read().decode('utf-8-sig') for u in urls}
    if url not in archives:
        archives[url] = zipfile.ZipFile(data.download(url))
    archive = archives[url]
    return {name: archive.read(name).decode('utf-8-sig') for name in fnmatch.filter(archive.namelist(), members)}


def local(task, folder):
    """The same of a folder, {} where it has none."""
    url, members = SOURCES[task]
    names = [task + '.jsonl', os.path.basename(members or url)]
    if task == 'blimp':
        names = ['*.jsonl', 'blimp/*.jsonl', 'data/*.jsonl']
    elif task == 'piqa':
        names.append(LABELS)
    paths = [path for name in names for path in sorted(glob(os.path.join(escape(folder), name)))]
    texts = {path: data.read_text(path) for path in paths}
    return {path: text for path, text in texts.items() if task != 'blimp' or '"sentence_good"' in text[:2000]}


def with_labels(text, labels, path):
    """PIQA's rows with their labels, which its authors keep in a file of their own."""
    rows = [entry for _, entry in parse_jsonl(text, path)]
    if len(rows) != len(labels):
        raise config.UserError(f'{path} has {len(rows)} rows, {LABELS} has {len(labels)} labels')
    return ''.join(json.dumps({**row, 'label': label}) + '\n' for row, label in zip(rows, labels))


def main(argv):
    settings = config.load(__file__, argv)[0]
    folder = settings['input']
    archives = {}
    n_files = 0
    wanted = [task.strip() for task in settings['tasks'].split(',')]
    for task in wanted:
        config.check_choice({'tasks': task}, 'tasks', ' '.join(SOURCES))
    if folder and not os.path.isdir(folder):
        raise config.UserError(f'input = {folder!r}: there is no such folder')
    for task in wanted:
        try:
            texts = local(task, folder) if folder else downloaded(task, archives)
        except (zipfile.BadZipFile, UnicodeDecodeError) as e:
            raise config.UserError(f'{SOURCES[task][0]} is damaged ({e}): give a folder that has the files with '
                                   '--input=DIR') from e
        labels = [texts.pop(path) for path in [*texts] if path.endswith(LABELS)]
        for path, text in texts.items() if task == 'blimp' else [*texts.items()][:1]:
            if labels and '"label"' not in text:
                text = with_labels(text, labels[0].split(), path)
            name = 'blimp/' + os.path.basename(path).removesuffix('.jsonl') if task == 'blimp' else task
            print(f'{name}: {len(zeroshot.rows_of(text, path, name))} rows')
            os.makedirs(os.path.join(FOLDER, os.path.dirname(name)), exist_ok=True)
            write_file(os.path.join(FOLDER, name + '.jsonl'), text)
            n_files += 1
        if not texts:
            print(f'{task}: no file in {folder}')
    if not n_files:
        raise config.UserError(f'input = {folder!r} has no file of {",".join(wanted)}')


if __name__ == '__main__':
    config.launch(main)
