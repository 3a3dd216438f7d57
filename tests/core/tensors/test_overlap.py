"""Parameters that share memory are found, and those that only lie side by side are not."""

import pytest
import torch
from torch import nn

from isthmus.errors import TaskError
from isthmus.tensors.exchange_set import TensorLayout


def with_tensors(**tensors):
    model = nn.Module()
    for name, tensor in tensors.items():
        if isinstance(tensor, nn.Parameter):
            model.register_parameter(name, tensor)
        else:
            model.register_buffer(name, tensor)
    return model


def views(*chosen, trained=(True, True)):
    base = torch.arange(24.0)
    pairs = zip("ab", chosen, trained, strict=True)
    return with_tensors(**{name: nn.Parameter(of(base), grad) for name, of, grad in pairs})


OVERLAPPING = {
    "slices": lambda: views(lambda base: base[:8], lambda base: base[4:12]),
    "the same": lambda: views(lambda base: base, lambda base: base),
    "a frozen one": lambda: views(
        lambda base: base[:8], lambda base: base[4:12], trained=(True, False)
    ),
    "columns": lambda: views(
        lambda base: base.view(4, 6)[:, :3], lambda base: base.view(4, 6)[:, 2:]
    ),
    "a buffer": lambda: (lambda weight: with_tensors(b=weight.data[0], a=weight))(
        nn.Parameter(torch.ones(2, 2))
    ),
    "two dtypes": lambda: views(lambda base: base, lambda base: base.view(torch.float16)),
}


@pytest.mark.parametrize("case", OVERLAPPING)
def test_two_tensors_with_common_elements_are_refused(case):
    with pytest.raises(TaskError, match=r"^'a' and 'b' share memory without being one parameter"):
        TensorLayout.of(OVERLAPPING[case]())


@pytest.mark.parametrize(
    "shared",
    [
        torch.zeros(1).expand(8),
        torch.arange(6.0).as_strided((4, 3), (1, 1)),  # sliding windows
    ],
)
def test_elements_that_share_memory_with_each_other_are_refused(shared):
    with pytest.raises(TaskError, match=r"^elements of 'a' share memory .* by .clone\(\)$"):
        TensorLayout.of(with_tensors(a=nn.Parameter(shared)))


def test_two_layers_with_one_running_mean_are_refused():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    model[1].running_mean = model[0].running_mean
    with pytest.raises(TaskError, match=r"^'0.running_mean' and '1.running_mean' share memory"):
        TensorLayout.of(model)


@pytest.mark.parametrize(
    "build",
    [
        lambda: views(lambda base: base[:8], lambda base: base[8:]),
        lambda: views(lambda base: base[::2], lambda base: base[1::2]),
        lambda: views(lambda base: base.view(4, 6)[:, :3], lambda base: base.view(4, 6)[:, 3:]),
        lambda: with_tensors(a=nn.Parameter(torch.ones(3, 2).t())),
        lambda: with_tensors(a=nn.Parameter(torch.ones(2)), b=torch.zeros(1).expand(8)),
        lambda: with_tensors(a=nn.Parameter(torch.ones(2)), b=nn.Parameter(torch.ones(0))),
    ],
)
def test_tensors_without_common_elements_are_not(build):
    assert TensorLayout.of(build()).size


def test_tied_weights_are_one_parameter():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    assert TensorLayout.of(model).names == ("0.weight",)
