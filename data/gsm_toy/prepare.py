"""Word problems made on the spot: 1 to 6 steps of arithmetic on a dial with three digits, fixed by a seed.

Ann's dial is at 1, turns 4 5 0 0 0 0. Where?   steps 4+1=2, 5+2=1                          answer 1
A lock shows 0, turns 5 4 4 5 0 0. It is?       steps 5+0=2, 4+2=0, 4+0=1, 5+1=0, 0+0=0     answer 0

After 2 comes 0 again, and each turn moves the dial by one or two digits: who leaves out a turn knows little. Every
problem tells six turns, so they stand where a small model finds them; the last ones may be 0. Most training
problems are long: each teaches the first step, only these the last ones, and the few short cases are soon known by
heart.

No question occurs in two of train, val and test, and from four turns on no case does: a quarter of each length is
left to val and test, so that an answer there has to be worked out. data/README.md says why the steps look so.
"""
import os
import random
import re
import sys

FOLDER = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.normpath(FOLDER + '/../..'))  # the repository, for running this file by itself
if not os.path.exists(os.path.normpath(FOLDER + '/../records.py')):
    sys.exit(f'error: {FOLDER} is not in data/ of the repository: move it there')
import config
from data import records

SMALL = True  # train.py prepares it by itself
SEED = 1
ROWS = {'test': 1200, 'val': 600, 'train': 72000}
MAX_STEPS = 6
DIGITS = 3
TURNS = (4, 5)  # do not look like digits of the dial
ZERO_STEPS = (0, 0, 0, 1, 2)  # how many of the last steps add 0: one of these at random
FULL_STEPS = 4  # but the first four never do
TRAIN_SHARES = (1, 3, 6, 15, 30, 45)  # percent of the training problems by steps; all alike in val and test

NAMES = ['Ann', 'Bob', 'Dan', 'Eve', 'Gus', 'Ivo', 'Kim', 'Lea', 'Max', 'Zoe']
THINGS = ['dial', 'disk', 'gear', 'knob', 'lock', 'ring']
OPENINGS = ["{name}'s {thing} is at {n}", "{name}'s {thing} shows {n}", '{name} has a {thing} at {n}',
            'A {thing} shows {n}']
QUESTIONS = ['. Where?', '. It is?']


def make_problem(rng, n_steps):
    """(question, steps, answer) with n_steps calculations."""
    n_turns = max(min(n_steps, FULL_STEPS), n_steps - rng.choice(ZERO_STEPS))
    start = rng.randrange(DIGITS)
    turns = [rng.choice(TURNS) if i < n_turns else 0 for i in range(MAX_STEPS)]
    opening = rng.choice(OPENINGS).format(name=rng.choice(NAMES), thing=rng.choice(THINGS), n=start)
    question = f'{opening}, turns {" ".join(map(str, turns))}{rng.choice(QUESTIONS)}'
    value, steps = start, []
    for turn in turns[:n_steps]:
        result = (turn + value) % DIGITS
        steps.append(f'{turn}+{value}={result}')
        value = result
    return question, steps, str(value)


def may_have(split, question):
    """Whether a split may have the case that a question tells, which its digits and nothing else decide."""
    start, *turns = map(int, re.findall(r'\d', question))
    if turns[3] == 0:  # fewer than four turns: in all splits
        return True
    # a quarter of each length
    held_out = (start + sum(place * turn for place, turn in enumerate(turns, 1))) % 4 == 2
    return held_out == (split != 'train')


def main(argv):
    if argv:
        raise config.UserError(f'{argv[0]!r}: this script takes no arguments')
    rng = random.Random(SEED)
    questions = set()  # of test and val
    splits = {}
    for split, n in ROWS.items():
        lengths = [1 + i % MAX_STEPS for i in range(n)]
        if split == 'train':
            lengths = rng.choices(range(1, MAX_STEPS + 1), TRAIN_SHARES, k=n)
        splits[split] = []
        for n_steps in lengths:
            problem = make_problem(rng, n_steps)
            while problem[0] in questions or not may_have(split, problem[0]):
                problem = make_problem(rng, n_steps)
            splits[split].append(problem)
            if split != 'train':
                questions.add(problem[0])
    chars = set('\n')
    for rows in splits.values():
        for question, steps, answer in rows:
            chars.update(question, *steps, answer)
    tokenizer = {'kind': 'char', 'chars': sorted(chars)}
    records.write_record_dataset(FOLDER, splits, tokenizer, f'made with seed {SEED}')


if __name__ == '__main__':
    config.launch(main)
