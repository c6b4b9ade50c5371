# Catch Your Breath from Gemma 1 2B on C4 (arXiv 2510.13879).
# First: python data/c4/prepare.py --tokenizer=google/gemma-2b
# The paper also has W = 4. "chosen" marks what it does not state or what we could not look up.
init_from = 'google/gemma-2b'
dataset = 'c4'
out_dir = 'out/cyb_gemma_2b'
method = 'cyb'
W = 2

vocab_size = 256000  # the model's shape stands here so that a plan needs no network
n_layer = 18
n_head = 8
n_kv_head = 1
head_dim = 256
n_embd = 2048
n_hidden = 16384
activation = 'gelu_tanh'
gated = True
rms_norm = True
norm_eps = 1e-6
scale_embedding = True

block_size = 512  # chosen, as are those below
batch_size = 2
grad_accum = 64
max_iters = 10000
learning_rate = 1e-5
min_lr = 1e-6
warmup_iters = 500
beta2 = 0.95
weight_decay = 0.01
eval_interval = 1000
checkpoint_blocks = True
shard_optimizer = True
