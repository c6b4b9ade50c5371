"""Published weights: a folder as Hugging Face lays it out (config.json, *.safetensors, tokenizer.json) becomes a
checkpoint of this project, that of a GPT at step 0.

    FAMILIES   config.json -> settings of GPTConfig
    NAMES      our tensors -> theirs

Only safetensors files are read: a pickle can run code.
"""
import math
import os
import re

import torch

from config import UserError, need, on_hub, read_json
from config.checkpoint import VERSION, first_line, load_checkpoint
from data import Tokenizer
from data.bpe import published_spec

BLOCK_SIZE = 1024  # at most, unless set: a row's memory and time grow with it, and published models reach far
WANTED = ['config.json', 'generation_config.json', 'tokenizer.json', 'tokenizer_config.json', '*.safetensors',
          'model.safetensors.index.json']


# --- where a start is ---

def load_start(name):
    """The checkpoint to start from: a file, a run's folder, a published model's folder, or its name. Raises
    UserError."""
    if os.path.exists(os.path.join(name, 'config.json')):
        return read_folder(name)
    if os.path.isdir(name):
        path = os.path.join(name, 'ckpt.pt')
        if not os.path.exists(path):
            raise UserError(f'{name} has neither a ckpt.pt nor the config.json of a published model')
        return load_checkpoint(path)
    return read_folder(download(name)) if on_hub(name) and not os.path.exists(name) else load_checkpoint(name)


def download(name):
    """The folder that a model on the hub was fetched into."""
    hub = need('huggingface_hub', 'fetching a model')
    print(f'{name}: looking for it on the Hugging Face hub, or in its cache here', flush=True)
    try:
        return hub.snapshot_download(name, allow_patterns=WANTED)
    except hub.errors.GatedRepoError as e:
        raise UserError(f'{name} is open only to those who accepted its licence: do that on its page at '
                        'huggingface.co, then run hf auth login') from e
    except hub.errors.RepositoryNotFoundError as e:
        raise UserError(f'{name} is not on the Hugging Face hub, or not for you: check the name, or run hf auth '
                        'login') from e
    except Exception as e:  # many kinds, of the hub and of the network
        raise UserError(f'{name} could not be fetched ({type(e).__name__}: {first_line(e)}): without a network, give '
                        'a folder that has it') from e


# --- settings ---

def gpt2(c):
    return dict(n_layer=c['n_layer'], n_head=c['n_head'], n_embd=c['n_embd'], n_hidden=c.get('n_inner') or 0,
                bias=True, learned_positions=True, activation=activation(c.get('activation_function', 'gelu_new')),
                norm_eps=c.get('layer_norm_epsilon', 1e-5), tie_weights=c.get('tie_word_embeddings', True),
                block_size=c.get('n_positions', 1024), vocab_size=c.get('vocab_size', 50257))


def llama(c):
    theta, frequencies = rotary(c, c.get('rope_parameters') or c.get('rope_scaling') or {}, 10000.0)
    return dict(n_layer=c['num_hidden_layers'], n_head=c['num_attention_heads'], n_embd=c['hidden_size'],
                n_hidden=c['intermediate_size'], n_kv_head=c.get('num_key_value_heads') or c['num_attention_heads'],
                head_dim=c.get('head_dim') or 0, gated=True, activation=activation(c.get('hidden_act', 'silu')),
                rms_norm=True, norm_eps=c.get('rms_norm_eps', 1e-6), tie_weights=c.get('tie_word_embeddings', False),
                rope_base=theta, rope_frequencies=frequencies, vocab_size=c.get('vocab_size', 32000),
                block_size=c.get('max_position_embeddings', 2048))


def gemma(c):
    c = {'head_dim': 256, 'num_key_value_heads': 16, 'tie_word_embeddings': True, 'vocab_size': 256000,
         'max_position_embeddings': 8192, **c}
    act = c.get('hidden_activation') or 'gelu_pytorch_tanh'  # its hidden_act says gelu and means the tanh form
    return {**llama({**c, 'hidden_act': act}), 'scale_embedding': True}


def gemma3(c):
    c = {'hidden_size': 2304, 'intermediate_size': 9216, 'num_hidden_layers': 26, 'num_attention_heads': 8,
         'num_key_value_heads': 4, 'vocab_size': 262208, 'max_position_embeddings': 131072, 'rope_theta': 1e6,
         'sliding_window': 4096, 'query_pre_attn_scalar': 256, **c}
    n = c['num_hidden_layers']
    types = c.get('layer_types')
    if types is None:
        every = c.get('sliding_window_pattern') or c.get('_sliding_window_pattern') or 6
        types = ['sliding_attention' if (i + 1) % every else 'full_attention' for i in range(n)]
    rope = c.get('rope_parameters') or {}
    local = rope.get('sliding_attention', {}).get('rope_theta') or c.get('rope_local_base_freq') or 10000.0
    c['rope_parameters'] = rope.get('full_attention') or c.get('rope_scaling') or {}
    return {**gemma(c), 'qk_norm': True, 'second_norms': True, 'window': c['sliding_window'],
            'local_layers': tuple(i for i in range(n) if types[i] == 'sliding_attention'),
            'local_rope_base': float(local)}


def activation(name):
    names = {'gelu_new': 'gelu_tanh', 'gelu_pytorch_tanh': 'gelu_tanh', 'gelu': 'gelu', 'silu': 'silu',
             'swish': 'silu'}
    if name not in names:
        raise UserError(f'activation {name!r}: there are {", ".join(names)}')
    return names[name]


def rotary(c, scaling, default):
    """(rope_base, rope_frequencies) of config.json and its part on rotary positions."""
    base = float(scaling.get('rope_theta') or c.get('rope_theta') or default)
    kind = scaling.get('rope_type', scaling.get('type', 'default'))
    if kind == 'default':
        return base, ()
    D = c.get('head_dim') or c['hidden_size'] // c['num_attention_heads']
    plain = [base ** (-i / D) for i in range(0, D, 2)]
    factor = scaling.get('factor')
    if kind == 'linear':
        return base, tuple(f / factor for f in plain)
    if kind != 'llama3':
        raise UserError(f'rotary scaling of type {kind!r}: there are default, linear and llama3')
    # Llama 3.1: pairs that turn often within the old length keep their frequency, slow ones are divided by factor
    low, high, old_length = (scaling[name] for name in ('low_freq_factor', 'high_freq_factor',
                                                        'original_max_position_embeddings'))
    keep = [min(1.0, max(0.0, (old_length * f / (2 * math.pi) - low) / (high - low))) for f in plain]
    return base, tuple(f * (k + (1 - k) / factor) for f, k in zip(plain, keep))


FAMILIES = {'gpt2': gpt2, 'llama': llama, 'gemma': gemma, 'gemma3_text': gemma3, 'gemma3': gemma3}
MODELS = 'GPT-2, Llama (3, SmolLM2), Gemma 1, Gemma 3'
# what must be off or absent, since the core has no such thing
OFF = ('attention_bias', 'mlp_bias', 'add_cross_attention', 'scale_attn_by_inverse_layer_idx',
       'reorder_and_upcast_attn', 'attn_logit_softcapping', 'final_logit_softcapping', 'use_bidirectional_attention')
NAMES = {'wte': ['embed_tokens'], 'ln_f': ['norm'], 'ln_1': ['input_layernorm'], 'ln_2': ['post_attention_layernorm'],
         'attn.c_attn': ['self_attn.q_proj', 'self_attn.k_proj', 'self_attn.v_proj'],
         'attn.c_proj': ['self_attn.o_proj'], 'mlp.c_fc': ['mlp.gate_proj', 'mlp.up_proj'],
         'mlp.c_proj': ['mlp.down_proj'], 'attn.q_norm': ['self_attn.q_norm'], 'attn.k_norm': ['self_attn.k_norm']}
GEMMA3_NAMES = {'post_1': ['post_attention_layernorm'], 'ln_2': ['pre_feedforward_layernorm'],
                'post_2': ['post_feedforward_layernorm']}


def settings_of(path):
    """(family, config.json of the language model, our settings) of a config.json."""
    c = read_json(path)
    family = c.get('model_type')
    if family not in FAMILIES:
        raise UserError(f'{path}: architecture {family!r} is not supported: there are {MODELS}')
    c = {**c, **c.get('text_config', {})} if family == 'gemma3' else c
    for name in OFF:
        if c.get(name):
            raise UserError(f'{path}: {name} = {c[name]!r} is not supported')
    try:
        return family, c, FAMILIES[family](c)
    except UserError as e:
        raise UserError(f'{path}: {e}') from None
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as e:
        raise UserError(f'{path} is damaged or lacks a setting ({type(e).__name__}: {e})') from e


# --- weights ---

def open_tensors(folder):
    """{tensor's name: the open file that has it} of all safetensors files of a folder."""
    safe_open = need('safetensors', 'reading published weights').safe_open
    index = os.path.join(folder, 'model.safetensors.index.json')
    weight_map = read_json(index).get('weight_map')
    files = sorted({*weight_map.values()}) if weight_map else ['model.safetensors']
    where = {}
    for file in files:
        path = os.path.join(folder, os.path.basename(file))
        if not os.path.exists(path):
            why = f'{index} names it' if weight_map else 'other formats, such as pickles, are not read'
            raise UserError(f'{path} is missing: {why}')
        try:
            handle = safe_open(path, 'pt')
            where.update((name, handle) for name in handle.keys())
        except Exception as e:
            raise UserError(f'{path} is damaged or not complete ({first_line(e)})') from e
    lacking = sorted({*(weight_map or ())} - {*where})
    if lacking:
        raise UserError(f'{index} names {lacking[0]}, which its file lacks')
    return where


def strip(name):
    """(name without what stands before a language model's tensors, whether it is one)."""
    if re.match(r'(model\.)?(vision_tower|multi_modal_projector)\.', name):
        return name, False
    return re.sub(r'^((language_model\.)?model\.(language_model\.)?|transformer\.|language_model\.)', '', name), True


def read_weights(folder, family, shapes):
    """Weights for the tensors whose {name: shape} are given."""
    where, skipped = {}, 0
    for name, file in open_tensors(folder).items():
        short, wanted = strip(name)
        skipped += not wanted
        if wanted and not re.search(r'(\.attn\.(masked_)?bias|rotary_emb\.inv_freq)$', short):  # buffers
            where[short] = name, file
    if skipped:
        print(f'{folder}: {skipped} tensors of the vision tower are left out: only the language model is read')
    state = {}
    unused = {*where}
    for name, shape in shapes.items():
        parts = theirs(name, family)
        if name == 'lm_head.weight' and parts[0] not in where:
            parts = theirs('wte.weight', family)  # tied: the file has it once
        for part in parts:
            if part not in where:
                raise UserError(f'{folder}: its files have no tensor {part}, but config.json asks for one')
        unused -= {*parts}
        try:
            found = [where[part][1].get_tensor(where[part][0]).float() for part in parts]
        except Exception as e:
            raise UserError(f'{folder}: {parts[0]} cannot be read ({first_line(e)})') from e
        if family == 'gpt2' and re.search(r'(c_attn|c_fc|c_proj)\.weight$', name):
            found = [tensor.T for tensor in found]  # GPT-2 multiplies from the other side
        if family.startswith('gemma') and found[0].dim() == 1:
            found = [1 + tensor for tensor in found]  # its norms multiply by 1 + w
        if any(tensor.shape[1:] != shape[1:] for tensor in found) or sum(map(len, found)) != shape[0]:
            sizes = ', '.join(f'{part} {tuple(where[part][1].get_slice(where[part][0]).get_shape())}' for part in parts)
            raise UserError(f'{folder}: {sizes} does not fit config.json, which makes {tuple(shape)} of it')
        state[name] = torch.cat(found).contiguous() if len(found) > 1 else found[0].contiguous()
    if unused:
        raise UserError(f'{folder}: {sorted(unused)[0]} has no place in this architecture ({len(unused)} such tensors)')
    return state


def theirs(name, family):
    """The published names of one of our tensors."""
    module, kind = name.rsplit('.', 1)
    if family == 'gpt2':
        return [name.replace('layers.', 'h.', 1)]
    layer, inner = re.fullmatch(r'(layers\.\d+\.)?(.+)', module).groups()
    names = {**NAMES, **GEMMA3_NAMES} if family.startswith('gemma3') else NAMES
    return [f'{layer or ""}{part}.{kind}' for part in names.get(inner, [inner])]


# --- all of it ---

def read_folder(folder):
    """A published model's folder as a checkpoint. Raises UserError."""
    from model import GPT, GPTConfig  # which builds on this package
    family, c, settings = settings_of(os.path.join(folder, 'config.json'))
    try:
        config = GPTConfig(**settings)
        with torch.device('meta'):
            shapes = {name: tensor.shape for name, tensor in GPT(config).state_dict().items()}
    except (UserError, TypeError) as e:
        raise UserError(f'{folder}/config.json: {e}') from e
    state = read_weights(folder, family, shapes)
    if family.startswith('gemma3'):  # its own divisor of q.k, where we have sqrt(D)
        for name in [name for name in state if name.endswith('q_norm.weight')]:
            state[name] *= (config.head_width / c.get('query_pre_attn_scalar', 256)) ** 0.5
    try:
        spec = published_spec(folder, c.get('eos_token_id'))
        size = Tokenizer(spec).vocab_size
    except (KeyError, TypeError, AttributeError, IndexError) as e:
        raise UserError(f'{folder}: tokenizer.json or tokenizer_config.json is damaged ({e!r})') from e
    if size > config.vocab_size:
        raise UserError(f'{folder}: the tokenizer has {size} tokens, config.json has vocab_size = {config.vocab_size}')
    if not config.learned_positions:
        settings['block_size'] = min(settings['block_size'], BLOCK_SIZE)
    return {'version': VERSION, 'method': 'gpt', 'model_config': settings, 'model': state,
            'meta': {'kind': 'text', 'tokenizer': spec, 'vocab_size': size}, 'step': 0, 'settings': {},
            'best_val_loss': math.inf}
