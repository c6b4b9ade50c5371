# Baseline TBYS: the pauses of cyb_code, but the answer always comes in the last slot.
from config.cyb_code import *

out_dir = 'out/tbys_code'
objective = 'tbys'
