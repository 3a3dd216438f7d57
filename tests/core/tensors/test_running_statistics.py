"""Running statistics of normalisation layers in the exchange set."""

import pytest
import torch
from torch import nn

from isthmus.errors import TaskError, UpdateError
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.tensors.running_statistics import find_statistics, freeze_statistics


def model():
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def test_statistics_follow_the_parameters_and_survive_the_header():
    layout = TensorLayout.of(model())
    assert layout.statistics == ("1.running_mean", "1.running_var")
    assert layout.trained_size == 6 + 3 + 6 + 4
    assert layout.size == layout.trained_size + 6
    assert TensorLayout.from_header(layout.header) == layout
    both = layout.gradient_and_update
    assert TensorLayout.from_header(both.header) == both
    halves = [entry.name.split(entry.name[len("gradient")])[0] for entry in both.entries[:8]]
    assert set(halves) == {"gradient"}
    assert [entry.name.removeprefix("gradient")[1:] for entry in both.entries[:8]] == [
        entry.name for entry in layout.entries
    ]


def test_the_parameters_of_an_update_are_found_with_and_without_a_gradient():
    layout = TensorLayout.of(model())
    both = layout.gradient_and_update
    vector = torch.arange(both.size)
    expected = [
        int(value)
        for name, part in both.parts(vector)
        if name.startswith("update.")
        for value in part.flatten()
    ]
    assert layout.parameters_of_update(vector).tolist() == expected
    update = vector[layout.size :]
    assert layout.parameters_of_update(update).tolist() == expected


def test_a_model_without_statistics_has_the_same_bytes_as_ever():
    layout = TensorLayout.of(nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3)))
    assert b"__metadata__" not in layout.header
    assert layout.trained_size == layout.size


@pytest.mark.parametrize("statistics", ['["other"]', "[[]]", "{}", "3", "[", '["a", "a"]'])
def test_a_header_with_other_statistics_is_refused(statistics):
    layout = TensorLayout.from_shapes({"a": (2,), "b": (2,)}, ["b"])
    header = layout.header.replace(b'[\\"b\\"]', statistics.encode().replace(b'"', b'\\"'))
    with pytest.raises(UpdateError):
        TensorLayout.from_header(header)


def test_statistics_are_gathered_and_scattered():
    source, target = model(), model()
    source[1].running_mean.fill_(3.0)
    layout = TensorLayout.of(source)
    layout.scatter(layout.gather(source), target)
    assert target[1].running_mean.tolist() == [3.0] * 3
    assert torch.equal(source[0].weight, target[0].weight)


def test_a_layer_that_normalises_by_its_batch_in_evaluation_is_refused():
    with pytest.raises(TaskError, match=r"module '1' \(BatchNorm1d\) normalises by the batch"):
        TensorLayout.of(
            nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False))
        )
    assert find_statistics(nn.InstanceNorm1d(2, affine=True)) == {}
    assert list(find_statistics(nn.InstanceNorm1d(2, track_running_stats=True))) == [
        "running_mean",
        "running_var",
    ]


def test_frozen_statistics_do_not_change_in_any_mode():
    frozen = model()
    freeze_statistics(frozen)
    frozen.train()
    inputs = torch.randn(4, 2)
    first = frozen(inputs)
    assert not frozen[1].training
    assert frozen[0].training
    assert frozen[1].running_mean.eq(0).all()
    assert torch.equal(first, frozen.eval()(inputs))
