"""Handwritten digits, 8x8: some are frequent in a public archive, the others on devices.

Every training image is in exactly one place. The setting `fleet_share` lists for each digit the
fraction of its images on the devices; the datacenter's public archive holds the others.
"""

import gzip
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

import isthmus

HELD_OUT_PER_DIGIT = 36


class Digits(isthmus.Task):
    def __init__(self, settings, data=None):
        super().__init__(settings, data)
        self.images, self.labels = read_digits()
        self.held_out, self.archive, self.fleet = self.split()

    def model(self):
        return nn.Sequential(
            nn.Linear(64, 128),
            nn.LayerNorm(128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )

    def loss(self, output, target):
        return nn.functional.cross_entropy(output, target, reduction="none")

    def metrics(self, output, target):
        return {"accuracy": (output.argmax(-1) == target).float()}

    def local_data(self, participant):
        if participant.regime == "datacenter":
            return self.dataset(self.archive)
        if participant.shard is None:
            raise isthmus.TaskError("this example splits one data set: each device needs a shard")
        index, count = participant.shard
        return self.dataset(self.deal(count)[index])

    def eval_data(self):
        return self.dataset(self.held_out)

    def public_eval(self):
        """The held-out images of each digit, in the archive's proportions."""
        rows = [
            self.held_out[self.labels[self.held_out] == digit][
                : round((1 - share) * HELD_OUT_PER_DIGIT)
            ]
            for digit, share in enumerate(self.settings["fleet_share"])
        ]
        return self.dataset(np.concatenate(rows))

    def optimizer(self, parameters, participant):
        if participant.regime == "datacenter":
            return torch.optim.AdamW(parameters, lr=self.settings["datacenter_lr"], fused=True)
        return torch.optim.SGD(parameters, lr=self.settings["client_lr"])

    def statistics_columns(self):
        """What `isthmus statistics` tells of the images of all devices together."""
        return {"ink": isthmus.Column(0, 1), "digit": isthmus.Category(range(10))}

    def statistics_data(self, participant):
        """How dark each image is, from 0 to 1, and its digit."""
        images, labels = self.local_data(participant).tensors
        return {"ink": images.mean(1), "digit": labels}

    def dataset(self, rows):
        images = torch.tensor(self.images[rows] / 16, dtype=torch.float32)
        return TensorDataset(images, torch.tensor(self.labels[rows]))

    def split(self):
        """The rows of the held-out set, of the archive and of all devices together."""
        order = np.random.RandomState(self.settings["split_seed"]).permutation(len(self.labels))
        parts = []
        for digit, share in enumerate(self.settings["fleet_share"]):
            rows = order[self.labels[order] == digit]
            fleet = round(share * (len(rows) - HELD_OUT_PER_DIGIT))
            parts.append(np.split(rows, [HELD_OUT_PER_DIGIT, len(rows) - fleet]))
        return [np.concatenate(rows) for rows in zip(*parts, strict=True)]

    def deal(self, count):
        """Divide the devices' rows among `count` devices, each digit in Dirichlet proportions."""
        random = np.random.RandomState(self.settings["split_seed"])
        order = random.permutation(self.fleet)
        devices = [order[index : index + 1] for index in range(count)]  # at least one each
        order = order[count:]
        for digit in range(10):
            rows = order[self.labels[order] == digit]
            ends = np.cumsum(random.dirichlet([self.settings["dirichlet"]] * count)) * len(rows)
            for index, dealt in enumerate(np.split(rows, ends[:-1].round().astype(int))):
                devices[index] = np.append(devices[index], dealt)
        return devices


def read_digits():
    """Load images (1797, 64) of 0 to 16 and labels (1797), like scikit-learn's `load_digits`.

    Reads scikit-learn's file directly, because importing scikit-learn takes seconds in each of a
    job's processes.
    """
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise isthmus.TaskError("this example's images come with scikit-learn, which is missing")
    file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    with gzip.open(file, "rt") as lines:
        rows = np.loadtxt(lines, delimiter=",")
    return rows[:, :-1], rows[:, -1].astype(int)
