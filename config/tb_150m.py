# Thoughtbubbles, 150M parameters, kappa 4, on OpenWebText: 75,000 steps, 2.5B tokens (arXiv 2510.00219).
# First: python data/openwebtext/prepare.py. "chosen": the paper does not state it, or we could not look it up.
dataset = 'openwebtext'
out_dir = 'out/tb_150m'
method = 'thoughtbubbles'
fork_layers = 3, 7, 11
kappa = 4.0  # the paper: 2 and 4
merge = 'residual'  # the paper's for large models

vocab_size = 50304  # GPT-2's 50,257, filled up to a multiple of 64
n_layer = 16  # chosen, as are heads and width: the paper names the number of parameters
n_head = 12
n_embd = 768
block_size = 512

batch_size = 8
grad_accum = 8  # 64 rows of 512 tokens: 75,000 steps are 2.5B tokens
max_iters = 75000
learning_rate = 6e-4  # chosen, as are those below: usual for models of this size
min_lr = 6e-5
warmup_iters = 2000
beta2 = 0.95
eval_interval = 2500
