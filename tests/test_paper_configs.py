"""The published runs: their models have the published sizes."""
import os

import pytest
import torch

import config
import train
from conftest import ROOT

# parameters of the model that a run trains or starts from, without what a method adds
PUBLISHED = {'rim_gpt2': 124_439_808, 'rim_llama_1b': 1_235_814_400, 'rim_llama_3b': 3_212_749_824,
             'cyb_gemma_2b': 2_506_172_416, 'cyb_gemma3_4b': 3_880_263_168}
NAMED = {'tb_150m': 150e6, 'tb_319m': 319e6, 'tb_772m': 772e6, 'tb_1_9b': 1.9e9, 'gpt_772m': 772e6,
         'copy3_772m': 772e6, 'copy5_772m': 772e6}
OTHERS = ['tbys_gemma_2b', 'tbys_gemma3_4b', 'coconut_gpt2']


def settings_of(name):
    """(train.py's settings, the model's) of a config."""
    classes = {method: entry[0] for method, entry in train.METHODS.items()}
    return config.load(train.__file__, [os.path.join(ROOT, 'config', name + '.py')], classes)[:2]


def parameters(method, settings):
    config_class, model_class, _ = train.METHODS[method]
    with torch.device('meta'):
        model = model_class(config_class(**settings))
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize('name', [*PUBLISHED, *NAMED, *OTHERS])
def test_a_published_run_has_a_model_of_the_published_size(name):
    settings, model_settings = settings_of(name)
    found = parameters(settings['method'], model_settings)
    if name in NAMED:
        assert abs(found / NAMED[name] - 1) < 0.02
    if name in PUBLISHED:
        core = {key: value for key, value in model_settings.items() if key in config.class_settings(train.GPTConfig)}
        core.update(lora_rank=0, vocab_size=core['vocab_size'] - (4 if settings['method'] == 'rim' else 0))
        assert parameters('gpt', core) == PUBLISHED[name] < found


def test_what_a_config_says_of_a_published_model_is_what_its_files_say(tmp_path):
    """Else the run would refuse to start from them."""
    from config.checkpoint import starting_settings
    from config.pretrained import read_settings
    from published import write_json
    llama = dict(model_type='llama', hidden_act='silu', rms_norm_eps=1e-5, vocab_size=128256, rope_theta=500000.0,
                 num_key_value_heads=8, intermediate_size=8192, tie_word_embeddings=True,
                 max_position_embeddings=131072, rope_scaling=dict(
                     factor=32.0, high_freq_factor=4.0, low_freq_factor=1.0, original_max_position_embeddings=8192,
                     rope_type='llama3'))
    files = {  # as published
        'rim_gpt2': dict(model_type='gpt2', n_layer=12, n_head=12, n_embd=768, n_positions=1024, vocab_size=50257,
                         activation_function='gelu_new'),
        'rim_llama_1b': dict(llama, num_hidden_layers=16, num_attention_heads=32, hidden_size=2048, head_dim=64),
        'rim_llama_3b': dict(llama, num_hidden_layers=28, num_attention_heads=24, hidden_size=3072, head_dim=128),
        'cyb_gemma_2b': dict(model_type='gemma', num_hidden_layers=18, num_attention_heads=8, num_key_value_heads=1,
                             head_dim=256, hidden_size=2048, intermediate_size=16384, vocab_size=256000,
                             hidden_act='gelu', max_position_embeddings=8192, rms_norm_eps=1e-6, rope_theta=10000.0),
        'cyb_gemma3_4b': dict(model_type='gemma3', text_config=dict(
            model_type='gemma3_text', hidden_size=2560, intermediate_size=10240, num_hidden_layers=34,
            rope_scaling=dict(factor=8.0, rope_type='linear'), sliding_window=1024, max_position_embeddings=131072)),
    }
    for name, file in files.items():
        write_json(tmp_path, 'config.json', file)
        _, _, saved = read_settings(str(tmp_path / 'config.json'))
        settings, model_settings = settings_of(name)
        meta = {'kind': 'records' if settings['method'] == 'rim' else 'text', 'vocab_size': 0}
        class_ = train.METHODS[settings['method']][0]
        full = {**vars(train.GPTConfig(**saved))}
        starting_settings({'model_config': full}, name, class_.shape, model_settings, meta)  # raises where they differ
