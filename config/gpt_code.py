# The plain GPT on the code of Python packages: 3.4M parameters. First: python data/pycode/prepare.py
# The other *_code.py configs import this one and change the method alone.
dataset = 'pycode'
out_dir = 'out/gpt_code'
method = 'gpt'

n_layer = 6
n_head = 6
n_embd = 192
block_size = 256

batch_size = 8  # 2,048 tokens a step, 6.6 million in all
max_iters = 3200
learning_rate = 2e-3
min_lr = 2e-4
warmup_iters = 200
eval_interval = 160  # a twentieth of the steps
eval_rows = 512
