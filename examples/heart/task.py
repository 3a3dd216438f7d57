"""Heart disease in four hospitals, none of which gives its patients' rows away.

The split, the model, the loss and the metric are those of Fed-Heart-Disease in FLamby (Ogier du
Terrail et al. 2022, https://arxiv.org/abs/2210.04620), from the UCI heart disease data: ten columns
of each row without a missing value, of which two are categorical, and whether a disease was found.
"""

import csv
import functools

import torch
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import TensorDataset

import isthmus

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
NUMBERS = (0, 1, 3, 4, 5, 7, 8, 9)
"""Columns that are used as they are."""
CATEGORIES = {2: (2, 3, 4), 6: (1, 2)}
"""Categorical columns, with the values that become a column each; the first value has none."""
TEST_SHARE = 0.34


class Heart(isthmus.Task):
    """Logistic regression on 13 features."""

    def model(self):
        """One layer."""
        return nn.Linear(13, 1)

    def loss(self, output, target):
        """Cross entropy of each patient."""
        return nn.functional.binary_cross_entropy_with_logits(output, target, reduction="none")

    def metrics(self, output, target):
        """The share of patients who are classified correctly."""
        return {"accuracy": ((output > 0) == (target > 0)).float()}

    def device_metrics(self):
        """What hospitals count on their test rows."""
        return {
            "accuracy": isthmus.Mean(),
            "confusion": isthmus.Confusion(2, of=lambda output, target: ((output > 0), target)),
            "auc": isthmus.BinnedScores(of=lambda output, target: (output.sigmoid(), target)),
        }

    def local_data(self, participant):
        """The training rows of a hospital."""
        return TensorDataset(*split(self.file_of(participant), test=False))

    def validation_data(self, participant):
        """The test rows of a hospital."""
        return TensorDataset(*split(self.file_of(participant), test=True))

    def statistics_columns(self):
        """What `isthmus statistics` tells of the training rows of all hospitals together."""
        return {
            "age": isthmus.Column(19.5, 89.5, bins=70),
            "pressure": isthmus.Column(0, 240, bins=120),
            "cholesterol": isthmus.Column(0, 700, bins=70),
            "pain": isthmus.Category((1, 2, 3, 4)),
            "disease": isthmus.Category((0, 1)),
        }

    def statistics_data(self, participant):
        """Columns as they are in the file, and the label."""
        rows, train, _ = table(self.file_of(participant))
        numbers = {"age": 0, "pressure": 3, "cholesterol": 4, "pain": 2}
        columns = {name: rows[train, place] for name, place in numbers.items()}
        return {**columns, "disease": (rows[train, 10] > 0).int()}

    def optimizer(self, parameters, participant):
        """Plain SGD."""
        return torch.optim.SGD(parameters, lr=self.settings.get("lr", 0.001))

    def file_of(self, participant):
        """The file of a hospital: on one machine one of a folder, else that of `--data`."""
        if participant.shard is None:
            return self.data
        index, count = participant.shard
        if count != len(HOSPITALS):
            raise isthmus.TaskError(
                f"there are {count} devices for {len(HOSPITALS)} hospitals; set "
                f"federated.clients={len(HOSPITALS)}"
            )
        return self.data / f"{HOSPITALS[index]}.csv"


@functools.cache
def table(path):
    """Complete rows of a hospital, ten columns and the label (n, 11), and FLamby's split."""
    if not path.is_file():
        raise isthmus.TaskError(
            f"there is no file {path}; give the folder of the UCI heart disease data with "
            "--set task.data=PATH"
        )
    with path.open() as file:
        complete = [row for row in csv.reader(file) if "?" not in row[:10]]
    rows = torch.tensor([[float(value) for value in (*row[:10], row[13])] for row in complete])
    ill = rows[:, 10] > 0
    few = min(int(ill.sum()), int((~ill).sum())) <= 2
    train, test = train_test_split(
        range(len(rows)),
        train_size=1 - TEST_SHARE,
        test_size=TEST_SHARE,
        random_state=43,
        stratify=None if few else ill.tolist(),
    )
    return rows, sorted(train), sorted(test)


@functools.cache
def split(path, test):
    """Features (n, 13) and labels (n, 1) of a hospital's training or test rows.

    Features are normalised by the mean and the deviation of the training rows.
    """
    rows, train, held_out = table(path)
    chosen = held_out if test else train
    columns = [rows[:, column] for column in NUMBERS]
    columns += [
        (rows[:, column] == value).float() for column in CATEGORIES for value in CATEGORIES[column]
    ]
    features, labels = torch.stack(columns, dim=1), (rows[:, 10:] > 0).float()
    mean, deviation = features[train].mean(0), features[train].std(0)
    return (features[chosen] - mean) / (deviation + 1e-9), labels[chosen]
