# Baseline: as rim_small, but without stage 1, so that the blocks are mere pauses. Equally many training rows.
from config.rim_small import *

out_dir = 'out/pause_small'
train_on = 'pause'
max_iters += stage2_iters
