"""The published runs, tiny: python tests/paper_long.py

Each keeps all that its config says but sizes. On two processes it is killed in its fourth step and resumed; it
must then be what the same run is on one process without a stop, and be sampled. Those that start from a published
model start from a tiny one of the same kind. Prints the cases that fail and a summary, which tests/README.md
records.
"""
import json
import sys
import tempfile
from pathlib import Path

from conftest import ROWS, arguments, read_log, train, train_on, without_reports, write_records  # first: the path
import sample
from config import class_settings
from config.checkpoint import load_checkpoint
from data import corpus
from model import GPTConfig
from registry_long import try_all
from test_corpus import DOCUMENTS, SETTINGS, SPEC
from test_paper_configs import NAMED, OTHERS, PUBLISHED, settings_of

TINY = dict(n_layer=7, n_head=4, n_embd=16, n_kv_head=2, head_dim=8, n_hidden=24, block_size=64, vocab_size=320,
            window=5, lora_rank=4, epochs=0.0, stage2_epochs=0.0)
RUN = dict(batch_size=2, grad_accum=2, max_iters=6, warmup_iters=2, eval_interval=1, eval_rows=4, threads=1)
KILLED_IN = 3


def tiny(given):
    """A config's model settings at small sizes; what it leaves out stays out."""
    settings = {name: TINY.get(name, value) for name, value in given.items()}
    if given.get('n_kv_head') == 1:
        settings['n_kv_head'] = 1
    if 'fork_layers' in given:
        settings['fork_layers'] = tuple(layer // 2 for layer in given['fork_layers'])
    if 'local_layers' in given:
        settings['local_layers'] = tuple(layer for layer in given['local_layers'] if layer < TINY['n_layer'])
    if 'rope_frequencies' in given:
        every = len(given['rope_frequencies']) // (TINY['head_dim'] // 2)
        settings['rope_frequencies'] = given['rope_frequencies'][::every]
    return settings


def prepare(folder, name):
    """The command line of a tiny run; the model that it starts from is made here."""
    settings, model_settings = settings_of(name)
    model_settings = tiny(model_settings)
    of_records = 'n_blocks' in model_settings
    more = {}
    if settings['init_from'] != 'scratch':
        core = {key: value for key, value in model_settings.items() if key in class_settings(GPTConfig)}
        core.update(lora_rank=0, method='gpt', dataset=folder / 'text', out_dir=folder / f'{name}-start')
        with without_reports():
            train.main(arguments(**{**RUN, **core, 'max_iters': 0}))
        more['init_from'] = folder / f'{name}-start' / 'ckpt.pt'
    if of_records:
        more['vocab_size'] = 265  # the tokenizer's 261 and the four special tokens
    if 'stage2_epochs' in model_settings:
        more['stage2_iters'] = 2
    run = dict(dataset=folder / ('records' if of_records else 'text'), out_dir=folder / name)
    return [f'config/{name}.py', *arguments(**{**model_settings, **RUN, **run, **more})]


def check(folder, name, command):
    with without_reports():
        train.main([*command, f'--out_dir={folder}/{name}-one'])
    one, two = (load_checkpoint(str(folder / run / 'ckpt.pt')) for run in (f'{name}-one', name))
    assert one['step'] == two['step'] == one['total_iters'] and two['settings']['init_from'] == 'resume'
    for key, weight in one['model'].items():
        assert (weight - two['model'][key]).abs().max() < 1e-6, key
    for a, b in zip(*(read_log(folder / run) for run in (f'{name}-one', name)), strict=True):
        key = 'val_loss' if 'val_loss' in a else 'train_loss'
        assert a['iter'] == b['iter'] and abs(a[key] - b[key]) < 1e-5, (a, b)
    prompt = ROWS[0]['question'] if one['meta']['kind'] == 'records' else 'the cat'
    sample.main([f'--out_dir={folder}/{name}', '--device=cpu', f'--prompt={prompt}', '--max_new_tokens=8'])


def main():
    names = [*PUBLISHED, *NAMED, *OTHERS]
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        commands = {}

        def run_all():
            source = folder / 'documents.jsonl'
            source.write_text(''.join(json.dumps({'text': text}) + '\n' for text in DOCUMENTS), encoding='utf-8')
            corpus.write_corpus(str(folder / 'text'), [str(source)], SPEC, **SETTINGS)
            write_records(folder / 'records')
            jobs = []
            for name in names:
                commands[name] = prepare(folder, name)
                jobs.append((commands[name], {'killed_in': KILLED_IN}))
                jobs.append(([*commands[name], '--init_from=resume'], {}))
            train_on(2, folder, jobs)

        sys.exit(try_all(names, run_all, lambda _, name: check(folder, name, commands[name])) > 0)


if __name__ == '__main__':
    main()
