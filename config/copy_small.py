# Baseline copy-2: as gpt_small, but every token is fed twice and its right-most copy is decoded.
from config.gpt_small import *

out_dir = 'out/copy_small'
method = 'thoughtbubbles'
fork_layers = ()
copies = 2
merge = 'rightmost'
