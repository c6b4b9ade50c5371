"""What tests/test_registry.py packs into few cases, apart: python tests/registry_long.py

Each second value of a setting by itself, for every method, and each pair of those that the method adds. Prints the
cases that fail, those that change no loss, and a summary, which tests/README.md records.
"""
import contextlib
import io
import itertools
import sys
import tempfile
import time
from pathlib import Path

import pytest

from conftest import train  # first: it puts the repository on the path
from config import class_settings
from model import GPTConfig
from test_registry import SETTINGS, changes, check, fit, train_on_two_processes


def cases_of(method):
    """The defaults, each change, each pair of the method's own ones that goes together."""
    singles = list(changes(method))
    own = SETTINGS[method].keys() - class_settings(GPTConfig).keys() or SETTINGS[method].keys()
    pairs = itertools.combinations([change for change in singles if next(iter(change)) in own], 2)
    cases = [{}, *singles, *({**a, **b} for a, b in pairs if fit(method, a, b))]
    return [case for i, case in enumerate(cases) if case not in cases[:i]]


def try_all(cases, prepare, check):
    """prepare(), then check(number, case) for each, in silence; prints the cases that fail, and a summary. Returns
    how many failed."""
    start, failed = time.perf_counter(), 0
    with contextlib.redirect_stdout(io.StringIO()):
        prepare()
        for i, case in enumerate(cases):
            try:
                check(i, case)
            except (Exception, pytest.fail.Exception) as e:
                failed += 1
                print(f'failed: {case}: {type(e).__name__} {e}', file=sys.stderr)
    print(f'{len(cases)} cases, {failed} failed, {time.perf_counter() - start:.0f} seconds')
    return failed


def main():
    cases = [(method, case) for method in train.METHODS for case in cases_of(method)]
    losses = {}
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)

        def check_and_compare(i, case):
            method, settings = case
            twin = losses.setdefault((method, tuple(check(folder, i))), settings)
            if twin is not settings:
                print(f'the same losses: {method} {settings} and {twin}', file=sys.stderr)

        sys.exit(try_all(cases, lambda: train_on_two_processes(folder, cases), check_and_compare) > 0)


if __name__ == '__main__':
    main()
