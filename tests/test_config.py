"""Settings: where they come from, their types, and what is said about wrong ones."""
import ast
import dataclasses
import itertools
import os

import pytest
import torch

import config
import train
from config import UserError
from conftest import ROOT

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
    (tmp_path / 'base.py').write_text('import os\nsteps = 7\nname = "é"\nlayers = [3]\n_private = 1\n',
                                      encoding='utf-8')
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
    # the command line wins wherever it stands
    (['--steps=9', 'base.py'], dict(steps=9, name='é', layers=(3,)), {}),
    (['--steps=9', '--flag', '--rate=-1e-3'], dict(steps=9, flag=True, rate=-0.001), {}),
    (['--flag', 'base.py'], dict(flag=True, steps=7, name='é', layers=(3,)), {}),
    (['--flag=False', '--steps=1e3'], dict(steps=1000), {}),
    (['--flag=true', '--layers=4,5'], dict(flag=True, layers=(4, 5)), {}),
    (['--layers=', '--name='], dict(layers=(), name=''), {}),
    (['--layers=(3, 7)', '--name=x=y=z'], dict(layers=(3, 7), name='x=y=z'), {}),
    (['--method=fancy', '--width=4', '--omega=0.25,0.75'], dict(method='fancy'),
     dict(width=4, omega=(0.25, 0.75))),
    (['--method=fancy', '--omega=uniform', '--bubbles=False'], dict(method='fancy'),
     dict(omega='uniform', bubbles=False)),
    (['fancy.py'], dict(method='fancy', rate=2.0), dict(omega=(0.5, 0.5))),
    (['written.py'], dict(steps=1000, flag=True, layers=(3,)), {}),  # a file is read as the command line is
])
def test_settings_come_from_defaults_files_and_the_command_line(load, argv, changed, model):
    settings, model_settings, given = load(*argv)
    assert settings == {**DEFAULTS, **changed} and model_settings == model
    assert set(given) >= set(changed) | set(model)
    assert all(type(settings[name]) is type(default) for name, default in DEFAULTS.items())


def test_help_prints_every_setting_with_its_comment(load, capsys):
    with pytest.raises(SystemExit) as stopped:
        load('--help')
    assert stopped.value.code == 0
    out = capsys.readouterr().out
    for line in ('--steps=100 ', 'how long', '--layers=1,2', '--width=8', 'how wide', '--omega=last',
                 'a name or numbers'):
        assert line in out
    assert out.count('--width') == 1


@pytest.mark.parametrize('script', ['train.py', 'sample.py', 'eval.py', 'bench.py'])
def test_every_setting_of_the_scripts_has_a_comment(script):
    """Read with Python's own parser: the plain values that stand before the first function."""
    path = os.path.join(ROOT, script)
    with open(path, encoding='utf-8') as f:
        head = list(itertools.takewhile(lambda node: not isinstance(node, ast.FunctionDef),
                                        ast.parse(f.read()).body))
    written = {node.targets[0].id: ast.literal_eval(node.value) for node in head
               if isinstance(node, ast.Assign) and isinstance(node.value, (ast.Constant, ast.Tuple, ast.UnaryOp))}
    settings = config.script_settings(path)
    assert {name: setting.default for name, setting in settings.items()} == {
        name: value for name, value in written.items() if name.islower()}
    assert all(len(setting.comment) >= 5 for setting in settings.values()) and len(settings) >= 5


@pytest.mark.parametrize('name', sorted(f for f in os.listdir(os.path.join(ROOT, 'config'))
                                        if f.endswith(('_small.py', '_code.py', '_from_gpt.py'))))
def test_every_config_file_loads_and_builds(name):
    methods = {m: entry[0] for m, entry in train.METHODS.items()}
    settings, model_settings, _ = config.load(os.path.join(ROOT, 'train.py'), [os.path.join(ROOT, 'config', name)],
                                              methods)
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
    assert settings['init_from'] == os.path.join(ROOT, 'out/cot_small/ckpt.pt')
    assert settings['dataset'] == 'gsm_toy'
    settings, _, _ = config.load(train_py, [path, '--out_dir=out/mine', '--init_from=scratch'], classes)
    assert settings['out_dir'] == 'out/mine' and settings['init_from'] == 'scratch'
