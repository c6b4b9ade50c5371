# Control: a plain GPT of the size of tb_772m, on the same rows.
from config.tb_772m import *

out_dir = 'out/gpt_772m'
method = 'gpt'
del fork_layers, kappa, merge
