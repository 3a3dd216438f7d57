"""A model is split into pipeline stages at its blocks; modules around them go where needed."""

from __future__ import annotations

import pytest
import torch
from tests.datacenter.attention_models import WIDTH, Angles, AngleTransformer
from torch import nn

from isthmus_datacenter.parallel.equivalence_check import check_stages, run_in_eval_mode
from isthmus_datacenter.parallel.pipeline_stages import split_at_blocks


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
