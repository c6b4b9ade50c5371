"""Corpora: shards are the documents one after the other, whatever the number of processes and interruptions."""
import gzip
import json
import os
import random
import runpy
import shutil
import subprocess
import sys
import zipfile

import numpy as np
import pytest

import data
from config import UserError
from conftest import ROOT
from data import Tokenizer, corpus
from data.text import Split, TextBatches
from model import GPTConfig
from published import tokenizer_json

SPEC = {'kind': 'json', 'json': json.dumps(tokenizer_json()), 'tiktoken': True, 'begin': [260], 'end': 259}
SETTINGS = dict(column='text', processes=1, val_fraction=0.2, seed=1, shard_tokens=2000)
DOCUMENTS = [' '.join(random.Random(i).choices(['the', 'cat', 'and', 'dog', 'é', '<|endoftext|>'], k=10 + i % 40))
             for i in range(700)]


@pytest.fixture
def source(tmp_path):
    """The documents in files of three kinds."""
    folder = tmp_path / 'source'
    folder.mkdir()
    for name, opened, part in [('a.jsonl', open, DOCUMENTS[:400]), ('b.json.gz', gzip.open, DOCUMENTS[400:699])]:
        with opened(folder / name, 'wt', encoding='utf-8') as f:
            f.writelines(json.dumps({'text': text}) + '\n' for text in [*part, ' \n'])  # the blank one is no document
    (folder / 'c.txt').write_text(DOCUMENTS[699], encoding='utf-8')
    return str(folder)


def write(folder, source, **settings):
    corpus.write_corpus(str(folder), corpus.local_files(source), SPEC, **{**SETTINGS, **settings})
    return {name: (folder / name).read_bytes() for name in sorted(os.listdir(folder))}


def test_shards_are_the_documents_in_their_order(source, tmp_path):
    files = write(tmp_path / 'out', source)
    meta = data.read_meta(str(tmp_path / 'out'))
    tokenizer = Tokenizer(SPEC)
    ids = {split: np.concatenate([np.frombuffer(files[name], '<u2') for name in names]).tolist()
           for split, names in meta['shards'].items()}
    assert len(meta['shards']['train']) > 5 and len(meta['shards']['val']) > 1
    for name in meta['shards']['train'][:-1]:  # a shard ends with the document that fills it
        found = np.frombuffer(files[name], '<u2')
        last = len(found) - 1 - found[:-1].tolist()[::-1].index(259)
        assert found[-1] == 259 and last <= 2000 <= len(found)
    found = {}
    for split, tokens in ids.items():
        texts = [part for part in ' '.join(map(str, tokens)).split('259')[:-1]]
        found[split] = [tokenizer.decode([int(i) for i in text.split()][1:]) for text in texts]
        assert all(text.split()[0] == '260' for text in texts)  # the begin token
        assert meta[split + '_tokens'] == len(tokens)
    position = {text: i for i, text in enumerate(DOCUMENTS)}
    assert sorted(found['train'] + found['val']) == sorted(DOCUMENTS) and meta['documents'] == 700
    for texts in found.values():
        assert [position[text] for text in texts] == sorted(position[text] for text in texts)
    assert 90 < len(found['val']) < 190


def test_the_files_do_not_depend_on_processes_or_interruptions(source, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, 'BATCH', 16)
    expected = write(tmp_path / 'one', source)
    assert write(tmp_path / 'three', source, processes=3) == expected
    real, stops = corpus.write_file, random.Random(5)

    def stop_somewhere(path, content):
        if os.path.basename(path) == 'progress.json' and stops.random() < 0.5:
            raise KeyboardInterrupt  # the shards are ahead of what progress.json says
        real(path, content)

    monkeypatch.setattr(corpus, 'write_file', stop_somewhere)
    interrupted = 0
    while True:
        try:
            found = write(tmp_path / 'stopped', source, processes=1)
            break
        except KeyboardInterrupt:
            interrupted += 1
    assert interrupted > 3 and found == expected


def test_a_long_text_becomes_documents_that_end_with_a_line(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, 'PIECE', 100)
    text = '\n'.join(DOCUMENTS[:20])
    (tmp_path / 'a.txt').write_text(text, encoding='utf-8')
    found = [document for _, _, document in corpus.documents([str(tmp_path / 'a.txt')], 'text')]
    assert ''.join(found) == text and len(found) > 5
    assert all(part.endswith('\n') and len(part) >= 100 for part in found[:-1])
    (tmp_path / 'a.txt').write_bytes(b'a\xff')
    with pytest.raises(UserError, match='a.txt is not there or is not UTF-8 text'):
        write(tmp_path / 'out', str(tmp_path / 'a.txt'))


def test_rows_are_read_across_shards(source, tmp_path):
    write(tmp_path / 'out', source)
    meta = data.read_meta(str(tmp_path / 'out'))
    batches = TextBatches(str(tmp_path / 'out'), meta, GPTConfig(block_size=700), 1, 8, 4)
    whole = np.concatenate([np.fromfile(tmp_path / 'out' / name, '<u2') for name in meta['shards']['train']])
    assert len(batches.tokens['train']) == len(whole)
    for start in [0, 1, len(whole) - 701, *range(1000, 6000, 333)]:
        assert (batches.tokens['train'].window(start, 701) == whole[start:start + 701]).all()
    idx, targets = batches.train_batch(None, 3, [0, 1, 2])
    assert idx.shape == (3, 700) and (idx[:, 1:] == targets[:, :-1]).all()


def test_parquet_is_read_by_the_datasets_package(tmp_path, source):
    pytest.importorskip('datasets', reason='pip install datasets')
    pq = pytest.importorskip('pyarrow.parquet')
    import pyarrow
    folder = tmp_path / 'parquet'
    folder.mkdir()
    pq.write_table(pyarrow.table({'content': DOCUMENTS, 'other': list(range(700))}), folder / 'x.parquet')
    write(tmp_path / 'out', str(folder), column='content')
    write(tmp_path / 'lines', source)
    assert data.read_meta(str(tmp_path / 'out'))['documents'] == 700


def test_what_does_not_fit_is_named(source, tmp_path, monkeypatch):
    def refused(message, spec=SPEC, files=None, **settings):
        with pytest.raises(UserError, match=message) as error:
            corpus.write_corpus(str(tmp_path / 'out'), files or corpus.local_files(source), spec,
                                **{**SETTINGS, **settings})
        assert '\n' not in str(error.value)

    refused('no end-of-text token', {'kind': 'char', 'chars': ['a']})
    refused(r'a.jsonl, document 0: its body is NoneType, not text; the name of the text is set by --column',
            column='body')
    with monkeypatch.context() as patch:
        usage = corpus.shutil.disk_usage(str(tmp_path))
        patch.setattr(corpus.shutil, 'disk_usage', lambda path: usage._replace(free=1000))
        refused('about 0 MB will be written, but the disk has 0 MB free')
    with monkeypatch.context() as patch:
        patch.setattr(corpus, 'append', lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path / 'out', source)
    (tmp_path / 'out' / 'progress.json').write_text(json.dumps({'about': {}}))
    refused('progress.json is of a preparation with other files or settings: delete it')
    (tmp_path / 'out' / 'progress.json').unlink()
    broken = tmp_path / 'source' / 'a.jsonl'
    broken.write_text('{"text": "x"}\n{"text"')
    refused('a.jsonl cannot be read as a JSON object a line')
    (tmp_path / 'out' / 'progress.json').unlink(missing_ok=True)
    broken.write_text('{"text": "x"}\n')
    refused('no document fell to val: the corpus is small', files=[str(broken)], val_fraction=0.0)
    with pytest.raises(UserError, match='has no file that ends in .parquet'):
        corpus.local_files(str(tmp_path / 'out' / 'nothing'))


def test_what_on_the_disk_does_not_fit_is_named(source, tmp_path):
    write(tmp_path / 'out', source)
    meta = data.read_meta(str(tmp_path / 'out'))
    path = tmp_path / 'out' / 'train_00002.bin'
    content = path.read_bytes()
    path.write_bytes(content[:-2] + b'\x01\x00')
    with pytest.raises(UserError, match='train_00002.bin is damaged or was changed'):
        Split(str(tmp_path / 'out'), 'train', meta, 16)
    path.unlink()
    with pytest.raises(UserError, match='train_00002.bin is missing'):
        Split(str(tmp_path / 'out'), 'train', meta, 16)
    with pytest.raises(UserError, match='tokens of val are fewer than block_size'):
        Split(str(tmp_path / 'out'), 'val', meta, 10 ** 6)
    with pytest.raises(UserError, match='was encoded with another tokenizer than the model has: prepare it anew; --tokenizer'):
        data.read_with(str(tmp_path / 'out'), {**SPEC, 'begin': [], 'end': 258})


@pytest.mark.parametrize('name', ['openwebtext', 'fineweb', 'c4', 'pes2o'])
def test_each_corpus_is_prepared_from_local_files_by_its_script(name, source, tmp_path, monkeypatch):
    folder = tmp_path / 'data' / name
    folder.mkdir(parents=True)
    shutil.copy(os.path.join(ROOT, 'data', name, 'prepare.py'), folder)
    monkeypatch.setattr('sys.path', [*sys.path])
    main = runpy.run_path(str(folder / 'prepare.py'))['main']
    model = tmp_path / 'model'
    model.mkdir()
    (model / 'tokenizer.json').write_text(json.dumps(tokenizer_json()))
    (model / 'config.json').write_text('{"eos_token_id": 0, "text_config": {"eos_token_id": 259}}')
    main([f'--input={source}', f'--tokenizer={model}', '--processes=1', '--val_fraction=0.1'])
    meta = data.read_meta(str(folder))
    assert meta['documents'] == 700 and meta['tokenizer']['end'] == 259
    with pytest.raises(UserError, match='the corpus is prepared; delete it'):
        main([f'--input={source}'])


# --- data/pycode/prepare.py, with small packages ---

WRITTEN = [f'def f{i}(x):\n    """Adds {i} to its argument."""\n    return x + {i}\n' + 'words = sorted(x)\n' * 12
           for i in range(60)]
PACKAGES = {  # of each file its name and whether it becomes a document
    'first-one==1.0': {**{f'first/{i:02}.py': (WRITTEN[i], True) for i in range(50)},
                       'first/guide.rst': (WRITTEN[50].replace('\n', '\r\n'), True),
                       'first/notes.txt': (WRITTEN[57] + '\udce9', True),  # a byte that is no UTF-8
                       'first/copy.py': (WRITTEN[3], False),
                       'first/logo.svg': (WRITTEN[51], False),
                       **{f'first/{folder}/x.py': (WRITTEN[58] + folder, False)
                          for folder in ('translations', '_vendor', 'vendored', 'third_party')},
                       'first_one-1.0.dist-info/LICENSE.txt': (WRITTEN[52], False)},
    'second==2.0': {'a.py': (WRITTEN[7], False), 'b.py': ('x = 1\n', False),
                    **{f'c{i}.py': (f'# {head}\n' + WRITTEN[53], False) for i, head in enumerate([
                        'Generated by protoc', 'generated from x', 'generated with y', 'Autogenerated',
                        'auto-generated', 'Automatically generated', 'DO NOT EDIT'])},
                    'd.py': (WRITTEN[54] + f'x = {"ab" * 300!r}\n', False), 'e.txt': ('rows 12\n' * 90, False),
                    'f.md': ('слово за словом\n' * 30, False), 'locale/g.py': (WRITTEN[55], False),
                    'h.md': ('déjà vu, où ça ?\n' * 30, True),
                    'i.py': (WRITTEN[59] * 6 + '# numbers generated by hand\n', True),
                    'z.md': (WRITTEN[56], True)}}
KEPT = [files[name][0].replace('\r\n', '\n').removesuffix('\udce9')
        for files in PACKAGES.values() for name in sorted(files) if files[name][1]]


@pytest.fixture
def pycode(tmp_path, monkeypatch):
    """prepare.py as if it lay in tmp_path/pycode and named the packages above; tmp_path/wheels has them."""
    monkeypatch.setattr('sys.path', [*sys.path])
    functions = runpy.run_path(os.path.join(ROOT, 'data', 'pycode', 'prepare.py'), run_name='prepare')
    functions['main'].__globals__.update(PACKAGES=dict.fromkeys(PACKAGES, 'MIT'), VOCAB=280)
    for folder in ('wheels', 'pycode', 'one', 'two'):
        (tmp_path / folder).mkdir()
    for package, files in PACKAGES.items():
        name = package.replace('-', '_').replace('==', '-')
        with zipfile.ZipFile(tmp_path / 'wheels' / f'{name}-py3-none-any.whl', 'w') as wheel:
            for path, (text, _) in reversed(files.items()):
                wheel.writestr(path, text.encode('utf-8', 'surrogateescape'),
                               zipfile.ZIP_DEFLATED if path == 'z.md' else zipfile.ZIP_STORED)

    def main(*argv, folder='pycode', **changed):
        place = dict(FOLDER=str(tmp_path / folder), __file__=str(tmp_path / folder / 'prepare.py'))
        functions['main'].__globals__.update(place, **changed)
        functions['main']([f'--input={tmp_path}/wheels', '--processes=1', *argv])
    return main


def test_pycode_is_what_was_written_by_hand_each_text_once(pycode, tmp_path):
    pytest.importorskip('tokenizers', reason='pip install tokenizers')
    pycode('--val_fraction=0.2')
    meta = data.read_meta(str(tmp_path / 'pycode'))
    tokenizer = Tokenizer(meta['tokenizer'])
    assert tokenizer.vocab_size == 280 and meta['tokenizer']['tiktoken']  # read without the tokenizers package
    assert tokenizer.decode([tokenizer.end]) == '<|endoftext|>'
    found = []
    for split in ('train', 'val'):
        texts, ids = [], []
        for i in np.fromfile(tmp_path / 'pycode' / meta['shards'][split][0], '<u2').tolist():
            if i == tokenizer.end:
                texts.append(tokenizer.decode(ids))
                ids = []
            else:
                ids.append(i)
        assert not ids and len(texts) > 3
        found += texts
    assert sorted(found) == sorted(KEPT)
    lines = (tmp_path / 'pycode' / 'documents.jsonl').read_text('utf-8').splitlines()
    assert [json.loads(line)['text'] for line in lines] == KEPT  # in an order of ours, not that of a wheel
    assert len(tokenizer.encode(WRITTEN[0])) < len(WRITTEN[0]) / 2
    with pytest.raises(UserError, match='the corpus is prepared; delete it'):  # before any wheel is asked for
        pycode(PACKAGES={'missing==1.0': 'MIT'})


def test_pycode_is_the_same_bytes_each_time_downloaded_or_not(pycode, tmp_path, monkeypatch):
    pytest.importorskip('tokenizers', reason='pip install tokenizers')
    asked = []

    def pip(command, **_):
        asked.extend(command[3:])
        shutil.copytree(tmp_path / 'wheels', command[command.index('--dest') + 1])
        return subprocess.CompletedProcess(command, 0)
    monkeypatch.setattr(data.subprocess, 'run', pip)
    contents = []
    for folder, given in (('one', []), ('two', ['--input='])):
        pycode('--val_fraction=0.2', *given, folder=folder)
        contents.append([(tmp_path / folder / name).read_bytes() for name in (
            'documents.jsonl', 'tokenizer/tokenizer.json', 'train_00000.bin', 'val_00000.bin')])
    assert contents[0] == contents[1]
    assert asked == ['download', '--quiet', '--no-deps', '--only-binary=:all:', '--platform=any',
                     '--python-version=3.13', '--dest', str(tmp_path / 'two' / 'wheels'), *PACKAGES]


def test_pycode_takes_the_tokenizer_of_a_published_model(pycode, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'tokenizers', None)  # which is then not needed
    (tmp_path / 'model').mkdir()
    (tmp_path / 'model' / 'tokenizer.json').write_text(json.dumps(tokenizer_json()))
    (tmp_path / 'model' / 'config.json').write_text('{"eos_token_id": 259}')
    pycode(f'--tokenizer={tmp_path}/model', '--seed=4')  # which gives val some of the few documents
    meta = data.read_meta(str(tmp_path / 'pycode'))
    assert meta['vocab_size'] == 261 and meta['val_fraction'] == 0.02


def test_what_pycode_cannot_be_made_of_is_named_in_one_line(pycode, tmp_path, monkeypatch):
    def refused(message, *argv, **changed):
        with pytest.raises(UserError, match=message) as error:
            pycode(*argv, **changed)
        assert '\n' not in str(error.value) and not (tmp_path / 'pycode' / 'meta.json').exists()

    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, 'tokenizers', None)
        refused('making the tokenizer needs the tokenizers package: pip install tokenizers')
    with monkeypatch.context() as patch:
        patch.setattr(data.subprocess, 'run', lambda command, **_: subprocess.CompletedProcess(
            command, 1, '', 'ERROR: no network\n'))
        pytest.importorskip('tokenizers', reason='pip install tokenizers')
        refused(r'pip could not download packages \(ERROR: no network\): give a folder .* --input=DIR', '--input=')
    path = tmp_path / 'wheels' / 'second-2.0-py3-none-any.whl'
    content = path.read_bytes()
    at, deflated = content.index(b'return x'), content.index(b'z.md') + 4
    for broken in (content[:200], content[:at] + b'RETURN' + content[at + 6:],
                   content[:deflated] + b'\xff' + content[deflated + 1:]):
        path.write_bytes(broken)
        refused('second-2.0-py3-none-any.whl is not there or is broken .*: delete it, and download it again')
    path.unlink()
    refused('second-2.0-py3-none-any.whl is not there or is broken')
    path.write_bytes(content)
    sample = sum(map(len, KEPT[::7]))
    refused(f'the packages have too little text, {sample:,} characters, for a tokenizer of 4096', VOCAB=4096)
