"""A generator and a discriminator of points in a plane (Goodfellow et al. 2014)."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import isthmus

CENTRE = torch.tensor([2.0, -1.0])
NOISE = 4


class Gan(isthmus.Task):
    def model(self):
        generator = nn.Sequential(nn.Linear(NOISE, 16), nn.ReLU(), nn.Linear(16, 2))
        discriminator = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 1))
        return nn.ModuleDict({"generator": generator, "discriminator": discriminator})

    def optimizer(self, parameters, participant):
        """Each batch is used for the first, then for the second."""
        return {
            "discriminator": torch.optim.Adam(parameters.of("discriminator"), 1e-2, (0.5, 0.9)),
            "generator": torch.optim.Adam(parameters.of("generator"), 5e-3, (0.5, 0.9)),
        }

    def training_step(self, model, batch, optimizer):
        (points,) = batch
        noise = torch.randn(len(points), NOISE, device=points.device)
        of_made = model["discriminator"](model["generator"](noise))
        if optimizer == "generator":
            return nn.functional.softplus(-of_made).mean()
        of_real = model["discriminator"](points)
        return (nn.functional.softplus(-of_real) + nn.functional.softplus(of_made)).mean()

    def evaluation_step(self, model, batch):
        """The distance of the centres of generated and held-out points."""
        (points,) = batch
        noise = torch.randn(1000, NOISE, generator=torch.Generator().manual_seed(0))
        made = model["generator"](noise.to(points.device))
        return (made.mean(0) - points.mean(0)).norm()

    def local_data(self, participant):
        return points(128, 1 + (participant.shard or (0, 1))[0])

    def eval_data(self):
        return points(256, 0)


def points(count, seed):
    draw = torch.Generator().manual_seed(seed)
    return TensorDataset(CENTRE + 0.5 * torch.randn(count, 2, generator=draw))
