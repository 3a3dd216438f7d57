"""The workload as a task of Isthmus."""

import torch
from simulation_peers.mnist_users import RATE, Users, build
from torch import nn
from torch.utils.data import TensorDataset

from isthmus import Task


class MnistUsers(Task):
    """Digits of 1,000 users; `settings["model"]` names the model."""

    def __init__(self, settings, data=None):
        super().__init__(settings, data)
        self.users = Users()

    def model(self):
        return build(self.settings["model"])

    def local_data(self, participant):
        index, _ = participant.shard
        return TensorDataset(self.users.inputs[index], self.users.digits[index])

    def loss(self, output, target):
        return nn.functional.cross_entropy(output, target, reduction="none")

    def optimizer(self, parameters, participant):
        return torch.optim.SGD(parameters, lr=RATE)
