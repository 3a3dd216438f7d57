"""Features of handwritten digits, learned without labels by SimCLR (Chen et al. 2020)."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import isthmus

HELD_OUT = 300


class SimCLR(isthmus.Task):
    def model(self):
        features = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
        return nn.ModuleDict({"features": features, "head": nn.Linear(64, 32)})

    def training_step(self, model, batch):
        """NT-Xent: each image has to find its other view among all views of the batch."""
        (images,) = batch
        views = torch.cat([altered(images), altered(images)])
        directions = nn.functional.normalize(model["head"](model["features"](views).relu()))
        similarity = directions @ directions.T / self.settings.get("temperature", 0.2)
        similarity.fill_diagonal_(-torch.inf)
        partner = torch.arange(len(views)).roll(len(images)).to(views.device)
        return nn.functional.cross_entropy(similarity, partner)

    evaluation_step = training_step

    def local_data(self, participant):
        index, count = participant.shard or (0, 1)
        return TensorDataset(digits()[HELD_OUT + index :: count])

    def eval_data(self):
        return TensorDataset(digits()[:HELD_OUT])

    def optimizer(self, parameters, participant):
        return torch.optim.Adam(parameters, lr=3e-3)


def digits():
    """The 1797 images (N, 8, 8) of scikit-learn, from 0 to 1."""
    return torch.tensor(load_digits().images / 16, dtype=torch.float32)


def altered(images):
    """Views (N, 8, 8) of images, shifted by up to one pixel, with noise."""
    moves = torch.randint(-1, 2, (len(images), 2)).tolist()
    moved = torch.stack(
        [image.roll(move, (0, 1)) for image, move in zip(images, moves, strict=True)]
    )
    return moved + 0.1 * torch.randn_like(moved)
