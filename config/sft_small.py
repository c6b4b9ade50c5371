# Baseline: as rim_small, but the answer follows the question at once. Equally many training rows.
from config.rim_small import *

out_dir = 'out/sft_small'
train_on = 'sft'
max_iters += stage2_iters
