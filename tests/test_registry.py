"""Every method of the registry through all that a run is, with every setting of its config at a second value.

Nothing here names a method: a new one, or a new setting, is taken up by itself. registry_long.py has more cases.
"""
import json
import math
import re
from fnmatch import fnmatch

import pytest
import torch.nn as nn

import eval as evaluation
import sample
import train
from config import UserError, class_settings
from config.checkpoint import load_checkpoint
from conftest import ROWS, arguments, interrupted, read_log, train_on, without_reports, write_records, write_text
from data.text import TextBatches

TEXT = ''.join(f'{a}+{b}={a + b}\n' for a in range(30) for b in range(12))
VOCABULARY = 18  # of the records; as a second value it pads that of the text
SETTINGS = {method: class_settings(config_class) for method, (config_class, *_) in train.METHODS.items()}
# where they differ from the defaults, so that a run takes a moment
TINY = dict(n_layer=2, n_head=2, n_embd=16, block_size=28, fork_layers=(0, 1), n_blocks=2, stage2_iters=2)
# second values of settings for which the next number does not do, and those that a comment does not list
SECOND = dict(vocab_size=[VOCABULARY], n_head=[4], n_embd=[24], fork_layers=[(1,)], kappa=[1.5],
              omega=[(0.25, 0.75)], rope_frequencies=[(1.0, 0.5, 0.2, 0.1)], local_layers=[(1,)],
              window=[3], head_dim=[6], n_hidden=[20], epochs=[0.3], stage2_epochs=[0.4], max_steps=[2],
              attenuate_attention=[False])
# what a setting needs beside it to make a difference
NEEDS = {**dict.fromkeys('anneal stage2_learning_rate stage2_dropout stage2_epochs'.split(), {'train_on': 'rim'}),
         'stage2_iters': {'train_on': 'rim', 'stage2_epochs': 0.0}, 'd_init': {'objective': 'cyb'},
         'rope_base': {'learned_positions': False, 'rope_frequencies': ()}, 'local_layers': {'window': 3},
         'window': {'local_layers': (1,)}, 'local_rope_base': {'local_layers': (1,), 'window': 3}}
# weights that do not start as GPT-2's: pattern of the name, (mean, std) from the config and the weight's shape
SCALES = {
    # P(don't know) = d_init, where the logsumexp of the others is log V
    'dont_know.bias': lambda c, shape: (math.log(c.vocab_size * c.d_init / (1 - c.d_init)), 0),
    'pauses': lambda c, shape: (0, 0.02),  # embeddings, though no nn.Embedding
    'special_*': lambda c, shape: (0, 0.02),
    'forks.*.embedding': lambda c, shape: (0, c.n_embd ** -0.5),  # the paper's N(0, 1/C)
    '*.lora_a': lambda c, shape: (0, shape[1] ** -0.5),  # keeps the level of its input
    '*.lora_b': lambda c, shape: (0, 0),  # the adapter begins as nothing
}


def changes(method):
    """Each second value of a method's settings by itself, with what it needs: those in SECOND, those in a
    comment 'a | b | c', or the next number."""
    for name, setting in SETTINGS[method].items():
        now, kinds, values = TINY.get(name, setting.default), setting.types, list(SECOND.get(name, []))
        if kinds == (bool,):
            values.append(not now)
        elif str in kinds and '|' in setting.comment:
            words = (re.match(r'(?:[^(]*: )?([a-z]\w*)', part.strip()) for part in setting.comment.split('|'))
            values += [word[1] for word in words if word and word[1] != now]
        elif not values and kinds in ((int,), (float,)):
            values.append(now + 1 if kinds == (int,) else now / 2 or 0.5)
        assert values, f'the setting {name} has no second value: add one to SECOND in tests/test_registry.py'
        yield from ({name: value, **NEEDS.get(name, {})} for value in values)


def tiny(method, case):
    return {**{name: value for name, value in TINY.items() if name in SETTINGS[method]}, **case}


def fit(method, a, b):
    """Whether two cases go together."""
    try:
        train.METHODS[method][0](**tiny(method, {**a, **b}))
    except UserError:
        return False
    return all(a.get(name, value) == value for name, value in b.items())


def packed(method):
    """The defaults, and few cases that hold every change."""
    cases = [{}]
    for change in changes(method):
        case = next((case for case in cases[1:] if fit(method, case, change)), None)
        if case is None:
            cases.append(case := {})
        case.update(change)
    return cases


def train_on_two_processes(folder, cases):
    """Makes data sets and, for each case (method, settings), a run of two steps a stage in folder/two<its number>,
    all by one pair of processes; jobs.json keeps the command lines."""
    write_text(folder / 'text', TEXT)
    write_records(folder / 'records')
    jobs = []
    for i, (method, case) in enumerate(cases):
        kind = 'text' if issubclass(train.METHODS[method][2], TextBatches) else 'records'
        run = dict(method=method, dataset=folder / kind, out_dir=folder / f'two{i}', threads=1, batch_size=2,
                   grad_accum=2, max_iters=2, warmup_iters=0, eval_interval=9, eval_rows=4)
        jobs.append((arguments(**{**run, **tiny(method, case)}), {}))
    (folder / 'jobs.json').write_text(json.dumps(jobs), 'utf-8')
    train_on(2, folder, jobs)


def check(folder, i):
    """Case number i on one process, stopped by a signal in its first step and resumed, equals that on two; what it
    leaves is evaluated and sampled. Returns its losses."""
    command, out = json.loads((folder / 'jobs.json').read_text('utf-8'))[i][0], folder / f'one{i}'
    two = load_checkpoint(str(folder / f'two{i}' / 'ckpt.pt'))
    config_class, model_class, _ = train.METHODS[two['method']]
    with without_reports():
        with interrupted(0):
            train.main([*command, f'--out_dir={out}'])
        assert read_log(out)[-1]['iter'] == 1
        train.main([*command, f'--out_dir={out}', '--init_from=resume'])

    one = load_checkpoint(str(out / 'ckpt.pt'))
    assert one['step'] == two['step'] == one['total_iters']
    for name, weight in one['model'].items():
        assert (weight - two['model'][name]).abs().max() < 1e-6, name
    losses, others = ([entry.get('train_loss', entry.get('val_loss')) for entry in read_log(run)]
                      for run in (out, folder / f'two{i}'))
    assert losses == pytest.approx(others, abs=1e-6)
    model = model_class(config_class(**one['model_config']))
    params = [p for group in model.param_groups(0.1) for p in group['params']]  # in the optimizer's order
    used = [id(p) for n, p in enumerate(params) if n in one['optimizer']['state']]
    unused = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in used]
    assert not unused, f'no gradient reaches {", ".join(unused)}'

    evaluation.main([f'--out_dir={out}', '--device=cpu', '--eval_rows=2', '--slow_rows=1'])
    json.loads((out / 'eval.json').read_text('utf-8'), parse_constant=lambda it: pytest.fail(f'{it} in eval.json'))
    prompt = ROWS[0]['question'] if one['meta']['kind'] == 'records' else TEXT[:24]  # the text then slides on
    sample.main([f'--out_dir={out}', '--device=cpu', f'--prompt={prompt}', '--max_new_tokens=8'])
    return losses


@pytest.mark.parametrize('method', train.METHODS)
def test_weights_start_as_gpt2s(method):
    """Means and standard deviations within five standard errors."""
    for case in packed(method):
        settings = {'vocab_size': VOCABULARY, 'n_embd': 64, 'head_dim': 8, 'bias': True, **case}
        model = train.METHODS[method][1](train.METHODS[method][0](**tiny(method, settings)))
        for name, p in model.named_parameters():
            module, std = model.get_submodule(name.rpartition('.')[0]), 0.02 if name.endswith('weight') else 0
            scale = None
            if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
                scale = float(name.endswith('weight')), 0
            elif isinstance(module, (nn.Linear, nn.Embedding)):
                scale = 0, std / math.sqrt(2 * model.config.n_layer) if 'c_proj' in name else std
            scale = next((at(model.config, p.shape) for like, at in SCALES.items() if fnmatch(name, like)), scale)
            assert scale, f'{name} is neither in a Linear nor an Embedding nor a norm: add its scale to SCALES'
            (mean, std), n = scale, p.numel()
            assert p.mean().item() == pytest.approx(mean, abs=5 * std / math.sqrt(n), rel=1e-6), (name, case)
            found = p.std(correction=0).item()
            assert found == pytest.approx(std, abs=1e-7, rel=5 / math.sqrt(2 * n)), (name, case)


def test_every_method_trains_resumes_evaluates_and_samples_with_every_setting(tmp_path):
    cases = [(method, case) for method in train.METHODS for case in packed(method)]
    train_on_two_processes(tmp_path, cases)
    for i, case in enumerate(cases):
        print('case', case)
        check(tmp_path, i)
