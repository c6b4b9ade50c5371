"""Tiny random models in the layout of published ones: written by transformers, which is also what they are compared
with, in both forms of config.json that are in use."""
import json
import os

import torch

from data.bpe import GPT2, byte_alphabet

SHARED = dict(vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4)
LLAMA3 = {'rope_type': 'llama3', 'rope_theta': 500.0, 'factor': 8.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0,
          'original_max_position_embeddings': 16}
LINEAR = {'full_attention': {'rope_type': 'linear', 'rope_theta': 1e6, 'factor': 8.0},
          'sliding_attention': {'rope_type': 'default', 'rope_theta': 1e4}}
# name -> (transformers' config class, model class, settings)
FAMILIES = {
    'gpt2': ('GPT2Config', 'GPT2LMHeadModel', dict(vocab_size=300, n_positions=64, n_embd=32, n_layer=3, n_head=4)),
    'llama': ('LlamaConfig', 'LlamaForCausalLM', dict(SHARED, num_key_value_heads=2, tie_word_embeddings=True)),
    'llama3': ('LlamaConfig', 'LlamaForCausalLM', dict(SHARED, num_key_value_heads=1, tie_word_embeddings=False,
                                                       rope_parameters=LLAMA3)),
    'gemma': ('GemmaConfig', 'GemmaForCausalLM', dict(SHARED, num_key_value_heads=1, head_dim=16)),
    'gemma3': ('Gemma3TextConfig', 'Gemma3ForCausalLM', dict(
        SHARED, num_hidden_layers=7, num_key_value_heads=2, head_dim=16, sliding_window=5, query_pre_attn_scalar=10,
        rope_parameters=LINEAR)),
}
LAYOUTS = ['transformers 5', 'published']
SPECIAL = ['<|endoftext|>', '<bos>']


def tokenizer_json(begin=False):
    """A byte-level BPE of 256 bytes, three merges and two special tokens."""
    merges = ['t h', 'th e', 'Ġ the']
    vocab = {token: i for i, token in enumerate([*byte_alphabet(), *(merge.replace(' ', '') for merge in merges)])}
    added = [{'id': 259 + i, 'content': token, 'single_word': False, 'lstrip': False, 'rstrip': False,
              'normalized': False, 'special': True} for i, token in enumerate(SPECIAL)]
    level = {'type': 'ByteLevel', 'add_prefix_space': False, 'trim_offsets': True, 'use_regex': True}
    post = {'type': 'TemplateProcessing', 'pair': [],
            'single': [{'SpecialToken': {'id': '<bos>', 'type_id': 0}}, {'Sequence': {'id': 'A', 'type_id': 0}}],
            'special_tokens': {'<bos>': {'id': '<bos>', 'ids': [260], 'tokens': ['<bos>']}}}
    return {'version': '1.0', 'truncation': None, 'padding': None, 'added_tokens': added, 'normalizer': None,
            'pre_tokenizer': level, 'post_processor': post if begin else None, 'decoder': level,
            'model': {'type': 'BPE', 'dropout': None, 'unk_token': None, 'continuing_subword_prefix': None,
                      'end_of_word_suffix': None, 'fuse_unk': False, 'byte_fallback': False, 'ignore_merges': False,
                      'vocab': vocab, 'merges': merges}}


def write_json(folder, name, content):
    with open(os.path.join(folder, name), 'w', encoding='utf-8') as f:
        json.dump(content, f)


def change_json(folder, name, change):
    with open(os.path.join(folder, name), encoding='utf-8') as f:
        content = json.load(f)
    write_json(folder, name, change(content) or content)


def change_tensors(folder, change):
    """Write model.safetensors anew; change: {name: tensor} -> the same."""
    from safetensors.torch import load_file, save_file
    path = os.path.join(folder, 'model.safetensors')
    save_file(change(load_file(path)), path, {'format': 'pt'})


def write_model(family, folder, layout='transformers 5', begin=False):
    """Write a model with random weights of some size, so that attention is not flat; returns transformers' model."""
    import transformers
    config_class, model_class, settings = FAMILIES[family]
    config = getattr(transformers, config_class)(**settings, attn_implementation='eager', eos_token_id=259)
    model = getattr(transformers, model_class)(config).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    model.save_pretrained(folder)
    write_json(folder, 'tokenizer.json', tokenizer_json(begin))
    if layout == 'published':
        change_json(folder, 'config.json', as_published)
        if family == 'gpt2':
            buffers = {f'h.{i}.attn.bias': torch.ones(1, 1, 64, 64) for i in range(3)}
            change_tensors(folder, lambda weights: {**buffers, **{name.removeprefix('transformer.'): tensor
                                                                  for name, tensor in weights.items()}})
    return model


def as_published(config):
    """config.json as it was before transformers 5."""
    config['torch_dtype'] = config.pop('dtype')
    rope = config.pop('rope_parameters', None)
    if config['model_type'] == 'gemma3_text':
        whole, local = dict(rope['full_attention']), rope['sliding_attention']
        del config['layer_types'], config['tie_word_embeddings']
        config.update(rope_local_base_freq=local['rope_theta'], rope_theta=whole.pop('rope_theta'), rope_scaling=whole,
                      sliding_window_pattern=config.pop('_sliding_window_pattern', 6))
    elif rope:
        config['rope_theta'] = rope.pop('rope_theta')
        config['rope_scaling'] = None if rope['rope_type'] == 'default' else rope
