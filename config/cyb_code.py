# Catch Your Breath: as gpt_code, but every token may take a second slot before it is answered.
from config.gpt_code import *

out_dir = 'out/cyb_code'
method = 'cyb'
W = 2
