# A small GPT trained on gsm_toy with its written steps: the start of rim_small and of its baselines.
method = 'rim'
train_on = 'cot'
dataset = 'gsm_toy'
out_dir = 'out/cot_small'

n_layer = 6  # a chain of steps that is computed in one pass needs about a layer per step
n_head = 4
n_embd = 128
block_size = 128
rope_base = 300.0  # rows are short

batch_size = 16
max_iters = 1000
learning_rate = 1e-3
min_lr = 1e-4
warmup_iters = 100
weight_decay = 0.01
eval_interval = 300
