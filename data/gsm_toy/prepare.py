"""Word problems made on the spot: 1 to 6 steps of arithmetic on a dial with ten digits, the same for the same seed.

Ann's dial is at 7, +5, -3, +1, +1, -4, +2. After 2?   steps 7+5=2, 2-3=9   answer 9

After 9 comes 0 again: on a dial all answers stay equally likely as long as one step is unknown, so that guessing or
adding up roughly gains nothing. Six turns are always told and the question asks about some of them; thus the turns
stand where a small model finds them quickly. No question occurs in two of train, val and test.
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
ROWS = {'test': 1200, 'val': 600, 'train': 120000}
MAX_STEPS, LARGEST_TURN = 6, 5

NAMES = ['Ann', 'Bob', 'Dan', 'Eve', 'Gus', 'Ivo', 'Kim', 'Lea', 'Max', 'Zoe']
THINGS = ['dial', 'disk', 'gear', 'knob', 'lock', 'ring']
OPENINGS = ["{name}'s {thing} is at {n}", "{name}'s {thing} shows {n}", '{name} has a {thing} at {n}', 'A {thing} shows {n}']
QUESTIONS = ['. After {n}?', '. Up to {n}?']


def make_problem(rng, n_steps):
    """(question, steps, answer) with n_steps calculations."""
    value = rng.randint(0, 9)
    text, steps = rng.choice(OPENINGS).format(name=rng.choice(NAMES), thing=rng.choice(THINGS), n=value), []
    for i in range(MAX_STEPS):
        sign, n = rng.choice('+-'), rng.randint(1, LARGEST_TURN)
        text += f', {sign}{n}'
        if i < n_steps:
            result = (value + n if sign == '+' else value - n) % 10
            steps.append(f'{value}{sign}{n}={result}')
            value = result
    return text + rng.choice(QUESTIONS).format(n=n_steps), steps, str(value)


def main(argv):
    if argv:
        raise config.UserError(f'{argv[0]!r}: this script takes no arguments')
    rng, seen, splits = random.Random(SEED), set(), {}
    for split, n in ROWS.items():
        splits[split] = []
        while len(splits[split]) < n:
            problem = make_problem(rng, 1 + len(splits[split]) % MAX_STEPS)  # equally many of each number of steps
            if problem[0] not in seen:
                seen.add(problem[0])
                splits[split].append(problem)
    chars = set('\n')
    for rows in splits.values():
        for question, steps, answer in rows:
            chars.update(question, *steps, answer)
    records.write_record_dataset(FOLDER, splits, {'kind': 'char', 'chars': sorted(chars)}, f'made with seed {SEED}')


if __name__ == '__main__':
    config.run(main)
