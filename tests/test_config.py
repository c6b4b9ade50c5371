"""Settings: where they come from, their types, and what is said about wrong ones."""
import dataclasses
import math
import os

import pytest
import torch

import config
import train
from config import UserError

SCRIPT = '''"""A script."""
steps = 100  # how long
rate = 0.5  # how fast
name = 'a'  # what
flag = False  # whether
layers = (1, 2)  # where
method = 'plain'  # which
TABLE = {'x': 1}  # no setting
def f():
    inner = 1  # no setting either
'''


@dataclasses.dataclass
class Plain:
    width: int = 8  # how wide


@dataclasses.dataclass
class Fancy(Plain):
    omega: str | tuple = 'last'  # a name or numbers
    bubbles: bool = True  # fork or not


@pytest.fixture
def load(tmp_path):
    (tmp_path / 'script.py').write_text(SCRIPT, encoding='utf-8')
    (tmp_path / 'base.py').write_text('import os\nsteps = 7\nname = "é"\nlayers = [3]\n_private = 1\n', encoding='utf-8')
    (tmp_path / 'written.py').write_text('steps = 1e3\nflag = 1\nlayers = 3\n', encoding='utf-8')
    (tmp_path / 'fancy.py').write_text("method = 'fancy'\nomega = (0.5, 0.5)\nrate = 2\n", encoding='utf-8')

    def load(*argv):
        argv = [str(tmp_path / a) if a.endswith('.py') else a for a in argv]
        return config.load(str(tmp_path / 'script.py'), argv, {'plain': Plain, 'fancy': Fancy})
    return load


DEFAULTS = dict(steps=100, rate=0.5, name='a', flag=False, layers=(1, 2), method='plain')


@pytest.mark.parametrize('argv, changed, model', [
    ([], {}, {}),
    (['base.py'], dict(steps=7, name='é', layers=(3,)), {}),
    (['--steps=9', 'base.py'], dict(steps=9, name='é', layers=(3,)), {}),  # the command line wins wherever it stands
    (['--steps=9', '--flag', '--rate=-1e-3'], dict(steps=9, flag=True, rate=-0.001), {}),
    (['--flag', 'base.py'], dict(flag=True, steps=7, name='é', layers=(3,)), {}),
    (['--flag=False', '--steps=1e3'], dict(steps=1000), {}),
    (['--flag=true', '--layers=4,5'], dict(flag=True, layers=(4, 5)), {}),
    (['--layers=', '--name='], dict(layers=(), name=''), {}),
    (['--layers=(3, 7)', '--name=x=y=z'], dict(layers=(3, 7), name='x=y=z'), {}),
    (['--method=fancy', '--width=4', '--omega=0.25,0.75'], dict(method='fancy'), dict(width=4, omega=(0.25, 0.75))),
    (['--method=fancy', '--omega=uniform', '--bubbles=False'], dict(method='fancy'), dict(omega='uniform', bubbles=False)),
    (['fancy.py'], dict(method='fancy', rate=2.0), dict(omega=(0.5, 0.5))),
    (['written.py'], dict(steps=1000, flag=True, layers=(3,)), {}),  # a file is read as the command line is
])
def test_settings_come_from_defaults_files_and_the_command_line(load, argv, changed, model):
    settings, model_settings, given = load(*argv)
    assert settings == {**DEFAULTS, **changed} and model_settings == model
    assert set(given) >= set(changed) | set(model)
    assert all(type(settings[name]) is type(default) for name, default in DEFAULTS.items())


@pytest.mark.parametrize('argv, message', [
    (['--step=9'], "no setting 'step'; did you mean steps"),
    (['--zzz=9'], '--help lists'),
    (['--steps=many'], "steps = 'many': expected a whole number, such as 100 .how long"),
    (['--steps=1.5'], "steps = '1.5'"), (['--steps='], "steps = ''"), (['--steps'], "steps = True: expected a whole number"), (['--steps=inf'], 'whole number'),
    (['--rate=fast'], 'expected a number'), (['--flag=perhaps'], 'expected True or False'),
    (['--layers=1,x'], 'numbers separated by commas'),
    (['--method=other'], "'other': choose one of plain, fancy"),
    (['--omega=last'], 'omega is a setting of method fancy, not of plain; add --method=fancy'),
    (['--method=fancy', '--omega=first', '--wdth=3'], 'did you mean width'),
    (['--rate=nan'], 'expected a number'), (['--rate=inf'], 'expected a number'), (['script'], 'is not a .py file'),
    (['--steps', '9'], "'9' is not there .*--key=value"), (['--rate', '-1e-3'], '--key=value'), (['--name', 'base'], '--key=value'),
    (['--name'], 'name = True: expected text'), (['--layers'], 'layers = True'), (['--flag', 'False'], '--key=value'),
    (['missing.py'], 'missing.py.* is not there'), (['basee.py'], 'did you mean .*base.py'),
    (['--inner=2'], "no setting 'inner'"), (['--TABLE=2'], 'no setting'),
])
def test_wrong_settings_are_named_with_the_way_out(load, argv, message):
    with pytest.raises(UserError, match=message) as caught:
        load(*argv)
    assert '\n' not in str(caught.value)


@pytest.mark.parametrize('source, message', [
    ('stepz = 3\n', 'wrong.py.*stepz.*did you mean steps'), ('steps = "3x"\n', 'expected a whole number'),
    ('steps = True\n', 'expected a whole number'), ('flag = 2\n', 'expected True or False'),
    ('steps = (\n', 'does not run: SyntaxError'), ('raise SystemExit(3)\n', 'SystemExit'), ('method = ["plain"]\n', 'method = .*expected text'),
    ('rate = float("nan")\n', 'expected a number'), ('steps = 1/0\n', 'ZeroDivisionError')])
def test_wrong_config_files_are_named(load, tmp_path, source, message):
    (tmp_path / 'wrong.py').write_text(source, encoding='utf-8')
    with pytest.raises(UserError, match=message):
        load('wrong.py')


def test_help_prints_every_setting_with_its_comment(load, capsys):
    with pytest.raises(SystemExit) as stopped:
        load('--help')
    assert stopped.value.code == 0
    out = capsys.readouterr().out
    for line in ('--steps=100 ', 'how long', '--layers=1,2', '--width=8', 'how wide', '--omega=last', 'a name or numbers'):
        assert line in out
    assert out.count('--width') == 1


ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@pytest.mark.parametrize('script', ['train.py', 'sample.py', 'bench.py'])
def test_every_setting_of_the_scripts_has_a_comment(script):
    path = os.path.join(ROOT, script)
    settings = config.script_settings(path)
    with open(path, encoding='utf-8') as f:
        head = f.read().split('\n# the only list')[0].split('\ndef ')[0]
    written = [line.split(' = ')[0] for line in head.split('\n') if line[:1].islower() and ' = ' in line.split('#')[0]]
    assert list(settings) == written and len(settings) >= 5


@pytest.mark.parametrize('name', sorted(f for f in os.listdir(os.path.join(ROOT, 'config')) if f.endswith('_small.py')))
def test_every_config_file_loads_and_builds(name):
    methods = {m: entry[0] for m, entry in train.METHODS.items()}
    settings, model_settings, _ = config.load(os.path.join(ROOT, 'train.py'), [os.path.join(ROOT, 'config', name)], methods)
    methods[settings['method']](**model_settings)
    assert settings['out_dir'] == config.from_repository('out/' + name[:-3])


def test_run_turns_a_user_error_into_one_line(capsys):
    def main(argv):
        raise UserError('steps = 3: too few')
    with pytest.raises(SystemExit) as stopped:
        config.launch(main)
    assert stopped.value.code == 1 and capsys.readouterr().err == 'error: steps = 3: too few\n'


@pytest.mark.parametrize('stream', [None, object()], ids=['none', 'a notebook'])
def test_run_needs_no_terminal(monkeypatch, stream):
    monkeypatch.setattr('sys.stdout', stream)
    monkeypatch.setattr('sys.stderr', stream)
    ran = []
    config.launch(ran.append)
    assert len(ran) == 1 and not config.is_terminal(stream)


def test_out_of_memory_is_one_line(capsys):
    def main(argv):
        raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 9 GiB.\nmany more lines')
    with pytest.raises(SystemExit):
        config.launch(main)
    error = capsys.readouterr().err
    assert error.count('\n') == 1 and 'Tried to allocate 9 GiB' in error and 'lower batch_size' in error


def test_paths_in_a_config_count_from_the_repository_those_given_from_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path, train_py = os.path.join(ROOT, 'config', 'rim_small.py'), os.path.join(ROOT, 'train.py')
    classes = {m: entry[0] for m, entry in train.METHODS.items()}
    settings, _, _ = config.load(train_py, [path], classes)
    assert settings['out_dir'] == os.path.join(ROOT, 'out/rim_small')
    assert settings['init_from'] == os.path.join(ROOT, 'out/cot_small/ckpt.pt') and settings['dataset'] == 'gsm_toy'
    settings, _, _ = config.load(train_py, [path, '--out_dir=out/mine', '--init_from=scratch'], classes)
    assert settings['out_dir'] == 'out/mine' and settings['init_from'] == 'scratch'


def test_ranges():
    config.check_range(dict(a=1, b=0.5, c=7), 'a c')
    config.check_range(dict(a=0, b=0.5), 'a b', 0, 1)
    for settings, low, below, message in [(dict(a=0), 1, math.inf, 'a = 0: must be at least 1$'),
                                          (dict(a=1.0), 0, 1, 'a = 1.0: must be at least 0 and below 1$'),
                                          (dict(a=math.nan), 0, math.inf, 'a = nan'), (dict(a=math.inf), 0, math.inf, 'a = inf')]:
        with pytest.raises(UserError, match=message):
            config.check_range(settings, 'a', low, below)
