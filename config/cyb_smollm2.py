# Catch Your Breath from the same published model as gpt_smollm2, on the same rows.
from config.gpt_smollm2 import *

out_dir = 'out/cyb_smollm2'
method = 'cyb'
W = 2
