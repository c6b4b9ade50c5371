"""Run train.main once for each job of the JSON file argv[1]; started by torchrun.

A job is a list: arguments, a port free for its group of processes, whether the finished run makes its report.
"""
import contextlib
import json
import os
import sys

from conftest import train, without_reports

if __name__ == '__main__':
    os.environ['TORCHELASTIC_USE_AGENT_STORE'] = 'False'  # a process group per run wants a store of its own
    with open(sys.argv[1], encoding='utf-8') as f:
        jobs = json.load(f)
    for arguments, port, report in jobs:
        os.environ['MASTER_PORT'] = str(port)
        with contextlib.nullcontext() if report else without_reports():
            train.main(arguments)
