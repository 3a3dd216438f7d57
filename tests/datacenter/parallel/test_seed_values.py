"""Values of the seed, which ranks read from a file, and what reading them must not look like."""

import functools
import os

import pytest
import torch
from torch import nn

from isthmus.errors import StorageError
from isthmus.start.unfilled import parameters_without_memory
from isthmus.tensors.exchange_set import TensorLayout
from isthmus_datacenter.parallel import module_calls, seed_values
from isthmus_datacenter.parallel.seed_values import SeedValues
from isthmus_datacenter.parallel.unfilled_model import UnfilledModel


class Small(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.first = nn.Linear(3, 5, dtype=dtype)
        self.norm = nn.BatchNorm1d(5)
        self.second = nn.Linear(3, 5)
        self.second.weight = self.first.weight


@pytest.fixture
def written(tmp_path, monkeypatch):
    """The values of a model in a file, and the model."""
    monkeypatch.setattr(seed_values, "_PIECE_ELEMENTS", 4)

    def write(make):
        model = make()
        layout = TensorLayout.of(model)
        with parameters_without_memory():
            empty = make()
        assert SeedValues.are_enough(layout, empty)
        values = SeedValues(tmp_path / "new" / "seeded", layout, empty)
        values.write(model)
        return values, model, empty

    return write


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_those_of_the_model(written, dtype):
    values, model, _ = written(lambda: Small(dtype))
    weight = model.first.weight
    for name in ("first.weight", "second.weight"):
        read = values.read(name)
        assert (read.dtype, read.equal(weight)) == (dtype, True)
        assert values.read(name, 1, 3).equal(weight[1:4])
        assert values.read(name, 5, 0).shape == (0, 3)
    assert values.read("norm.running_var").equal(torch.ones(5))
    assert values.has("second.weight")
    assert not values.has("norm.num_batches_tracked")


def test_the_file_is_the_encoded_model(written):
    values, model, _ = written(lambda: Small(torch.float32))
    layout = TensorLayout.of(model)
    assert values.path.read_bytes() == layout.encode(layout.gather(model))
    assert list(values.path.parent.iterdir()) == [values.path]


def test_frozen_and_wider_parameters_are_not_in_the_file():
    model = nn.Linear(2, 2)
    layout = TensorLayout.of(model)
    assert SeedValues.are_enough(layout, model)
    assert not SeedValues.are_enough(layout, nn.Linear(2, 2).double())
    assert not SeedValues.are_enough(layout, nn.Sequential(nn.Linear(2, 2)))


def test_a_file_that_cannot_be_written_or_read_is_one_sentence(written):
    values, model, _ = written(lambda: Small(torch.float32))
    os.truncate(values.path, values.path.stat().st_size - 1)
    with pytest.raises(StorageError, match=r"seeded is shorter than the model$"):
        values.read("norm.running_var")
    values.path.unlink()
    with pytest.raises(StorageError, match=r"seeded cannot be read: No such file or directory$"):
        values.read("first.weight")
    values.path.mkdir()
    with pytest.raises(
        StorageError, match=r"first values cannot be written to .*: Is a directory$"
    ):
        values.write(model)


def test_values_that_are_read_are_no_decision_of_the_model(written):
    """Modules after a small one, which is no unit, are found as in a model with values."""

    def make():
        return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))

    values, whole, empty = written(make)
    inputs = torch.randn(3, 4)
    found = []
    unfilled = UnfilledModel(empty, values)
    for model, wrapped in ((whole, lambda call: call), (empty, unfilled.trying)):
        units = [model[0], model[2]]
        call = wrapped(lambda called, examples, training: called(inputs[:examples]))
        try_batch = functools.partial(call, model)
        found.append(module_calls._find(model, [units], units, try_batch, given=False, parts=0))
    assert found[0] == found[1]
    assert found[0].kept == [0, 1]


@pytest.mark.parametrize("listed", [False, True])
def test_copies_of_parameters_have_no_values_without_them(make_setup, tmp_path, listed):
    """The model is built whole then, also where no unit of it is tried with examples."""
    for name, in_parts in (("Table", True), ("Anchored", False)):
        prepared = make_setup(name, {"listed": listed}, zero_stage=3)
        built = UnfilledModel.of(
            prepared.task, prepared.job, tmp_path, prepared.layout, tmp_path / "seeded"
        )
        assert (built is not None) == in_parts
