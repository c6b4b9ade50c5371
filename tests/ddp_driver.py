"""Run train.main once for each job of the JSON file argv[1], each in a process of its own; started by torchrun.

A job is a list: arguments, a port free for its group of processes, whether the finished run makes its report, and
the step in which all of them are killed, or null.
"""
import contextlib
import json
import multiprocessing
import os
import signal
import sys

import torch._dynamo  # here, so that it is not imported in every run
import torch.distributed.optim

from conftest import train, without_reports

child = None


def run(arguments, report, killed_in):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    rate = train.learning_rate_at  # asked for once in each step

    def killed(stage, it):
        if it == killed_in:
            os.kill(os.getpid(), signal.SIGKILL)
        return rate(stage, it)

    train.learning_rate_at = killed
    with contextlib.nullcontext() if report else without_reports():
        train.main(arguments)


def stop(*_):
    if child:
        child.kill()
    sys.exit(1)


if __name__ == '__main__':
    os.environ['TORCHELASTIC_USE_AGENT_STORE'] = 'False'  # a process group per run wants a store of its own
    signal.signal(signal.SIGTERM, stop)
    with open(sys.argv[1], encoding='utf-8') as f:
        jobs = json.load(f)
    for arguments, port, report, killed_in in jobs:
        os.environ['MASTER_PORT'] = str(port)
        child = multiprocessing.get_context('fork').Process(target=run, args=(arguments, report, killed_in))
        child.start()
        child.join()
        if child.exitcode != (0 if killed_in is None else -signal.SIGKILL):
            sys.exit(f'this run ended with {child.exitcode}: {" ".join(arguments)}')
