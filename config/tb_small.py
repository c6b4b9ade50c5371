# Thoughtbubbles: as gpt_small, but the model may fork its residual streams before blocks 1 and 2.
from config.gpt_small import *

out_dir = 'out/tb_small'
method = 'thoughtbubbles'
fork_layers = (1, 2)
kappa = 2.0
