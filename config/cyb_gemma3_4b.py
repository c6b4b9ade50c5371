# Catch Your Breath from Gemma 3 4B on C4: as cyb_gemma_2b. First: python data/c4/prepare.py
# --tokenizer=google/gemma-3-4b-pt
from config.cyb_gemma_2b import *
from config.pretrained import rotary as _rotary

init_from = 'google/gemma-3-4b-pt'
out_dir = 'out/cyb_gemma3_4b'

vocab_size = 262208
n_layer = 34
n_kv_head = 4
n_embd = 2560
n_hidden = 10240
qk_norm = True
second_norms = True
local_layers = tuple(i for i in range(34) if (i + 1) % 6)
window = 1024
rope_base = 1e6
rope_frequencies = _rotary({'head_dim': 256, 'rope_theta': rope_base}, {'rope_type': 'linear', 'factor': 8.0})[1]
