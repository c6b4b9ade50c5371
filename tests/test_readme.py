"""README.md: its commands run as written, in their order; what a README links to is there."""
import importlib.util
import os
import random
import re
import runpy
import shlex

import pytest

import config
import eval as evaluation
import sample
import train
from data import records
from conftest import ROOT, without_reports, write_text

READMES = ['README.md', 'config/README.md', 'data/README.md', 'tests/README.md']
CANNOT_RUN = re.compile(r'\d+ GPUs|several machines|needs the network')  # how the comment of such a command begins
TINY = {
    'train.py': dict(max_iters=2, eval_interval=2, eval_rows=2, batch_size=2, warmup_iters=0, n_layer=3, n_head=2,
                     n_embd=8, device='cpu', threads=1, snapshots='0,1,2'),
    'sample.py': dict(max_new_tokens=8),
    'eval.py': dict(eval_rows=4, slow_rows=2),
    'assets/draw.py': {},
}
spec = importlib.util.spec_from_file_location('draw', os.path.join(ROOT, 'assets', 'draw.py'))
draw = importlib.util.module_from_spec(spec)
spec.loader.exec_module(draw)
SCRIPTS = {'train.py': train, 'sample.py': sample, 'eval.py': evaluation, 'assets/draw.py': draw}


def read(name):
    with open(os.path.join(ROOT, name), encoding='utf-8') as f:
        return f.read()


def code_blocks(name):
    """(language, code) of each block of a README."""
    return re.findall(r'^```(sh|python)\n(.*?)^```', read(name), re.MULTILINE | re.DOTALL)


def commands(code):
    """(words, comment) of each command of a shell block."""
    for line in code.replace('\\\n', ' ').splitlines():
        command, _, comment = line.partition('  # ')
        for part in command.split('&&'):
            yield shlex.split(part), comment.strip()


def load_settings(script, argv):
    """The settings of a script as its main would read them."""
    path = os.path.join(ROOT, script)
    if script == 'train.py':
        return config.load(path, argv, {name: entry[0] for name, entry in train.METHODS.items()})[0]
    if script in ('sample.py', 'eval.py'):
        return sample.load_settings(path, argv)[0]
    return config.load(path, argv)[0]


def script_and_arguments(words):
    """Of python ... or torchrun ...; None for another command."""
    if words[:2] == ['python', '-m'] and words[2].startswith('config.'):
        return words[2].replace('.', '/') + '.py', words[3:]
    at = next((i for i, word in enumerate(words) if word.endswith('.py')), None)
    if at is None:
        assert words[:2] in (['pip', 'install'], ['python', '-m']), words
        return None
    return words[at], words[at + 1:]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(script, argv): run a command in tmp_path, where the runs and data of the repository are tiny ones."""
    for name in ('config', 'assets'):
        (tmp_path / name).symlink_to(os.path.join(ROOT, name))
    text = ''.join(f'ROMEO:\nBut, soft! what light is {i}?\n' for i in range(60))
    write_text(tmp_path / 'shakespeare_char', text)
    (tmp_path / 'path' / 'to').mkdir(parents=True)
    (tmp_path / 'path' / 'to' / 'my.txt').write_text(text, encoding='utf-8')
    make_problem = runpy.run_path(os.path.join(ROOT, 'data', 'gsm_toy', 'prepare.py'))['make_problem']
    rng = random.Random(0)
    problems = [make_problem(rng, 1 + i % 5) for i in range(10)]
    chars = {'\n', *''.join(question + ''.join(steps) for question, steps, _ in problems)}
    records.write_record_dataset(str(tmp_path / 'gsm_toy'), dict.fromkeys(('train', 'val', 'test'), problems),
                                 {'kind': 'char', 'chars': sorted(chars)}, 'a test')
    monkeypatch.chdir(tmp_path)

    def run(script, argv):
        settings = load_settings(script, argv)
        tiny = dict(TINY[script])
        if settings.get('init_from') == 'resume':
            tiny = dict(max_iters=3)
        elif settings.get('over_training'):
            tiny = {}  # no new tokens
        elif script == 'train.py' and settings['dataset'] == 'gsm_toy':
            tiny['block_size'] = 100
            if settings['init_from'] != 'scratch':
                tiny['stage2_iters'] = 2
        elif script == 'train.py':
            tiny['block_size'] = 16
            if settings['plan']:
                tiny['fork_layers'] = '1,2'
        if settings.get('dataset') in ('shakespeare_char', 'gsm_toy') and settings.get('init_from') != 'resume':
            tiny['dataset'] = tmp_path / settings['dataset']
        for name, value in settings.items():  # paths of the repository are paths of tmp_path here
            if isinstance(value, str) and value.startswith(ROOT):
                tiny[name] = tmp_path / os.path.relpath(value, ROOT)
        if settings.get('curves'):
            del tiny['out_dir']  # has no effect there
        if script == 'assets/draw.py':
            tiny['output'] = tmp_path
        with without_reports():
            SCRIPTS[script].main([*argv, *(f'--{name}={value}' for name, value in tiny.items())])
    return run


def test_every_command_of_the_lesson_runs_as_written_and_in_this_order(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train, 'METHODS', dict(train.METHODS))
    ran = []
    for language, code in code_blocks('README.md'):
        if language == 'python':
            exec(code, dict(vars(train)))
        for words, comment in commands(code) if language == 'sh' else ():
            command = script_and_arguments(words)
            if command and not CANNOT_RUN.match(comment):
                run(*command)
                ran.append(command[0])
    assert {*ran} == {*TINY} and 'train.py' in ran[:1]
    assert {'streams.svg', 'slots.svg', 'memory.svg'} <= {*os.listdir(tmp_path)}
    assert 'ROMEO:' in capsys.readouterr().out


@pytest.mark.parametrize('name', READMES)
def test_every_command_is_made_of_settings_that_there_are(name, monkeypatch):
    monkeypatch.setitem(train.METHODS, 'looped', train.METHODS['gpt'])
    monkeypatch.chdir(ROOT)
    shell = ''.join(code for language, code in code_blocks(name) if language == 'sh')
    for words, _ in commands(shell):
        command = script_and_arguments(words)
        if command:
            load_settings(*command)
        elif words[0] == 'pip':
            assert words[2] == '-r' and os.path.exists(words[3])


@pytest.mark.parametrize('name', READMES)
def test_what_a_readme_links_to_is_there(name):
    folder = os.path.dirname(os.path.join(ROOT, name))
    for target in re.findall(r'\]\(([^)]+)\)', read(name)):
        path, _, anchor = target.partition('#')
        if path.startswith('https://'):
            continue
        path = os.path.join(folder, path) if path else os.path.join(ROOT, name)
        assert os.path.exists(path), target
        if anchor:  # as GitHub makes it of a title
            titles = [title.lower() for title in re.findall(r'^#+ (.*)', read(path), re.MULTILINE)]
            assert anchor in [re.sub(r'[^\w -]', '', title).replace(' ', '-') for title in titles], target


def test_the_lesson_has_at_most_200_lines():
    assert read('README.md').count('\n') <= 200


@pytest.mark.parametrize('name', ['streams', 'slots', 'memory'])
def test_a_picture_is_small_and_reads_on_a_dark_page(name):
    picture = read(f'assets/{name}.svg')
    assert len(picture.encode()) < 40_000 and '<title>' in picture and 'class="panel"' in picture
