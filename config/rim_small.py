# Reasoning in Memory on gsm_toy, from the small model that config/cot_small.py trains: run that first.
from config.cot_small import *

out_dir = 'out/rim_small'
init_from = 'out/cot_small/ckpt.pt'

train_on = 'rim'
n_blocks = 5  # the paper: 8
n_mem = 2
max_iters = 4000  # read-outs must not fade before they are learned, which takes some hundred steps for each
learning_rate = 7e-4
eval_interval = 500
stage2_iters = 1500
stage2_learning_rate = 3e-4
stage2_dropout = 0.0  # the paper has more than in stage 1; here no problem is read twice
