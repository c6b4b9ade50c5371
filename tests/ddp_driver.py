"""Run train.main once for each job of the JSON file argv[1], each in a process of its own; started by torchrun.

A job is a list: arguments, whether the finished run makes its report, and the step in which all of its processes
are killed, or null.
"""
import contextlib
import functools
import json
import multiprocessing
import os
import signal
import sys

import torch._dynamo  # here, so that it is not imported in every run
import torch.distributed as dist
import torch.distributed.optim

from conftest import train, without_reports

child = None


def connect(number, init_process_group, backend):
    """A group of processes meets in torchrun's store, which is there already, under the number of its run."""
    rank, world, port = (int(os.environ[name]) for name in ('RANK', 'WORLD_SIZE', 'MASTER_PORT'))
    store = dist.TCPStore(os.environ['MASTER_ADDR'], port, world, is_master=False)
    init_process_group(backend, store=dist.PrefixStore(f'run {number}', store), rank=rank, world_size=world)


def run(number, arguments, report, killed_in):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    dist.init_process_group = functools.partial(connect, number, dist.init_process_group)
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
    signal.signal(signal.SIGTERM, stop)
    with open(sys.argv[1], encoding='utf-8') as f:
        jobs = json.load(f)
    for number, (arguments, report, killed_in) in enumerate(jobs):
        child = multiprocessing.get_context('fork').Process(target=run,
                                                            args=(number, arguments, report, killed_in))
        child.start()
        child.join()
        if child.exitcode != (0 if killed_in is None else -signal.SIGKILL):
            sys.exit(f'this run ended with {child.exitcode}: {" ".join(arguments)}')
