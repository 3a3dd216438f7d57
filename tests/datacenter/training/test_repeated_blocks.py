"""Which blocks repeat, and what follows from a few of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from isthmus_datacenter.training.repeated_blocks import (
    NotOnALineError,
    Repetition,
    blocks_of,
    extended,
    find_repetition,
    shortened,
)


def found(model: nn.Module, multiple: int = 1) -> Repetition | None:
    return find_repetition(model, lambda: model(torch.randn(2, 4)), multiple)


def stack(kinds: str) -> nn.Sequential:
    layers = {
        "l": lambda: nn.Linear(4, 4),
        "n": lambda: nn.LayerNorm(4),
        "d": lambda: nn.Linear(4, 4, bias=False),
    }
    return nn.Sequential(*(layers[kind]() for kind in kinds))


def test_the_longest_repetition_is_found() -> None:
    assert found(stack("n" + "l" * 30 + "n")) == Repetition("", 1, 1, 30)
    assert found(stack("dd" + "ln" * 30 + "dd")) == Repetition("", 2, 2, 30)
    # The first keeps less: its inputs have no gradient.
    assert found(stack("l" * 40), multiple=2) == Repetition("", 1, 2, 19)
    # So few that taking all is faster.
    assert found(stack("l" * 12)) is None
    nested = nn.Sequential(stack("n"), nn.Sequential(*stack("l" * 30)))
    assert found(nested) is None  # an inner container is one block


def test_blocks_that_differ_do_not_repeat() -> None:
    frozen = stack("l" * 40)
    for block in list(frozen)[::2]:
        block.requires_grad_(False)
    assert found(frozen) == Repetition("", 2, 2, 19)
    shared = nn.Sequential(*[nn.Linear(4, 4)] * 30)
    assert found(shared) is None

    class Numbered(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number
            self.layer = nn.Linear(4, 4)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.layer(inputs) if self.number < 10 else self.layer(inputs).tanh()

    assert found(nn.Sequential(*map(Numbered, range(80)))) == Repetition("", 10, 1, 70)


def test_blocks_that_the_model_recomputes_are_not_like_others() -> None:
    class Recomputed(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number
            self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            if self.number > 10:
                return self.layers(inputs)
            output: torch.Tensor = checkpoint(self.layers, inputs, use_reentrant=False)
            return output

    assert found(nn.Sequential(*map(Recomputed, range(60)))) == Repetition("", 11, 1, 49)


def test_blocks_whose_parameters_have_other_optimizers_are_not_alike() -> None:
    model = stack("l" * 100)
    states = {each: "momentum" for block in model[:20] for each in block.parameters()}
    repetition = find_repetition(model, lambda: model(torch.randn(2, 4)), 1, states)
    assert repetition == Repetition("", 20, 1, 80)


def test_a_shortened_model_is_another_one() -> None:
    model = stack("n" + "l" * 30 + "d")
    repetition = found(model)
    assert repetition is not None
    short = shortened(model, repetition, 3)
    assert isinstance(short, nn.Sequential)
    assert [type(each) for each in short] == [nn.LayerNorm, *[nn.Linear] * 4]
    assert short[-1].bias is None
    assert len(blocks_of(short, repetition, 3)) == 3
    assert len(model) == 32
    assert short[1].weight is not model[1].weight


def test_counts_that_are_on_no_line_are_refused() -> None:
    def counts(times: int, curve: int = 0, bend: int = 0) -> dict[tuple[object, int | None], int]:
        at_blocks = {
            ("peak", block): 7 * block + 3 * times + bend * (block == 2) for block in range(times)
        }
        return {("all", None): 10 * times + 1 + curve * times**2, **at_blocks}

    lengths = (3, 4, 5)
    lines = extended([counts(each) for each in lengths], 1, 80)
    assert lines["all", None] == 801
    assert max(count for (what, _), count in lines.items() if what == "peak") == 7 * 79 + 3 * 80
    with pytest.raises(NotOnALineError):
        extended([counts(each, curve=1) for each in lengths], 1, 80)
    with pytest.raises(NotOnALineError):
        extended([counts(3), counts(4), counts(5, bend=1)], 1, 80)
    with pytest.raises(NotOnALineError):
        extended([counts(3), counts(4), {**counts(5), ("other", None): 1}], 1, 80)
