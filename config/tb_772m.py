# Thoughtbubbles, 772M parameters: as tb_319m, larger.
from config.tb_319m import *

out_dir = 'out/tb_772m'
n_layer = 36  # chosen
n_head = 20
n_embd = 1280
learning_rate = 2.5e-4  # chosen
min_lr = 2.5e-5
