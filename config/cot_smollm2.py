# As sft_smollm2, but the answer comes after written steps.
from config.sft_smollm2 import *

out_dir = 'out/cot_smollm2'
train_on = 'cot'
