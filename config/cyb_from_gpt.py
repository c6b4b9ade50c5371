# Catch Your Breath from the plain GPT that gpt_small trains: run that first. It begins at that model's loss.
from config.cyb_small import *

out_dir = 'out/cyb_from_gpt'
init_from = 'out/gpt_small/ckpt.pt'
see_pauses = False  # a token sees what it saw before
d_init = 1e-4  # and is answered at once
learning_rate = 1e-3
min_lr = 1e-4
