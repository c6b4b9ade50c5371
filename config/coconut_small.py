# Baseline Coconut: as rim_small, but each step is replaced by a hidden state that is fed back. Equally many training rows.
from config import rim_small
from config.rim_small import *  # noqa: F403

out_dir = 'out/coconut_small'
train_on = 'coconut'
max_iters = rim_small.max_iters + rim_small.stage2_iters
coconut_stages = 6
