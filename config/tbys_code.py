# Baseline TBYS: the pauses of cyb_code, but the answer always comes in the last slot.
from config.gpt_code import *

out_dir = 'out/tbys_code'
method = 'cyb'
objective = 'tbys'
W = 2
