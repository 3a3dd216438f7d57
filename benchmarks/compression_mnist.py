"""MNIST on devices that have the digits in different proportions, for `compression.py`."""

from __future__ import annotations

import numpy as np
import torch
from regime_simulation.readers import mnist_images
from torch import nn
from torch.utils.data import TensorDataset

import isthmus

DEVICES, TEST, ALPHA = 10, 2000, 1.0


class Mnist(isthmus.Task):
    """A perceptron with 159,010 parameters; each digit is divided by Dirichlet(1) shares."""

    def __init__(self, settings, data=None):
        super().__init__(settings, data)
        images, digits = mnist_images(data)
        order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))
        inputs = ((images.float() - images.float().mean()) / images.float().std()).flatten(1)
        self.inputs, self.digits = inputs[order], digits[order]

    def model(self):
        return nn.Sequential(nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 10))

    def local_data(self, participant):
        index, count = participant.shard
        random, own = np.random.default_rng(0), []
        digits = self.digits[:-TEST].numpy()
        for digit in range(10):
            (rows,) = np.nonzero(digits == digit)
            ends = np.cumsum(random.dirichlet([ALPHA] * count)) * len(rows)
            own.append(np.split(rows, ends[:-1].astype(int))[index])
        rows = torch.from_numpy(np.concatenate(own))
        return TensorDataset(self.inputs[rows], self.digits[rows])

    def eval_data(self):
        return TensorDataset(self.inputs[-TEST:], self.digits[-TEST:])

    def loss(self, output, target):
        return nn.functional.cross_entropy(output, target, reduction="none")

    def metrics(self, output, target):
        return {"accuracy": (output.argmax(1) == target).float()}

    def optimizer(self, parameters, participant):
        return torch.optim.SGD(parameters, lr=0.05)
