"""Word problems made on the spot: 1 to 6 steps of arithmetic on small numbers, the same for the same seed.

Ann has 7 figs, eats 2, doubles them. How many now?   steps 7-2=5, 5*2=10   answer 10
No question occurs in two of train, val and test.
"""
import os
import random
import sys

FOLDER = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(os.path.dirname(FOLDER)))  # the repository, for running this file by itself
import config  # noqa: E402
from data import records  # noqa: E402

SMALL = True  # train.py prepares it by itself
SEED = 1
ROWS = {'test': 1200, 'val': 600, 'train': 60000}
MAX_STEPS, LARGEST = 6, 20  # no number in a problem is above LARGEST

NAMES = ['Ann', 'Bob', 'Cy', 'Dan', 'Eve', 'Gus', 'Ivo', 'Jo', 'Kim', 'Lea', 'Max', 'Zoe']
THINGS = ['cups', 'eggs', 'figs', 'hats', 'keys', 'nuts', 'pens', 'toys']
OPENINGS = ['{name} has {n} {thing}', '{name} had {n} {thing}', '{name} owns {n} {thing}']
QUESTIONS = ['How many?', 'How many now?', 'And now?', 'What is left?']
PHRASES = {'+': ['gets {n}', 'buys {n}', 'wins {n}', 'finds {n}'],
           '-': ['uses {n}', 'sells {n}', 'loses {n}', 'gives {n}'],
           '*': ['doubles'],
           '/': ['halves']}


def make_problem(rng, n_steps):
    """(question, steps, answer) with n_steps calculations."""
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    value = rng.randint(1, 9)
    sentence, steps = [rng.choice(OPENINGS).format(name=name, n=value, thing=thing)], []
    for _ in range(n_steps):
        possible = ([('+', n) for n in range(1, 10) if value + n <= LARGEST]
                    + [('-', n) for n in range(1, 10) if value - n >= 1]
                    + [('*', 2)] * (3 if 2 * value <= LARGEST else 0) + [('/', 2)] * (3 if value % 2 == 0 else 0))
        sign, n = rng.choice(possible)
        result = {'+': value + n, '-': value - n, '*': value * n, '/': value // n}[sign]
        steps.append(f'{value}{sign}{n}={result}')
        sentence.append(rng.choice(PHRASES[sign]).format(n=n))
        value = result
    return f'{", ".join(sentence)}. {rng.choice(QUESTIONS).format(thing=thing)}', steps, str(value)


def main(argv):
    if argv:
        raise config.UserError(f'{argv[0]!r}: this script takes no arguments')
    rng, seen, splits = random.Random(SEED), set(), {}
    for split, n in ROWS.items():
        rows = []
        while len(rows) < n:
            problem = make_problem(rng, 1 + len(rows) % MAX_STEPS)  # equally many of each number of steps
            if problem[0] not in seen:
                seen.add(problem[0])
                rows.append(problem)
        splits[split] = rows
    chars = sorted(set('\n'.join('\n'.join([q, *steps, answer]) for rows in splits.values() for q, steps, answer in rows)))
    records.write_record_dataset(FOLDER, splits, {'kind': 'char', 'chars': chars}, f'data/gsm_toy/prepare.py, seed {SEED}')


if __name__ == '__main__':
    config.run(main)
