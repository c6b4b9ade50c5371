"""LoRA (arXiv 2106.09685): a model's matrices stay as they are, and small adapters beside them are trained.

    python -m config.lora --out_dir=out/rim_lora    writes merged.pt there: the adapters added into the matrices
"""
import os

import torch
import torch.nn as nn
import torch.nn.functional as F

import config
from config import UserError
from config.checkpoint import LORA_SCALE, OWN_ROWS, load_checkpoint, merge_adapters, save_checkpoint

out_dir = 'out/run'  # a run with lora_rank above 0


class LoRALinear(nn.Linear):
    """weight + 2 B A, of which the weight is frozen. A stored sum would go stale."""

    def __init__(self, linear, rank):
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None)
        self.load_state_dict(linear.state_dict())
        self.lora_a = nn.Parameter(torch.randn(rank, self.in_features) * self.in_features ** -0.5)
        self.lora_b = nn.Parameter(torch.zeros(self.out_features, rank))

    def forward(self, x):
        return super().forward(x) + LORA_SCALE * F.linear(F.linear(x, self.lora_a), self.lora_b)


def add_adapters(model, rank):
    """Adapters beside all matrices of a model's blocks; nothing else that it has so far is trained."""
    for part in [part for layer in model.layers for part in (layer.attn, layer.mlp)]:
        for name, linear in list(part.named_children()):
            if isinstance(linear, nn.Linear):
                setattr(part, name, LoRALinear(linear, rank))
    for name, p in model.named_parameters():
        p.requires_grad = 'lora_' in name


class OwnRows:
    """Of a GPT (the next base class) that LoRA has frozen: the rows of the vocabulary's last tokens, in embedding
    and head, are trained as parameters of their own."""
    first = None  # the first of these tokens; None: there are no such rows

    def own_rows(self, first):
        self.first = first
        self.special_in = nn.Parameter(self.wte.weight[first:].detach().clone())
        self.special_out = self.special_in
        if not self.config.tie_weights:
            self.special_out = nn.Parameter(self.lm_head.weight[first:].detach().clone())

    def load_pretrained(self, state):
        new = super().load_pretrained(state)
        with torch.no_grad():
            for own, matrix in OWN_ROWS.items() if self.first else ():
                getattr(self, own).copy_(self.get_parameter(matrix)[self.first:])
        return new

    def token_vectors(self, idx):
        x = super().token_vectors(idx)
        if self.first is None:
            return x
        own = self.special_in[(idx - self.first).clamp(min=0)] * self.embedding_scale
        return torch.where((idx >= self.first)[..., None], own, x)

    def logits(self, x):
        z = super().logits(x)
        if self.first is not None:
            z[..., self.first:] = F.linear(self.ln_f(x), self.special_out)
        return z

    def target_numbers(self, y, targets):
        """As GPT's; the logits of these tokens are computed beside the others'."""
        if self.first is None:
            return super().target_numbers(y, targets)
        target_logit, lse = super().target_numbers(y, targets.clamp(max=self.first - 1), self.first)
        z = F.linear(y, self.special_out).to(lse.dtype)  # (..., as many)
        own = z.gather(-1, (targets - self.first).clamp(min=0)[..., None])[..., 0]
        return torch.where(targets < self.first, target_logit, own), torch.logaddexp(lse, z.logsumexp(dim=-1))


def main(argv):
    folder = config.load(__file__, argv)[0]['out_dir']
    path = os.path.join(folder, 'ckpt.pt')
    checkpoint = load_checkpoint(path)
    if not checkpoint['model_config'].get('lora_rank'):
        raise UserError(f'{path} has no adapters: lora_rank is 0')
    for name in ('optimizer', 'scaler', 'stage'):  # of the adapters
        checkpoint.pop(name, None)
    save_checkpoint(os.path.join(folder, 'merged.pt'), {
        **checkpoint, 'model': merge_adapters(checkpoint['model']),
        'model_config': {**checkpoint['model_config'], 'lora_rank': 0}})
    print(f'written to {folder}/merged.pt')


if __name__ == '__main__':
    config.launch(main)
