# Baseline: as cyb_smollm2, but every answer comes after the pause.
from config.cyb_smollm2 import *

out_dir = 'out/tbys_smollm2'
objective = 'tbys'
