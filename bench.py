"""Speed and memory as ratios within one run: python bench.py [--part=train]

All cases are timed in turn, round after round, and medians taken: a slow moment of the machine hits all.
"""
import os
import statistics
import time

import torch
import torch.nn.functional as F

import config
from config.machine import checkpoint_blocks, choose_device, flops_per_token, set_threads
from data.records import row_tensors
from model import GPT, GPTConfig
from rim import build_row
from train import METHODS

os.environ.setdefault('KINETO_LOG_LEVEL', '99')  # or the profiler's library writes lines of its own

part = 'all'  # all | train | vocabulary | checkpoint | generate | answer
rounds = 15  # timed rounds of a training step
batch_size = 32  # rows of a training step
threads = 0  # CPU threads, 0 = PyTorch's choice
device = 'auto'  # auto | cpu | cuda | cuda:1 | mps

SMALL = dict(vocab_size=65, block_size=64, n_layer=4, n_head=4, n_embd=128)  # config/gpt_small.py


def build(method, rows=None, batch=None, recompute=False, **settings):
    """A model with random weights and its training step, a function, on a batch or on `rows` or batch_size random
    rows. recompute: with checkpoint_blocks."""
    config_class, model_class, *_ = METHODS.get(method, (GPTConfig, WholeLogits))
    torch.manual_seed(0)
    model = model_class(config_class(**settings)).to(device)
    if recompute:
        checkpoint_blocks(model)
    optimizer = torch.optim.AdamW(model.param_groups(0.1), lr=1e-4, fused=True)
    batch = [t.to(device) for t in batch or make_batch(model, rows or batch_size)]

    def step():
        model(*batch)[1].backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return model, step


def make_batch(model, rows):
    """Rows of block_size random tokens; of a model with memory blocks as in stage 2, K read-outs of 4 tokens."""
    c = model.config
    ids = torch.randint(c.vocab_size, (rows, c.block_size + 1))
    K, M = getattr(c, 'layout', (0, 0))
    if K == 0:
        return ids[:, :-1], ids[:, 1:]
    n = c.block_size - K * (M + 2 + 4)  # tokens of the question
    return row_tensors([build_row(row[:n], K * [row[n:n + 4]], K * [1.0], M, model.special)
                        for row in ids.tolist()])


def seconds(function):
    start = time.perf_counter()
    function()
    if device.startswith('cuda'):
        torch.cuda.synchronize()
    return time.perf_counter() - start


def peak_memory(function):
    """Most bytes that the function held at once, beyond what there was before."""
    if device.startswith('cuda'):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    held = peak = 0
    events = (e for e in profile.profiler.kineto_results.events() if e.name() == '[memory]')
    for event in sorted(events, key=lambda e: e.start_ns()):  # one event per allocation (> 0) or release (< 0)
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def compare_steps(cases):
    """Time and memory of training steps, as ratios to the first of cases = [(name, method, settings), ...]."""
    built = [(name, *build(method, **settings)) for name, method, settings in cases]
    for _ in range(min(3, rounds)):
        for _, _, step in built:
            step()
    times = {name: [] for name, _, _ in built}
    for _ in range(rounds):
        for name, _, step in built:
            times[name].append(seconds(step))
    base = None
    print(f'{"training step":32s}       ms       MB   time x  memory x  FLOPs x  time/FLOPs  mem/FLOPs')
    for name, model, step in built:
        now = statistics.median(times[name]), peak_memory(step), flops_per_token(model) * model.config.block_size
        base = base or now
        time_x, memory_x, flops_x = (a / b for a, b in zip(now, base))
        print(f'{name:32s} {now[0] * 1e3:8.1f} {now[1] / 1e6:8.1f} {time_x:8.2f} {memory_x:9.2f} {flops_x:8.2f} '
              f'{time_x / flops_x:11.2f} {memory_x / flops_x:10.2f}')


def training_step():
    """Training steps at the size of config/*_small.py."""
    compare_steps([('gpt', 'gpt', SMALL),
                   ('gpt again (the noise)', 'gpt', SMALL),
                   ('copy-2', 'thoughtbubbles', dict(SMALL, fork_layers=(), copies=2, merge='rightmost')),
                   *((f'thoughtbubbles kappa {kappa} {merge}', 'thoughtbubbles',
                      dict(SMALL, kappa=kappa, merge=merge))
                     for kappa in (2, 4) for merge in ('probs', 'residual'))])


def wide_vocabulary():
    """Each method at GPT-2's vocabulary, where the head is nearly all of a small model. `whole`: a plain GPT whose
    loss holds all logits at once, as most do, also as many as W = 4 slots a token need."""
    size = dict(SMALL, vocab_size=50257, rows=4)
    compare_steps([('gpt, whole logits', 'whole', size),
                   ('gpt', 'gpt', size),
                   ('thoughtbubbles kappa 2 probs', 'thoughtbubbles', size),
                   ('thoughtbubbles kappa 2 residual', 'thoughtbubbles', dict(size, merge='residual')),
                   ('gpt, 4 times the tokens, whole', 'whole', dict(size, block_size=4 * 64)),
                   ('cyb W=4', 'cyb', dict(size, W=4)),
                   ('tbys W=4', 'cyb', dict(size, W=4, objective='tbys'))])


class WholeLogits(GPT):
    def nll(self, x, targets):
        nll = F.cross_entropy(self.logits(x).flatten(0, 1), targets.flatten(), reduction='none')
        return nll.view(targets.shape)


def checkpointing():
    """Each method as it is and with checkpoint_blocks: less memory for a third more of the blocks' work."""
    for n_layer, n_embd, block_size in ((4, 128, 64), (6, 256, 128), (8, 384, 256)):
        for vocab_size in (8192, 50257):
            size = dict(SMALL, n_layer=n_layer, n_embd=n_embd, block_size=block_size, vocab_size=vocab_size,
                        rows=2)
            print(f'{n_layer} blocks of width {n_embd}, 2 rows of {block_size} tokens, vocabulary {vocab_size:,}')
            compare_steps([(name + (', checkpoint_blocks' if recompute else ''), method,
                            dict(size, recompute=recompute, **settings))
                           for name, method, settings in [('gpt', 'gpt', {}),
                                                          ('tb kappa 2', 'thoughtbubbles', {}),
                                                          ('cyb W=2', 'cyb', {}),
                                                          ('rim stage 2, K=4', 'rim', dict(n_blocks=4))]
                           for recompute in (False, True)])


def generating():
    """256 tokens after a prompt of 16, with the KV cache and without."""
    model, _ = build('gpt', **dict(SMALL, block_size=512))
    prompts = [list(range(16))]
    times = [[seconds(lambda: model.complete(prompts, 256, use_cache=use_cache)) for use_cache in (True, False)]
             for _ in range(3)]
    cached, uncached = (statistics.median(t) for t in zip(*times))
    print(f'{"generating 256 tokens":32s} cached {cached:.2f} s, uncached {uncached:.2f} s, '
          f'{uncached / cached:.1f} times faster')
    streaming()


def streaming():
    """Thoughtbubbles, kappa 2, one text: 256 tokens streamed, and each rereading the text, in turn. The seconds up
    to a length, and the milliseconds of a token there, the median of 16."""
    print(f'{"generating n tokens":32s} {"n":>5s} {"streaming":>10s} {"rereading":>10s} {"times x":>8s} '
          f'{"ms a token":>11s} {"rereading":>10s} {"times x":>8s}')
    wide = dict(n_layer=6, n_head=6, n_embd=384, fork_layers=(2, 4))
    for name, size in [('thoughtbubbles, 128 wide', {}), ('thoughtbubbles, 384 wide', wide)]:
        model, _ = build('thoughtbubbles', rows=1, **{**SMALL, 'block_size': 256, **size})
        ways = [model.generate([[0]], 256, streaming=on) for on in (True, False)]
        times = [[seconds(lambda: next(steps)) for steps in ways] for _ in range(256)]
        for n in (64, 128, 256):
            stream, reread = (sum(t) for t in zip(*times[:n]))
            token, again = (1e3 * statistics.median(t) for t in zip(*times[n - 16:n]))
            print(f'{name:32s} {n:5d} {stream:8.2f} s {reread:8.2f} s {reread / stream:8.1f} '
                  f'{token:11.2f} {again:10.2f} {again / token:8.1f}')


def answering():
    """From a question to its answer's first token, with random weights of the size of gpt_small: memory blocks
    join the prefill, Coconut takes a pass per thought, written steps (24 tokens, about four steps) one per
    token."""
    print(f'{"time to the first token":32s} {"question":>8s} {"ms":>8s} {"time x":>8s}')
    for length in (64, 192):
        size = dict(SMALL, block_size=256)
        question = [i % 60 for i in range(length)]
        times = {}
        models = {on: build('rim', rows=1, **size, train_on=on)[0].eval() for on in ('sft', 'rim', 'cot')}
        models['coconut'] = build('coconut', rows=1, **size, n_blocks=6, n_mem=1)[0].eval()
        for model in models.values():
            model.wte.weight.data[-1] = 0  # <end> is never the likeliest
        for _ in range(20 * rounds):
            for train_on, model in models.items():
                new = 25 if train_on == 'cot' else 1
                taken = seconds(lambda: model.answers([question], max_new_tokens=new))
                times.setdefault(train_on, []).append(taken)
        medians = {train_on: statistics.median(t) for train_on, t in times.items()}
        for train_on, t in medians.items():
            print(f'{train_on:32s} {length:8d} {t * 1e3:8.2f} {t / medians["sft"]:8.2f}')


PARTS = {'train': training_step, 'vocabulary': wide_vocabulary, 'checkpoint': checkpointing,
         'generate': generating, 'answer': answering}


def main(argv):
    settings, _, _ = config.load(__file__, argv)
    config.check_choice(settings, 'part', ' '.join(['all', *PARTS]))
    config.check_range(settings, 'rounds batch_size')
    settings['device'] = choose_device(settings['device'])[0]
    globals().update(settings)
    set_threads(threads)
    print(f'device {device}, {torch.get_num_threads()} threads')
    for name, function in PARTS.items():
        if part in ('all', name):
            function()


if __name__ == '__main__':
    config.launch(main)
