# The plain GPT on Shakespeare's characters: 0.8M parameters, about a minute on two cores.
# The other *_small.py text configs import this one and change the method alone.
dataset = 'shakespeare_char'
out_dir = 'out/gpt_small'
method = 'gpt'

n_layer = 4
n_head = 4
n_embd = 128
block_size = 64

batch_size = 32
max_iters = 1000
learning_rate = 2e-3
min_lr = 2e-4
warmup_iters = 100
eval_interval = 250
eval_rows = 512
