# The plain GPT on Python packages: 3.4M parameters, 6 layers, rows of 256 tokens. First: python data/pycode/prepare.py
# The other *_code.py configs import this one and change the method alone.
dataset = 'pycode'
out_dir = 'out/gpt_code'
method = 'gpt'

n_layer = 6
n_head = 6
n_embd = 192
block_size = 256

batch_size = 16
max_iters = 2000
learning_rate = 2e-3
min_lr = 2e-4
warmup_iters = 100
eval_interval = 100  # a twentieth of the steps
eval_rows = 512
