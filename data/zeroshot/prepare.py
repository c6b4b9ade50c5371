"""The files of the zero-shot tasks: LAMBADA, HellaSwag, PIQA, ARC, BLiMP.

python data/zeroshot/prepare.py downloads them from their authors (LAMBADA as OpenAI gave it to GPT-2; ARC comes in
an archive of 680 MB), --tasks=piqa,blimp some of them. --input=DIR takes those that are there already, under their
authors' names or those of this script, BLiMP's in a folder blimp or beside the others.
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
        return {os.path.basename(u): data.download(u).read().decode('utf-8-sig') for u in urls}
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
    if task == 'blimp':
        return {path: text for path, text in texts.items() if '"sentence_good"' in text[:2000]}
    return texts


def as_read(entry):
    """A row as its authors wrote it -> as data/zeroshot reads it; others stay."""
    if 'text' in entry:  # LAMBADA: the last word is what is asked
        context, _, target = entry['text'].rpartition(' ')
        return {'context': context, 'target': target}
    asked = entry.get('question')
    if isinstance(asked, dict):  # ARC
        choices = {key: [choice[key] for choice in asked['choices']] for key in ('text', 'label')}
        return {**entry, 'question': asked['stem'], 'choices': choices}
    return entry


def rows_of(task, texts):
    """{name of a task's file: its rows} from {file: its text}. Raises UserError for a row that is broken."""
    found, labels = {}, []
    for path, text in texts.items():
        if path.endswith(LABELS):
            labels = text.split()
    for path, text in texts.items():
        name = 'blimp/' + os.path.basename(path).removesuffix('.jsonl') if task == 'blimp' else task
        if path.endswith(LABELS) or name in found:
            continue
        found[name] = []
        for n, (where, entry) in enumerate(parse_jsonl(text, path)):
            try:
                entry = as_read(entry)
                if labels and 'label' not in entry:
                    entry = {**entry, 'label': int(labels[n])}
            except (KeyError, TypeError, ValueError, AttributeError, IndexError) as e:
                raise config.UserError(f'{where} is no row of {name} ({type(e).__name__}: {e})') from e
            zeroshot.parse(name, entry, 'ours', where)
            found[name].append(entry)
        if not found[name]:
            raise config.UserError(f'{path} holds no row')
    return found


def main(argv):
    settings = config.load(__file__, argv)[0]
    folder, archives, n_files = settings['input'], {}, 0
    for task in settings['tasks'].split(','):
        config.check_choice({'tasks': task}, 'tasks', ' '.join(SOURCES))
        try:
            texts = local(task, folder) if folder else downloaded(task, archives)
        except (zipfile.BadZipFile, UnicodeDecodeError) as e:
            raise config.UserError(f'{SOURCES[task][0]} is damaged ({e}): give a folder that has the files with '
                                   '--input=DIR') from e
        found = rows_of(task, texts)
        for name, rows in found.items():
            path = os.path.join(FOLDER, name + '.jsonl')
            os.makedirs(os.path.dirname(path), exist_ok=True)
            write_file(path, ''.join(json.dumps(row) + '\n' for row in rows))
        print(f'{task}: {sum(map(len, found.values()))} rows in {len(found)} files')
        n_files += len(found)
    if not n_files:
        raise config.UserError(f'input = {folder!r} has no file of {settings["tasks"]}')


if __name__ == '__main__':
    config.launch(main)
