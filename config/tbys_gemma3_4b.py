# Baseline: as cyb_gemma3_4b, but every answer comes after all pauses.
from config.cyb_gemma3_4b import *

out_dir = 'out/tbys_gemma3_4b'
objective = 'tbys'
