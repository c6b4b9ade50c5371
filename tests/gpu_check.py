"""What can only be known on a GPU: python tests/gpu_check.py    (under 8 minutes; no GPU: one line)

Prints a table and writes it as JSON. --rehearse runs all of it, tiny, on the CPU. What a check finds stands beside
what it should find; the last line says how many differ.
"""
import contextlib
import io
import json
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from torch._dynamo.utils import counters

from conftest import TEXT, arguments, read_log, torchrun, train, without_reports, write_text  # first: the path
import bench
import config
from config.checkpoint import load_checkpoint
from config.files import write_file
from config.machine import checkpoint_blocks, flops_per_token, peak_flops
from config.plan import kernel, step_memory
from test_paper_configs import settings_of

rehearse = False  # the same checks in a tiny form on the CPU
only = 'all'  # or one of the checks at the end of this file
output = 'gpu_check.json'  # where to write

LARGE = dict(vocab_size=50257, block_size=512, n_layer=4, n_head=8, n_embd=512)
TINY = dict(vocab_size=300, block_size=128, n_layer=2, n_head=2, n_embd=32)
CASES = {  # name -> (method, settings)
    'gpt': ('gpt', {}),
    'gpt, grouped heads': ('gpt', dict(n_kv_head=1)),
    'gpt, windows': ('gpt', dict(local_layers=(0,), window=32, n_kv_head=1)),
    'thoughtbubbles': ('thoughtbubbles', dict(fork_layers=(0, 1))),
    'thoughtbubbles residual': ('thoughtbubbles', dict(fork_layers=(0, 1), merge='residual')),
    'cyb': ('cyb', dict(W=2)),
    'cyb, pauses unseen': ('cyb', dict(W=2, see_pauses=False)),
    'rim stage 2': ('rim', dict(n_blocks=4)),
    'rim, LoRA': ('rim', dict(n_blocks=4, lora_rank=8))}
ATTENTION = 'aten::_scaled_dot_product_'


def build(method, settings, dtype=None):
    """(a model on the device, a function that returns the loss of a random batch)."""
    config_class, model_class, _ = train.METHODS[method]
    torch.manual_seed(0)
    model = model_class(config_class(**settings)).to(device)
    batch = [t.to(device) for t in bench.make_batch(model, rows)]

    def loss_of(called=model):
        with torch.autocast(device, dtype, enabled=dtype is not None):
            return called(*batch)[1]

    return model, loss_of


def train_silently(settings, **more):
    with contextlib.redirect_stdout(io.StringIO()), without_reports():
        train.main(arguments(**{**settings, **more}))


def small_text(folder):
    with contextlib.redirect_stdout(io.StringIO()):
        return write_text(Path(folder) / 'text', TEXT)


def kernels():
    """The attention that PyTorch picks, in half precision and in float32, against what a plan says."""
    for name, (method, settings) in CASES.items():
        for dtype in (torch.bfloat16, None):
            model, loss_of = build(method, {**size, **settings}, dtype)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                loss_of().backward()
            names = {event.key.removeprefix(ATTENTION) for event in profile.key_averages()
                     if event.key.startswith(ATTENTION) and 'backward' not in event.key}
            wanted = kernel(model.config, {'dtype': 'bfloat16' if dtype else 'float32'})
            right = bool(names)
            if 'flash' in wanted:
                right = right and all('flash' in used or 'cudnn' in used for used in names)
            elif 'no fused' not in wanted:
                right = right and not any('math' in used for used in names)
            yield f'{name}, {dtype or torch.float32}', ', '.join(sorted(names)), wanted, right


def compiler():
    """torch.compile gives the loss and the gradient of the model as it is, without a graph break. In float32: a
    relative 1e-4 of the loss, 1e-2 of the gradient's norm, which may cross a tie of two streams. Two blocks, and
    few cases with checkpoint_blocks, since each takes the compiler long."""
    torch.set_float32_matmul_precision('highest')
    for name, (method, settings) in CASES.items():
        for recompute in (False, True) if name in ('gpt', 'thoughtbubbles') else (False,):
            model, loss_of = build(method, {**size, **settings, 'n_layer': 2})
            if recompute:
                checkpoint_blocks(model)
            torch._dynamo.reset()
            counters.clear()
            found = []
            for called in (model, torch.compile(model, backend='eager' if rehearse else 'inductor')):
                loss = loss_of(called)
                loss.backward()
                norm = torch.nn.utils.get_total_norm(p.grad for p in model.parameters() if p.grad is not None)
                found.append((loss.item(), norm.item()))
                model.zero_grad(set_to_none=True)
            loss_apart, norm_apart = (abs(b / a - 1) for a, b in zip(*found))
            breaks, graphs = sum(counters['graph_break'].values()), counters['stats']['unique_graphs']
            yield (name + (', checkpoint_blocks' if recompute else ''),
                   f'loss {loss_apart:.1e}, gradient {norm_apart:.1e} apart, {graphs} graph, {breaks} breaks',
                   '1e-4, 1e-2, 1, 0', loss_apart < 1e-4 and norm_apart < 1e-2 and (graphs, breaks) == (1, 0))
    torch.set_float32_matmul_precision('high')


def precision():
    """30 steps of training in each precision: the loss falls as in float32 (5 %)."""
    with tempfile.TemporaryDirectory() as folder:
        dataset = small_text(folder)
        for method, settings in [('gpt', {}), ('thoughtbubbles', {'fork_layers': '1,2'}), ('cyb', {'W': 2})]:
            losses = {}
            for dtype in ('float32', 'bfloat16', 'float16'):
                out = Path(folder) / f'{method}-{dtype}'
                steps = 6 if rehearse else 30
                train_silently(settings, method=method, dataset=dataset, out_dir=out, device=device, dtype=dtype,
                               compile='off', max_iters=steps, eval_interval=steps, learning_rate=0.01,
                               min_lr=0.001)
                first, *_, last = (entry['val_loss'] for entry in read_log(out) if 'val_loss' in entry)
                losses[dtype] = last
            for dtype in ('bfloat16', 'float16'):
                yield (f'{method}, {dtype}', f'{first:.3f} to {losses[dtype]:.3f}',
                       f'to {losses["float32"]:.3f}, less than at first',
                       losses[dtype] < first and abs(losses[dtype] / losses['float32'] - 1) < 0.05)


def utilisation():
    """config/tb_150m.py: tokens per second and model FLOPs utilisation of a training step, compiled."""
    settings, model_settings = settings_of('tb_150m')
    if rehearse:
        model_settings.update(TINY, fork_layers=(0, 1))
    model, loss_of = build('thoughtbubbles', model_settings, torch.bfloat16)
    called = model if rehearse else torch.compile(model)
    optimizer = torch.optim.AdamW(model.param_groups(0.1), lr=1e-4, fused=True)

    def step():
        loss_of(called).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(3):
        step()
    taken = statistics.median(bench.seconds(step) for _ in range(3 if rehearse else 20))
    rate = rows * model.config.block_size / taken
    peak = peak_flops(device)
    mfu = f'MFU {rate * flops_per_token(model) / peak:.3f}' if peak else 'no peak known of this device'
    yield 'tb_150m' + (', tiny' if rehearse else ''), f'{rate:,.0f} tokens/s, {mfu}', 'a figure', True


def memory():
    """The most that a training step holds, against config/plan.py."""
    for name, (method, settings) in CASES.items():
        for recompute in (False, True):
            entry = train.METHODS[method]
            c = entry[0](**{**size, **settings})
            how = {'dtype': 'float32' if rehearse else 'bfloat16', 'checkpoint_blocks': recompute}
            n, trained, history = step_memory(entry, c, rows, how)
            planned = max(held for held, _ in history)
            model = entry[1](c).to(device)
            if recompute:
                checkpoint_blocks(model)
            optimizer = torch.optim.AdamW(model.param_groups(0.1), lr=1e-4, fused=True)
            batch = [t.to(device) for t in entry[2].largest(c, rows)]

            def step():
                with torch.autocast(device, torch.bfloat16, enabled=not rehearse):
                    loss = model(*batch)[1]
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

            step()  # from here on AdamW's moments are there
            measured = 4 * n + 8 * trained + bench.peak_memory(step)
            yield (name + (', checkpoint_blocks' if recompute else ''),
                   f'{measured / 1e6:,.1f} MB, planned {planned / 1e6:,.1f}', 'within 10 %',
                   measured / 1.1 < planned < measured * 1.1)


def processes():
    """As many processes as GPUs, the optimizer sharded, stopped half-way and resumed, against one process: the
    same weights (1e-4), since nothing but the order of sums differs."""
    n = 2 if rehearse else torch.cuda.device_count()
    with tempfile.TemporaryDirectory() as folder:
        dataset = small_text(folder)
        run = dict(dataset=dataset, device=device, dtype='float32', compile='off', grad_accum=n, max_iters=8,
                   warmup_iters=100, shard_optimizer=True)
        for method, settings in [('gpt', {}), ('thoughtbubbles', {'fork_layers': '1,2'})][:1 if rehearse else 2]:
            one, several = Path(folder) / f'{method}-one', Path(folder) / f'{method}-several'
            train_silently(run, method=method, out_dir=one, **settings)
            first = arguments(**{**run, **settings, 'method': method, 'out_dir': several, 'max_iters': 4})
            for command in (first, [f'--out_dir={several}', '--init_from=resume', '--max_iters=8']):
                status, said = torchrun(n, 'train.py', *command)
                if status:
                    raise RuntimeError(said[-2000:])
            a, b = (load_checkpoint(str(out / 'ckpt.pt')) for out in (one, several))
            apart = max((weight - b['model'][name]).abs().max().item() for name, weight in a['model'].items())
            yield (f'{method}, {n} processes, {"gloo" if rehearse else "NCCL"}',
                   f'weights {apart:.1e} apart after {b["step"]} steps', '1e-4', apart < 1e-4 and b['step'] == 8)


CHECKS = {'kernels': kernels, 'compiler': compiler, 'precision': precision, 'memory': memory,
          'utilisation': utilisation, 'processes': processes}


def main(argv):
    global device, size, rows
    settings, _, _ = config.load(__file__, argv)
    config.check_choice(settings, 'only', ' '.join(['all', *CHECKS]))
    globals().update(settings)
    if not rehearse and not torch.cuda.is_available():
        print('gpu_check needs a GPU, and here is none; --rehearse runs it, tiny, on the CPU')
        return
    device = bench.device = 'cpu' if rehearse else 'cuda'
    size, rows = (TINY, 2) if rehearse else (LARGE, 8)
    machine = 'CPU' if rehearse else torch.cuda.get_device_name()
    print(f'{machine}, PyTorch {torch.__version__}, CUDA {torch.version.cuda}')
    found, begun = [], time.perf_counter()
    for check, function in CHECKS.items():
        if only not in ('all', check):
            continue
        start = time.perf_counter()
        try:
            for name, what, wanted, right in function():
                found.append(dict(check=check, case=name, found=what, wanted=wanted, right=right))
                print(f'{"" if right else "DIFFERS ":8s}{check:12s} {name:44s} {what}  ({wanted})', flush=True)
        except Exception as e:
            found.append(dict(check=check, case='', found=f'{type(e).__name__}: {e}', wanted='', right=False))
            print(f'FAILED  {check:12s} {type(e).__name__}: {e}', flush=True)
        print(f'        {check:12s} took {time.perf_counter() - start:.0f} s', flush=True)
        write_file(output, json.dumps(dict(machine=machine, torch=torch.__version__, checks=found), indent=1))
    wrong = sum(not entry['right'] for entry in found)
    print(f'{len(found)} checks, {wrong} differ, {time.perf_counter() - begun:.0f} seconds; written to {output}')
    sys.exit(wrong > 0)


if __name__ == '__main__':
    warnings.simplefilter('ignore')
    config.launch(main)
