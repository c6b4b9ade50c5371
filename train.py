"""Train any method.

    python train.py config/tb_small.py [--key=value ...]                                   one machine
    torchrun --standalone --nproc_per_node=8 train.py config/tb_small.py --grad_accum=8    eight GPUs
    python train.py --init_from=resume --out_dir=out/tb_small                              go on with a run

main() has what is trained, on what, and the loop. What guards a run and changes no number (checkpoints, log,
signals, refusals) is in config/run.py. A config file and then --key=value override the settings below; --help
lists all.
"""
import math
import os

import torch
from torch.nn.parallel import DistributedDataParallel

import config
import data
from config import UserError, machine
from config.checkpoint import first_line, load_start, load_weights
from config.plan import make_plan
from config.run import Run
from cyb import CYB, CYBConfig
from data.text import TextBatches
from model import GPT, GPTConfig, eval_mode
from rim import Coconut, CoconutBatches, CoconutConfig, RiM, RiMBatches, RiMConfig
from thoughtbubbles import Thoughtbubbles, ThoughtbubblesConfig

# what and where
method = 'gpt'  # gpt | thoughtbubbles | cyb | rim | coconut
dataset = 'shakespeare_char'  # a folder under data/, or the path of a text (my.txt) or of a prepared folder
out_dir = 'out/run'  # checkpoints and log.jsonl
init_from = 'scratch'  # scratch | resume | auto (resume if it can) | a checkpoint | gpt2 | org/name | a folder
overwrite = False  # let a run from scratch replace an earlier run in out_dir
seed = 1337  # of the weights, the batches and dropout
# batches
batch_size = 32  # rows in a micro-batch
grad_accum = 1  # micro-batches in a step, over all processes together
# optimisation
max_iters = 1500  # steps; of a method with two stages those of the first
learning_rate = 1e-3  # at its peak
schedule = 'cosine'  # after the warm-up: cosine (down to min_lr) | constant
min_lr = 1e-4  # at the end of the cosine
warmup_iters = 100  # steps of linear warm-up
warmup_share = 0.0  # above 0: this share of a stage's steps in place of warmup_iters
weight_decay = 0.1  # on matrices and embeddings
beta1 = 0.9  # AdamW: decay of the mean
beta2 = 0.99  # AdamW: decay of the mean square
grad_clip = 1.0  # largest gradient norm, 0 = unlimited
# evaluation and output
eval_interval = 250  # steps between evaluations; a checkpoint is written before each
eval_rows = 512  # validation rows, the same ones at each evaluation
snapshots = ()  # steps whose weights are kept, as step_N.pt, for sample.py --over_training
plan = False  # print what the run needs on a number of GPUs, and end; nothing has to be there
gpus = 8  # of a plan
gpu_memory = 80.0  # of a plan: GB of each GPU
show_batch = False  # print the first rows of the first batch as a table, and end
log_interval = 10  # steps between log lines
wandb_project = ''  # log to Weights & Biases under this name as well
# machine
device = 'auto'  # auto | cpu | cuda | cuda:1 | mps
dtype = 'auto'  # auto | float32 | bfloat16 | float16
compile = 'auto'  # torch.compile: auto | on | off
threads = 0  # CPU threads per process, 0 = PyTorch's choice
checkpoint_blocks = False  # keep less of each block for the backward pass and compute it again there
shard_optimizer = False  # share AdamW's state out over the processes (ZeRO stage 1) instead of copying it

# the only list of the methods: name -> (config class, model class, source of its batches)
METHODS = {
    'gpt': (GPTConfig, GPT, TextBatches),
    'thoughtbubbles': (ThoughtbubblesConfig, Thoughtbubbles, TextBatches),
    'cyb': (CYBConfig, CYB, TextBatches),
    'rim': (RiMConfig, RiM, RiMBatches),
    'coconut': (CoconutConfig, Coconut, CoconutBatches),
}


def build_model(checkpoint, path='checkpoint'):
    """The model of a checkpoint, on the CPU. Raises UserError if method, configuration or weights do not fit."""
    if checkpoint['method'] not in METHODS:
        raise UserError(f'{path}: method {checkpoint["method"]!r} is unknown; there are {", ".join(METHODS)}')
    config_class, model_class, _ = METHODS[checkpoint['method']]
    try:
        model = model_class(config_class(**checkpoint['model_config']))
    except Exception as e:
        raise UserError(f'{path}: its configuration does not fit this code ({e})') from e
    load_weights(model, checkpoint, path)
    return model


def learning_rate_at(stage, it):
    """Linear warm-up to the stage's peak_lr, then constant or a cosine to min_lr * peak_lr / learning_rate."""
    it -= stage.first
    warmup = round(warmup_share * stage.iters) or warmup_iters
    if it < warmup:
        return stage.peak_lr * (it + 1) / warmup
    if schedule == 'constant':
        return stage.peak_lr
    progress = (it - warmup) / max(1, stage.iters - warmup)
    lowest = min_lr * stage.peak_lr / (learning_rate or 1.0)
    return lowest + 0.5 * (1 + math.cos(math.pi * min(1.0, progress))) * (stage.peak_lr - lowest)


def open_checkpoint(path, device='auto'):
    """(path, checkpoint, its model in eval mode) of a run's folder, a checkpoint's path or a published model.
    Raises UserError."""
    if os.path.exists(os.path.join(path, 'ckpt.pt')):
        path = os.path.join(path, 'ckpt.pt')
    checkpoint = load_start(path)
    return path, checkpoint, build_model(checkpoint, path).to(machine.choose_device(device)[0]).eval()


def load(path, device='auto'):
    """(model in eval mode, tokenizer) of a run's folder, a checkpoint's path or a published model, such as gpt2;
    for use from Python."""
    _, checkpoint, model = open_checkpoint(path, device)
    return model, data.Tokenizer(checkpoint['meta']['tokenizer'])


def stage_at(stages, it):
    """The stage of an iteration; the run's end belongs to the last one. A stage without iterations never
    begins."""
    return ([stage for stage in stages if stage.first <= it and stage.iters] or stages[:1])[-1]


def make_optimizer(model, shard):
    """AdamW; with `shard` each process holds a share of its state."""
    adamw = dict(lr=learning_rate, betas=(beta1, beta2), fused=True)
    params = model.param_groups(weight_decay)
    if shard:
        from torch.distributed.optim import ZeroRedundancyOptimizer  # slow to import
        return ZeroRedundancyOptimizer(params, torch.optim.AdamW, **adamw)
    return torch.optim.AdamW(params, **adamw)


@torch.no_grad()
def evaluate(model, batches, stage, run):
    """Mean loss over the validation rows, shared out over the processes; None if a signal came meanwhile."""
    total = torch.zeros(2, dtype=torch.float64)  # sum of the rows' losses, rows
    with eval_mode(model):
        for start in range(0, eval_rows, run.world * batch_size):
            if run.stop_agreed():
                return None
            first = start + run.rank * batch_size
            batch = batches.val_batch(stage, list(range(first, min(first + batch_size, eval_rows))))
            if batch:
                torch.manual_seed(first)  # a model that draws at random draws the same at every evaluation
                with run.autocast():
                    loss = model(*(t.to(run.device) for t in batch))[1]
                total += torch.tensor([loss.item() * len(batch[0]), len(batch[0])], dtype=torch.float64)
    total = run.sum(total)
    return (total[0] / total[1]).item()


def main(argv):
    run = Run(__file__, argv, METHODS)  # settings, device, processes, and the checkpoint to go on with, if any
    globals().update(run.settings)  # from here on `learning_rate` is the configured one
    config_class, model_class, batch_class = METHODS[method]

    if plan:
        print(make_plan(method, METHODS[method], run.model_settings, run.settings))
        return

    # --- what is trained, and on what ---
    rows_of, meta = run.open_data()
    model_config = run.model_config(config_class, meta)
    batches = batch_class(rows_of, meta, model_config, seed, eval_rows, batch_size * grad_accum)
    run.wait()  # the main process has looked through the whole data set
    stages = model_config.stages(max_iters, learning_rate, batches.epoch_iters)
    total_iters = stages[-1].first + stages[-1].iters
    torch.manual_seed(seed)
    raw_model = model_class(model_config)
    it, best_val_loss = run.load_into(raw_model)
    stage = stage_at(stages, it)
    if show_batch or (run.finished and it >= total_iters):
        run.say(batches.table(stage, it) if show_batch else
                f'{out_dir}: this run has finished its {total_iters} steps; --max_iters=... with a larger number '
                'goes on with it')
        run.close()
        return

    # --- with what ---
    raw_model.to(run.device)
    raw_model.set_dropout(stage.dropout)
    if checkpoint_blocks:
        machine.checkpoint_blocks(raw_model)
    optimizer = make_optimizer(raw_model, run.ddp and shard_optimizer)
    scaler = torch.amp.GradScaler(run.device_type, enabled=run.dtype == 'float16')
    run.load_optimizer(optimizer, scaler, stage)
    model = raw_model
    if run.ddp:  # gradients exist once; buffers never change
        model = exchange = DistributedDataParallel(model, gradient_as_bucket_view=True, forward_sync_buffers=False)
    if run.compile:  # around DDP: the graph is cut at its buckets, and one is sent while the next is computed
        model = torch.compile(model)
    finished = stop_wanted = False

    def save(name, weights_only=False):
        """Write out_dir/name: the weights, and all else that a resume needs. Returns the seconds it took."""
        state = dict(step=it, stage=[stage.name, stage.first], best_val_loss=best_val_loss, finished=finished)
        if not weights_only:
            if run.ddp and shard_optimizer:
                optimizer.consolidate_state_dict(to=0)  # every process sends its share
            state.update(optimizer=optimizer.state_dict() if run.is_main else None, scaler=scaler.state_dict())
        return run.save(name, state)

    def fetch(step, micro):
        """A micro-batch, on its way to the device."""
        rows = list(range(micro * batch_size, (micro + 1) * batch_size))
        return machine.send(batches.train_batch(stage_at(stages, step), step, rows), run.device)

    # --- the loop ---
    run.begin(raw_model, meta, it, stages, batches.epoch_iters, best_val_loss)
    model.train()
    batch = fetch(it, run.rank) if it < total_iters else None
    while True:
        # once in a while: save, then evaluate on the same rows as always
        if it % eval_interval == 0 or it >= total_iters:
            if not all(p.isfinite().all() for p in raw_model.parameters()):
                raise UserError(f'step {it}: a weight is not finite: training has diverged; {out_dir}/ckpt.pt is '
                                'from before')
            save_s = save('ckpt.pt')  # before the evaluation, so that a crash in it loses nothing
            val_loss = evaluate(raw_model, batches, stage, run)
            if val_loss is None:
                stop_wanted = True
                break
            if not math.isfinite(val_loss):
                raise UserError(f'step {it}: val loss {val_loss}: the model has diverged; {out_dir}/best.pt is '
                                'the best before')
            run.say(f'step {it}: val loss {val_loss:.4f} {data.UNIT[meta["kind"]]}')
            run.log(iter=it, val_loss=val_loss, save_s=save_s)
            if val_loss < best_val_loss:
                best_val_loss = val_loss
                save('best.pt', weights_only=True)
            run.restart_clock()
        if it in snapshots:
            save(f'step_{it}.pt', weights_only=True)
        if it >= total_iters:
            break

        # one step
        lr = learning_rate_at(stage, it)
        for group in optimizer.param_groups:
            group['lr'] = lr
        step_loss = torch.zeros(1, device=run.device)
        tokens = 0
        for micro in range(run.rank, grad_accum, run.world):
            tokens += batch[0].numel() * run.world
            # dropout depends on (seed, step, micro-batch) alone: the same on many processes and after a resume
            torch.manual_seed(((seed * 1_000_003 + it) * 1_000_003 + micro) % 2 ** 63)
            if run.ddp:  # gradients are exchanged once per step; must be set before the forward pass
                exchange.require_backward_grad_sync = micro + run.world >= grad_accum
            with run.autocast():
                loss = model(*batch)[1]
            scaler.scale(loss * run.world / grad_accum).backward()  # DDP averages over processes, hence * world
            step_loss += loss.detach() / grad_accum
            following = (it, micro + run.world) if micro + run.world < grad_accum else (it + 1, run.rank)
            batch = fetch(*following) if following[0] < total_iters else None  # while the GPU computes
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(raw_model.parameters(), grad_clip or math.inf)
        status = torch.cat((step_loss, step_loss.new_tensor([float(bool(run.signals))])))
        train_loss, stop_wanted = run.sum(status).tolist()
        # float16 gradients may overflow: the scaler skips that step and lowers its scale
        overflow_only = scaler.is_enabled() and scaler.get_scale() >= 1
        if not math.isfinite(train_loss) or not (overflow_only or math.isfinite(norm)):
            raise UserError(f'step {it}: loss {train_loss}, gradient norm {norm.item()}: training has diverged; '
                            f'{out_dir}/ckpt.pt is from before; a learning_rate below {learning_rate} may help')
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        it += 1
        run.count(tokens)
        if it % log_interval == 0 or it == total_iters:
            run.log_step(it, train_loss, lr, norm.item())

        # a stage ends: its checkpoint, a fresh optimizer, a fresh schedule
        if it == stage.first + stage.iters and it < total_iters:
            save(f'{stage.name}.pt', weights_only=True)
            run.close_stage(stage.name)
            best_val_loss = math.inf
            stage = stage_at(stages, it)
            raw_model.set_dropout(stage.dropout)
            optimizer = make_optimizer(raw_model, run.ddp and shard_optimizer)
            run.say(f'step {it}: {stage.name} begins, learning rate {stage.peak_lr}')
        if stop_wanted and it < total_iters:
            save('ckpt.pt')
            break

    # --- the end ---
    finished = it >= total_iters and not stop_wanted
    if finished:
        save('ckpt.pt')  # once more, now that the best loss is known
        try:
            if run.is_main:
                torch.manual_seed(seed)
                run.say(raw_model.report(batches))
        except Exception as e:  # the run has ended well all the same
            run.say(f'no report on the model could be made ({type(e).__name__}: {first_line(e)})')
        run.say_finished(best_val_loss)
    else:
        run.say(f'stopped by a signal after step {it}; go on with the same command and --init_from=resume')
    # DDP's reducer must not be the last to hold the group: it would wait for gloo's thread while it holds Python's
    # lock, which that thread may need to free the tensor of the last all_reduce
    model = exchange = None
    run.close()


if __name__ == '__main__':
    config.launch(main)
