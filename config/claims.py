"""Writes config/CLAIMS.md: what the three papers claim, what came out here, and a verdict that is computed.

    python -m config.claims

A file of config/results/ has {"from": the command, "note": what else matters, "values": {name: {seed: number}}}.
A compare.json of config.compare is such a file; copied there it is kept with the code and read here.
"""
import os
from collections import namedtuple

import config
from config.compare import mean_and_error, paired
from config.files import write_file
from config.tables import formatted

FOLDER = os.path.join(config.ROOT, 'config', 'results')
PAGE = os.path.join(config.ROOT, 'config', 'CLAIMS.md')
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # 97.5 % quantiles, of 2, 3, ... seeds
NEAR = 0.1  # of the second number

# first is below, above or near second (nothing: 0), names in the values of config/results/FILE.json
Claim = namedtuple('Claim', 'claim paper command file first direction second')
COMPARE = 'python -m config.compare --configs=config/gpt_small.py,config/'
REAL = 'python -m config.compare --equal_flops=none --configs=config/'
CYB = 'python eval.py --out_dir=out/cyb_small'
RIM = 'python eval.py --eval_rows=600 --out_dir=out/'
TIMES = 'python eval.py --out_dir=out/rim_small --beside=out/sft_small,out/cot_small,out/coconut_small'


def variant(setting, name):
    """The commands that train cyb_small with another setting in a folder of its own, and measure it."""
    folder = f'--out_dir=out/{name}'
    return f'python train.py config/cyb_small.py --{setting} {folder} && python eval.py {folder}'


CLAIMS = {
    'Thoughtbubbles, perplexity or loss': [
        ('kappa 2 beats a plain GPT', '20.19, plain 21.22', f'{COMPARE}tb_small.py',
         'text', 'tb_small', 'below', 'gpt_small'),
        ('the same at 772M parameters', '20.19, plain 21.22', f'{REAL}gpt_772m.py,"config/tb_772m.py --kappa=2"',
         'text_772m', 'tb_772m_kappa=2', 'below', 'gpt_772m'),
        ('kappa 4 beats kappa 2', '19.74, kappa 2 20.19', f'{COMPARE}tb_small.py,"config/tb_small.py --kappa=4"',
         'text', 'tb_small_kappa=4', 'below', 'tb_small'),
        ('fixed copies beat a plain GPT', '20.90 (copy-5), plain 21.22', f'{COMPARE}copy_small.py',
         'text', 'copy_small', 'below', 'gpt_small'),
        ('kappa 2 beats fixed copies', '20.19, copy-5 20.90', f'{COMPARE}tb_small.py,config/copy_small.py',
         'text', 'tb_small', 'below', 'copy_small'),
        ('it needs p in the attention', 'loss 3.90 without, 3.17 with',
         f'{COMPARE}tb_small.py,"config/tb_small.py --attenuate_attention=False"',
         'text', 'tb_small_attenuate_attention=False', 'above', 'tb_small'),
        ('a budget that grows with the text beats a plain GPT', '21.2, plain 22.2',
         'python eval.py --out_dir=out/tb_small --slow_rows=512', 'budget', 'growing', 'below', 'gpt_small'),
        ('a fixed budget is worse than a plain GPT', '23.1, plain 22.2',
         'python eval.py --out_dir=out/tb_small --slow_rows=512', 'budget', 'fixed', 'above', 'gpt_small')],
    'Catch Your Breath, loss where nothing else is said': [
        ('it beats TBYS at equal data', 'yes', f'{COMPARE}tbys_small.py,config/cyb_small.py',
         'text', 'cyb_small', 'below', 'tbys_small'),
        ('TBYS beats a plain GPT', 'yes', f'{COMPARE}tbys_small.py', 'text', 'tbys_small', 'below', 'gpt_small'),
        ('it beats TBYS, a published model fine-tuned', 'yes',
         f'{REAL}gpt_smollm2.py,config/tbys_smollm2.py,config/cyb_smollm2.py',
         'smollm2', 'cyb_smollm2', 'below', 'tbys_smollm2'),
        ('TBYS beats a plain GPT, the same', 'yes', f'{REAL}gpt_smollm2.py,config/tbys_smollm2.py',
         'smollm2', 'tbys_smollm2', 'below', 'gpt_smollm2'),
        ('it beats a plain GPT, the same', 'yes', f'{REAL}gpt_smollm2.py,config/cyb_smollm2.py',
         'smollm2', 'cyb_smollm2', 'below', 'gpt_smollm2'),
        ('the same, where later tokens do not see the pauses', '',
         f'{REAL}gpt_smollm2.py,"config/cyb_smollm2.py --see_pauses=False"',
         'smollm2', 'cyb_smollm2_see_pauses=False', 'below', 'gpt_smollm2'),
        ('it beats TBYS, Gemma 2B on C4', 'yes', 'python train.py config/cyb_gemma_2b.py',
         'gemma', 'cyb_gemma_2b', 'below', 'tbys_gemma_2b'),
        ("P(don't know) correlates with the gain of a pause", 'yes', CYB, 'cyb', 'correlation', 'above', ''),
        ('the same with W = 4', 'yes', variant('W=4', 'cyb_w4'),
         'cyb', 'correlation, W = 4', 'above', ''),
        ('a world that stops early hurts', 'yes', variant('omega=first', 'cyb_first'),
         'cyb', 'loss, omega first', 'above', 'loss'),
        ('a discount saves slots', 'yes', variant('gamma0=0.9', 'cyb_discount'),
         'cyb', 'slots, gamma0 0.9', 'below', 'slots'),
        ('and costs accuracy', 'yes', variant('gamma0=0.9', 'cyb_discount'),
         'cyb', 'accuracy, gamma0 0.9', 'below', 'accuracy')],
    'Reasoning in Memory, share of right answers or ms': [
        ('it beats direct answers', '42.1 %, direct 23.9 %', f'{RIM}rim_small && {RIM}sft_small',
         'gsm_toy', 'rim', 'above', 'sft'),
        ('the same, Llama 3.2 1B on GSM8K', '42.1 %, direct 23.9 %', 'python train.py config/rim_llama_1b.py',
         'gsm8k', 'rim', 'above', 'sft'),
        ('it beats Coconut', '42.1 %, Coconut 36.9 %', f'{RIM}rim_small && {RIM}coconut_small',
         'gsm_toy', 'rim', 'above', 'coconut'),
        ('written steps beat it', '49.1 %, it 42.1 %', f'{RIM}cot_small && {RIM}rim_small',
         'gsm_toy', 'cot', 'above', 'rim'),
        ('it needs stage 1', '', f'{RIM}rim_small && {RIM}pause_small', 'gsm_toy', 'rim', 'above', 'pause'),
        ('it answers as fast as without thought', '16.1, direct 16.1 ms (Llama); 7.6, 7.6 (GPT-2)', TIMES,
         'times', 'rim', 'near', 'sft'),
        ('and faster than Coconut', '16.1, 108.3 ms (Llama); 7.6, 53.4 (GPT-2)', TIMES,
         'times', 'rim', 'below', 'coconut'),
        ('and faster than written steps', '16.1, 420.3 ms (Llama); 7.6, 213.7 (GPT-2)', TIMES,
         'times', 'rim', 'below', 'cot')],
}
RULE = f'''# The papers' claims, and what came out here

`python -m config.claims` writes this page from the files of [results](results). *here*: mean ± standard error.
The verdict is computed from the difference of the two numbers, seed by seed: *holds* if its 95 % confidence
interval (Student's t) lies on the claimed side of 0; *does not* if it lies on the other side; else, or with one
seed alone, *too small to tell*. "As fast" means within {NEAR:.0%} of the second number. A verdict is about the
model of its command: a toy, where no other is named. Numbers at one learning rate, as the notes below say, are
weaker evidence than those of [a fair comparison](README.md#comparing-fairly). The command of a line makes such
numbers; those under *here* are from the commands at the end of this page, which may be others. What
[README.md](README.md) has as means alone does not count here, since runs are compared seed by seed.
'''


def verdict(differences, direction, near=0.0):
    """(a word, why) for numbers that are claimed to be below, above or near 0, one of each seed."""
    mean, error = mean_and_error(differences)
    if error is None:
        return 'too small to tell', f'difference {formatted(mean)}, one seed'
    reach = STUDENT[min(len(differences) - 2, len(STUDENT) - 1)] * error
    low, high = (mean - reach, mean + reach) if direction != 'below' else (-mean - reach, -mean + reach)
    if direction == 'near':
        holds, fails = -near <= low and high <= near, low > near or high < -near
    else:
        holds, fails = low > 0, high < 0
    word = 'holds' if holds else 'does not' if fails else 'too small to tell'
    return word, f'difference {formatted(mean)} ± {formatted(error)}'


def judge(claim):
    """(what came out, verdict, reason) of a claim."""
    values = config.read_json(os.path.join(FOLDER, claim.file + '.json')).get('values')
    if values is None:
        return '', 'not measured', f'no results/{claim.file}.json'
    names = [name for name in (claim.first, claim.second) if name]
    missing = [name for name in names if not values.get(name)]
    first, second = (values.get(name, {}) for name in (claim.first, claim.second))
    seeds = [seed for seed in first if seed in second or not claim.second]
    if missing or not seeds:
        return '', 'not measured', f'{claim.file}.json: no {missing[0] if missing else "seed of both"}'
    told = []
    for name in names:
        mean, error = mean_and_error([values[name][seed] for seed in seeds])
        told.append(formatted(mean) + (f' ± {formatted(error)}' if error is not None else ''))
    differences = paired(first, second or dict.fromkeys(seeds, 0.0))
    near = NEAR * mean_and_error([second[seed] for seed in seeds])[0] if second else 0.0
    here = f'{" against ".join(told)}, {len(seeds)} seed{"s" if len(seeds) > 1 else ""}'
    return here, *verdict(differences, claim.direction, near)


def page():
    """The text of config/CLAIMS.md."""
    lines = [RULE]
    for title, claims in CLAIMS.items():
        lines += [f'## {title}\n', '| claim | paper | here | verdict | why | command |', '| --- ' * 6 + '|']
        for claim in map(Claim._make, claims):
            here, word, why = judge(claim)
            lines.append(f'| {claim.claim} | {claim.paper} | {here} | {word} | {why} | `{claim.command}` |')
        lines.append('')
    lines += ['## Where the numbers are from\n']
    for name in sorted(os.listdir(FOLDER)):
        about = config.read_json(os.path.join(FOLDER, name))
        lines.append(f'- [{name}](results/{name}): `{about["from"]}`; {about.get("note", "")}'.rstrip('; '))
    return '\n'.join(lines) + '\n'


def main(argv):
    config.load(__file__, argv)  # there are no settings
    write_file(PAGE, page())
    print(f'written to {PAGE}')


if __name__ == '__main__':
    config.launch(main)
