# Reasoning in Memory from Llama 3.2 3B on GSM8K-Aug: as rim_gpt2.
from config.pretrained import rotary as _rotary
from config.rim_llama_1b import *
from config.rim_llama_1b import _SCALING

init_from = 'meta-llama/Llama-3.2-3B'
out_dir = 'out/rim_llama_3b'

n_layer = 28
n_head = 24
head_dim = 128
n_embd = 3072
rope_frequencies = _rotary({'head_dim': head_dim, 'rope_theta': rope_base}, _SCALING)[1]
