# Thoughtbubbles, 1.9B parameters: as tb_150m, larger.
from config.tb_150m import *

out_dir = 'out/tb_1_9b'
n_layer = 36  # chosen
n_head = 16
n_embd = 2048
learning_rate = 2e-4  # chosen
min_lr = 2e-5
checkpoint_blocks = True
shard_optimizer = True
