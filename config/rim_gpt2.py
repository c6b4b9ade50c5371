# Reasoning in Memory from GPT-2 (124M) on GSM8K-Aug (arXiv 2605.30343): 6 + 2 epochs, batch 128, a constant rate
# after 4 % warm-up, LoRA of rank 128. First: python data/gsm8k_aug/prepare.py. Baselines:
# --train_on=sft --epochs=8 --out_dir=out/sft_gpt2, and the same with cot.
# "chosen" marks what the paper does not state or what we could not look up.
init_from = 'gpt2'
dataset = 'gsm8k_aug'
out_dir = 'out/rim_gpt2'
method = 'rim'
train_on = 'rim'
n_blocks = 8
n_mem = 2
lora_rank = 128

vocab_size = 50261  # GPT-2's and the four special tokens; the shape stands here so that a plan needs no network
n_layer = 12
n_head = 12
n_embd = 768
bias = True
learned_positions = True
activation = 'gelu_tanh'
block_size = 1024

epochs = 6.0
stage2_epochs = 2.0
batch_size = 16
grad_accum = 8  # 128 rows
schedule = 'constant'
warmup_share = 0.04
learning_rate = 3e-4  # chosen, as are those below
stage2_learning_rate = 1e-4
weight_decay = 0.01
eval_interval = 1000
