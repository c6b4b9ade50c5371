"""Word problems made on the spot: 1 to 6 steps of arithmetic on a dial with five digits, the same for the same seed.

Ann's dial is at 3, turns 4 2 1 3 3 2. After 2?   steps 3+4=2, 2+2=4   answer 4

After 4 comes 0 again: as long as one turn is unknown, no answer is likelier than one in four, so that guessing or adding
up roughly gains little. Six turns are always told and the question asks about some of them; thus the turns stand where a
small model finds them quickly. Five digits make 20 sums, which are to be learned anew for each depth of the chain. No
question occurs in two of train, val and test; with so few digits the same turns do, in other words.
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
MAX_STEPS, DIGITS = 6, 5

NAMES = ['Ann', 'Bob', 'Dan', 'Eve', 'Gus', 'Ivo', 'Kim', 'Lea', 'Max', 'Zoe']
THINGS = ['dial', 'disk', 'gear', 'knob', 'lock', 'ring']
OPENINGS = ["{name}'s {thing} is at {n}", "{name}'s {thing} shows {n}", '{name} has a {thing} at {n}', 'A {thing} shows {n}']
QUESTIONS = ['. After {n}?', '. Up to {n}?']


def make_problem(rng, n_steps):
    """(question, steps, answer) with n_steps calculations."""
    value, turns = rng.randrange(DIGITS), [rng.randint(1, DIGITS - 1) for _ in range(MAX_STEPS)]
    opening = rng.choice(OPENINGS).format(name=rng.choice(NAMES), thing=rng.choice(THINGS), n=value)
    text, steps = f'{opening}, turns {" ".join(map(str, turns))}', []
    for turn in turns[:n_steps]:
        result = (value + turn) % DIGITS
        steps.append(f'{value}+{turn}={result}')
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
