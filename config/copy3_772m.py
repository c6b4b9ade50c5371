# Control: as gpt_772m, but every token is read 3 times and decoded once.
from config.gpt_772m import *

out_dir = 'out/copy3_772m'
method = 'thoughtbubbles'
fork_layers = ()
copies = 3
merge = 'rightmost'
