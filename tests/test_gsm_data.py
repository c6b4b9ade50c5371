"""Records: numbers, the toy problems, and GSM8K in its published forms."""
import codecs
import http.client
import json
import os
import re
import runpy
import urllib.request
import zlib
from collections import Counter
from decimal import Decimal

import pytest

import data
from config import UserError
from data import records
from config.files import write_file


@pytest.fixture
def prepare(tmp_path, monkeypatch):
    """prepare(name, *args): run data/<name>/prepare.py, with other values of its names, and return what it would write:
    (splits, left out, tokenizer)."""
    def prepare(name, *args, **values):
        written = []

        def write(folder, splits, tokenizer, source, left_out=None):
            written.append((splits, left_out, tokenizer))
        monkeypatch.setattr(records, 'write_record_dataset', write)
        main = runpy.run_path(os.path.join(data.ROOT, name, 'prepare.py'))['main']
        main.__globals__.update(values)
        main(list(args))
        return written[0]
    return prepare


@pytest.mark.parametrize('text, value', [
    ('1,234', '1234'), ('-3', '-3'), ('3.0', '3'), ('$5', '5'), ('-$5', '-5'), (' 72\n', '72'), ('.5', '0.5'),
    ('10.', '10'), ('25%', '25'), ('12,345,678.50', '12345678.5'), ('+4', '4'), ('\u22127', '-7'),
    ('1 000', '1000'), ('00', '0'), ('-0', '0'), ('50%.', '50'), ('5 %', '5'), ('5\u00a0%.', '5'),
    ('1\u00a0000', '1000'), ('1\u202f234\u2009567.5', '1234567.5'), ('\u20137', '-7'), ('$\u20137', '-7'),
    ('\u2014$7', '-7'), ('1e5', '100000'), ('1.5E-2', '0.015'), ('-2e+3', '-2000'), ('1/2', '0.5'),
    ('-3/4.', '-0.75'), ('1,000/8', '125'), ('1.5/-.5', '-3'), ('0/5', '0'), ('1e\u22122', '0.01')])
def test_numbers_are_compared_as_numbers(text, value):
    assert records.parse_number(text) == Decimal(value)


@pytest.mark.parametrize('text', [
    '', 'many', '3 apples', '3 4', '1,2,3', '12,34', '$', '%', '1.2.3', '--3', '5-3', '.', 'nan', '-', '5\u20133',
    '1/0', '0/0', '1/', '/2', '1/2/3', '1 1/2', '1e', 'e5', '1e5.5', '1..', '50%%', '1\n000', '1e999999999',
    '-1e-999999999', '1/1e9999', '9' * 10 ** 4, '7 <m> 2 <end>', '7<128>', '<7>'])
def test_what_is_no_number(text):
    assert records.parse_number(text) is None


@pytest.mark.parametrize('a, b, same', [
    ('3244047.0999999996', '3244047.10', True), ('72', '72.00001', True),
    ('0.333333', '1/3', True), ('1e-9', '0', False), ('72', '72.0', True),
    ('72', '72.001', False), ('1000000001', '1000000000', False), ('-0.5', '0.5', False),
    ('1e999', '1e999', True), ('many', 'many', False), ('many', '3', False), ('3', 'many', False)])
def test_whole_numbers_are_compared_exactly_and_others_nearly(a, b, same):
    assert records.same_number(records.parse_number(a), records.parse_number(b)) is same


@pytest.mark.parametrize('solution, steps', [
    ('It is <<48/2=24>>24, so $<<24+(1-3)*2 = $20>>', ['48/2=24', '24+(1-3)*2=20']),
    ('<<80,000+1,234,567.5=1,314,567.5>>', ['80000+1234567.5=1314567.5']), ('none < of > them', []),
    ('<<max(3,5)=5>>', ['max(3,5)=5']), ('<<max(100,200)=200>>', ['max(100,200)=200']),
    ('<<1,23+4=5>>', ['1,23+4=5']), ('<<1+1=2>><<2+2=4>>', ['1+1=2', '2+2=4']),
    ('<<<1+1=2>>>', None), ('<<8>>2=2>>', None), ('<<2*3=<<1+1=2>>2*3=6>>', None),
    ('<<1<2=1>>', None), ('<<1+1=2', None), ('1+1=2>>', None), ('<<1+1>>', None),
    ('<<1+1=2=2>>', None), ('<<>>', None),    ('<<=2>>', None), ('<<1+1=2>> <<3', None)])
def test_a_step_has_one_equals_sign_and_no_bracket_of_a_mark(solution, steps):
    assert records.marked_steps(solution) == steps


def test_an_answer_with_what_is_no_text_is_wrong():
    """7 <m> 2 <end> is not 72: `decode` shows what is not text."""
    tokenizer = data.Tokenizer({'kind': 'char', 'chars': sorted('0123456789\n?. '), 'special': records.SPECIAL})
    m, end = tokenizer.special['<m>'], tokenizer.special['<end>']
    says = {'a': [*tokenizer.encode('7'), m, *tokenizer.encode('2'), end], 'b': tokenizer.encode('72.00001'),
            'c': [*tokenizer.encode('7'), 128, *tokenizer.encode('2')]}

    asked = [records.Record(f'{n}?', ['1'], '72', 'here') for n in range(3)]
    right = records.score(lambda questions: [[([says[name] for name in 'abc'], None)]], tokenizer, asked)
    assert right.tolist() == [[False], [True], [False]]


def test_toy_problems_are_right_disjoint_and_the_same_again(prepare):
    splits, _, tokenizer = prepare('gsm_toy', ROWS={'test': 1200, 'val': 600, 'train': 18000})  # a fifth
    few = {'test': 60, 'val': 30, 'train': 600}
    assert prepare('gsm_toy', ROWS=few) == prepare('gsm_toy', ROWS=few)
    questions = {split: {row[0] for row in rows} for split, rows in splits.items()}
    assert max(len(q) for split in questions for q in questions[split]) <= 120
    assert len(questions['test']) == 1200 and len(questions['val']) == 600  # none twice
    staying, cases = Counter(), {split: set() for split in splits}
    for split, rows in splits.items():
        assert not any(questions[split] & questions[other] for other in splits if other != split)
        for question, steps, answer in rows:
            start, turns = re.search(r' (\d), turns (.*)\. ', question).groups()
            assert re.fullmatch(r'((6\+|7\+|8-|9-) ){1,5}(0\+ ){0,4}', turns + ' ') and len(turns.split()) == 5
            value = int(start)
            for turn, step in zip(turns.split(), steps):
                result = {'+': int(turn[0]) + value, '-': int(turn[0]) - value}[turn[1]] % 5
                assert step == f'{turn}{value}={result}'
                value = result
            assert answer == str(value) and set(turns.split()[len(steps):]) <= {'0+'}
            cases[split].add((start, *turns.split()))
            staying[len(steps), turns.split()[:len(steps)].count('0+')] += split == 'train'
    long = {split: {case for case in cases[split] if case[2] != '0+'} for split in cases}  # two turns or more
    assert not long['train'] & (long['val'] | long['test'])
    assert len(cases['test'] - long['test']) == len(cases['train'] - long['train']) == 20
    # three of four each
    counted = Counter(5 - case[1:].count('0+') for case in long['train'])
    assert counted[2] == 60 and counted[3] == 240 and 940 < counted[4] <= 960 and 2500 < counted[5] <= 3840
    assert set(''.join(questions['test'])) | set('\n=+') <= set(tokenizer['chars'])
    assert Counter(len(steps) for _, steps, _ in splits['test']) == dict.fromkeys(range(1, 6), 240)
    lengths = Counter(len(steps) for _, steps, _ in splits['train'])
    assert [lengths[n] / 180 for n in range(1, 6)] == pytest.approx([5, 8, 14, 28, 45], abs=1)  # percent
    for steps, shares in [(4, [1, 0, 0]), (5, [0.6, 0.4, 0])]:
        assert [staying[steps, n] / lengths[steps] for n in range(3)] == pytest.approx(shares, abs=0.03)
    # templates, names and things
    assert len({re.sub(r'\d', '', question) for question in questions['test']}) > 100


GSM8K = [{'question': 'A robe takes 2 bolts.',
          'answer': 'It takes 2/2=<<2/2=1>>1 bolt\nSo 2+1=<<2+1=3>>3 bolts\n#### 3'},
         {'question': 'Profit?',
          'answer': 'He pays $<<80,000 + 50000=130000>>130,000.\nSo $<<.5*$10=5.0>>5\n#### 70,000'},
         {'question': 'Degrees?', 'answer': 'It falls by <<4-7=-3>>3.\n#### -3'},
         {'question': 'Unmarked?', 'answer': 'It is 5.\n#### 5'},
         {'question': 'Not a number?', 'answer': '<<1+1=2>>\n#### two'},
         {'question': ' ', 'answer': '<<1+1=2>>\n#### 2'}]


def test_gsm8k_marks_become_steps(prepare, tmp_path):
    for split, rows in (('train', GSM8K * 2), ('test', GSM8K)):
        write_file(str(tmp_path / f'{split}.jsonl'), ''.join(json.dumps(row) + '\n' for row in rows))
    splits, left_out, tokenizer = prepare('gsm8k', f'--input={tmp_path}', '--val_rows=2')
    right = [('A robe takes 2 bolts.', ['2/2=1', '2+1=3'], '3'),
             ('Profit?', ['80000+50000=130000', '.5*10=5.0'], '70000'),
             ('Degrees?', ['4-7=-3'], '-3')]
    assert splits == {'train': right + right[:1], 'val': right[1:], 'test': right + [('Unmarked?', [], '5')]}
    assert left_out == {'train: no step is marked': 2, 'train: the answer is not a number': 2,
                        'test: the answer is not a number': 1, 'train: the question is empty': 2,
                        'test: the question is empty': 1}
    assert tokenizer == {'kind': 'gpt2'}


USABLE = json.dumps(GSM8K[0])
MARKED = json.dumps({'question': 'Broken?', 'answer': '<<<1+1=2>>>\n#### 2'})


def test_gsm8k_with_blank_lines_broken_marks_and_the_mark_before_utf8(prepare, tmp_path):
    for split in ('train', 'test'):
        content = f'{USABLE}\r\n\r\n{MARKED}\n\n{USABLE}\n'.encode()
        (tmp_path / f'{split}.jsonl').write_bytes(codecs.BOM_UTF8 + content)
    splits, left_out, _ = prepare('gsm8k', f'--input={tmp_path}', '--val_rows=1')
    row = ('A robe takes 2 bolts.', ['2/2=1', '2+1=3'], '3')
    assert splits == {'train': [row], 'val': [row], 'test': [row, row]}
    assert left_out == {'train: a mark << >> is broken': 1, 'test: a mark << >> is broken': 1}


def test_a_download_that_breaks_off_is_named(prepare, monkeypatch):
    def breaks_off(url, timeout):
        raise http.client.IncompleteRead(b'half')
    monkeypatch.setattr(urllib.request, 'urlopen', breaks_off)
    with pytest.raises(UserError, match='train.jsonl cannot be read .*--input=DIR'):
        prepare('gsm8k')


def test_gsm8k_aug_as_text_and_as_json(prepare, tmp_path):
    lines = ['How much?||<<16-3-4=9>> <<9*2=18>> #### 18', 'Cost?||<<600*30/100=180>> #### 1,180',
             'None?|| #### 6']
    for split in ('train', 'valid', 'test'):
        write_file(str(tmp_path / f'{split}.txt'), '\n'.join(lines) + '\n')
    right = [('How much?', ['16-3-4=9', '9*2=18'], '18'), ('Cost?', ['600*30/100=180'], '1180')]
    splits, left_out, _ = prepare('gsm8k_aug', f'--input={tmp_path}')
    assert splits == {'train': right, 'val': right, 'test': right + [('None?', [], '6')]}
    assert left_out == {'train: no step is marked': 1, 'valid: no step is marked': 1}
    entries = [{'question': q, 'steps': [f'<<{s}>>' for s in steps], 'answer': a} for q, steps, a in right]
    write_file(str(tmp_path / 'train.json'), json.dumps(entries))
    write_file(str(tmp_path / 'valid.json'), ''.join(json.dumps(e) + '\n' for e in entries))
    splits = prepare('gsm8k_aug', f'--input={tmp_path}')[0]
    assert splits['train'] == right == splits['val']
    write_file(str(tmp_path / 'train.json'),
               json.dumps([{**e, 'steps': [s.strip('<>') for s in e['steps']]} for e in entries]))
    assert prepare('gsm8k_aug', f'--input={tmp_path}')[0]['train'] == right
    os.remove(tmp_path / 'train.json')
    os.remove(tmp_path / 'train.txt')
    os.remove(tmp_path / 'valid.json')
    write_file(str(tmp_path / 'valid.txt'), '\n'.join(lines[:2] * 5) + '\n')
    splits = prepare('gsm8k_aug', f'--input={tmp_path}')[0]
    assert [len(splits[split]) for split in ('train', 'val')] == [9, 1]
    for n in range(2, 10):  # at least one row for val
        write_file(str(tmp_path / 'valid.txt'), '\n\n'.join(lines[:1] * n))
        splits = prepare('gsm8k_aug', f'--input={tmp_path}')[0]
        assert [len(splits[split]) for split in ('train', 'val')] == [n - 1, 1]


def test_the_last_bars_before_the_first_mark_separate(prepare, tmp_path):
    lines = ['|x||y|=3?||<<1+1=2>> #### 2', 'a||b #### c?||<<1+1=2>> #### 2', 'Max(a||b)?|| #### 2',
             'Broken?||<<8>>2=2>> #### 2']
    for split in ('train', 'valid', 'test'):
        (tmp_path / f'{split}.txt').write_bytes(codecs.BOM_UTF8 + '\r\n\r\n'.join(lines).encode())
    splits, left_out, _ = prepare('gsm8k_aug', f'--input={tmp_path}')
    assert [row[0] for row in splits['train']] == ['|x||y|=3?', 'a||b #### c?']
    assert splits['test'][2:] == [('Max(a||b)?', [], '2')] and left_out['test: a mark << >> is broken'] == 1


def test_a_record_file_with_blank_lines_and_the_mark_before_utf8(tmp_path):
    path, line = str(tmp_path / 'train.jsonl'), b'{"question": "q", "steps": ["1"], "answer": "1"}'
    content = codecs.BOM_UTF8 + b'\n' + line + b'\r\n\n' + line
    write_file(path, content)
    read = records.read_records(path, meta={'crc32': {'train.jsonl': zlib.crc32(content)}})  # of the file's bytes
    assert [record.where for record in read] == [f'{path} line 2', f'{path} line 4'] and read[0].question == 'q'


def test_a_record_data_set_is_written_whole_and_read_back(tmp_path, capsys):
    rows = [('1 + 1?\u2028', ['1+1=2'], '2'), ('2+1+1?', ['2+1=3', '3+1=4'], '4')]
    chars = sorted(set('1234+=? \u2028\n'))
    spec = {'kind': 'char', 'chars': chars}
    records.write_record_dataset(str(tmp_path), {'train': rows, 'val': rows[:1], 'test': rows[1:]}, spec, 'a test',
                                 {'why': 3})
    meta = data.read_meta(str(tmp_path))
    assert (meta['kind'], meta['train_rows'], meta['train_steps']) == ('records', 2, 3)
    assert meta['vocab_size'] == len(chars) + 4
    assert [tuple(r[:3]) for r in records.read_records(str(tmp_path / 'train.jsonl'))] == rows
    out = capsys.readouterr().out
    assert 'rows by number of steps: 1: 1, 2: 1' in out and 'left out: 3 rows, why' in out
    tokenizer = data.Tokenizer(meta['tokenizer'])
    ids = [tokenizer.text.ids['1'], *tokenizer.special.values()]
    assert tokenizer.decode(ids) == '1<b><m></b><end>' and ids[1:] == list(range(len(chars), len(chars) + 4))
    with pytest.raises(UserError, match="no 'x'"):
        records.write_record_dataset(str(tmp_path), {'train': [('x', ['1'], '1')]}, spec, 'a test')
    assert data.read_meta(str(tmp_path)) == meta  # what was there is untouched
