"""Training of factors as autograd sees it: a model whose matrix is W + alpha / r * B A."""

import math

import torch
from torch import nn
from torch.nn.utils import parametrize

from isthmus.task.definition import Parameters
from isthmus.task.scoring import build_model

ALPHA = 12.0
LOW_RANK = f"exchange.low_rank={{include=['2.weight'],rank=3,alpha={ALPHA}}}"
METHODS = """
def model(self):
    last = nn.Linear(12, 3)
    last.bias.requires_grad_(False)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 12), nn.Tanh(), last)

def adapter_rank(self, participant):
    return {"a": 2, "b": 4, "c": 8}.get(participant.name)

def local_data(self, participant):
    return rows(8 * len(participant.name) + ord(participant.name[0]) - 90, seed=3)

def optimizer(self, parameters, participant):
    return torch.optim.AdamW(parameters, lr=0.02)
"""
STEPS = ("federated.local_steps=5", "federated.batch_size=6")


class Product(nn.Module):
    """A matrix plus the product of factors, by autograd."""

    def __init__(self, matrix, rank, seed):
        super().__init__()
        m, n = matrix.shape
        generator = torch.Generator().manual_seed(int.from_bytes(seed[8:16], "little") >> 1)
        uniform = torch.rand(rank, n, generator=generator)
        self.right = nn.Parameter((uniform * 2 - 1) / math.sqrt(n))
        self.left = nn.Parameter(torch.zeros(m, rank))
        self.scale = ALPHA / rank

    def forward(self, matrix):
        return matrix.detach() + self.product

    @property
    def product(self):
        return self.scale * self.left @ self.right


def reference(run, start, rank, added=None):
    """What a device's training must be: the update, and the parametrisation with the factors."""
    settings, seed = run.job.federated, run.seed_of(1)
    model = build_model(run.task, run.job.seed)
    run.layout.scatter(start, model)
    for name, each in model.named_parameters():
        each.requires_grad_(name in run.layout.names)
    product = Product(model[2].weight, rank, seed)
    parametrize.register_parametrization(model[2], "weight", product)
    left_out = model[2].parametrizations.weight.original
    left_out.requires_grad_(False)
    optimizer = run.task.optimizer(
        Parameters((name, each) for name, each in model.named_parameters() if each.requires_grad),
        run.participant,
    )

    def now(name):
        module, _, kind = name.rpartition(".")
        return getattr(model.get_submodule(module), kind)

    for parts in run.data.steps(seed, 1, settings):
        optimizer.zero_grad()
        batches = [part.batch for part in parts]
        inputs, target = (torch.cat(each) for each in zip(*batches, strict=True))
        loss = run.task.loss(model(inputs), target).mean()
        for name, part in run.layout.parts(start):
            loss = loss + settings.proximal / 2 * (now(name) - part).square().sum()
        for name, part in run.layout.parts(torch.zeros_like(start) if added is None else added):
            loss = loss + (now(name) * part).sum()
        loss.backward()
        if settings.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm)
        optimizer.step()
    end = torch.cat([now(name).detach().flatten() for name in run.layout.names])
    return start - end, product


def matrix_of(run, vector):
    return dict(run.layout.parts(vector))["2.weight"]
