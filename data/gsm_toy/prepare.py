"""Word problems made on the spot: 1 to 5 steps of arithmetic on a dial with five digits, fixed by a seed.

Ann's dial is at 1, turns 6+ 8- 0+ 0+ 0+. Where?   steps 6+1=2, 8-2=1                   answer 1
A lock shows 0, turns 9- 7+ 6+ 8- 0+. It is?       steps 9-0=4, 7+4=1, 6+1=2, 8-2=1     answer 1

After 4 comes 0 again. 6+ adds six to what the dial shows, 8- takes that from eight: so the order of the turns
matters, and who leaves one out knows nothing. Every problem tells five turns, so they stand where a small model
finds them; the last ones may be 0+. Most training problems are long: each teaches the first step, only these the
last ones.

No question occurs in two of train, val and test, and from two turns on no case does: a quarter of each length is
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
ROWS = {'test': 1200, 'val': 600, 'train': 96000}
MAX_STEPS = 5
DIGITS = 5
TURNS = ('6+', '7+', '8-', '9-')  # do not begin like digits of the dial
STAYS = '0+'
STAYING = (0, 0, 0, 1, 1)  # how many of the last steps do so: one of these at random
FULL_STEPS = 4  # but the first four never do
TRAIN_SHARES = (5, 8, 14, 28, 45)  # percent of the training problems by steps; all alike in val and test

NAMES = ['Ann', 'Bob', 'Dan', 'Eve', 'Gus', 'Ivo', 'Kim', 'Lea', 'Max', 'Zoe']
THINGS = ['dial', 'disk', 'gear', 'knob', 'lock', 'ring']
OPENINGS = ["{name}'s {thing} is at {n}", "{name}'s {thing} shows {n}", '{name} has a {thing} at {n}',
            'A {thing} shows {n}']
QUESTIONS = ['. Where?', '. It is?']


def make_problem(rng, n_steps):
    """(question, steps, answer) with n_steps calculations."""
    n_turns = max(min(n_steps, FULL_STEPS), n_steps - rng.choice(STAYING))
    start = rng.randrange(DIGITS)
    turns = [rng.choice(TURNS) if i < n_turns else STAYS for i in range(MAX_STEPS)]
    opening = rng.choice(OPENINGS).format(name=rng.choice(NAMES), thing=rng.choice(THINGS), n=start)
    question = f'{opening}, turns {" ".join(turns)}{rng.choice(QUESTIONS)}'
    value, steps = start, []
    for turn in turns[:n_steps]:
        n, sign = int(turn[0]), turn[1]
        result = (n + value if sign == '+' else n - value) % DIGITS
        steps.append(f'{turn}{value}={result}')
        value = result
    return question, steps, str(value)


def may_have(split, question):
    """Whether a split may have the case that a question tells, which its digits and nothing else decide."""
    start, *turns = map(int, re.findall(r'\d', question))
    if turns[1] == 0:  # a single turn: in all splits
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
