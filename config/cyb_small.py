# Catch Your Breath: as gpt_small, but every token may take a second slot before it is answered; --W=4 for more.
from config.gpt_small import *

out_dir = 'out/cyb_small'
method = 'cyb'
W = 2
