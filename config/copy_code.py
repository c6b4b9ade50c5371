# Baseline copy-2: as gpt_code, but every token is fed twice and its right-most copy is decoded.
from config.gpt_code import *

out_dir = 'out/copy_code'
method = 'thoughtbubbles'
fork_layers = ()
copies = 2
merge = 'rightmost'
