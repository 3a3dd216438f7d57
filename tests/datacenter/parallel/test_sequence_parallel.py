"""Tensor-parallel ranks share the positions of sequences between the layers of a block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.datacenter.task_models import Decoder, TiedTransformer
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from isthmus.errors import TaskError
from isthmus_datacenter.parallel.equivalence_check import run_in_eval_mode
from isthmus_datacenter.parallel.kept_groups import forget_groups
from isthmus_datacenter.parallel.parallel_dims import ParallelDims
from isthmus_datacenter.parallel.sequence_parallel import GathersPositions
from isthmus_datacenter.parallel.tensor_plans import default_tensor_plan
from isthmus_datacenter.parallel.tensor_styles import apply_style

WORDS = torch.arange(12).view(2, 6)


@pytest.fixture
def mesh() -> Iterator[Any]:
    """Two tensor-parallel ranks, of which the other one is not there: nothing is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield ParallelDims(ranks=2, zero_stage=0, tensor=2).mesh("cpu")["tensor"]
    forget_groups()
    dist.destroy_process_group()


def plan(model: nn.Module) -> Any:
    return default_tensor_plan(
        model, 2, [model], lambda: run_in_eval_mode(model, WORDS % 11), sequence=True
    )[0]


def test_norms_and_the_residual_stream_have_half_of_the_positions(mesh: Any) -> None:
    model = Decoder(2, tied=False)
    for module, style in plan(model):
        apply_style(module, style, mesh)
    positions = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.LayerNorm | nn.Linear):
            module.register_forward_pre_hook(
                lambda module, args, name=name: positions.__setitem__(name, args[0].shape[1])
            )
    output = model(WORDS % 11)
    assert output.shape == (2, 6, 12)
    halves = {name for name, count in positions.items() if count == 3}
    assert halves >= {f"blocks.{at}.{norm}" for at in range(2) for norm in ("first", "second")}
    # After the last block all positions are there again.
    assert positions["norm"] == positions["head"] == 6


def test_an_attention_within_a_block_is_given_all_positions() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            heads = (*hidden.shape[:-1], -1, 2)  # from its own inputs, as transformers do
            q, k, v = (
                each(hidden).view(heads).transpose(1, 2) for each in (self.q, self.k, self.v)
            )
            mixed = nn.functional.scaled_dot_product_attention(q, k, v)
            output: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
            return output

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Attention()

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden + self.attention(hidden)

    model = nn.Sequential(nn.Embedding(12, 8), nn.Sequential(Block(), Block()))[1]
    hidden = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))
    styles, _ = default_tensor_plan(
        model, 2, [model], lambda: run_in_eval_mode(model, hidden), sequence=True
    )
    gathering = [module for module, style in styles if isinstance(style, GathersPositions)]
    assert gathering == [model[0].attention, model[1].attention]


def test_positions_that_the_ranks_cannot_share_are_refused(mesh: Any) -> None:
    model = Decoder(1, tied=False)
    for module, style in plan(model):
        apply_style(module, style, mesh)
    with pytest.raises(TaskError, match=r"shape \(2, 5, 8\) have no positions that tensor_parall"):
        model(WORDS[:, :5] % 11)


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (TiedTransformer(12), "no block of the model has an attention that can be sharded"),
        (nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 8)), "no block of the model has"),
    ],
)
def test_a_model_without_such_blocks_is_refused(model: nn.Module, sentence: str) -> None:
    with pytest.raises(TaskError, match=sentence):
        plan(model)


def test_a_list_with_other_blocks_is_refused() -> None:
    model = Decoder(2, tied=False)
    model.blocks.insert(1, nn.Identity())
    model.blocks[1].forward = lambda hidden: hidden
    with pytest.raises(TaskError, match="a Identity is in one list with blocks whose attention"):
        plan(model)


def test_a_block_that_takes_other_whole_activations_is_refused(
    make_setup: Any, on_ranks: Any, tmp_path: Any
) -> None:
    command = make_setup("Skipping", tensor_parallel=2, sequence_parallel=True).open_command()
    failure = (
        r"with its matrices sharded the model fails \(.*\); attention .* sequence_parallel = false"
    )
    with pytest.raises(RuntimeError, match=failure):
        on_ranks(2, "train", [(command, {"op": "train_steps"}, str(tmp_path))])
