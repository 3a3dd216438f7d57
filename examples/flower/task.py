"""Classify points on three noisy rings; every device has a different arc of the circle."""

import math

import torch
from torch import nn
from torch.utils.data import TensorDataset

import isthmus


class Rings(isthmus.Task):
    def model(self):
        return nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 3))

    def loss(self, output, target):
        return nn.functional.cross_entropy(output, target, reduction="none")

    def metrics(self, output, target):
        return {"accuracy": (output.argmax(-1) == target).float()}

    def local_data(self, participant):
        index, count = participant.shard
        return rings(200, seed=1 + index, begins=index / count, width=3 / 4)

    def eval_data(self):
        return rings(600, seed=0, begins=0.0, width=1.0)

    def optimizer(self, parameters, participant):
        return torch.optim.SGD(parameters, lr=0.3)


def rings(points, seed, begins, width):
    draw = torch.Generator().manual_seed(seed)
    ring = torch.randint(3, (points,), generator=draw)
    angle = 2 * math.pi * (begins + width * torch.rand(points, generator=draw))
    radius = 0.5 + ring / 2 + 0.08 * torch.randn(points, generator=draw)
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], 1), ring)
