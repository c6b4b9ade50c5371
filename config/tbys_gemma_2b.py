# Baseline: as cyb_gemma_2b, but every answer comes after all pauses.
from config.cyb_gemma_2b import *

out_dir = 'out/tbys_gemma_2b'
objective = 'tbys'
