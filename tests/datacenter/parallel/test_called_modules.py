"""The modules that are being called, also where a model goes on after a failure in one of them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from isthmus_datacenter.parallel.called_modules import called_modules
from isthmus_datacenter.parallel.random_draws import FixedDraws


class _Noting(nn.Module):
    """Notes what is called when it is, and fails if it should."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__()
        self.called: Sequence[nn.Module] = ()
        self.noted: list[str] = []
        self._fails = fails

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.noted = [type(each).__name__ for each in self.called]
        if self._fails:
            raise ArithmeticError
        return hidden


class _Trying(nn.Module):
    """Goes on where its first child fails."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first = first
        self.second = second

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        with contextlib.suppress(ArithmeticError):
            hidden = self.first(hidden)
        return self.second(hidden)


def _refuse(module: nn.Module, args: object) -> None:
    raise ArithmeticError


def _refused() -> nn.Module:
    module = nn.Identity()
    module.register_forward_pre_hook(_refuse)
    return module


@pytest.mark.parametrize(
    "first",
    [_Noting(), _Noting(fails=True), _refused()],
    ids=["returns", "fails", "has a hook that fails"],
)
def test_the_innermost_module_is_the_last(first: nn.Module) -> None:
    second = _Noting()
    model = nn.Sequential(_Trying(first, second))
    with called_modules(model) as called:
        second.called = called
        model(torch.zeros(1))
        assert not called
    assert second.noted == ["Sequential", "_Trying", "_Noting"]
    model(torch.zeros(1))
    assert not second.noted  # no hook is left


def test_what_a_hook_draws_belongs_to_the_caller() -> None:
    """A rank's own stream is around `forward()`, which hooks are not in."""
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_forward_pre_hook(lambda module, args: (args[0] + torch.rand(3).sum(),))
    model[0].register_forward_hook(lambda module, args, output: output + torch.rand(5).sum())
    with FixedDraws(model) as fixed:
        model(torch.zeros(1, 2))
    assert fixed.draws == {"": [(3,), (5,)]}
