"""Survival in hospitals by a Cox model, whose loss compares the patients of one hospital."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import isthmus

HAZARDS = torch.tensor([1.0, -0.5, 0.0, 0.8])
"""Effects that the simulated data have, one for each measurement of a patient."""


class Cox(isthmus.Task):
    def model(self):
        return nn.Linear(len(HAZARDS), 1, bias=False)

    def training_step(self, model, batch):
        """Breslow's negative log partial likelihood (Cox 1972), per observed event."""
        measurements, time, event = batch
        order = time.argsort(descending=True)
        risk, observed = model(measurements[order]).squeeze(1), event[order]
        likelihoods = (risk - risk.logcumsumexp(0)) * observed
        events = observed.sum()
        return isthmus.StepLoss(-likelihoods.sum() / events.clamp(min=1), weight=float(events))

    def evaluation_step(self, model, batch):
        loss = self.training_step(model, batch)
        measurements, time, event = batch
        risk = model(measurements).squeeze(1)
        comparable = (time[:, None] < time) & event[:, None].bool()
        concordant = (risk[:, None] > risk)[comparable].float().mean()
        return isthmus.StepLoss(loss.loss, loss.weight, {"concordance": concordant})

    def local_data(self, participant):
        return hospital(200, 1 + (participant.shard or (0, 1))[0])

    def eval_data(self):
        return hospital(300, 0)

    def optimizer(self, parameters, participant):
        return torch.optim.Adam(parameters, lr=0.1)


def hospital(patients, seed):
    """Measurements (N, 4), times (N) and whether the event was observed (N); simulated.

    Each hospital has another baseline hazard, which the loss does not have to know.
    """
    draw = torch.Generator().manual_seed(seed)
    measurements = torch.randn(patients, len(HAZARDS), generator=draw)
    baseline = 1.0 + 3.0 * torch.rand((), generator=draw)
    waiting = -torch.rand(patients, generator=draw).log() / (measurements @ HAZARDS).exp()
    end = -torch.rand(patients, generator=draw).log() * 2.0
    time, event = torch.minimum(waiting, end) / baseline, (waiting < end).float()
    return TensorDataset(measurements, time, event)
