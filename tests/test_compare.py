"""config/compare.py with a stand-in for train.py whose loss is a known function; config/claims.py."""
import itertools
import json
import math
import os
import re
import signal
import sys
import types

import pytest
import torch

import bench
import config
from config import UserError, claims, compare
from config.machine import flops_per_token
from conftest import ROOT, TEXT, write_records, write_text
from model import GPT, GPTConfig

BUILD = bench.build
BEST = {'plain': 2e-3, 'tb': 4e-3, 'cyb': 1e-3}  # learning rates


def loss_at(name, rate, seed):
    return 2 + math.log2(rate / BEST[name]) ** 2 / 10 + seed * (0.01 if name == 'plain' else 0.02)


class Child:
    """A stand-in for a process that ends when it has been asked `polls` times."""

    def __init__(self, end, polls=1):
        self.end = end
        self.polls = polls
        self.signals = []
        self.returncode = None

    def poll(self):
        self.polls -= 1
        if self.polls <= 0 and self.returncode is None:
            self.returncode = self.end()
        return self.returncode

    def send_signal(self, number):
        self.signals.append(number)

    def wait(self):
        self.returncode = 0


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Three configs on one text, and others that do not fit."""
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path / 'text', TEXT)
    write_text(tmp_path / 'other', TEXT)
    write_records(tmp_path / 'records')
    size = ("n_layer = 3\nn_head = 2\nn_embd = 16\nblock_size = 16\nmax_iters = 40\nlearning_rate = 2e-3\n"
            "min_lr = 2e-4\nbatch_size = 4\neval_rows = 8\neval_interval = 20\n")
    records = "method = 'rim'\nblock_size = 48\n"
    for name, dataset, more in [
            ('plain', 'text', ''), ('other', 'other', ''), ('cyb', 'text', "method = 'cyb'\nW = 2\n"),
            ('tb', 'text', "method = 'thoughtbubbles'\nfork_layers = (1, 2)\n"),
            ('sft', 'records', records + "train_on = 'sft'\n"), ('cot', 'records', records + "train_on = 'cot'\n"),
            ('rim', 'records', records + 'stage2_iters = 10\nstage2_learning_rate = 1e-3\n')]:
        (tmp_path / f'{name}.py').write_text(f"{size}dataset = '{tmp_path / dataset}'\n{more}")
    compare.opened.cache_clear()
    for name, setting in config.script_settings(compare.__file__).items():
        monkeypatch.setattr(compare, name, setting.default)  # main() sets them; here they are as before afterwards
    return tmp_path


@pytest.fixture
def trainings(place, monkeypatch):
    """The commands that were started. trainings.fail: {part of a folder's name: what such a run prints}."""
    class Trainings(list):
        fail = {}
        alive = most = 0
        stop_at = math.inf
    made = Trainings()

    def start(words, output):
        if len(made) == made.stop_at:
            raise KeyboardInterrupt
        made.append(words)
        made.alive += 1
        made.most = max(made.most, made.alive)
        given = dict(word[2:].split('=', 1) for word in words if word.startswith('--'))
        folder = given['out_dir']

        def end():
            made.alive -= 1
            said = next((said for part, said in made.fail.items() if part in folder), 'step 40: well done\n')
            with open(output, 'a') as f:
                f.write(said)
            name = os.path.basename(folder).split('_lr=')[0]
            loss = loss_at(name, float(given['learning_rate']), int(given['seed']))
            for file in ('ckpt.pt', 'best.pt'):
                open(os.path.join(folder, file), 'w').close()
            log = [{'iter': 0, 'val_loss': 9.9}, {'iter': 40, 'train_loss': 1.0}, {'iter': 40, 'val_loss': loss}]
            with open(os.path.join(folder, 'log.jsonl'), 'w') as f:
                f.write(''.join(json.dumps(entry) + '\n' for entry in log))
            return int(any(part in folder for part in made.fail))  # whatever log there is, it has failed
        made.children.append(Child(end, polls=2))
        return made.children[-1]

    made.children = []
    monkeypatch.setattr(compare, 'start', start)
    monkeypatch.setattr(compare, 'time', types.SimpleNamespace(sleep=lambda seconds: None))
    monkeypatch.setattr(bench, 'build', lambda *_, **__: (None, lambda: None))
    return made


def run(*arguments, out='cmp'):
    """What compare.json holds afterwards."""
    compare.main(['--configs=plain.py,tb.py', '--equal_flops=none', f'--out_dir={out}', *arguments])
    return config.read_json(f'{out}/compare.json')


def started(trainings):
    return [os.path.basename(next(w for w in words if w.startswith('--out_dir='))) for words in trainings]


def test_means_errors_and_pairs_are_those_computed_by_hand():
    assert compare.mean_and_error([1.0, 2.0, 4.0, 5.0]) == (3.0, math.sqrt(10 / 3) / 2)
    assert compare.mean_and_error([7.0]) == (7.0, None) and compare.mean_and_error([]) == (None, None)
    assert compare.paired({'1': 3.0, '2': 5.0, '4': 1.0}, {'2': 4.5, '1': 1.0, '3': 0.0}) == [2.0, 0.5]


def test_each_config_is_searched_and_then_run_with_other_seeds_at_its_best_rate(trainings, capsys):
    saved = run('--configs=plain.py,tb.py,cyb.py', '--seeds=3')
    rates = {name: {r['rate'] for r in saved['results'].values() if r['run'] == name and r['seed'] > 1}
             for name in BEST}
    assert rates == {name: {rate} for name, rate in BEST.items()}
    assert len(trainings) == 3 * (5 + 3) and len(saved['results']) == 24
    assert saved['values']['tb'] == pytest.approx({'2': 2.04, '3': 2.06, '4': 2.08})
    said = capsys.readouterr().out
    losses, differences = said.split('\nlosses\n')[1].split('\ndifferences\n')
    row = next(line.split() for line in losses.splitlines() if line.split()[:1] == ['tb'])
    assert 1.5 < float(row[3]) < 3  # FLOPs over those of the plain one
    assert row[1:3] == ['40', '16'] and row[4:] == ['0.004', 'no', '3', '2.0600', '0.0115']  # 0.02 / sqrt(3)
    assert ['tb', 'plain', '3', '0.0300', '0.0058'] in [line.split() for line in differences.splitlines()]


def test_a_best_rate_at_the_edge_extends_the_grid_once_or_is_said(trainings, capsys, monkeypatch):
    monkeypatch.setitem(BEST, 'tb', 16e-3)  # one beyond the grid, and none beyond that
    monkeypatch.setitem(BEST, 'plain', 5e-5)  # far below it
    saved = run('--seeds=1')
    tried = {name: sorted(r['rate'] for r in saved['results'].values() if r['run'] == name and r['seed'] == 1)
             for name in ('plain', 'tb')}
    assert tried == {'plain': [2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3], 'tb': [5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 16e-3]}
    rows = [line.split() for line in capsys.readouterr().out.split('\nlosses\n')[1].splitlines()]
    assert [row[4:6] for row in rows[1:3]] == [['0.00025', 'yes'], ['0.016', 'yes']]
    n = len(trainings)
    run('--seeds=1')
    assert len(trainings) == n


def test_the_other_rates_keep_their_proportion_and_a_checkpoint_is_gone_on_with(place, monkeypatch):
    monkeypatch.setattr(compare, 'extra', '--device=cpu')
    rim = compare.read_run('rim.py --n_mem=1')
    assert rim.name == 'rim_n_mem=1' and rim.steps == 50
    words = compare.command(rim, 4e-3, 7, 'out/x')
    assert words[:2] == [sys.executable, compare.train.__file__]
    assert words[2:] == ['rim.py', '--threads=1', '--device=cpu', '--n_mem=1', '--min_lr=0.0004',
                         '--stage2_learning_rate=0.002', '--learning_rate=0.004', '--seed=7', '--out_dir=out/x']
    os.makedirs('out/x')
    (place / 'out/x/ckpt.pt').touch()
    assert compare.command(rim, 4e-3, 7, 'out/x')[-1] == '--init_from=resume'


def test_a_config_may_bring_settings_with_commas(place, monkeypatch):
    for name, value in dict(configs='plain.py,tb.py --fork_layers=0,1,2,cyb.py --W=3', equal_flops='none').items():
        monkeypatch.setattr(compare, name, value)
    runs, pairs = compare.read_runs()
    assert list(runs) == ['plain', 'tb_fork_layers=0,1,2', 'cyb_W=3'] and runs['cyb_W=3'].config.W == 3
    assert pairs == [('tb_fork_layers=0,1,2', 'plain'), ('cyb_W=3', 'plain')]


def test_the_plain_gpt_with_equal_flops_has_more_steps_or_the_nearest_width(place, monkeypatch):
    def flops(**settings):
        return flops_per_token(GPT(GPTConfig(vocab_size=18, block_size=16, n_layer=3, n_head=2, **settings)))

    for name, value in dict(configs='plain.py,tb.py,cyb.py', equal_flops='both').items():
        monkeypatch.setattr(compare, name, value)
    runs, pairs = compare.read_runs()
    plain = runs['plain']
    assert plain.flops == 40 * 4 * 16 * flops(n_embd=16)
    for name in ('tb', 'cyb'):
        more = math.ceil(10 * runs[name].flops / plain.flops) / 10
        assert 1.5 < more < 3
        steps = f'plain_max_iters={round(40 * more)}'
        width = min(range(16, 65, 4), key=lambda n: abs(flops(n_embd=n) - flops(n_embd=16) * more))
        assert {(name, 'plain'), (name, steps), (name, f'plain_n_embd={width}')} < {*pairs}
        assert 0.99 < runs[steps].flops / runs[name].flops < 1.1
    assert {(name, 'plain') for name in runs if name != 'plain'} < {*pairs}
    assert not compare.controls(plain, plain.flops)
    for choice, number in dict(steps='max_iters', width='n_embd').items():
        monkeypatch.setattr(compare, 'equal_flops', choice)
        found, = compare.controls(plain, plain.flops * 2)
        assert found.name.startswith(f'plain_{number}=')


def test_methods_that_cost_nearly_the_same_share_a_control_with_no_fewer_flops(place, monkeypatch):
    monkeypatch.setattr(compare, 'equal_flops', 'both')
    plain, sft = compare.read_run('plain.py'), compare.read_run('sft.py --epochs=3')
    least, most = ([run.name for run in compare.controls(plain, plain.flops * more)] for more in (1.81, 1.9))
    assert least == most and 'plain_max_iters=76' in most
    assert 'sft_epochs=3_epochs=5.7' in [run.name for run in compare.controls(sft, sft.flops * 1.81)]


def test_a_run_from_other_weights_has_their_shape_and_no_wider_control(run, place):
    run('start', n_layer=2, n_embd=24)
    (place / 'tuned.py').write_text(
        f"init_from = '{place}/start/ckpt.pt'\ndataset = '{place}/text'\nmax_iters = 50\n")
    tuned = compare.read_run('tuned.py')
    assert (tuned.config.n_layer, tuned.config.n_embd, tuned.config.block_size, tuned.steps) == (2, 24, 16, 50)
    assert [control.name for control in compare.controls(tuned, tuned.flops * 2)] == ['tuned_max_iters=100']


def test_what_an_interruption_left_undone_is_made_at_the_next_call(trainings, place):
    trainings.stop_at = 4
    with pytest.raises(KeyboardInterrupt):
        run('--parallel=3')
    assert [child.signals for child in trainings.children if child.signals] == [[signal.SIGINT]] * trainings.alive
    done = config.read_json('cmp/compare.json')['results']
    assert 0 < len(done) < 4
    open(place / 'cmp' / started(trainings)[3].split('/')[-1].removeprefix('--out_dir=') / 'ckpt.pt', 'w').close()
    trainings.stop_at = math.inf
    first = started(trainings)
    saved = run('--parallel=3')
    again = started(trainings)[4:]
    assert len(saved['results']) == 20 and not {*again} & {'--out_dir=cmp/' + name for name in done}
    assert trainings[4 + again.index(first[3])][-1] == '--init_from=resume'
    run('--parallel=3')
    assert len(trainings) == 4 + len(again)


def test_two_at_a_time_are_two(trainings):
    run('--parallel=2', '--seeds=2')
    assert trainings.most == 2 and trainings.alive == 0


def test_a_run_that_fails_is_named_with_its_last_line_and_tried_again(trainings, capsys):
    trainings.fail = {'tb_lr=0.008': 'step 3\nerror: step 4: loss nan: it has diverged\n\n',
                      'plain_lr=0.002_seed=3': ''}
    saved = run('--seeds=2')
    assert saved['results']['tb_lr=0.008_seed=1'] == {'run': 'tb', 'rate': 8e-3, 'seed': 1,
                                                      'failed': 'error: step 4: loss nan: it has diverged'}
    said = capsys.readouterr().out
    assert 'tb_lr=0.008_seed=1 failed: error: step 4: loss nan: it has diverged\n' in said
    assert 'plain_lr=0.002_seed=3 failed: ended with status 1\n' in said
    assert ['tb', 'plain', '1', '0.0200', '-'] in [line.split() for line in said.splitlines()]  # one pair is left
    path = 'cmp/plain_lr=0.002_seed=1'  # one that a signal has stopped ends well, but before its last step
    with open(f'{path}/log.jsonl', 'w') as f:
        f.write('{"iter": 20, "val_loss": 1.0}')
    assert compare.outcome(types.SimpleNamespace(steps=40), 0, path) == {'failed': 'step 40: well done'}
    trainings.fail = {}
    n = len(trainings)
    assert not any('failed' in r for r in run('--seeds=2')['results'].values()) and len(trainings) == n + 2


def test_a_config_all_of_whose_runs_fail_does_not_stop_the_others(trainings, capsys):
    trainings.fail = {'tb_': 'error: no\n'}
    saved = run('--seeds=1')
    assert saved['values']['tb'] == {} and len(saved['values']['plain']) == 1
    assert ['tb', 'plain', '0', '-', '-'] in [line.split() for line in capsys.readouterr().out.splitlines()]


def test_only_the_checkpoint_with_the_optimizer_is_deleted(trainings, place):
    (place / 'cmp').mkdir()
    (place / 'cmp' / 'mine.pt').touch()
    run('--seeds=1')
    assert len([*place.glob('cmp/*/best.pt')]) == 12 and not [*place.glob('cmp/*/ckpt.pt')]
    run('--seeds=1', '--keep=True', out='kept')
    assert len([*place.glob('kept/*/ckpt.pt')]) == 12 and (place / 'cmp' / 'mine.pt').exists()


def test_a_plan_says_the_hours_and_makes_nothing(trainings, capsys, monkeypatch, place):
    monkeypatch.setattr(bench, 'build', BUILD)
    taken = itertools.cycle([1.0, 1.0, 9.0, 9.0, 9.0, 1e3])  # of the two in turn: medians of 9
    monkeypatch.setattr(bench, 'seconds', lambda step: step() or next(taken))
    run('--plan=True')
    # 10 runs of 40 steps and 3 evaluations of 2 batches, each a third of a step
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ['tb', '40', '9.0000', '10', '1.0500'] in rows
    assert ['20', 'runs,', 'about', '2.10', 'hours'] in [row[:5] for row in rows]
    assert not trainings and not (place / 'cmp').exists()
    monkeypatch.setattr(bench, 'seconds', lambda step: 9.0)
    run('--parallel=2', '--seeds=1')
    capsys.readouterr()
    run('--plan=True', '--parallel=2', '--seeds=2')
    assert '2 runs, about 0.10 hours with 2 at a time' in capsys.readouterr().out.replace('\n', ' ')


@pytest.mark.parametrize('arguments, message', [
    (['--configs='], 'configs is empty: name files'),
    (['--configs=plain.py,nothing.py'], 'nothing.py'),
    (['--configs=plain.py,other.py'], "other' in other.py, '"),
    (['--configs=plain.py,tb.py --eval_rows=16'], 'eval_rows = 16 in tb.py --eval_rows=16, 8 in plain.py'),
    (['--configs=plain.py,tb.py --block_size=8'], 'block_size = 8 in tb.py --block_size=8, 16 in plain.py'),
    (['--configs=plain.py,tb.py --vocab_size=30'], 'vocab_size = 30 in tb.py --vocab_size=30, '),
    (['--configs=tb.py,plain.py'], 'tb.py stands first and is no plain GPT'),
    (['--configs=plain.py,tb.py,tb.py'], 'two runs would have the same name'),
    (['--configs=sft.py,cot.py'], 'the loss of cot.py counts written steps'),
    (['--rates=4'], 'rates = 4: give an odd number'), (['--seeds=0'], 'seeds = 0: must be at least 1'),
    (['--factor=1'], 'factor = 1.0'), (['--equal_flops=time'], 'choose both, steps, width, none'),
    (['--extra=--n_embed=3'], 'did you mean n_embd'), (['--configs=plain.py --n_embd=7'], 'n_embd = 7')])
def test_what_cannot_be_compared_is_refused_in_one_line(trainings, arguments, message):
    with pytest.raises(UserError) as refused:
        run(*arguments)
    assert message in str(refused.value) and not trainings


def test_results_of_other_settings_are_not_taken_for_these(trainings):
    run('--seeds=1')
    with pytest.raises(UserError, match='compare.json has plain with n_layer = 3, now it is 2: choose another'):
        run('--seeds=1', '--extra=--n_layer=2', '--configs=plain.py')


def test_a_child_prints_into_its_file_and_hears_a_signal_of_ours_alone(tmp_path):
    program = 'import os; print(os.getpgid(0) == os.getpid(), flush=True); input()'
    child = compare.start([sys.executable, '-c', program], tmp_path / 'output.txt')
    assert child.wait() == 1  # there is nothing to read
    said = (tmp_path / 'output.txt').read_text()
    assert said.startswith('True\n') and 'EOFError' in said


# --- the page of claims ---

@pytest.mark.parametrize('differences, direction, near, word', [
    ([-0.2, -0.3, -0.25], 'below', 0.0, 'holds'), ([-0.2, -0.3, -0.25], 'above', 0.0, 'does not'),
    ([0.2, 0.3, 0.25], 'above', 0.0, 'holds'), ([0.2, -0.3, 0.25], 'above', 0.0, 'too small to tell'),
    ([0.2], 'above', 0.0, 'too small to tell'), ([0.2, 0.3], 'above', 0.0, 'too small to tell'),
    ([0.01, -0.01, 0.0], 'near', 0.1, 'holds'), ([0.5, 0.51, 0.49], 'near', 0.1, 'does not'),
    ([-0.5, -0.51, -0.49], 'near', 0.1, 'does not'), ([0.1, 0.12, 0.08], 'near', 0.1, 'too small to tell')])
def test_a_verdict_is_computed_by_one_rule(differences, direction, near, word):
    assert claims.verdict(differences, direction, near)[0] == word


def test_an_interval_is_students():
    """Three seeds 0, 1, 2 have the mean 1 and the error 1/sqrt(3): 4.30 errors reach from -1.48 to 3.48."""
    for shift, word in [(1.47, 'too small to tell'), (1.49, 'holds')]:
        assert claims.verdict([shift, shift + 1, shift + 2], 'above')[0] == word
    many = [float(i % 2) for i in range(200)]
    assert claims.verdict([x - 0.4 for x in many], 'above')[0] == 'holds'  # 0.1 is 2.8 errors
    for degrees, quantile in enumerate(claims.STUDENT, 1):
        x = torch.linspace(0, quantile, 10_001, dtype=torch.float64)
        density = (1 + x ** 2 / degrees) ** (-(degrees + 1) / 2)
        density *= math.gamma((degrees + 1) / 2) / math.gamma(degrees / 2) / math.sqrt(degrees * math.pi)
        assert 0.5 + torch.trapezoid(density, x).item() == pytest.approx(0.975, abs=3e-4)


def test_a_claim_is_judged_by_the_seeds_that_both_have(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, 'FOLDER', str(tmp_path))
    values = {'a': {'1': 1.0, '2': 1.1, '3': 0.9, '4': 50.0}, 'b': {'3': 2.0, '2': 2.2, '1': 2.1}, 'c': {'9': 1.0},
              'a + 0.105': {'1': 1.104, '2': 1.206, '3': 1.005}}
    (tmp_path / 'x.json').write_text(json.dumps({'from': 'y', 'values': values}))

    def judge(file, first, direction, second):
        return claims.judge(claims.Claim('', '', '', file, first, direction, second))

    assert judge('x', 'a', 'below', 'b') == ('1.0000 ± 0.0577 against 2.1000 ± 0.0577, 3 seeds', 'holds',
                                             'difference -1.1000 ± 0.0000')
    assert judge('x', 'b', 'above', '')[:2] == ('2.1000 ± 0.0577, 3 seeds', 'holds')
    assert judge('x', 'c', 'above', '') == ('1.0000, 1 seed', 'too small to tell', 'difference 1.0000, one seed')
    assert judge('x', 'a', 'below', 'd') == ('', 'not measured', 'x.json: no d')
    assert judge('x', 'a', 'below', 'c') == ('', 'not measured', 'x.json: no seed of both')
    assert judge('z', 'a', 'below', 'b') == ('', 'not measured', 'no results/z.json')
    # near is a tenth of the second number, of 1.000 and of 1.105
    assert judge('x', 'a + 0.105', 'near', 'a')[1] == 'does not'
    assert judge('x', 'a', 'near', 'a + 0.105')[1] == 'holds'


def test_the_page_is_what_the_command_writes():
    with open(claims.PAGE, encoding='utf-8') as f:
        assert f.read() == claims.page()


def test_what_config_compare_writes_is_read(trainings, monkeypatch, place):
    run('--seeds=2')
    run('--seeds=3')
    commands = run('--seeds=3')['from'].split('; ')  # all that its values are from, each once
    assert [command.split()[-1] for command in commands] == ['--seeds=2', '--seeds=3']
    monkeypatch.setattr(claims, 'FOLDER', 'cmp')
    claim = claims.Claim('', '', '', 'compare', 'tb', 'above', 'plain')
    assert claims.judge(claim) == ('2.0600 ± 0.0115 against 2.0300 ± 0.0058, 3 seeds', 'holds',
                                   'difference 0.0300 ± 0.0058')


def test_the_configs_that_a_claim_names_are_there_and_numbers_have_a_name():
    rows = [claims.Claim(*row) for rows in claims.CLAIMS.values() for row in rows]
    for claim in rows:
        names = re.findall(r'config/(\w+)\.py', claim.command) + re.findall(r'\bout/(\w+)', claim.command)
        assert (names or not claim.command) and claim.direction in ('below', 'above', 'near'), claim
        made = re.findall(r'train\.py [^&]*--out_dir=out/(\w+)', claim.command)
        for name in {*names} - {*made}:
            assert os.path.exists(os.path.join(ROOT, 'config', name + '.py')), claim
        if 'config.compare' in claim.command:  # they are the names that it gives to these runs
            texts = re.findall(r'config/(\w+)\.py( --[^"]+)?', claim.command)
            assert {claim.first, claim.second} <= {name + more.replace(' --', '_') for name, more in texts}, claim
    known = {claim.file + '.json' for claim in rows}
    assert {*os.listdir(claims.FOLDER)} <= known  # a file that no claim reads would be an unread result
