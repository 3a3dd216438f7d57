"""The workload of benchmarks/simulation.py, which every contender imports: data, models, numbers.

1,000 users have 8 images of MNIST each; 2,000 other images are the test set. The file `DATA` of the
environment has all of them, as `write_data` wrote it.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn

USERS, IMAGES, COHORT = 1000, 8, 50
EPOCHS, BATCH, RATE = 5, 4, 0.05
"""Local training of a user: epochs of SGD, images in a step, learning rate."""
TEST = 2000


def write_data(images: torch.Tensor, digits: torch.Tensor, file: Path) -> None:
    """Store normalised images, in one random order for all contenders."""
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))
    inputs = (images[order] - images.mean()) / images.std()
    torch.save({"inputs": inputs, "digits": digits[order]}, file)


class Users:
    """The users' images (1000, 8, 1, 28, 28) and digits (1000, 8), and the test set."""

    def __init__(self, device: str = "cpu") -> None:
        """Load the file."""
        data = torch.load(os.environ["DATA"], weights_only=True, map_location=device)
        count = USERS * IMAGES
        self.inputs = data["inputs"][:count].view(USERS, IMAGES, 1, 28, 28)
        self.digits = data["digits"][:count].view(USERS, IMAGES)
        self.test = data["inputs"][-TEST:], data["digits"][-TEST:]


def build(name: str) -> nn.Module:
    """A new model: `mlp` (159,010 parameters) or `cnn` (20,490)."""
    if name == "mlp":
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 10))
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 49, 10),
    )


def train(model: nn.Module, inputs: torch.Tensor, digits: torch.Tensor) -> None:
    """The local training of one user, as a plain loop."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    model.train()
    for _ in range(EPOCHS):
        for part in torch.randperm(IMAGES).split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs[part]), digits[part]).backward()
            optimizer.step()


@torch.no_grad()
def accuracy(model: nn.Module, users: Users) -> float:
    """Share of the test set that the model gets right."""
    inputs, digits = users.test
    return (model.eval()(inputs).argmax(1) == digits).float().mean().item()
