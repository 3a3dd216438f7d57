"""The workload in pfl's simulation; prints the ends of rounds and the accuracy as JSON.

pfl chooses one framework for the process and trains the users of a cohort one after the other.
"""

import json
import sys
import time

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from simulation_peers.mnist_users import (
    BATCH,
    COHORT,
    EPOCHS,
    IMAGES,
    RATE,
    USERS,
    Users,
    accuracy,
    build,
)
from torch import nn


class Model(nn.Module):
    """The model with the loss that pfl asks for."""

    def __init__(self, name):
        super().__init__()
        self.net = build(name)

    def loss(self, inputs, digits, **keywords):
        self.train(not keywords)
        return nn.functional.cross_entropy(self.net(inputs), digits)

    @torch.no_grad()
    def metrics(self, inputs, digits, **keywords):
        self.eval()
        loss = nn.functional.cross_entropy(self.net(inputs), digits, reduction="sum")
        return {"loss": Weighted(loss.item(), len(digits))}


class Timer(TrainingProcessCallback):
    """Notes when each round ended."""

    def __init__(self):
        self.ends = []

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        self.ends.append(time.perf_counter())
        return False, Metrics()


def main(name, rounds):
    torch.manual_seed(0)
    np.random.seed(0)
    users = Users()
    model = Model(name)
    central = torch.optim.SGD(model.parameters(), 1.0)
    pfl_model = PyTorchModel(model, torch.optim.SGD, central)

    def dataset(user):
        order = torch.randperm(IMAGES)  # pfl trains every epoch in the order of the data
        tensors = [users.inputs[user][order], users.digits[user][order]]
        return PyTorchTensorDataset(tensors, eval_kwargs={"eval": True})

    sampler = get_user_sampler("random", list(range(USERS)))
    data = FederatedDataset(dataset, sampler)
    parameters = NNAlgorithmParams(
        central_num_iterations=rounds,
        evaluation_frequency=rounds + 1,
        train_cohort_size=COHORT,
        val_cohort_size=0,
    )
    training = NNTrainHyperParams(
        local_num_epochs=EPOCHS, local_learning_rate=RATE, local_batch_size=BATCH
    )
    timer = Timer()
    FederatedAveraging().run(
        parameters,
        SimulatedBackend(training_data=data, val_data=data),
        pfl_model,
        training,
        NNEvalHyperParams(local_batch_size=IMAGES),
        callbacks=[timer],
    )
    print(json.dumps({"ends": timer.ends, "accuracy": accuracy(model.net.cpu(), users)}))


main(sys.argv[1], int(sys.argv[2]))
