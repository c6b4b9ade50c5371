"""Published weights: a folder as Hugging Face lays it out (config.json, *.safetensors, tokenizer.json) becomes a
checkpoint of this project, that of a GPT at step 0. FAMILIES turns config.json into settings, NAMES our tensors'
names into theirs. Only safetensors files are read: a pickle can run code."""
import math
import os
import re

import torch

from config import UserError, need, read_json
from config.checkpoint import VERSION, first_line
from data import Tokenizer
from data.bpe import published_spec

BLOCK_SIZE = 1024  # at most, unless set: a row's memory and time grow with it, and published models reach far
ACTIVATIONS = {'gelu_new': 'gelu_tanh', 'gelu_pytorch_tanh': 'gelu_tanh', 'gelu': 'gelu', 'silu': 'silu'}
# settings that must be off or absent, since the core has no such thing
OFF = ('quantization_config', 'attention_bias', 'mlp_bias', 'add_cross_attention',
       'scale_attn_by_inverse_layer_idx', 'reorder_and_upcast_attn', 'attn_logit_softcapping',
       'final_logit_softcapping', 'use_bidirectional_attention')


# --- settings: config.json -> those of GPTConfig ---

def gpt2(c):
    return dict(n_layer=c['n_layer'], n_head=c['n_head'], n_embd=c['n_embd'], n_hidden=c.get('n_inner') or 0,
                bias=True, learned_positions=True,
                activation=ACTIVATIONS[c.get('activation_function', 'gelu_new')],
                norm_eps=c.get('layer_norm_epsilon', 1e-5), tie_weights=c.get('tie_word_embeddings', True),
                block_size=c['n_positions'], vocab_size=c['vocab_size'])


def llama(c):
    base, frequencies = rotary(c, c.get('rope_parameters') or c.get('rope_scaling') or {})
    return dict(n_layer=c['num_hidden_layers'], n_head=c['num_attention_heads'], n_embd=c['hidden_size'],
                n_kv_head=c.get('num_key_value_heads') or c['num_attention_heads'], head_dim=head_width(c),
                n_hidden=c['intermediate_size'], gated=True, activation=ACTIVATIONS[c.get('hidden_act', 'silu')],
                rms_norm=True, norm_eps=c.get('rms_norm_eps', 1e-6), rope_base=base, rope_frequencies=frequencies,
                tie_weights=c.get('tie_word_embeddings', False), vocab_size=c['vocab_size'],
                block_size=min(c['max_position_embeddings'], BLOCK_SIZE))


def head_width(c):
    return c.get('head_dim') or c['hidden_size'] // c['num_attention_heads']


def gemma(c):
    act = c.get('hidden_activation') or c.get('hidden_act', 'gelu')
    act = 'gelu_pytorch_tanh' if act == 'gelu' else act  # which is what published files mean by gelu
    c = {'head_dim': 256, 'tie_word_embeddings': True, 'max_position_embeddings': 8192, **c, 'hidden_act': act}
    return {**llama(c), 'scale_embedding': True}


def gemma3(c):
    rope = c.get('rope_parameters') or {}  # one for each type of layer; older files have three settings
    local, scaled = rotary({**c, 'rope_theta': c.get('rope_local_base_freq')}, rope.get('sliding_attention', {}))
    whole = rope.get('full_attention') or c.get('rope_scaling') or {}
    c = {'num_attention_heads': 8, 'num_key_value_heads': 4, 'vocab_size': 262208, 'rope_theta': 1e6, **c,
         'rope_parameters': whole}
    n = c['num_hidden_layers']
    every = c.get('sliding_window_pattern') or 6
    if scaled:
        raise UserError('rotary scaling of the local layers is not supported')
    types = c.get('layer_types') or [('sliding' if (i + 1) % every else 'full') + '_attention' for i in range(n)]
    if len(types) != n or not {*types} <= {'sliding_attention', 'full_attention'}:
        raise UserError(f'layer_types = {types}: expected sliding_attention or full_attention for each of {n} '
                        'layers')
    return {**gemma(c), 'qk_norm': True, 'second_norms': True, 'local_rope_base': local,
            'window': c.get('sliding_window', 4096),
            'local_layers': tuple(i for i in range(n) if types[i] == 'sliding_attention')}


def rotary(c, scaling):
    """(rope_base, rope_frequencies) of config.json and its part on rotary positions."""
    base = float(scaling.get('rope_theta') or c.get('rope_theta') or 10000.0)
    kind = scaling.get('rope_type', scaling.get('type', 'default'))
    if kind == 'default':
        return base, ()
    D = head_width(c)
    plain = [base ** (-i / D) for i in range(0, D, 2)]
    keep = [0.0] * len(plain)  # the share of a frequency that is not divided by factor
    if kind == 'llama3':  # all of what turns often within the length that was trained first, none of the slow
        low, high, length = (scaling[name] for name in ('low_freq_factor', 'high_freq_factor',
                                                        'original_max_position_embeddings'))
        keep = [min(1.0, max(0.0, (length * f / (2 * math.pi) - low) / (high - low))) for f in plain]
    elif kind != 'linear':
        raise UserError(f'rotary scaling of type {kind!r}: there are default, linear and llama3')
    return base, tuple(f * (k + (1 - k) / scaling['factor']) for f, k in zip(plain, keep))


FAMILIES = {'gpt2': gpt2, 'llama': llama, 'gemma': gemma, 'gemma3_text': gemma3, 'gemma3': gemma3}


def read_settings(path):
    """(family, config.json of the language model, our settings)."""
    c = read_json(path)
    family = c.get('model_type')
    if not isinstance(family, str) or family not in FAMILIES:
        raise UserError(f'{path}: architecture {family!r} is not supported: there are {", ".join(FAMILIES)}')
    try:
        c = {**c, **{name: value for name, value in c.get('text_config', {}).items() if value is not None}}
        for name in OFF:
            if c.get(name):
                raise UserError(f'{name} = {c[name]!r} is not supported')
        if not c.get('scale_attn_weights', True):
            raise UserError('scale_attn_weights = False is not supported')
        for name in ('activation_function', 'hidden_activation', 'hidden_act'):
            if c.get(name) not in (None, *ACTIVATIONS):
                raise UserError(f'{name} = {c[name]!r}: there are {", ".join(ACTIVATIONS)}')
        return family, c, FAMILIES[family](c)
    except UserError as e:
        raise UserError(f'{path}: {e}') from None
    except Exception as e:  # anything may stand in it
        raise UserError(f'{path} is damaged or lacks a setting ({type(e).__name__}: {e})') from e


# --- weights ---

NAMES = {'wte': ['embed_tokens'], 'ln_f': ['norm'], 'ln_1': ['input_layernorm'],
         'ln_2': ['post_attention_layernorm'],
         'attn.c_attn': ['self_attn.q_proj', 'self_attn.k_proj', 'self_attn.v_proj'],
         'attn.c_proj': ['self_attn.o_proj'], 'mlp.c_fc': ['mlp.gate_proj', 'mlp.up_proj'],
         'mlp.c_proj': ['mlp.down_proj'], 'attn.q_norm': ['self_attn.q_norm'], 'attn.k_norm': ['self_attn.k_norm']}
GEMMA3_NAMES = {**NAMES, 'post_1': ['post_attention_layernorm'], 'ln_2': ['pre_feedforward_layernorm'],
                'post_2': ['post_feedforward_layernorm']}
BEFORE = re.compile(r'^((language_model\.)?model\.(language_model\.)?|transformer\.|language_model\.)')
BUFFER = re.compile(r'(\.attn\.(masked_)?bias|rotary_emb\.inv_freq)$')
VISION = re.compile(r'^(model\.)?(vision_tower|multi_modal_projector)\.')


def theirs(name, family):
    """The published names, without what stands before all of them, of one of our tensors."""
    if family == 'gpt2':
        return [name.replace('layers.', 'h.', 1)]
    layer, module, kind = re.fullmatch(r'(layers\.\d+\.)?(.+)\.(\w+)', name).groups()
    names = GEMMA3_NAMES if family.startswith('gemma3') else NAMES
    return [f'{layer or ""}{part}.{kind}' for part in names.get(module, [module])]


def open_tensors(folder):
    """{name: the open file that has it} of a folder's tensors."""
    safe_open = need('safetensors', 'reading published weights').safe_open
    index = os.path.join(folder, 'model.safetensors.index.json')
    weight_map = read_json(index).get('weight_map') or {'': 'model.safetensors'}
    where = {}
    for file in sorted({*weight_map.values()}):
        path = os.path.join(folder, os.path.basename(file))
        if not os.path.exists(path):
            why = 'other formats, such as pickles, are not read' if '' in weight_map else f'{index} names it'
            raise UserError(f'{path} is missing: {why}')
        try:
            handle = safe_open(path, 'pt')
            where.update((name, handle) for name in handle.keys())
        except Exception as e:
            raise UserError(f'{path} is damaged or not complete ({first_line(e)})') from e
    return where


def read_weights(folder, family, config, shapes):
    """The weights of a GPT with these tensors, {name: shape}. Raises UserError where the files have others."""
    q, kv = (heads * config.head_width for heads in (config.n_head, config.kv_heads))
    rows_of = {'c_attn': [q, kv, kv], 'c_fc': [config.n_hidden, config.n_hidden]}  # of what we have in one
    where = {}
    tensors = open_tensors(folder)
    skipped = [name for name in tensors if VISION.match(name)]
    if skipped:
        print(f'{folder}: {len(skipped)} tensors of the vision tower are left out')
    for name, file in tensors.items():
        short = BEFORE.sub('', name)
        if short in where:
            raise UserError(f'{folder}: {where[short][0]} and {name} are the same tensor twice')
        if name not in skipped and not BUFFER.search(short):
            where[short] = name, file
    state, unused = {}, {*where}
    for name, shape in shapes.items():
        parts = theirs(name, family)
        if name == 'lm_head.weight' and parts[0] not in where and config.tie_weights:
            parts = theirs('wte.weight', family)  # the file has it once
        lacking = [part for part in parts if part not in where]
        if lacking:
            raise UserError(f'{folder}: its files have no tensor {lacking[0]}, but config.json asks for one')
        unused -= {*parts}
        try:
            found = [where[part][1].get_tensor(where[part][0]) for part in parts]
        except Exception as e:
            raise UserError(f'{folder}: {parts[0]} cannot be read ({first_line(e)})') from e
        if not all(tensor.is_floating_point() for tensor in found):
            raise UserError(f'{folder}: {parts[0]} holds {found[0].dtype}: quantized weights are not read')
        found = [tensor.float() for tensor in found]
        sizes = ', '.join(f'{part} {tuple(tensor.shape)}' for part, tensor in zip(parts, found))
        if family == 'gpt2' and re.search(r'(c_attn|c_fc|c_proj)\.weight$', name):
            found = [tensor.T for tensor in found]  # GPT-2 multiplies from the other side
        if family.startswith('gemma') and found[0].dim() == 1:
            found = [1 + tensor for tensor in found]  # its norms multiply by 1 + w
        rows = rows_of[name.split('.')[-2]] if len(found) > 1 else shape[:1]
        if [tensor.shape for tensor in found] != [(n, *shape[1:]) for n in rows]:
            raise UserError(f'{folder}: {sizes} does not fit config.json, which makes {tuple(shape)} of it')
        state[name] = torch.cat(found).contiguous()
    if config.tie_weights and not torch.equal(state['lm_head.weight'], state['wte.weight']):
        raise UserError(f'{folder}: config.json ties head and embeddings, but the files have two different ones')
    if unused:
        raise UserError(f'{folder}: {min(unused)} has no place in this architecture ({len(unused)} such tensors)')
    return state


def read_folder(folder):
    """A published model's folder as a checkpoint. Raises UserError."""
    from model import GPT, GPTConfig  # which builds on this package
    family, c, settings = read_settings(os.path.join(folder, 'config.json'))
    try:
        config = GPTConfig(**settings)
        with torch.device('meta'):
            shapes = {name: tensor.shape for name, tensor in GPT(config).state_dict().items()}
    except (UserError, TypeError, RuntimeError) as e:
        raise UserError(f'{folder}/config.json: {first_line(e)}') from e
    state = read_weights(folder, family, config, shapes)
    if family.startswith('gemma3'):  # it divides q.k by a number of its own, where we divide by sqrt(D)
        for name in [name for name in state if name.endswith('q_norm.weight')]:
            state[name] *= (config.head_width / c.get('query_pre_attn_scalar', 256)) ** 0.5
    spec = published_spec(folder, c.get('eos_token_id'), c.get('bos_token_id'))
    tokens = Tokenizer(spec).text
    if tokens.n > config.vocab_size:  # Gemma 3 1B: one for pictures, which this model never sees
        if not {*range(config.vocab_size, tokens.n)} <= {*getattr(tokens, 'special', ())}:
            raise UserError(f'{folder}: the tokenizer has {tokens.n} tokens, config.json has vocab_size = '
                            f'{config.vocab_size}')
        spec['rows'] = config.vocab_size
    size = Tokenizer(spec).vocab_size
    return {'version': VERSION, 'method': 'gpt', 'model_config': settings, 'model': state, 'step': 0,
            'settings': {}, 'best_val_loss': math.inf,
            'meta': {'kind': 'text', 'tokenizer': spec, 'vocab_size': size}}
