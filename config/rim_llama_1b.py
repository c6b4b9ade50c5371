# Reasoning in Memory from Llama 3.2 1B on GSM8K-Aug: as rim_gpt2.
from config.pretrained import rotary as _rotary
from config.rim_gpt2 import *

init_from = 'meta-llama/Llama-3.2-1B'
out_dir = 'out/rim_llama_1b'

vocab_size = 128260  # Llama 3's 128,256 and the four special tokens
n_layer = 16
n_head = 32
n_kv_head = 8
head_dim = 64
n_embd = 2048
n_hidden = 8192
bias = False
learned_positions = False
activation = 'silu'
gated = True
rms_norm = True
rope_base = 500000.0
_SCALING = {'rope_type': 'llama3', 'factor': 32.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0,
            'original_max_position_embeddings': 8192}
rope_frequencies = _rotary({'head_dim': head_dim, 'rope_theta': rope_base}, _SCALING)[1]
checkpoint_blocks = True
