"""The loop: exact batches, exact resume, whole checkpoints, and one clear line for what is wrong."""
import math
import os
import re
import shlex
import signal
import sys

import pytest
import torch

import config.run
import data
import sample
import train
from config import UserError, machine
from config.checkpoint import load_checkpoint
from conftest import METHOD_SETTINGS, interrupted, read_log, write_text
from data.text import TextBatches
from model import GPT, GPTConfig

def without_speed(log):
    return [{k: v for k, v in entry.items() if k not in ('tokens_per_s', 'save_s')} for entry in log]


def test_a_run_leaves_checkpoints_a_log_and_a_sample(run, tmp_path, capsys):
    checkpoint = run(method='thoughtbubbles', max_iters=5, report=True)
    assert checkpoint['step'] == 5 and checkpoint['method'] == 'thoughtbubbles'
    assert sorted(os.listdir(tmp_path / 'run')) == ['.lock', 'best.pt', 'ckpt.pt', 'log.jsonl']
    log = read_log(tmp_path / 'run')
    assert [(e['iter'], 'val_loss' in e) for e in log] == [
        (0, True), (1, False), (2, False), (2, True), (3, False), (4, False), (4, True), (5, False), (5, True)]
    best = min(e['val_loss'] for e in log if 'val_loss' in e)
    saved = load_checkpoint(str(tmp_path / 'run' / 'best.pt'))
    assert saved['best_val_loss'] == best and math.isfinite(best)
    assert checkpoint['best_val_loss'] == best  # the last checkpoint knows of the last evaluation
    out = capsys.readouterr().out
    assert 'cpu (as set)' in out and 'float32 (' in out and 'a sample at temperature' in out


def test_the_first_loss_is_that_of_a_uniform_guess(run, tmp_path):
    run()
    assert abs(read_log(tmp_path / 'run')[0]['val_loss'] - math.log(18)) < 0.1


@pytest.mark.parametrize('settings', METHOD_SETTINGS, ids=lambda s: s['method'])
def test_accumulation_changes_nothing(run, tmp_path, settings):
    runs = [run(f'run{a}', batch_size=8 // a, grad_accum=a, **settings) for a in (1, 2, 8)]
    logs = [read_log(tmp_path / f'run{a}') for a in (1, 2, 8)]
    for other in (1, 2):
        for one, two in zip(logs[0], logs[other], strict=True):
            key = 'val_loss' if 'val_loss' in one else 'train_loss'
            assert one[key] == pytest.approx(two[key], abs=2e-5)
        for name, weight in runs[0]['model'].items():
            assert (weight - runs[other]['model'][name]).abs().max() < 1e-4


@pytest.mark.parametrize('settings', [
    *METHOD_SETTINGS, dict(method='thoughtbubbles', fork_layers='0,1,2', kappa=1.5, random_forks=True)], ids=str)
def test_resume_equals_an_uninterrupted_run_bit_for_bit(run, tmp_path, capsys, settings):
    settings = dict(dict(dropout=0.2), **settings, max_iters=8, grad_accum=2, eval_interval=3)
    whole = run('whole', **settings)
    with interrupted(5):  # so that the step to resume at is one of the evaluations
        half = run('parts', **settings)
    assert half['step'] == 6 and 'stopped by a signal after step 6' in capsys.readouterr().out
    resumed = run('parts', init_from='resume', **settings)
    assert resumed['step'] == 8
    for name, weight in whole['model'].items():
        assert torch.equal(weight, resumed['model'][name]), name
    for one, two in zip(whole['optimizer']['state'].values(), resumed['optimizer']['state'].values(), strict=True):
        assert all(torch.equal(one[key], two[key]) for key in one)
    assert without_speed(read_log(tmp_path / 'whole')) == without_speed(read_log(tmp_path / 'parts'))
    assert whole['best_val_loss'] == resumed['best_val_loss']


def test_auto_resumes_if_there_is_something_to_resume(run, capsys):
    with interrupted(2):
        assert run(init_from='auto')['step'] == 3
    assert 'resuming' not in capsys.readouterr().out
    assert run(init_from='auto')['step'] == 4
    assert 'resuming' in capsys.readouterr().out


def test_a_run_keeps_the_weights_of_chosen_steps_also_where_it_was_stopped(run, tmp_path, capsys):
    whole = run('whole', snapshots='0,3,4')
    with interrupted(2):  # the loop ends after the step that leads to a snapshot
        stopped = run('parts', snapshots='0,3,4')
    assert stopped['step'] == 3 and not os.path.exists(tmp_path / 'parts' / 'step_3.pt')
    run('parts', init_from='resume')
    for folder in ('whole', 'parts'):
        kept = {step: load_checkpoint(str(tmp_path / folder / f'step_{step}.pt')) for step in (0, 3, 4)}
        assert all(saved['step'] == step and 'optimizer' not in saved for step, saved in kept.items())
        for name in whole['model']:
            assert torch.equal(kept[3]['model'][name], stopped['model'][name])
            assert torch.equal(kept[4]['model'][name], whole['model'][name])
        assert not torch.equal(kept[0]['model']['wte.weight'], kept[3]['model']['wte.weight'])
    capsys.readouterr()
    run('parts', init_from='resume', max_iters=5, snapshots='2,3,5')  # what is kept may change on the way
    assert 'snapshots: too late for [2], the run is at step 4\n' in capsys.readouterr().out
    assert not os.path.exists(tmp_path / 'parts' / 'step_2.pt')
    assert {'step_0.pt', 'step_3.pt', 'step_4.pt', 'step_5.pt'} < {*os.listdir(tmp_path / 'parts')}
    run('parts', overwrite=True)
    assert not os.path.exists(tmp_path / 'parts' / 'step_3.pt')


def test_an_earlier_run_is_not_overwritten_by_accident(run):
    run(seed=1)
    with pytest.raises(UserError, match='holds a run already.*--init_from=resume.*--overwrite'):
        run(seed=2)
    assert run(seed=2, overwrite=True)['settings']['seed'] == 2


def test_a_run_can_start_from_another_checkpoint(run, tmp_path, capsys):
    first = run('first')
    start = str(tmp_path / 'first' / 'ckpt.pt')
    second = run('second', init_from=start, method='thoughtbubbles', fork_layers='1', max_iters=0)
    out = capsys.readouterr().out
    assert 'a gpt model; new: forks.1.embedding, forks.1.ln.weight, forks.1.score.weight' in out
    assert all(torch.equal(weight, second['model'][name]) for name, weight in first['model'].items())


def test_the_shape_of_the_weights_comes_with_the_start(run, tmp_path, dataset, capsys):
    run('first', n_layer=2, n_embd=32, method='thoughtbubbles', fork_layers='1', kappa=3)
    start = str(tmp_path / 'first' / 'ckpt.pt')
    train.main([f'--dataset={dataset}', f'--init_from={start}', f'--out_dir={tmp_path / "second"}',
                '--method=thoughtbubbles',
                '--max_iters=0', '--device=cpu', '--dropout=0.1'])
    config = load_checkpoint(str(tmp_path / 'second' / 'ckpt.pt'))['model_config']
    assert (config['n_layer'], config['n_embd'], config['fork_layers'], config['block_size']) == (2, 32, (1,), 16)
    assert (config['kappa'], config['dropout']) == (2.0, 0.1)  # what the run does with them is its own
    out = capsys.readouterr().out
    assert 'settings that come with the start: ' in out
    assert 'other than there: dropout = 0.1 (was 0.0), kappa = 2.0 (was 3.0)' in out


def test_learning_rate_warms_up_and_follows_a_cosine(run, tmp_path):
    run(max_iters=12, warmup_iters=4, learning_rate=0.01, min_lr=0.002)
    rates = [e['lr'] for e in read_log(tmp_path / 'run') if 'lr' in e]
    assert rates[:5] == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01])
    assert rates[8] == pytest.approx(0.006)  # half way down
    assert rates[11] == pytest.approx(0.002 + 0.004 * (1 + math.cos(math.pi * 7 / 8)))
    run('constant', max_iters=10, warmup_share=0.3, warmup_iters=9, learning_rate=0.03, schedule='constant')
    rates = [e['lr'] for e in read_log(tmp_path / 'constant') if 'lr' in e]
    assert rates == pytest.approx([0.01, 0.02] + 8 * [0.03])


def test_a_step_is_adamw_with_clipped_gradients(run, tmp_path, dataset):
    """Two steps by hand, with the settings as given, against two steps of the loop."""
    settings = dict(learning_rate=0.01, min_lr=0.01, warmup_iters=2, weight_decay=0.5, beta1=0.8, beta2=0.9,
                    grad_clip=0.05)
    trained = run(max_iters=2, **settings)['model']
    torch.manual_seed(1337)
    config = GPTConfig(**load_checkpoint(str(tmp_path / 'run' / 'ckpt.pt'))['model_config'])
    model, state = GPT(config), {}
    source = TextBatches(dataset, data.read_meta(dataset), config, 1337, 8, 4)
    for t, lr in ((1, 0.005), (2, 0.01)):  # warming up
        gradients = torch.autograd.grad(model(*source.train_batch(None, t - 1, [0, 1, 2, 3]))[1],
                                        list(model.parameters()))
        norm = torch.cat([g.flatten() for g in gradients]).norm()
        assert norm > 0.05
        for p, g in zip(model.parameters(), gradients):
            g = g * 0.05 / norm
            m, v = state.get(p, (0, 0))
            m, v = state[p] = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
            p.data *= 1 - lr * (0.5 if p.dim() >= 2 else 0)
            p.data -= lr * (m / (1 - 0.8 ** t)) / ((v / (1 - 0.9 ** t)).sqrt() + 1e-8)
    for name, p in model.named_parameters():
        assert (trained[name] - p).abs().max() < 1e-5, name


def test_dropout_differs_from_step_to_step(run, monkeypatch):
    seeds, seed = [], torch.manual_seed
    monkeypatch.setattr(torch, 'manual_seed', lambda s: (seeds.append(s), seed(s))[1])
    run(max_iters=4, grad_accum=2, seed=2 ** 62 + 1, eval_interval=100)
    drawn = [s for s in seeds if s > 1000 and s != 2 ** 62 + 1]
    assert len(drawn) == len(set(drawn)) == 8 and all(0 <= s < 2 ** 63 for s in drawn)


def test_a_broken_log_line_and_a_lost_checkpoint(run, tmp_path):
    run(max_iters=3)  # ends with an evaluation at step 3, which eval_interval = 2 would not make
    with open(tmp_path / 'run' / 'log.jsonl', 'ab') as f:
        f.write(b'\0\0\xff\0\n' + b'[' * 100_000 + b'\n{"iter"')
    run(max_iters=5, init_from='resume')
    log = [(e['iter'], 'val_loss' in e) for e in read_log(tmp_path / 'run')]
    assert log == [(0, True), (1, False), (2, False), (2, True), (3, False), (3, True), (4, False), (4, True),
                   (5, False), (5, True)]
    os.remove(tmp_path / 'run' / 'ckpt.pt')
    with pytest.raises(UserError, match='holds a run already'):
        run()


def test_divergence_stops_before_a_checkpoint(run, tmp_path, monkeypatch):
    forward, calls = train.GPT.forward, []

    def explode_in_the_third_step(self, idx, targets=None, pad=None):
        _, loss = forward(self, idx, targets, pad)
        calls.extend([1] * self.training)
        return None, loss * math.inf if self.training and len(calls) == 3 else loss
    monkeypatch.setattr(train.GPT, 'forward', explode_in_the_third_step)
    with pytest.raises(UserError, match='step 2: loss inf.*diverged'):
        run(eval_interval=1)
    saved = load_checkpoint(str(tmp_path / 'run' / 'ckpt.pt'))
    assert saved['step'] == 2 and all(weight.isfinite().all() for weight in saved['model'].values())


def test_in_a_pipe_there_is_a_line_every_log_interval_steps(run, capsys):
    run(max_iters=6, log_interval=2, eval_interval=100)
    assert re.findall(r'step (\d): loss', capsys.readouterr().out) == ['2', '4', '6']


def test_a_finished_run_says_so_and_how_to_go_on(run, tmp_path, capsys):
    run()
    before = {f: os.path.getmtime(tmp_path / 'run' / f) for f in os.listdir(tmp_path / 'run') if f != '.lock'}
    capsys.readouterr()
    run(init_from='resume')
    out = capsys.readouterr().out
    assert 'this run has finished its 4 steps; --max_iters=... with a larger number' in out
    assert 'val loss' not in out
    assert all(os.path.getmtime(tmp_path / 'run' / f) == t for f, t in before.items())


def test_showing_the_batch_trains_nothing_and_writes_nothing(run, tmp_path, capsys):
    with pytest.raises(UserError, match='ckpt.pt is not there'):
        run(show_batch=True)
    out = capsys.readouterr().out
    assert 'position' in out and 'val loss' not in out and not (tmp_path / 'run').exists()


def test_the_best_model_is_saved_without_its_optimizer(run, tmp_path):
    run()
    best = load_checkpoint(str(tmp_path / 'run' / 'best.pt'))
    assert 'optimizer' not in best and train.build_model(best)
    with pytest.raises(UserError, match='lacks the optimizer'):
        os.replace(tmp_path / 'run' / 'best.pt', tmp_path / 'run' / 'ckpt.pt')
        run(init_from='resume', max_iters=6)


def test_the_seconds_of_a_save_are_logged_and_slow_ones_are_warned_of(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(config.run, 'SLOW_SAVE', 0)
    run(max_iters=1)
    assert all(e['save_s'] > 0 for e in read_log(tmp_path / 'run') if 'val_loss' in e)
    assert 'torchrun kills a run 30 s after a signal' in capsys.readouterr().out


def test_a_signal_drops_the_evaluation_that_has_begun(run, tmp_path, monkeypatch, capsys):
    draw, drawn = TextBatches.val_batch, []

    def val_batch(self, stage, rows):
        drawn.append(rows)
        if len(drawn) == 3:  # the first batch of the second evaluation
            os.kill(os.getpid(), signal.SIGTERM)
        return draw(self, stage, rows)
    monkeypatch.setattr(TextBatches, 'val_batch', val_batch)
    assert run()['step'] == 2 and len(drawn) == 3
    assert 'stopped by a signal after step 2' in capsys.readouterr().out
    assert [e['iter'] for e in read_log(tmp_path / 'run') if 'val_loss' in e] == [0]
    run(init_from='resume')
    assert [e['iter'] for e in read_log(tmp_path / 'run') if 'val_loss' in e] == [0, 2, 4]


@pytest.mark.parametrize('method, settings', [
    ('gpt', {}),
    *(('thoughtbubbles', dict(fork_layers=(1,), merge=merge)) for merge in ('probs', 'residual', 'rightmost')),
    ('cyb', {}), ('cyb', dict(objective='tbys')), ('rim', {}), ('rim', dict(train_on='sft')),
    ('coconut', {})], ids=str)
def test_a_batch_without_targets_teaches_nothing(method, settings):
    config_class, model_class, batch_class = train.METHODS[method]
    small = dict(vocab_size=11, block_size=8, n_layer=2, n_head=2, n_embd=16)
    model = model_class(config_class(**small, **settings))
    idx, none = torch.randint(7, (2, 8)), torch.full((2, 8), -1)
    nowhere = torch.zeros(0, dtype=torch.long)  # of rows of records, which say where something is learned
    loss = model(idx, none)[1] if batch_class is TextBatches else model(idx, nowhere, nowhere.float(), nowhere)[1]
    loss.backward()
    assert loss.item() == 0 and all(p.grad is None or (p.grad == 0).all() for p in model.parameters())


# --- sample.py ---

@pytest.mark.parametrize('settings', METHOD_SETTINGS, ids=lambda s: s['method'])
@pytest.mark.parametrize('piece, start', [('ab', 'a'), ('a\ufffd', 'a'), ('b\na\n', '\n')], ids=ascii)
def test_a_text_begins_with_a_character_that_is_there(run, tmp_path, capsys, settings, piece, start):
    folder = write_text(tmp_path / 'own', piece * 400)
    run('a run', dataset=folder, vocab_size=128, report=True, **settings)  # most ids are not text
    out = capsys.readouterr().out
    assert len(out.split('a sample at temperature 0.8:\n')[1].split('\n' + str(tmp_path))[0]) == 200
    script, *arguments = shlex.split(re.search('python (.*) samples from it', out)[1])
    assert os.path.samefile(script, sample.__file__) and arguments == [f'--out_dir={tmp_path}/a run']
    for seed in (1, 2, 3):
        text = text_of(capsys, *arguments, '--max_new_tokens=20', f'--seed={seed}')
        assert text[0] == start and len(text) == 1 + 20 + 1


def test_a_sample_never_fails_a_finished_run(run, monkeypatch, capsys):
    def fails(self, batches):
        raise RuntimeError('out of memory\nat this place')
    monkeypatch.setattr(GPT, 'report', fails)
    assert run(report=True)['step'] == 4
    out = capsys.readouterr().out
    assert 'no report on the model could be made (RuntimeError: out of memory)\n' in out and 'ckpt.pt is the last model' in out


@pytest.fixture
def trained(run, tmp_path, dataset, capsys):
    """A Thoughtbubbles checkpoint whose data set is gone: sampling needs the checkpoint alone."""
    run(method='thoughtbubbles')
    for name in os.listdir(dataset):
        os.remove(os.path.join(dataset, name))
    capsys.readouterr()
    return str(tmp_path / 'run' / 'ckpt.pt')


def text_of(capsys, *argv):
    sample.main(list(argv))
    return capsys.readouterr().out


def test_sampling(trained, capsys, tmp_path):
    arguments = [f'--checkpoint={trained}', '--prompt=12 plus', '--max_new_tokens=30']
    first = text_of(capsys, *arguments)
    assert first.startswith('12 plus') and len(first) == 7 + 30 + 1
    assert first == text_of(capsys, *arguments) != text_of(capsys, *arguments, '--seed=5')
    (tmp_path / 'prompt.txt').write_text('3 is', encoding='utf-8-sig')
    assert text_of(capsys, *arguments, f'--prompt_file={tmp_path / "prompt.txt"}').startswith('3 is')
    tokenizer = data.Tokenizer(load_checkpoint(trained)['meta']['tokenizer'])
    stop = first[12]
    assert text_of(capsys, *arguments, f'--stop={stop}') == first[:7 + first[7:].index(stop) + 1] + '\n'
    assert stop in tokenizer.text.ids
    several = text_of(capsys, *arguments, '--num_samples=3')
    assert several.count('12 plus') == 3 and '--- 3 of 3 ---' in several
    greedy = text_of(capsys, *arguments, '--temperature=0', '--num_samples=2')
    one, two = greedy.split('--- 2 of 2 ---\n')
    assert one == '--- 1 of 2 ---\n' + two


def test_sampling_shows_streams_as_numbers_or_colours(trained, capsys, monkeypatch):
    arguments = [f'--checkpoint={trained}', '--prompt=1 plus', '--max_new_tokens=8', '--show']
    numbers = text_of(capsys, *arguments)
    counts = [int(n) for n in re.findall(r"':(\d+)", numbers)]
    assert len(counts) == 6 + 8 and sum(counts) == 2 * 14  # kappa = 2
    assert 'streams per token: ' in numbers and 'mean streams per token: 2.00' in numbers and '\033' not in numbers
    # streaming: what the prompt's last and the new tokens held while generating; the last one was never read
    counts = re.findall(r"':(\d+|-)", text_of(capsys, *arguments, '--streaming'))
    assert counts[:5] == ['-'] * 5 and counts[-1] == '-' and all(1 <= int(n) <= 4 for n in counts[5:-1])
    monkeypatch.setattr(sys.stdout, 'isatty', lambda: True, raising=False)
    coloured = text_of(capsys, *arguments)
    assert 'mean 2.00' in coloured


def test_colours_tell_effort_apart_and_line_breaks_have_one():
    tokenizer = data.Tokenizer({'kind': 'char', 'chars': ['\n', 'a', 'b']})
    text = sample.coloured(tokenizer, [1, 2, 1, 0], [1, 2, 99, 3], 'streams', True)
    backs = re.findall(r'48;5;(\d+)m', text.split('streams per token')[0])
    assert len(backs) == len(set(backs)) == 4 and '\u21b5' in text and text.count('\n') == 2


# --- memory ---

@pytest.mark.parametrize('dropout', [0.0, 0.2])
@pytest.mark.parametrize('method, settings', [
    ('gpt', {}), ('thoughtbubbles', dict(fork_layers=(1,))), ('cyb', dict(W=2, see_pauses=False)), ('rim', {}),
    ('rim', dict(lora_rank=2)), ('coconut', dict(n_blocks=2))])
def test_checkpointed_blocks_give_the_same_gradients_bit_for_bit(method, settings, dropout):
    config_class, model_class, _ = train.METHODS[method]
    model = model_class(config_class(vocab_size=20, n_layer=3, n_head=2, n_embd=16, block_size=16, dropout=dropout,
                                     **settings))
    idx = torch.randint(15, (2, 17))
    batch = idx[:, :-1], idx[:, 1:]
    if method in ('rim', 'coconut'):
        idx[:, 3:5] = model.special.mem  # coconut: thoughts
        at = torch.arange(6, 16)
        batch = idx[:, :-1], idx[0, at + 1], torch.rand(10), at
    found = []
    for _ in range(2):
        model.zero_grad()
        torch.manual_seed(1)
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
            loss = model(*batch)[1]
        loss.backward()
        found.append((loss, sum(kept), [p.grad for p in model.parameters() if p.requires_grad]))
        machine.checkpoint_blocks(model)
    assert torch.equal(found[0][0], found[1][0])
    assert all(torch.equal(a, b) for a, b in zip(found[0][2], found[1][2]) if a is not None)
    assert (found[1][1] < found[0][1] / 2) == (method != 'coconut')  # whose caches are kept


def test_a_run_with_checkpointed_blocks_is_the_same_run(run):
    a, b = (run(name, dropout=0.1, checkpoint_blocks=name == 'kept') for name in ('plain', 'kept'))
    assert all(torch.equal(weight, b['model'][name]) for name, weight in a['model'].items())


def test_a_folder_that_holds_any_model_is_left_alone(run, tmp_path):
    """Such as merged.pt of config.lora: a run removes the models of the one that it replaces."""
    (tmp_path / 'run').mkdir()
    (tmp_path / 'run' / 'merged.pt').write_bytes(b'x')
    with pytest.raises(UserError, match='holds a run already'):
        run()
    assert (tmp_path / 'run' / 'merged.pt').exists()
