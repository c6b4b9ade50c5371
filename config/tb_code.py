# Thoughtbubbles: as gpt_code, but the model may fork its residual streams before blocks 2 and 4.
from config.gpt_code import *

out_dir = 'out/tb_code'
method = 'thoughtbubbles'
fork_layers = (2, 4)
kappa = 2.0
merge = 'residual'  # the paper's for large models; 'probs' would decode every stream
