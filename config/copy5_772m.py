# Control: as gpt_772m, but every token is read 5 times and decoded once.
from config.gpt_772m import *

out_dir = 'out/copy5_772m'
method = 'thoughtbubbles'
fork_layers = ()
copies = 5
merge = 'rightmost'
