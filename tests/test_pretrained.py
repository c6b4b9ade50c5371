"""Published models: equal to transformers' where that is installed; their tokenizers; what is refused."""
import copy
import json
import os
import random
import string

import pytest
import torch

import data
import train
from config import UserError
from config.checkpoint import load_checkpoint
from config.pretrained import load_start, theirs
from conftest import ROOT, arguments, torchrun, without_reports, write_records
from data import Tokenizer, bpe
from published import FAMILIES, LAYOUTS, SPECIAL, change_json, change_tensors, tokenizer_json, write_json, write_model

transformers = pytest.importorskip('transformers', reason='pip install transformers safetensors tokenizers')


def both(family, folder, layout='transformers 5', **settings):
    """(transformers' model, ours) of the same weights."""
    other = write_model(family, str(folder), layout)
    start = load_start(str(folder))
    return other, train.build_model({**start, 'model_config': {**start['model_config'], **settings}}).eval()


@pytest.mark.parametrize('layout', LAYOUTS)
@pytest.mark.parametrize('family', FAMILIES)
def test_a_published_model_says_what_transformers_says(family, layout, tmp_path):
    other, model = both(family, tmp_path, layout)
    idx = torch.randint(256, (2, 24))  # Gemma 3's window is 5
    assert (model(idx)[0] - other(idx).logits).abs().max() < 1e-4

    # padding on the left
    pad = torch.arange(24) < torch.tensor([[7], [0]])
    positions = (torch.arange(24) - torch.tensor([[7], [0]])).clamp(min=0)
    expected = other(idx, attention_mask=(~pad).long(), position_ids=positions).logits
    assert (model(idx, pad=pad)[0] - expected)[~pad].abs().max() < 1e-4


@pytest.mark.parametrize('family', FAMILIES)
def test_cached_generation_goes_on_as_transformers_does_without_a_cache(family, tmp_path):
    other, model = both(family, tmp_path)
    prompts = [[5, 6, 7], [1, 2, 3, 4, 5, 6, 7, 8]]
    new = model.complete(prompts, 20, temperature=0)
    for prompt, tokens in zip(prompts, new):
        text = list(prompt)
        for token in tokens:
            assert other(torch.tensor([text])).logits[0, -1].argmax() == token
            text.append(token)


@pytest.mark.parametrize('family', FAMILIES)
def test_loss_and_gradients_are_those_of_transformers(family, tmp_path):
    other, model = both(family, tmp_path)
    idx = torch.randint(256, (2, 25))
    loss = model.train()(idx[:, :-1], idx[:, 1:])[1]
    expected = torch.nn.functional.cross_entropy(other(idx[:, :-1]).logits.flatten(0, 1), idx[:, 1:].flatten())
    assert (loss - expected).abs() < 1e-4
    loss.backward()
    expected.backward()
    for name, p in model.named_parameters():
        grads = [other.get_parameter(('' if part.startswith('lm_head') else other.base_model_prefix + '.') + part).grad
                 for part in theirs(name, other.config.model_type)]
        if family == 'gpt2' and name.endswith(('c_attn.weight', 'c_fc.weight', 'c_proj.weight')):
            grads = [grad.T for grad in grads]
        if name.endswith('q_norm.weight'):  # holds a factor of sqrt(16 / 10)
            grads = [grad / 1.6 ** 0.5 for grad in grads]
        torch.testing.assert_close(p.grad, torch.cat(grads), atol=1e-4, rtol=1e-3)
