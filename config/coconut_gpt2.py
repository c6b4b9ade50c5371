# Baseline: Coconut from GPT-2 as in its repository: two thoughts a stage, three stages. The rest as in rim_gpt2.
from config.rim_gpt2 import *

out_dir = 'out/coconut_gpt2'
method = 'coconut'
n_blocks = 3
n_mem = 2
epochs = 8.0
del train_on, stage2_epochs, stage2_learning_rate
