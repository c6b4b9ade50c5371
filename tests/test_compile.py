"""torch.compile: one graph for a training step, whatever the length of its rows."""
import os

import pytest
import torch
from torch._dynamo.utils import counters

from train import METHODS

# how far the graph goes: as Python's bytecode is read, or with its backward pass as operators, five times as slow
BACKEND = 'aot_eager' if os.environ.get('LONG_TESTS') else 'eager'
CASES = {'gpt': {}, 'thoughtbubbles': {'fork_layers': (1,)}, 'cyb': {'W': 2, 'omega': 'uniform'}, 'rim': {}}
if os.environ.get('LONG_TESTS'):
    CASES['thoughtbubbles residual'] = {'fork_layers': (1,), 'merge': 'residual'}


def batch(method, T):
    idx = torch.randint(15, (2, T))
    if method != 'rim':
        return idx, torch.randint(15, (2, T))
    at = torch.arange(3, 2 * T - 1, 2)
    readout = (torch.arange(T) // 4).repeat(2, 1)
    return idx, torch.randint(15, at.shape), torch.rand(at.shape), at, torch.arange(T).repeat(2, 1), readout


@pytest.mark.parametrize('case', CASES)
def test_a_training_step_is_one_graph_and_a_second_one_serves_every_other_length(case):
    method = case.split()[0]
    config_class, model_class, _ = METHODS[method]
    torch.manual_seed(0)
    model = model_class(config_class(vocab_size=19, block_size=16, n_layer=2, n_head=2, n_embd=8, **CASES[case]))
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(model, backend=BACKEND, fullgraph=True)  # raises where the graph breaks
    for T in (16, 9, 12, 7):
        tensors = batch(method, T)
        losses = [m(*tensors)[1] for m in (model, compiled)]
        grads = [torch.autograd.grad(loss, list(model.parameters()), allow_unused=True) for loss in losses]
        assert abs(losses[0] - losses[1]) < 1e-5 * losses[0]
        for eager, other in zip(*grads):
            assert eager is other is None or (eager - other).abs().max() < 1e-5
    assert counters['stats']['unique_graphs'] <= 2
