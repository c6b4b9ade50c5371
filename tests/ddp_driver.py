"""Run train.main once for each list of arguments in the JSON file argv[1]; started by torchrun.

With a second argument a finished run makes no report, which takes longer than a tiny run.
"""
import json
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import train

if __name__ == '__main__':
    os.environ['TORCHELASTIC_USE_AGENT_STORE'] = 'False'  # a process group per run wants a store of its own
    for *_, batch_class in train.METHODS.values() if sys.argv[2:] else []:
        batch_class.report = lambda self, model: ''
    with open(sys.argv[1], encoding='utf-8') as f:
        for arguments, port in json.load(f):
            os.environ['MASTER_PORT'] = str(port)
            train.main(arguments)
