# Baseline: as rim_small, but the answer follows the question at once. Equally many training rows.
from config import rim_small
from config.rim_small import *

out_dir = 'out/sft_small'
train_on = 'sft'
max_iters = rim_small.max_iters + rim_small.stage2_iters
