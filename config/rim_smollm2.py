# Reasoning in Memory on GSM8K, from the same published model as sft_smollm2. Equally many training rows.
from config.sft_smollm2 import *

out_dir = 'out/rim_smollm2'
train_on = 'rim'
n_blocks = 8
n_mem = 2
max_iters = 200
stage2_iters = 100
stage2_learning_rate = 1e-4
