# Baseline Coconut: as rim_small, but hidden states that are fed back take the place of the steps.
from config import rim_small
from config.cot_small import *

del train_on
method = 'coconut'
out_dir = 'out/coconut_small'
init_from = rim_small.init_from
n_blocks = 5
n_mem = 1
max_iters = rim_small.max_iters + rim_small.stage2_iters
eval_interval = rim_small.eval_interval
