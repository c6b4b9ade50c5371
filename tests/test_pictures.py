"""What is shown: the page of coloured text, the curves of several runs."""
import html.parser
import importlib.util
import json
import re
import sys

import pytest

import config
import data
import eval as evaluation
import sample
import train
from config import UserError
from config.checkpoint import load_checkpoint
from config.curves import compare, validation_rows
from config.tables import draw
from conftest import write_records, write_text
from data import Tokenizer


class Page(html.parser.HTMLParser):
    """A page as its reader sees it: `texts`, one per <p>, of (what stands there, number below, under the pointer,
    background); `open` are the elements that nobody has closed."""

    def __init__(self, content):
        super().__init__()
        self.texts, self.open, self.styles = [], [], ''
        self.feed(content)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        assert not {'src', 'href'} & attributes.keys()  # it needs no other file
        if tag == 'p':
            self.texts.append([])
        if tag == 'ruby':
            self.texts[-1].append(['', '', attributes['title'], attributes['class']])
        if tag != 'meta':
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        place = self.open[-1] if self.open else ''
        if place == 'style':
            self.styles += text
        elif place == 'p':  # outside of a ruby nothing is known of the effort
            self.texts[-1].append([text, '', '', ''])
        elif place in ('ruby', 'rt'):
            self.texts[-1][-1][place == 'rt'] += text


def test_a_page_shows_every_text_with_its_numbers_and_escapes_it():
    tokenizer = data.Tokenizer({'kind': 'char', 'chars': sorted('\n"&<>ab')})
    texts = ['a<b>&"\na', 'ba']
    effort = [[None, 1, 2, 3, 9, 2, 1, 4], [1, 2]]
    rows = [tokenizer.encode(text) for text in texts]
    page = Page(sample.page('<run> & more', tokenizer, rows, effort, 'slots'))
    assert not page.open and len(page.texts) == 2
    for text, numbers, shown in zip(texts, effort, page.texts):
        assert ''.join(part for part, *_ in shown).replace('\u21b5', '') == text
        below = [number for part, number, *_ in shown if part != '\n']
        assert below == ['' if n is None else str(n) for n in numbers]
        told = [pointer for part, _, pointer, _ in shown if part != '\n']
        assert told == ['' if n is None else f'{c!r}, slots: {n}' for c, n in zip(text, numbers)]
    # the colours are those of a terminal: 255 is a grey, 55 a dark purple, on which text is white
    assert '.e1 { background: rgb(238 238 238); color: rgb(0 0 0) }' in page.styles
    assert '.e7 { background: rgb(95 0 175); color: rgb(255 255 255) }' in page.styles
    assert [background for *_, background in page.texts[0]][:5] == ['', 'e1', 'e2', 'e3', 'e7']


@pytest.mark.parametrize('method, W', [('thoughtbubbles', 1), ('cyb', 3)])
def test_sample_shows_what_each_snapshot_spends_on_the_prompt_line_under_line(run, tmp_path, capsys, method, W):
    run('run', method=method, snapshots='4,0,10,2', learning_rate=0.1, max_iters=10, **({'W': W} if W > 1 else {}))
    capsys.readouterr()
    sample.main([f'--out_dir={tmp_path}/run', '--prompt=1 plus\n2 is', '--over_training'])
    said = capsys.readouterr().out.splitlines()
    assert said[0].split('  ')[-2:] == ['1 plus\u21b52 is', 'mean ' + ('slots' if W > 1 else 'streams') + ' per token']
    place = said[0].index('1 plus')
    for line, step in zip(said[1:], (0, 2, 4, 10), strict=True):
        model, tokenizer = train.load(f'{tmp_path}/run/step_{step}.pt', 'cpu')
        ids = tokenizer.encode('1 plus\n2 is')
        numbers = model.spent([ids], [[]])[1][0]
        assert line == f'{step:7d}'.ljust(place) + ''.join(map(str, numbers)) + f'  {sum(numbers) / 11:.2f}'
    assert len({line[7:] for line in said[1:]}) > 1  # training changes them
    # without new tokens, one checkpoint shows the same
    sample.main([f'--checkpoint={tmp_path}/run/step_10.pt', '--prompt=1 plus\n2 is', '--show', '--max_new_tokens=0'])
    assert re.findall(r"':(\d)", capsys.readouterr().out) == [str(n) for n in numbers]


def test_a_row_of_effort_keeps_its_columns_where_tokens_are_long(run, tmp_path, capsys, monkeypatch):
    run('run', method='thoughtbubbles', snapshots='0')
    monkeypatch.setattr(Tokenizer, 'decode', lambda self, ids: {1: 'seven', 2: 'x'}.get(ids[0], '\n'))
    monkeypatch.setattr(Tokenizer, 'encode', lambda self, text: [1, 2, 1] if text else [])
    monkeypatch.setattr(train.Thoughtbubbles, 'spent', lambda self, prompts, new: ('streams', [[None, 12, 3]]))
    capsys.readouterr()
    sample.main([f'--out_dir={tmp_path}/run', '--prompt=any', '--over_training'])
    assert capsys.readouterr().out == ('   step  seven x  seven  mean streams per token\n'
                                       '      0  -     12 3      7.50\n')
    monkeypatch.setattr(config, 'is_terminal', lambda stream: stream is sys.stdout)
    sample.main([f'--out_dir={tmp_path}/run', '--prompt=any', '--over_training'])
    assert sample.paint('3    ', 3) in capsys.readouterr().out


@pytest.mark.parametrize('method', ['thoughtbubbles', 'cyb'])
def test_sample_writes_the_page_of_all_its_texts(run, tmp_path, capsys, method):
    run('run', method=method)
    capsys.readouterr()
    sample.main([f'--out_dir={tmp_path}/run', '--prompt=1 plus', '--max_new_tokens=8', '--num_samples=3', '--show',
                 f'--html={tmp_path}/page.html'])
    said = capsys.readouterr()
    texts = Page((tmp_path / 'page.html').read_text('utf-8')).texts
    assert len(texts) == 3 and said.err.endswith(f'written to {tmp_path}/page.html\n')
    for shown, printed in zip(texts, said.out.split('--- ')[1:]):
        assert ''.join(part for part, *_ in shown).replace('\u21b5', '') in printed
        numbers = re.findall(r"':(\d+)", printed)
        assert [number for _, number, *_ in shown if number] == numbers
        assert len(numbers) == (14 if method == 'thoughtbubbles' else 8)  # a prompt's slots are not known


# --- curves ---

def logged(folder, losses, step=10):
    """A run's log with these validation losses, among other lines."""
    lines = []
    for i, loss in enumerate(losses):
        lines += [{'iter': i * step, 'train_loss': 9.0, 'lr': 0.1}, {'iter': i * step, 'val_loss': loss}]
    (folder / 'log.jsonl').write_text('\n'.join(map(json.dumps, lines)), encoding='utf-8')


def test_curves_tell_when_a_run_reaches_the_first_ones_final_loss(run, tmp_path, capsys):
    runs = [str(tmp_path / name) for name in ('first', 'better', 'never', 'wider', 'others')]
    for name, settings in dict(first={}, better=dict(method='cyb'), never={}, wider=dict(grad_accum=3),
                               others=dict(eval_rows=4)).items():
        run(name, max_iters=1, **settings)
    losses_of = dict(first=[3.0, 2.0, 1.0, 1.5], better=[3.0, 9.0, 1.2], never=[3.0, 1.6], wider=[3.0, 1.5],
                     others=[3.0, 1.7])
    for name, losses in losses_of.items():
        logged(tmp_path / name, losses)
    with open(tmp_path / 'better' / 'log.jsonl', 'a', encoding='utf-8') as f:
        f.write('\n{"iter": 10, "val_loss": 1.4}\n{"iter": 30, "val_lo')  # the later loss of a step counts
    capsys.readouterr()
    evaluation.main([f'--curves={",".join(runs)}', f'--output={tmp_path}/new/curves'])
    out = capsys.readouterr().out
    assert out.count('passing over a broken line') == 1
    got = json.loads((tmp_path / 'new' / 'curves.json').read_text('utf-8'))
    assert got['unit of loss'] == 'nats per token'
    # a step has 4 rows of 16 tokens, in `wider` three times as many
    assert [list(row.values()) for row in got['runs']] == [
        [runs[0], 'gpt', 30, 30 * 64, 1.0, 1.5, 20, pytest.approx(20 / 30)],
        [runs[1], 'cyb', 20, 20 * 64, 1.2, 1.2, 10, pytest.approx(10 / 30)],
        [runs[2], 'gpt', 10, 10 * 64, 1.6, 1.6, None, None],
        [runs[3], 'gpt', 10, 30 * 64, 1.5, 1.5, 10, pytest.approx(1.0)],
        [runs[4], 'gpt', 10, 10 * 64, 1.7, 1.7, None, None]]
    assert list(got['runs'][0])[-2:] == ['step with 1.5000', 'share of the tokens of the first']
    assert [list(row.values()) for row in got['loss over steps']] == [
        [0, 3.0, 3.0, 3.0, 3.0, 3.0], [10, 2.0, 1.4, 1.6, 1.5, 1.7], [20, 1.0, 1.2, None, None, None],
        [30, 1.5, None, None, None, None]]
    assert [(row['tokens'], row[runs[3]]) for row in got['loss over tokens']] == [
        (0, 3.0), (640, None), (1280, None), (1920, 1.5)]
    # where both have a loss; `others` has other validation rows
    assert got[f'difference to {runs[0]} over tokens'] == [
        {'tokens': tokens, **dict(zip(runs[1:4], differences))} for tokens, *differences in [
            (0, 0.0, 0.0, 0.0), (640, pytest.approx(-0.6), pytest.approx(-0.4), None),
            (1280, pytest.approx(0.2), None, None), (1920, None, None, 0.0)]]
    never = next(line.split() for line in out.splitlines() if line.split()[:1] == [runs[2]])
    assert never[-3:] == ['1.6000', '-', '-']
    assert (tmp_path / 'new' / 'curves.png').exists() == (importlib.util.find_spec('matplotlib') is not None)
    saved = load_checkpoint(f'{runs[0]}/ckpt.pt')
    for part, name in (('meta', 'sha256'), ('settings', 'eval_rows'), ('model_config', 'block_size')):
        assert validation_rows({**saved, part: {**saved[part], name: 'another'}}) != validation_rows(saved)


def test_a_picture_has_a_panel_for_each_table_of_losses_and_a_line_for_each_run(tmp_path, monkeypatch):
    pyplot = pytest.importorskip('matplotlib.pyplot', reason='pip install matplotlib')
    figures = []
    monkeypatch.setattr(pyplot, 'close', figures.append)
    losses = [{'tokens': 0, 'a$_$': 3.0, 'b': 3.5}, {'tokens': 640, 'a$_$': 2.0, 'b': None},
              {'tokens': 1920, 'a$_$': None, 'b': 1.5}]
    tables = {'runs': [{'run': 'a$_$', 'method': 'gpt'}], 'loss over tokens': losses,
              'difference to a$_$ over tokens': [{'tokens': 0, 'b': 0.5}], 'nothing': []}  # which is no formula
    assert draw(tables, 'a$_$', str(tmp_path / 'a.png')) and (tmp_path / 'a.png').exists()
    panel, difference = figures[0].axes
    assert (panel.get_title(), panel.get_xlabel(), panel.get_ylabel()) == ('loss over tokens', 'tokens', '')
    assert {line.get_label(): line.get_xydata().tolist() for line in panel.lines} == {
        'a$_$': [[0, 3.0], [640, 2.0]], 'b': [[0, 3.5], [1920, 1.5]]}
    assert [line.get_label() for line in difference.lines] == ['b']


def test_curves_that_cannot_be_compared_are_refused_in_one_line(run, tmp_path):
    run('text')
    run('records', dataset=write_records(tmp_path / 'set'), method='rim', train_on='sft', block_size=48)
    run('other', dataset=write_text(tmp_path / 'abc'))
    (tmp_path / 'empty').mkdir()
    logged(tmp_path / 'empty', [])
    logged(tmp_path, [1.0])
    logged(tmp_path / 'records', [2.0])  # before its first step
    evaluation.main([f'--curves={tmp_path}/records', f'--output={tmp_path}/one'])  # one run has no difference
    one = json.loads((tmp_path / 'one.json').read_text('utf-8'))
    assert one['runs'][0]['records'] == 0 and list(one.values())[-1] == []
    logged(tmp_path / 'records', [2.0, 1.0])
    one, _ = compare([f'{tmp_path}/records'])
    assert one['loss over records'][1]['records'] == 10 * 4  # a row is a record
    for second, message in [('records', 'records has losses in nats per record, .*text in nats per token'),
                            ('other', 'or its tokenizer is another'), ('nowhere', 'nowhere/log.jsonl is not there'),
                            ('empty', 'empty/log.jsonl holds no validation loss yet'),
                            ('.', 'ckpt.pt is not there')]:
        with pytest.raises(UserError, match=message):
            evaluation.main([f'--curves={tmp_path}/text,{tmp_path}/{second}'])
