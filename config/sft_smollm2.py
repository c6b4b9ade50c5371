# Direct answers to GSM8K's problems, from a published model, by LoRA. First: python data/gsm8k/prepare.py
init_from = 'HuggingFaceTB/SmolLM2-135M'  # or a folder that has it
dataset = 'gsm8k'
out_dir = 'out/sft_smollm2'
method = 'rim'
train_on = 'sft'
lora_rank = 128

block_size = 256
batch_size = 8
max_iters = 300
learning_rate = 3e-4
schedule = 'constant'
warmup_share = 0.04
weight_decay = 0.0
eval_interval = 100
eval_rows = 100
