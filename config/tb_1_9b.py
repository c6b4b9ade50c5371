# Thoughtbubbles, 1.9B parameters: as tb_772m, wider.
from config.tb_772m import *

out_dir = 'out/tb_1_9b'
n_head = 16  # chosen
n_embd = 2048
learning_rate = 2e-4  # chosen
min_lr = 2e-5
