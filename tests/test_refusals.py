"""What is refused, and the one line that says so: a catalogue of messages, in which ... stands for anything.

What is typed, a config file, damaged data, a source of records, a checkpoint, a call. {names} are of `place`.
"""
import json
import math
import os
import re
import runpy
import shlex
import shutil
import sys
import types

import pytest
import torch

import config
import data
import train
from config import UserError
from config.checkpoint import load_checkpoint, save_checkpoint
from config.files import write_file
from conftest import CHARACTERS, ROOT, TEXT, arguments, without_reports, write_records, write_text
from cyb import CYB, CYBConfig
from data import records
from model import GPT, GPTConfig
from rim import Coconut, CoconutConfig, RiM, RiMConfig
from thoughtbubbles import Thoughtbubbles, ThoughtbubblesConfig


@pytest.fixture(scope='session')
def place(tmp_path_factory):
    """Data sets {text}, {other}, {records}; runs {gpt}, {tb}, {cyb}, {tbys}, {rim}, {sft}, {coconut}; {weights}: a
    run with no optimizer; {kept}: a snapshot alone; {stale}: a run whose data set {changed} was prepared anew;
    {unasked}: a model of records without an example to ask."""
    root = tmp_path_factory.mktemp('place')
    place = types.SimpleNamespace(text=write_text(root / 'text', TEXT), other=write_text(root / 'other'),
                                  records=write_records(root / 'records'),
                                  changed=write_text(root / 'changed', TEXT))
    small = dict(dataset=place.records, block_size=48, n_blocks=2, max_iters=1)
    runs = dict(gpt={}, tb=dict(method='thoughtbubbles'), cyb=dict(method='cyb'),
                tbys=dict(method='cyb', objective='tbys'), stale=dict(dataset=place.changed),
                rim=dict(small, method='rim', max_iters=3, stage2_iters=3),
                sft=dict(small, method='rim', train_on='sft', learned_positions=True),
                coconut=dict(small, method='coconut'))
    with without_reports():
        for name, settings in runs.items():
            setattr(place, name, str(root / f'run_{name}'))
            train.main(arguments(**{'dataset': place.text, 'out_dir': getattr(place, name), **settings}))
    write_text(place.changed, TEXT[::-1])
    place.weights, place.unasked, place.kept = str(root / 'weights'), str(root / 'unasked.pt'), str(root / 'kept')
    os.mkdir(place.weights)
    os.mkdir(place.kept)
    shutil.copy(place.gpt + '/best.pt', place.kept + '/step_4.pt')
    shutil.copy(place.gpt + '/best.pt', place.weights + '/ckpt.pt')
    rim = load_checkpoint(place.rim + '/ckpt.pt')
    save_checkpoint(place.unasked, {**rim, 'meta': {k: v for k, v in rim['meta'].items() if k != 'example'}})
    return place


@pytest.fixture
def refuses(place, tmp_path, monkeypatch, capsys):
    """refuses(command, message): the script ends with that one line; of training the rest of a tiny run is set."""
    def refuses(command, message):
        script, *typed = shlex.split(command.format(**vars(place), out=tmp_path / 'out', tmp=tmp_path))
        before = []
        if script == 'train.py':
            before = arguments(dataset=place.text, out_dir=tmp_path / 'out')
        elif script in ('sample.py', 'eval.py'):
            before = ['--device=cpu']
        capsys.readouterr()
        monkeypatch.chdir(ROOT)
        monkeypatch.setattr(sys, 'argv', [script, *before, *typed])
        monkeypatch.setattr(sys, 'path', list(sys.path))  # a prepare.py adds to it
        monkeypatch.setitem(sys.modules, 'wandb', None)  # as if it were not installed
        monkeypatch.setattr(records, 'write_record_dataset', lambda *_, **__: pytest.fail('not refused'))
        with pytest.raises(SystemExit) as stopped:
            runpy.run_path(script, run_name='__main__')
        said = capsys.readouterr()
        assert script != 'sample.py' or not said.out  # nothing that looks like a sample
        *others, last = said.err.splitlines()
        assert stopped.value.code == 1 and last.startswith('error: ') and says(last, message), last
        # a line may say which checkpoint was read
        assert all(re.match(r'/\S*\.pt: \w+, step \d+, ', line) for line in others), others
    return refuses


def says(line, message):
    return re.search('.*'.join(map(re.escape, message.split('...'))), line) and '\n' not in line


# --- what is typed ---

COMMANDS = [
    # settings
    ('train.py --learning_rte=1', "command line: there is no setting 'learning_rte'; did you mean learning_rate"),
    ('train.py --zzz=9', "there is no setting 'zzz'; --help lists the settings"),
    ('train.py --METHODS=2', "no setting 'METHODS'"),
    ('train.py --stage=2', "no setting 'stage'"),  # a variable of main
    ('train.py --method=cyb --gama0=1', 'did you mean gamma0'),
    ('train.py --max_iters=many', "max_iters = 'many': expected a whole number, such as 1500 (steps"),
    ('train.py --max_iters=1.5', "max_iters = '1.5': expected a whole number"),
    ('train.py --max_iters=', "max_iters = '': expected a whole number"),
    ('train.py --max_iters', 'max_iters = True: expected a whole number'),
    ('train.py --max_iters 9', "config file '9' is not there or is not a .py file; settings are given as --key=value"),
    ('train.py --method rim', 'did you mean ./rim.py? settings are given as --key=value'),
    ('train.py --max_iters=inf', "max_iters = 'inf': expected a whole number"),
    ('train.py --min_lr=small', "min_lr = 'small': expected a number"),
    ('train.py --min_lr=nan', "min_lr = 'nan': expected a number"),
    ('train.py --min_lr=inf', "min_lr = 'inf': expected a number"),
    ('train.py --overwrite=perhaps', "overwrite = 'perhaps': expected True or False"),
    ('train.py --method=thoughtbubbles --fork_layers=1,x',
     "fork_layers = '1,x': expected numbers separated by commas"),
    ('train.py --method=other', "method = 'other': choose one of gpt, thoughtbubbles, cyb, rim, coconut"),
    ('train.py --omega=last', 'omega is a setting of method cyb, not of gpt; add --method=cyb'),
    ('train.py --method=coconut --train_on=sft',
     'train_on is a setting of method rim, not of coconut; add --method=rim'),
    ('train.py script',
     "config file 'script' is not there or is not a .py file; settings are given as --key=value"),
    ('train.py nowhere/small.py', "config file 'nowhere/small.py' is not there"),
    ('train.py config/gtp_small.py', 'is not there or is not a .py file; did you mean config/gpt_small.py?'),
    *((f'train.py --{name}=0', f'{name} = 0: must be at least 1')
      for name in ('batch_size', 'grad_accum', 'eval_interval', 'eval_rows', 'log_interval')),
    *((f'train.py --{name}=-1', f'{name} = -1... must be at least 0')
      for name in ('max_iters', 'learning_rate', 'min_lr', 'warmup_iters', 'weight_decay', 'grad_clip')),
    ('train.py --beta2=1', 'beta2 = 1.0: must be at least 0 and below 1'),
    ('train.py --warmup_share=1', 'warmup_share = 1.0: must be at least 0 and below 1'),
    ('train.py --schedule=linear', "schedule = 'linear': choose cosine, constant"),
    ('train.py --beta1=-1', 'beta1 = -1.0: must be at least 0 and below 1'),
    (f'train.py --seed={2 ** 63}', f'seed = {2 ** 63}: must be at least 0 and below {2 ** 63}'),
    ('train.py --snapshots=2,99',
     'snapshots = (2, 99): 99 is not a step of this run; give whole numbers from 0 to 4'),
    ('train.py --snapshots=1.5', '1.5 is not a step of this run'),
    ('train.py --snapshots=-1', '-1 is not a step of this run'),
    ('train.py --snapshots=all', "snapshots = 'all': expected numbers separated by commas"),
    ('train.py --min_lr=0.1', 'min_lr = 0.1 is above learning_rate = 0.001: lower it too'),
    ('train.py --wandb_project=x', 'wandb_project needs the wandb package: pip install wandb'),
    # the machine
    ('train.py --device=tpu', "device = 'tpu': choose auto, cpu, cuda, cuda:N or mps"),
    ('train.py --device=cuda:x', "device = 'cuda:x': choose"),
    ('train.py --device=cuda:99', "device = 'cuda:99' is absent: this machine has ... --device=cpu always works"),
    ('train.py --dtype=int8', "dtype = 'int8': choose auto, float32, bfloat16, float16"),
    ('train.py --compile=yes', "compile = 'yes': choose auto, on, off"),
    ('train.py --threads=100000', 'threads = 100000: this machine has ...; 0 lets PyTorch choose'),
    ('train.py --threads=-1', 'threads = -1: this machine has'),
    # the folder and the start
    ('train.py --out_dir=/dev/null/x', "out_dir = '/dev/null/x' cannot be written: Not a directory"),
    ('train.py --out_dir={gpt}',
     'holds a run already: --init_from=resume ... --overwrite ... --out_dir=... leaves it alone'),
    ('train.py --init_from=resume', 'out/ckpt.pt is not there: train one first, or give --out_dir'),
    ('train.py --init_from=resmue',
     "init_from = 'resmue' is not there: choose scratch, resume, auto, the path of a checkpoint or"),
    ('train.py --init_from=out/cot_small/nothing.pt',
     'is not there: make it with python train.py config/cot_small.py'),
    ('train.py --init_from={tb}/ckpt.pt --method=thoughtbubbles --n_head=4',
     'n_head = 4: ... has 2; leave it out to start'),
    ('train.py --init_from={tb}/ckpt.pt --method=thoughtbubbles --rope_base=500',
     'rope_base = 500.0: ... has 10000.0; leave'),
    ('train.py --init_from={tb}/ckpt.pt --method=thoughtbubbles --tie_weights=False',
     'tie_weights = False: ... has True; leave'),
    ('train.py --init_from={tb}/ckpt.pt --method=thoughtbubbles --fork_layers=2',
     'fork_layers = (2,): ... has (1, 2); leave'),
    ('train.py --init_from={cyb}/ckpt.pt --method=cyb --W=4', 'W = 4: ... has 2; leave it out'),
    ('train.py --init_from={gpt}/ckpt.pt --dataset={other}',
     'was prepared anew since, or with another tokenizer than the model has: ...input.txt, the text'),
    ('train.py --init_from={sft}/ckpt.pt --method=rim --dataset={records} --learned_positions --block_size=64'
     ' --lora_rank=2',
     'block_size = 64: the checkpoint to start from has 48 positions, and with lora_rank no further ones are'),
    # going on with a run
    ('train.py --init_from=resume --out_dir={gpt} --method=thoughtbubbles',
     'ckpt.pt is a gpt model, not thoughtbubbles'),
    ('train.py --init_from=resume --out_dir={tb} --W=2', 'W is a setting of method cyb, not of thoughtbubbles'),
    ('train.py --init_from=resume --out_dir={tb} --kappa=3',
     'command line: kappa = 3.0: the run to resume has 2.0, and to change it'),
    ('train.py --init_from=resume --out_dir={cyb} --W=4', 'command line: W = 4: the run to resume has 2'),
    *((f'train.py --init_from=resume --out_dir={{gpt}} --max_iters=6 --{name}={value}',
       f'command line: {name} = {value}: the run to resume has ... start anew with --init_from=CHECKPOINT')
      for name, value in dict(seed=5, learning_rate=0.1, n_layer=4, warmup_iters=9, batch_size=8, eval_rows=4,
                              beta2=0.9).items()),
    ('train.py --init_from=resume --out_dir={weights}',
     'the checkpoint to resume lacks the optimizer or settings: start from its'),
    ('train.py --init_from=resume --out_dir={stale} --dataset={changed}',
     'is not what ... was trained on: it was prepared anew since'),
    ('train.py --init_from=resume --out_dir={rim} --dataset={records} --block_size=48 --max_iters=8',
     'max_iters = 8: the run to resume is in stage2 since step 3, and this would move it to stage1 since step 0'),
    # the model
    ('train.py --n_layer=0', 'n_layer = 0: must be at least 1'),
    ('train.py --n_embd=15',
     'n_embd = 15 is not divisible by n_head = 2 into heads of even width: try n_embd = 12'),
    ('train.py --n_embd=18', 'into heads of even width: try n_embd = 16'),
    ('train.py --n_embd=15 --learned_positions', 'n_embd = 15 is not divisible by n_head = 2: try n_embd = 14'),
    ('train.py --dropout=1', 'dropout = 1.0: must be at least 0 and below 1'),
    ('train.py --rope_base=1', 'rope_base = 1.0: must be above 1'),
    ('train.py --rope_base=nan', "rope_base = 'nan': expected a number"),
    ('train.py --vocab_size=5', 'vocab_size = 5: dataset ... has 18 tokens'),
    ('train.py --lora_rank=-1', 'lora_rank = -1: must be from 0 to n_embd = 16'),
    ('train.py --lora_rank=1000000', 'lora_rank = 1000000: must be from 0 to n_embd = 16'),
    ('train.py --batch_size=1000000000',
     'batch_size = 1000000000 rows of 16 positions: a step needs about ... would fit; checkpoint_blocks and ...'),
    ('train.py --method=thoughtbubbles --fork_layers=1,3',
     'fork_layers = (1, 3): 3 is not a block of n_layer = 3; ... 0 to 2'),
    ('train.py --method=thoughtbubbles --fork_layers=1.5', 'fork_layers = (1.5,): 1.5 is not a block'),
    ('train.py --method=thoughtbubbles --fork_layers=1,1', 'fork_layers = (1, 1): each layer may be named once'),
    ('train.py --method=thoughtbubbles --kappa=0.5', 'kappa = 0.5: must be at least 1'),
    ('train.py --method=thoughtbubbles --kappa=1e308', 'kappa = 1e+308: must be at least 1, ... and at most 1e6'),
    ('train.py --method=thoughtbubbles --merge=mean', "merge = 'mean': choose probs, residual, logits, rightmost"),
    ('train.py --method=thoughtbubbles --copies=0', 'copies = 0: must be at least 1'),
    ('train.py --method=cyb --W=0', 'W = 0: must be at least 1'),
    ('train.py --method=cyb --gamma0=0', 'gamma0 = 0.0: must be in (0, 1]'),
    ('train.py --method=cyb --gamma0=1.1', 'gamma0 = 1.1: must be in (0, 1]'),
    ('train.py --method=cyb --d_init=1', 'd_init = 1.0: must be between 0 and 1'),
    ('train.py --method=cyb --objective=ce', "objective = 'ce': choose cyb, tbys"),
    ('train.py --method=cyb --objective=tbys --gamma0=0.5', 'gamma0 = 0.5: ... no effect with objective = tbys'),
    ('train.py --method=cyb --omega=never',
     "omega = 'never': choose last, uniform, first, geometric or give W = 2 numbers"),
    ('train.py --method=cyb --W=3 --omega=0.5,0.5',
     'omega = (0.5, 0.5) has 2 numbers: give one for each of the W = 3 slots'),
    ('train.py --method=cyb --omega=-0.5,1.5', 'omega = (-0.5, 1.5): each must be a number from 0 to 1'),
    ('train.py --method=cyb --omega=0.5,0.50001',
     'omega = (0.5, 0.50001) sums to 1.00001: probabilities must sum to 1'),
    ('train.py --method=rim --n_blocks=0', 'n_blocks = 0: must be at least 1'),
    ('train.py --method=rim --n_mem=0', 'n_mem = 0: must be at least 1'),
    ('train.py --method=rim --max_steps=0', 'max_steps = 0: must be at least 1'),
    ('train.py --method=rim --epochs=-1', 'epochs = -1.0: must be at least 0'),
    ('train.py --method=rim --train_on=x', "train_on = 'x': choose rim, pause, sft, cot"),
    ('train.py --method=rim --anneal=x', "anneal = 'x': choose relative, uniform, none"),
    ('train.py --method=rim --stage2_iters=-1', 'stage2_iters = -1: must be at least 0'),
    ('train.py --method=rim --stage2_dropout=1', 'stage2_dropout = 1.0: must be at least 0 and below 1'),
    ('train.py --method=coconut --n_blocks=0', 'n_blocks = 0: must be at least 1'),
    # the data
    ('train.py --dataset=no_such_set',
     "dataset = 'no_such_set' is not in data/: there are ... given by its path, such as ./my.txt"),
    ('train.py --dataset={out}/my.txt', 'there is no text and no folder of that name'),
    ('train.py --dataset={records}', 'holds records, but this method trains on plain text'),
    ('train.py --method=rim',
     'holds text, but this method trains on records of question, steps and answer, such as gsm_toy'),
    ('train.py --method=rim --dataset={records} --vocab_size=30',
     'vocab_size = 30: ... it must be that of ..., 18'),
    ('train.py --method=rim --dataset={records} --block_size=8',
     'no train record is left; raise block_size or max_steps'),
    ('train.py --block_size=400',
     'val.bin: 300 tokens are fewer than block_size + 1 = 401: use a smaller block_size or more data'),
    # sample.py
    ('sample.py --out_dir={out}', 'out/ckpt.pt is not there: train one first, or give --out_dir'),
    ('sample.py --checkpoint=nowhere.pt', 'checkpoint nowhere.pt is not there'),
    ('sample.py --out_dir={gpt} --n_layer=3', "there is no setting 'n_layer'"),
    ('sample.py --out_dir={gpt} --prompt=', 'the prompt is empty: give at least one token'),
    ('sample.py --out_dir={gpt} --prompt=é', "the tokenizer has no 'é': its 18 characters are"),
    ('sample.py --out_dir={gpt} --prompt_file=nowhere.txt', 'nowhere.txt is not there or is not UTF-8 text'),
    ('sample.py --out_dir={gpt} --num_samples=0', 'num_samples = 0: must be at least 1'),
    ('sample.py --out_dir={gpt} --max_new_tokens=0', 'max_new_tokens = 0: must be at least 1'),
    ('sample.py --out_dir={tb} --show --max_new_tokens=-1', 'max_new_tokens = -1: must be at least 0'),
    ('sample.py --out_dir={gpt} --over_training', 'has no step_N.pt: train with --snapshots='),
    ('sample.py --out_dir={out} --over_training', 'has no step_N.pt: train with --snapshots='),
    ('sample.py --out_dir={kept} --over_training', 'over_training = True: this model spends the same'),
    ('sample.py --out_dir={kept} --over_training --top_k=3', 'top_k = 3: has no effect with over_training'),
    ('sample.py --out_dir={kept} --over_training --checkpoint=x', "checkpoint = 'x': has no effect with"),
    ('eval.py --out_dir={gpt} --over_training', 'has no step_N.pt: train with --snapshots='),
    ('eval.py --out_dir={kept} --over_training --output=x', "output = 'x': has no effect with over_training"),
    ('sample.py --out_dir={gpt} --temperature=-1',
     'temperature = -1.0: temperature and top_k are 0 or more, top_p is in (0, 1]'),
    ('sample.py --out_dir={gpt} --top_k=-2', 'top_k = -2: '),
    ('sample.py --out_dir={gpt} --top_p=0', 'top_p = 0.0: '),
    ('sample.py --out_dir={gpt} --seed=-1', 'seed = -1: must be at least 0'),
    ('sample.py --out_dir={gpt} --stop=12', "stop = '12' is 2 tokens: give the text of a single token"),
    ('sample.py --out_dir={gpt} --device=cuda:99', "device = 'cuda:99' is absent"),
    ('sample.py --out_dir={gpt} --show',
     'show = True: this model spends the same on every token, there is nothing to show'),
    ('sample.py --out_dir={gpt} --show --html=page.html',
     'show = True: this model spends the same on every token'),
    ('sample.py --out_dir={tb} --html=page.html',
     "html = 'page.html': the page has what --show=True colours, so add that"),
    ('sample.py --out_dir={tb} --show --html={tmp}/no/page.html',
     "no/page.html': its folder is not there, make it first"),
    ('sample.py --out_dir={rim} --show --html=page.html',
     "html = 'page.html': ... is a rim model without that setting"),
    ('sample.py --out_dir={gpt} --threshold=0.2', 'threshold = 0.2: ... is a gpt model without that setting'),
    ('sample.py --out_dir={cyb} --pace=slow', "pace = 'slow': choose model, first, all"),
    ('sample.py --out_dir={cyb} --temperature=0 --threshold=2', 'threshold = 2.0: must be in [0, 1]'),
    ('sample.py --out_dir={cyb} --threshold=0.2',
     'threshold = 0.2: has an effect at temperature = 0 and pace = model alone'),
    ('sample.py --out_dir={tbys} --pace=first', 'pace = first: a TBYS model answers in its last slot alone'),
    ('sample.py --out_dir={rim} --prompt=', 'prompt is empty: ask a question, such as --prompt='),
    ('sample.py --checkpoint={unasked}', 'prompt is empty: ask a question'),
    ('sample.py --out_dir={rim} --prompt=1+2? --top_p=0', 'top_p = 0.0: '),
    ('sample.py --out_dir={rim} --prompt=1+2? --stop=1', "stop = '1': ... is a rim model without that setting"),
    ('sample.py --out_dir={rim} --prompt=1+2? --pace=all',
     "pace = 'all': ... is a rim model without that setting"),
    ('sample.py --out_dir={rim} --prompt=1+2? --n_blocks=-1', 'n_blocks = -1, n_mem = 0: must be at least 1'),
    ('sample.py --out_dir={rim} --prompt=1+2? --n_blocks=12',
     'a question of 5 tokens with 48 memory tokens leaves no room for an answer'),
    ('sample.py --out_dir={sft} --prompt=1+2? --n_blocks=2',
     'n_blocks = 2, n_mem = 0: this model has no memory blocks'),
    ('sample.py --out_dir={coconut} --prompt=1+2? --n_mem=2',
     'n_blocks = 0, n_mem = 2: this model has no memory blocks'),
    # eval.py
    ('eval.py --out_dir={out}', 'out/ckpt.pt is not there'),
    ('eval.py --out_dir={gpt} --eval_rows=0', 'eval_rows = 0: must be at least 1'),
    ('eval.py --out_dir={gpt} --slow_rows=0', 'slow_rows = 0: must be at least 1'),
    ('eval.py --out_dir={gpt} --batch_size=0', 'batch_size = 0: must be at least 1'),
    (f'eval.py --out_dir={{gpt}} --seed={10 ** 20}', f'seed = {10 ** 20}: must be at least 0 and below'),
    ('eval.py --out_dir={gpt} --threads=-1', 'threads = -1: this machine has'),
    ('eval.py --out_dir={gpt} --threads=100000', 'threads = 100000: this machine has'),
    ('eval.py --out_dir={gpt} --n_mem=2', 'ckpt.pt is a gpt model, they are for models of records'),
    ('eval.py --out_dir={gpt} --beside={rim}', 'ckpt.pt is a gpt model, they are for models of records'),
    ('sample.py --init_from={gpt} --checkpoint=x', 'give that, or checkpoint, or out_dir'),
    ('eval.py --out_dir={gpt} --dataset={other}', 'with another tokenizer than the model has'),
    ('eval.py --out_dir={gpt} --test_set=x.json', 'ckpt.pt is a gpt model, they are for models of records'),
    ('eval.py --out_dir={rim} --test_set={out}/no.json', 'no.json is not there or is not UTF-8 text'),
    ('eval.py --out_dir={rim} --beside={gpt}',
     'beside: ...run_gpt was not trained on records with the tokenizer of'),
    ('eval.py --out_dir={rim} --beside={out}/nowhere', 'nowhere is not there'),
    ('eval.py --out_dir={cyb} --kappa=3', 'kappa = 3.0: ...ckpt.pt is a cyb model, which has no budget of streams'),
    ('eval.py --out_dir={tb} --kappa=0.5', 'kappa = 0.5: must be at least 1, since every token keeps its original'),
    ('eval.py --curves={gpt},{out}', 'curves: ...out/log.jsonl is not there: give folders of runs'),
    ('eval.py --curves={gpt},,', 'curves: a name is empty'),
    ('eval.py --curves={gpt} --kappa=3', 'kappa = 3.0: has no effect with curves'),
    ('eval.py --curves={gpt} --out_dir={out}', 'out_dir = ...: has no effect with curves'),
    ('eval.py --curves={gpt},{rim}', 'has losses in nats per record, ...run_gpt in nats per token'),
    ('eval.py --out_dir={rim} --n_mem=-1', 'n_mem = -1: must be at least 1'),
    ('eval.py --out_dir={gpt} --tasks=boolq',
     "tasks = 'boolq': there are lambada, hellaswag, piqa, arc_easy, arc_challenge, blimp and blimp/PARADIGM"),
    ('eval.py --out_dir={gpt} --tasks=piqa,', "tasks = '': there are lambada"),
    ('eval.py --out_dir={gpt} --tasks=blimp/../piqa', "tasks = 'blimp/../piqa': there are lambada"),
    ('eval.py --out_dir={gpt} --tasks=blimp/no_such', 'blimp/no_such.jsonl is missing: run python data/zero'),
    ('eval.py --out_dir={gpt} --tasks=piqa --form=theirs', "form = 'theirs': choose ours, harness"),
    ('eval.py --out_dir={gpt} --form=harness', "form = 'harness': has no effect without tasks"),
    ('eval.py --out_dir={gpt} --tasks=piqa --dataset={text}', 'dataset = ...: has no effect with tasks'),
    # bench.py and the data sets' scripts
    ('bench.py --part=x', "part = 'x': choose all, train, vocabulary, checkpoint, generate, answer"),
    ('bench.py --rounds=0', 'rounds = 0: must be at least 1'),
    ('bench.py --device=tpu', "device = 'tpu': choose"),
    ('bench.py --threads=100000', 'threads = 100000: this machine has'),
    ('data/shakespeare_char/prepare.py my.txt',
     'this script takes no arguments; your own text is given to train.py: --dataset='),
    ('data/gsm_toy/prepare.py --x', "'--x': this script takes no arguments"),
    ('data/gsm8k/prepare.py --input={out}/nowhere', 'nowhere/train.jsonl is not there or is not UTF-8 text'),
    ('data/gsm8k/prepare.py --val_row=3', "no setting 'val_row'; did you mean val_rows"),
    ('data/gsm8k_aug/prepare.py --input={out}/nowhere', 'nowhere/valid.txt is not there'),
    ('data/zeroshot/prepare.py --input={out}/nowhere', 'nowhere\': there is no such folder'),
    ('data/zeroshot/prepare.py --tasks=mmlu', "tasks = 'mmlu': choose lambada, hellaswag"),
]


@pytest.mark.parametrize('command, message', COMMANDS, ids=[command for command, _ in COMMANDS])
def test_what_is_typed(refuses, command, message):
    refuses(command, message)


# --- a config file ---

@pytest.mark.parametrize('source, message', [
    ('max_itres = 3', "wrong.py: there is no setting 'max_itres'; did you mean max_iters"),
    ('grad_accum = "3x"', "wrong.py: grad_accum = '3x': expected a whole number"),
    ('grad_accum = True', 'wrong.py: grad_accum = True: expected a whole number'),
    ('overwrite = 2', 'wrong.py: overwrite = 2: expected True or False'),
    ('method = ["gpt"]', "wrong.py: method = ['gpt']: expected text"),
    ('learning_rate = float("nan")', 'wrong.py: learning_rate = nan: expected a number'),
    ('max_iters = (', 'wrong.py does not run: SyntaxError: '),
    ('max_iters = 1/0', 'wrong.py does not run: ZeroDivisionError: division by zero'),
    ('raise SystemExit(3)', 'wrong.py does not run: SystemExit: 3'),
    ('raise ValueError("two\\nlines")', 'wrong.py does not run: ValueError: two lines'),
])
def test_a_config_file(refuses, tmp_path, source, message):
    (tmp_path / 'wrong.py').write_text(source + '\n', encoding='utf-8')
    refuses('train.py {tmp}/wrong.py', message)


# --- a data set with one file damaged; None: the file is not there ---

def instead(old, new):
    return lambda content: content.replace(old, new)


def second_line(line):
    return lambda content: content.replace(b'\n', b'\n' + line.encode() + b'\n', 1)


@pytest.mark.parametrize('kind, name, change, message', [
    ('text', 'val.bin', None, 'val.bin is missing: delete meta.json there and prepare the data set again'),
    ('text', 'train.bin', lambda b: b[:-1], 'train.bin: 5399 bytes is not a whole number of uint16 tokens'),
    ('text', 'train.bin', lambda b: b[:100] + b'\xff\x00' + b[102:],
     'token 50 has id 255, beyond the vocabulary of 18'),
    ('text', 'train.bin', lambda b: b[2:] + b[:2],
     'train.bin is damaged or was changed (its checksum is not that in meta.json)'),
    ('text', 'val.bin', lambda b: b'', 'val.bin: 0 tokens are fewer than block_size + 1 = 17'),
    ('text', 'val.bin', lambda b: b[:32], '16 tokens are fewer than block_size + 1 = 17'),
    ('text', 'meta.json', None, 'is not prepared'),
    ('text', 'meta.json', lambda b: b[:40], 'meta.json is damaged (JSONDecodeError'),
    ('text', 'meta.json', lambda b: b'[]', 'meta.json is damaged (TypeError'),
    ('text', 'meta.json', instead(b'"vocab_size": 18', b'"vocab_size": 24'),
     'vocab_size = 24, but its tokenizer has 18'),
    ('text', 'meta.json', instead(b'"kind": "text"', b'"kind": "records"'),
     'holds records, but this method trains on plain text'),
    ('text', 'meta.json', instead(b'uint16', b'uint32'),
     "dtype = 'uint32' in meta.json, but 18 tokens need uint16"),
    ('text', 'meta.json', instead(b'"uint16"', b'[]'), 'dtype = [] in meta.json'),
    ('text', 'meta.json', instead(b'"crc32": {', b'"crc32": 5, "x": {'), 'meta.json is damaged (crc32 = 5)'),
    ('text', 'meta.json', instead(b'"p"', b'"q"'), 'meta.json is damaged (checksum of the tokenizer)'),
    ('text', 'meta.json', instead(b'"p"', b'7'), 'meta.json: the tokenizer is damaged: chars = '),
    ('records', 'train.jsonl', None, 'train.jsonl is missing: run prepare.py in that folder'),
    ('records', 'train.jsonl', lambda b: b'', 'train.jsonl holds no record: run prepare.py again'),
    ('records', 'train.jsonl', lambda b: b'\xff' + b, 'train.jsonl cannot be read: '),
    ('records', 'train.jsonl', instead(b'"answer": "6"', b'"answer": "7"'),
     'train.jsonl is damaged or was changed'),
    ('records', 'train.jsonl', second_line('{"question": "1?", "steps": ["1"]'), 'train.jsonl line 2 is not JSON'),
    ('records', 'train.jsonl', second_line('[' * 10 ** 5), 'train.jsonl line 2 is not JSON'),
    ('records', 'train.jsonl', second_line('[1]'), "line 2 is '[1]', not an object"),
    ('records', 'train.jsonl', second_line('{"question": "1?", "steps": ["1"]}'),
     'line 2: answer = None: a record needs a text'),
    ('records', 'train.jsonl', second_line('{"steps": ["1"], "answer": "1"}'),
     'line 2: question = None: a record needs a text'),
    ('records', 'train.jsonl', second_line('{"question": "1?", "answer": "1"}'),
     'line 2: steps = None: a record needs a list'),
    ('records', 'train.jsonl', second_line('{"question": "1?", "steps": [], "answer": "1"}'),
     'line 2: steps = []: '),
    ('records', 'train.jsonl', second_line('{"question": "1?", "steps": [1], "answer": "1"}'),
     'line 2: steps = [1]: '),
    ('records', 'train.jsonl', second_line('{"question": "1?", "steps": ["1"], "answer": 1}'),
     'line 2: answer = 1: '),
    ('records', 'train.jsonl', second_line('{"question": "x?", "steps": ["1"], "answer": "1"}'),
     "line 2: the tokenizer has no 'x'"),
    ('records', 'val.jsonl', second_line('{"question": "1?", "steps": ["1"], "answer": "1+1"}'),
     "val.jsonl line 2: answer = '1+1' is not a number: accuracy compares numbers"),
    ('records', 'meta.json', instead(b'"<end>"', b'"<x>"'),
     'its tokenizer lacks the special tokens <b>, <m>, </b>, <end>'),
])
def test_a_damaged_data_set(refuses, place, tmp_path, kind, name, change, message):
    shutil.copytree(getattr(place, kind), tmp_path / 'set')
    path = tmp_path / 'set' / name
    content = path.read_bytes()
    os.remove(path)
    if change:
        path.write_bytes(change(content))
        assert path.read_bytes() != content
    if name != 'meta.json' and 'changed' not in message or 'special' in message:  # or the checksum would tell
        meta = json.loads((tmp_path / 'set' / 'meta.json').read_text('utf-8'))
        del meta['crc32']
        (tmp_path / 'set' / 'meta.json').write_text(json.dumps(meta), encoding='utf-8')
    refuses('train.py --dataset={tmp}/set' + ' --method=rim --block_size=48' * (kind == 'records'), message)


# --- GSM8K as it is published ---

USABLE = json.dumps({'question': 'A robe takes 2 bolts.', 'answer': 'So 2+1=<<2+1=3>>3 bolts\n#### 3'})
MARKED = json.dumps({'question': 'Broken?', 'answer': '<<<1+1=2>>>\n#### 2'})
LINE = 'How much?||<<16-3-4=9>> <<9*2=18>> #### 18'
STEP = {'question': 'How much?', 'steps': ['9*2=18'], 'answer': '18'}


@pytest.mark.parametrize('name, files, message', [
    ('gsm8k', {'train.jsonl': ''}, 'train.jsonl holds no record'),
    ('gsm8k', {'train.jsonl': '\n \n'}, 'train.jsonl holds no record'),
    ('gsm8k', {'test.jsonl': ''}, 'test.jsonl holds no record'),
    ('gsm8k', {'train.jsonl': USABLE},
     'train.jsonl holds one record that can be used: train and val need one each'),
    ('gsm8k', {'train.jsonl': f'{USABLE}\n' * 3},
     'val_rows = 500: must be at least 1 and less than the 3 rows of train.jsonl'),
    ('gsm8k', {'train.jsonl': MARKED},
     'train.jsonl holds no record that can be used (train: a mark << >> is broken)'),
    ('gsm8k', {'train.jsonl': f'{USABLE}\n\n\n{{"question"'}, 'train.jsonl line 4 is not JSON'),
    ('gsm8k', {'train.jsonl': '\ufeff\ufeff' + USABLE}, 'train.jsonl line 1 is not JSON'),
    ('gsm8k', {'train.jsonl': '[' * 10 ** 5}, 'train.jsonl line 1 is not JSON'),
    ('gsm8k', {'train.jsonl': '{"question": "a"}'}, 'train.jsonl line 1: answer = None: expected text'),
    ('gsm8k', {'train.jsonl': '{}\n{"question"'}, 'train.jsonl line 1: question = None: expected text'),
    ('gsm8k_aug', {'train.json': json.dumps([STEP, 5])}, "train.json entry 2 is '5', not an object"),
    ('gsm8k_aug', {'train.json': '[' * 10 ** 5}, 'train.json is not JSON'),
    ('gsm8k_aug', {'train.json': json.dumps([{**STEP, 'answer': 5}])},
     'train.json entry 1: answer = 5: a record needs a text'),
    ('gsm8k_aug', {'valid.txt': LINE}, 'valid holds one record that can be used: train and val need one each'),
    ('gsm8k_aug', {'valid.txt': ''}, 'valid.txt holds no record'),
    ('gsm8k_aug', {'valid.txt': LINE + '\nno bars #### 3\n'},
     "valid.txt line 2: 'no bars #### 3' is not of the form"),
], ids=str)
def test_a_source_of_records(refuses, tmp_path, name, files, message):
    usual = {'train.jsonl': f'{USABLE}\n{USABLE}', 'test.jsonl': USABLE,
             'valid.txt': f'{LINE}\n{LINE}', 'test.txt': LINE}
    for file, content in {**usual, **files}.items():
        (tmp_path / file).write_text(content, encoding='utf-8')
    refuses(f'data/{name}/prepare.py --input={{tmp}}', message)


# --- a checkpoint to go on with: bytes, another object, or one with these parts changed ---

class Hostile:
    mark = 'a_pickle_ran_code'

    def __reduce__(self):
        return os.mkdir, (self.mark,)


@pytest.mark.parametrize('content, message', [
    (b'', 'ckpt.pt is not a checkpoint, is damaged, or holds more than tensors and plain values'),
    (b'not a checkpoint', 'ckpt.pt is not a checkpoint'), (b'PK\x03\x04 half a zip', 'ckpt.pt is not a checkpoint'),
    (Hostile(), 'holds more than tensors and plain values'),
    ([1], 'ckpt.pt is not a checkpoint of this project'), ({'weights': torch.zeros(1)},
     'is not a checkpoint of this project'),
    ({'version': 1}, 'ckpt.pt has layout 1, this code reads layout 2'), ({'version': 99}, 'has layout 99'),
    ({'version': 2}, 'ckpt.pt lacks method: it is not a checkpoint of this project or is damaged'),
    (dict(whole=True, version=torch.tensor(1)), 'is not a checkpoint of this project'),
    (dict(whole=True, step=-3), 'ckpt.pt is damaged: step = -3'),
    (dict(whole=True, model={'wte.weight': 'not a tensor'}),
     'ckpt.pt is damaged: step = 4, or a weight is not a tensor'),
    (dict(whole=True, best_val_loss=None), 'ckpt.pt lacks best_val_loss'),
    (dict(whole=True, meta={}), 'ckpt.pt lacks the tokenizer'),
    (dict(whole=True, settings={}), 'the checkpoint to resume lacks the optimizer or settings'),
    (dict(whole=True, method='mamba'), "choose one of gpt"),
    (dict(whole=True, stage=['another', 0]), 'the run to resume is in another since step 0'),
    (dict(whole=True, model_config={'n_layer': 3}), 'vocab_size = 0: a model needs at least 1 token'),
    (dict(whole=True, model_config={'old_name': 1}), 'its configuration does not fit this code'),
    (dict(whole=True, model_config={'rope_base': 0.5}),
     'its configuration does not fit this code (rope_base = 0.5: must be above 1)'),
    (dict(whole=True, optimizer={}), 'ckpt.pt: the optimizer does not fit the model'),
    (dict(whole=True, moment=torch.zeros(3)),
     'the optimizer does not fit the model (a moment of shape (3,) for a weight of shape'),
], ids=str)
def test_a_checkpoint(refuses, place, tmp_path, content, message):
    os.makedirs(tmp_path / 'out')
    if isinstance(content, bytes):
        (tmp_path / 'out' / 'ckpt.pt').write_bytes(content)
    else:
        if isinstance(content, dict) and content.get('whole'):
            whole = load_checkpoint(place.gpt + '/ckpt.pt')
            state = whole['optimizer']['state'][0]
            state['exp_avg'] = content.get('moment', state['exp_avg'])
            content = {**whole, **content}
        torch.save(content, tmp_path / 'out' / 'ckpt.pt')
    refuses('train.py --init_from=resume --max_iters=6', message)
    assert not os.path.exists(os.path.join(ROOT, Hostile.mark))


@pytest.mark.parametrize('script', ['sample.py', 'eval.py'])
@pytest.mark.parametrize('change, message', [
    (dict(method='mamba'), "method 'mamba' is unknown; there are gpt, thoughtbubbles, cyb, rim, coconut"),
    (dict(model_config={'old_name': 1}), 'its configuration does not fit this code'),
    (dict(model_config={'n_layer': 3, 'vocab_size': 18}), 'weights and configuration do not fit together'),
], ids=str)
def test_a_checkpoint_to_read(refuses, place, tmp_path, script, change, message):
    torch.save({**load_checkpoint(place.gpt + '/ckpt.pt'), **change}, tmp_path / 'bad.pt')
    refuses(script + ' --checkpoint={tmp}/bad.pt', message)


# --- a call ---

SIZE = dict(vocab_size=14, block_size=16, n_layer=2, n_head=2, n_embd=16)


def gpt(**settings):
    return GPT(GPTConfig(**{**SIZE, **settings}))


def rim(**settings):
    return RiM(RiMConfig(**{**SIZE, 'n_blocks': 3, **settings}))


def breath(**settings):
    return CYB(CYBConfig(**{**SIZE, **settings}))


def row(n):
    return torch.zeros(1, n, dtype=torch.long)


def spec(**tokenizer):
    return data.Tokenizer({'kind': 'char', 'chars': ['a'], **tokenizer})


def write(**splits):
    spec = {'kind': 'char', 'chars': [*CHARACTERS, '\ud800']}
    records.write_record_dataset('nowhere', {split: rows for split, rows in splits.items()}, spec, 'a file')


@pytest.mark.parametrize('call, message', [
    (lambda: config.check_range(dict(a=0), 'a'), 'a = 0: must be at least 1'),
    (lambda: config.check_range(dict(a=1.0), 'a', 0, 1), 'a = 1.0: must be at least 0 and below 1'),
    (lambda: config.check_range(dict(b=1, a=math.nan), 'b a', 0), 'a = nan: must be at least 0'),
    (lambda: config.check_range(dict(a=math.inf), 'a'), 'a = inf: must be'),
    (lambda: config.check_choice(dict(a='x'), 'a', 'y z'), "a = 'x': choose y, z"),
    (lambda: write_file('/nowhere/file', 'text'), 'cannot write /nowhere/file: '),
    (lambda: save_checkpoint('/nowhere/ckpt.pt', {}), 'cannot write /nowhere/ckpt.pt: '),
    (lambda: load_checkpoint('/nowhere/ckpt.pt'), 'checkpoint /nowhere/ckpt.pt is not there: train one first'),
    (lambda: train.load('/nowhere'), 'checkpoint /nowhere is not there'),
    # tokenizers
    (lambda: spec(chars=sorted(set('hello wörld\n'))).encode('hello z\tzx'),
     "has no 'z', '\\t', 'x': its 10"),  # in order, once
    (lambda: spec(kind='words'), 'is unknown: its kind is char, gpt2 or json'),
    (lambda: data.Tokenizer([]), 'tokenizer ... is unknown'),
    *((lambda chars=chars: spec(chars=chars),
       'the tokenizer is damaged: chars = ... expected a list of distinct texts of at most 1 characters')
      for chars in (None, [1, 2], 'ab', ['a', 'a'], ['a', 'bc'], ['a', ''], ['a', ['b']])),
    *((lambda names=names: spec(special=names), 'the tokenizer is damaged: special = ')
      for names in ('m', ['<m>', '<m>'], [3], None)),
    # records
    (lambda: write(train=[('1?', ['1'], '1')], val=[]), 'no row for val was found in a file'),
    (lambda: write(train=[('x', ['1'], '1')]), "the tokenizer has no 'x'"),
    (lambda: write(train=[('\ud800', ['1'], '1')]),
     'a file: train, question ... is not text'),  # half a character, as JSON has it
    (lambda: records.read_records('/nowhere/train.jsonl'), '/nowhere/train.jsonl is missing'),
    (lambda: records.score(None, None, [records.Record('1?', ['1'], 'many', 'here')]),
     "here: answer = 'many' is not a number"),
    # models
    (lambda: gpt(vocab_size=0), 'vocab_size = 0: a model needs at least 1 token'),
    (lambda: rim(vocab_size=4), 'vocab_size = 4: there must be room for <b>, <m>, </b>, <end> and for text'),
    (lambda: Coconut(CoconutConfig(**{**SIZE, 'vocab_size': 4})), 'vocab_size = 4: there must be room'),
    (lambda: ThoughtbubblesConfig(kappa=math.nan), 'kappa = nan: must be at least 1'),
    (lambda: ThoughtbubblesConfig(keep_bias=math.inf), 'keep_bias = inf: must be at least -1000000.0'),
    *((lambda make=make: make()(row(17)), 'a row of 17 tokens is longer than block_size = 16')
      for make in (gpt, breath, lambda: Thoughtbubbles(ThoughtbubblesConfig(**SIZE, fork_layers=(1,))))),
    (lambda: gpt().complete([[]], 2), 'the prompt is empty: give at least one token'),
    (lambda: gpt().complete([], 2), 'the prompt is empty'),
    (lambda: gpt(vocab_size=9).load_pretrained(gpt().state_dict()),
     'the checkpoint to start from has wte.weight (14, 16), this model'),
    (lambda: gpt().load_pretrained(gpt(tie_weights=False).state_dict()),
     'tie_weights = True: ... has a head of its own'),
    (lambda: breath(see_pauses=False).complete([[1]], 2, skip_unused_pauses=True),
     'skip_unused_pauses = True: ... leaves them out anyway'),
    (lambda: breath().complete([[1]], 2, threshold=0.2, temperature=0, pace='all'),
     'threshold = 0.2: has an effect'),
    (lambda: rim().answers([[1] * 9]),
     'a question of 9 tokens with 12 memory tokens leaves no room for an answer in block_size = 16'),
    (lambda: rim(train_on='sft').answers([[1] * 16]),
     'a question of 16 tokens with 0 memory tokens leaves no room'),
    (lambda: rim().answers([[1]], n_blocks=-1, n_mem=2), 'n_blocks = -1, n_mem = 2: must be at least 1'),
    (lambda: rim().answers([[1]], n_blocks=2, n_mem=-1), 'n_blocks = 2, n_mem = -1: must be at least 1'),
    (lambda: rim(train_on='cot').answers([[1]], n_blocks=2),
     'n_blocks = 2, n_mem = 0: this model has no memory blocks'),
    (lambda: rim().answers([[1]], temperature=-1), 'temperature = -1'),
    (lambda: rim().answers([]), 'the prompt is empty'),
])
def test_a_call(call, message):
    with pytest.raises(UserError) as caught:
        call()
    assert says(str(caught.value), message), str(caught.value)
