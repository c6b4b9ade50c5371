# Thoughtbubbles, 319M parameters: as tb_150m, larger, with less memory for it (the last two lines).
from config.tb_150m import *

out_dir = 'out/tb_319m'
n_layer = 21  # chosen
n_head = 16
n_embd = 1024
learning_rate = 4e-4  # chosen
min_lr = 4e-5
checkpoint_blocks = True
shard_optimizer = True
