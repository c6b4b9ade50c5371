# Thoughtbubbles from the same published model as gpt_smollm2; it begins at that model's loss. Not in the paper.
from config.gpt_smollm2 import *

out_dir = 'out/tb_smollm2'
method = 'thoughtbubbles'
fork_layers = 3, 7, 11
merge = 'residual'
keep_bias = 14.0  # originals nearly undimmed
fork_bias = -14.0  # copies nearly silent
undivided_scores = True
