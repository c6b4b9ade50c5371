# Baseline TBYS: the pauses of cyb_small, but the answer always comes in the last slot.
from config.cyb_small import *

out_dir = 'out/tbys_small'
objective = 'tbys'
