# Control: as gpt_772m, but every token is read 5 times and decoded once.
from config.copy3_772m import *

out_dir = 'out/copy5_772m'
copies = 5
