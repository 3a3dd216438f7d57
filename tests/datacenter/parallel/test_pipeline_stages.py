"""A model is split into pipeline stages at its blocks; modules around them go where needed."""

from __future__ import annotations

import contextlib

import pytest
import torch
from tests.datacenter.attention_models import WIDTH, Angles, AngleTransformer
from tests.datacenter.tasks import Table
from torch import nn

from isthmus.errors import TaskError
from isthmus_datacenter.parallel.equivalence_check import check_stages, run_in_eval_mode
from isthmus_datacenter.parallel.parallel_dims import ParallelDims
from isthmus_datacenter.parallel.pipeline_stages import split_at_blocks, split_into_stages
from isthmus_datacenter.parallel.unfilled_model import UnfilledModel


class CallsInsideBlocks(AngleTransformer):
    """Calls the children of its blocks, and not the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(2))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(self.embed(words))
        for block in self.blocks:
            hidden = block[0](hidden)
        output: torch.Tensor = self.head(hidden)
        return output


@pytest.fixture
def words() -> torch.Tensor:
    return torch.randint(9, (2, 6), generator=torch.Generator().manual_seed(0))


def test_every_stage_has_the_angles_and_only_the_first_the_dropout(words: torch.Tensor) -> None:
    model = AngleTransformer()
    stages = split_at_blocks(model, 2, words)
    check_stages(stages, run_in_eval_mode(model, words), words)
    kinds = [[type(stage.get_submodule(name)) for name in ("drop", "angles")] for stage in stages]
    assert kinds[0] == [nn.Dropout, Angles]
    assert kinds[1][0] is not nn.Dropout
    assert kinds[1][1] is Angles


def test_a_model_that_does_not_call_its_blocks_fails_the_check(words: torch.Tensor) -> None:
    model = CallsInsideBlocks()
    stages = split_at_blocks(model, 2, words)
    with pytest.raises(TypeError, match="SkippedModule"):
        check_stages(stages, run_in_eval_mode(model, words), words)


class LearnedPositions(AngleTransformer):
    """Adds positions that belong to the model itself, and begin with zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(6, WIDTH))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(self.embed(words)) + self.positions
        angles, scale = self.angles(hidden)
        for block in self.blocks:
            hidden = block(hidden, angles, scale=scale)
        output: torch.Tensor = self.head(hidden)
        return output


class LearnedAngles(LearnedPositions):
    """Gives what the model itself has to its blocks, which is right in every stage."""

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(self.embed(words))
        for block in self.blocks:
            hidden = block(hidden, 1 + self.positions[:, :1], scale=0.3)
        output: torch.Tensor = self.head(hidden)
        return output


class Stored:
    """Values of a model, as files have them."""

    def __init__(self, model: nn.Module) -> None:
        self.state = {name: each.clone() for name, each in model.state_dict().items()}

    def has(self, name: str) -> bool:
        return name in self.state

    def read(self, name: str, start: int = 0, rows: int | None = None) -> torch.Tensor:
        assert (start, rows) == (0, None)
        return self.state[name].clone()

    def check(self) -> None:
        """Nothing can have changed."""


@pytest.mark.parametrize("kind", [LearnedPositions, LearnedAngles])
@pytest.mark.parametrize("filled", [True, False])
def test_what_stages_do_twice_shows_although_it_begins_with_zeros(
    words: torch.Tensor, kind: type[LearnedPositions], filled: bool
) -> None:
    model = kind()
    expected = run_in_eval_mode(model, words)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    stored = Stored(model)
    unfilled = None if filled else UnfilledModel(model.to("meta"), stored)
    run = run_in_eval_mode if unfilled is None else unfilled.run_in_eval_mode
    dims = ParallelDims(ranks=2, zero_stage=0, pipeline=2)
    refused = pytest.raises(
        TaskError, match=r"with other values of 'positions', which several stages use: .*another"
    )
    with refused if kind is LearnedPositions else contextlib.nullcontext():
        split_into_stages(Table({}, 0), model, dims, words, expected, run, unfilled=unfilled)
    if filled:
        assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
