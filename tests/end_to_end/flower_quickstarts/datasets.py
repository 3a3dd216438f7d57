"""As much of Hugging Face's `datasets` as the quickstarts use."""

import local_data
import numpy as np


class Dataset:
    def __init__(self, columns, transform=None, pandas=False):
        self.columns = columns
        self.transform = transform
        self.pandas = pandas

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index):
        if self.pandas:
            import pandas

            return pandas.DataFrame({name: column[index] for name, column in self.columns.items()})
        batch = {name: [column[index]] for name, column in self.columns.items()}
        if self.transform is not None:
            batch = self.transform(batch)
        return {name: values[0] for name, values in batch.items()}

    def with_transform(self, transform):
        return Dataset(self.columns, transform)

    def with_format(self, kind):
        return Dataset(self.columns, pandas=kind == "pandas")

    def rows(self, indices):
        return Dataset({name: [c[i] for i in indices] for name, c in self.columns.items()})

    def train_test_split(self, test_size, seed):
        order = np.random.default_rng(seed).permutation(len(self))
        held_out = int(len(order) * test_size)
        parts = {"train": self.rows(order[held_out:]), "test": self.rows(order[:held_out])}
        return DatasetDict(parts)


class DatasetDict(dict):
    def with_transform(self, transform):
        return DatasetDict({name: part.with_transform(transform) for name, part in self.items()})


def load_dataset(name, split):
    return Dataset(local_data.load(name, split))
