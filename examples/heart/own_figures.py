"""What a hospital computes for itself: how a model does on its own test rows.

    python examples/heart/own_figures.py RUN/model.safetensors va.csv

The figures of one hospital are printed where its rows are, and nowhere else.
"""

import sys
from pathlib import Path

from safetensors.torch import load_file
from task import Heart, split


def main(model_file, *tables):
    """Print the accuracy of a model on the test rows of each table."""
    task = Heart({})
    model = task.model()
    model.load_state_dict(load_file(model_file))
    for table in map(Path, tables):
        features, labels = split(table, test=True)
        right = task.metrics(model(features), labels)["accuracy"]
        print(f"{table.stem:12} {right.mean():.4f} of {len(right)} patients")


if __name__ == "__main__":
    main(*sys.argv[1:])
