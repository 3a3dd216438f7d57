"""A small model and a million users, whose data are made when they are needed."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from isthmus import Task

FEATURES, CLASSES, EXAMPLES = 32, 10, 20
TRUTH = torch.randn(FEATURES, CLASSES, generator=torch.Generator().manual_seed(7))


class Population(Task):
    """Each user's examples are drawn from the user's number."""

    def model(self):
        return nn.Linear(FEATURES, CLASSES)

    def local_data(self, participant):
        return _examples(EXAMPLES, participant.shard[0])

    def eval_data(self):
        return _examples(1000, 2**40)

    def loss(self, output, target):
        return nn.functional.cross_entropy(output, target, reduction="none")

    def metrics(self, output, target):
        return {"accuracy": (output.argmax(1) == target).float()}

    def optimizer(self, parameters, participant):
        return torch.optim.SGD(parameters, lr=0.3)


def _examples(count, seed):
    inputs = torch.randn(count, FEATURES, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, (inputs @ TRUTH).argmax(1))
