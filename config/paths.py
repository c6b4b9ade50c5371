"""What eval.py measures of the gradients of Thoughtbubbles, in the form of config/measures.py: why a score goes up
or down. A stream's p is read in four ways: by those who attend to it, as a key's bias and as a value's factor; by
its own updates, as a gate; and by the merge. One number serves all four, and they may want different things."""
import numpy as np
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from config.measures import entropies, progress
from thoughtbubbles import is_original

PATHS = ('as key', 'as value', 'as gate', 'in the merge')
HARD = 0.75  # the tokens above this quantile of the entropy


class Paths(TorchFunctionMode):
    """While it is active and a Thoughtbubbles model computes its loss: adds a zero to log p wherever that is read,
    so that the loss has a gradient for each way. `levels` has for each fork its log_p and src (B,S), and `zeros`:
    {path: (B,S)}, and under 'forked' the one that the next fork's candidates inherit."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.levels = []

    def __enter__(self):
        model = self.model
        self.hooks = [layer.register_forward_pre_hook(self.before_block) for layer in model.layers]
        for fork in model.forks.values():
            self.hooks.append(fork.register_forward_pre_hook(self.before_fork))
            self.hooks.append(fork.register_forward_hook(self.after_fork))
        streams = model.streams

        def with_zero(*args):
            x, log_p, src = streams(*args)
            return x, log_p + self.zero('in the merge'), src
        model.streams = with_zero  # hides the method
        return super().__enter__()

    def __exit__(self, *error):
        for hook in self.hooks:
            hook.remove()
        del self.model.streams
        return super().__exit__(*error)

    def zero(self, path):
        return self.levels[-1]['zeros'][path]

    def after_fork(self, fork, inputs, output):
        _, log_p, src = output
        zeros = {path: torch.zeros_like(log_p, requires_grad=True) for path in (*PATHS, 'forked')}
        self.levels.append({'log_p': log_p, 'src': src, 'zeros': zeros})

    def before_fork(self, fork, inputs):
        if self.levels:
            x, log_p, *others = inputs
            return x, log_p + self.zero('forked'), *others

    def before_block(self, block, inputs):
        *others, gate = inputs
        if self.levels and gate is not None:
            return *others, gate * self.zero('as gate').exp()[..., None]

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.scaled_dot_product_attention and self.levels:
            q, k, v = args  # (B,H,S,D + 1 or more); the score is channel D of k
            attention = self.model.layers[0].attn
            D = self.model.config.head_width
            if k.size(-1) > D:
                key = F.pad(self.zero('as key')[:, None, :, None], (D, k.size(-1) - D - 1))
                value = (attention.value_unit * self.zero('as value')).exp()[:, None, :, None]
                args = q, k + key.to(k.dtype), v * value.to(v.dtype)
        return function(*args, **(kwargs or {}))


def gradients(model, idx, targets):
    """Of each fork (log_p (B,S), src (B,S), {path: d loss / d log_p (B,S)}), where the loss is summed over the
    tokens. What a fork's children inherit counts for it. The paths' sum is the whole gradient."""
    with Paths(model) as watch:
        loss = model(idx, targets)[1] * (targets >= 0).sum()
    found = []
    for level in reversed(watch.levels):
        zeros = level['zeros']
        by_path = torch.autograd.grad(loss, [zeros[path] for path in PATHS], retain_graph=True, allow_unused=True,
                                      materialize_grads=True)
        if found:  # log p of the next fork is this one's and the score of a single fork or keep
            by_path = [own + torch.autograd.grad(after['log_p'], zeros['forked'], later, retain_graph=True)[0]
                       for own, later in zip(by_path, found[0][2].values())]
        after = level
        found.insert(0, (level['log_p'].detach(), level['src'], dict(zip(PATHS, by_path))))
    return found


def paths(model, on):
    """Thoughtbubbles: d loss / d log p of each fork's streams by what p is used for, in nats of a whole row; above
    0 training lowers p. Apart for the quarter of the tokens whose prediction has the highest entropy: by their
    loss they would be chosen for what came next, and more confidence would seem to harm."""
    if not model.forks:
        return {}
    found = {layer: [] for layer in sorted(model.config.fork_layers)}
    of_tokens = []
    for idx, targets in progress(on.rows, 'paths'):
        entropy = torch.stack([entropies(model, row) for row in idx])  # (B,T)
        of_tokens.append(entropy)
        with torch.enable_grad(), torch.autocast(idx.device.type, enabled=False):
            levels = gradients(model, idx, targets)
        for columns, (log_p, src, by_path) in zip(found.values(), levels):
            src = src.cpu()
            columns.append(torch.stack([entropy.gather(1, src), is_original(src),
                                        *(t.cpu().double() for t in (log_p.exp(), *by_path.values()))]).flatten(1))
    limit = float(np.quantile(torch.cat(of_tokens), HARD))  # torch's own takes 2 ** 24 numbers at most
    table = []
    for layer, columns in found.items():
        entropy, original, p, *by_path = torch.cat(columns, dim=1)
        uncertain = entropy > limit
        for tokens, group in (('uncertain', uncertain), ('others', ~uncertain)):
            n_tokens = int((group & (original == 1)).sum())  # 0 where all entropies are the same
            for streams, kind in (('originals', original == 1), ('copies', original == 0)):
                here = group & kind
                n = int(here.sum())
                means = [column[here].mean().item() if n else None for column in (p, *by_path, sum(by_path))]
                table.append({'fork before block': layer, 'tokens': tokens, 'streams': streams,
                              'per token': n / n_tokens if n_tokens else None,
                              **dict(zip(('mean p', *PATHS, 'sum'), means))})
    return {'d loss / d log p': table}
