# Plain fine-tuning of a published model of 135M parameters on Shakespeare. Needs 8 GB of memory.
init_from = 'HuggingFaceTB/SmolLM2-135M'  # or a folder that has it
dataset = 'shakespeare_char'  # encoded anew with the model's own tokenizer
out_dir = 'out/gpt_smollm2'

block_size = 64
batch_size = 4
max_iters = 200
learning_rate = 1e-4
min_lr = 1e-5
warmup_iters = 20
weight_decay = 0.01
eval_interval = 100
eval_rows = 128
