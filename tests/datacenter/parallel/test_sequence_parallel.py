"""Ranks share the positions of sequences: between the layers of a block, or within whole blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.datacenter.task_models import Decoder, TiedTransformer
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from isthmus.errors import TaskError
from isthmus_datacenter.parallel.context_parallel import SharesAttention, context_plan
from isthmus_datacenter.parallel.equivalence_check import run_in_eval_mode
from isthmus_datacenter.parallel.kept_groups import forget_groups
from isthmus_datacenter.parallel.parallel_dims import ParallelDims
from isthmus_datacenter.parallel.sequence_parallel import ChecksCalls, GathersPositions
from isthmus_datacenter.parallel.tensor_plans import default_tensor_plan
from isthmus_datacenter.parallel.tensor_styles import apply_style

WORDS = torch.arange(12).view(2, 6)


class Attended(TorchDispatchMode):
    """Shapes of queries, keys and masks of attention on a processor."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
            mask = kwargs["attn_mask"]
            self.calls.append((*(tuple(each.shape) for each in args[:2]), tuple(mask.shape[-2:])))
        return func(*args, **kwargs)


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


def shared(model: nn.Module) -> Any:
    return context_plan(model, [model], lambda: run_in_eval_mode(model, WORDS % 11))


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


def test_whole_blocks_have_half_of_the_positions_and_all_keys(mesh: Any) -> None:
    model = Decoder(2, tied=False)
    for module, style in shared(model):
        apply_style(module, style, mesh)
    seen: dict[str, Any] = {}
    model.blocks[1].up.register_forward_pre_hook(lambda module, args: seen.update(up=args[0].shape))
    with Attended() as attended:
        output = model(WORDS % 11)
    assert output.shape == (2, 6, 12)
    assert seen["up"] == (2, 3, 8)
    # Queries of three positions, keys of six, and a mask in place of `is_causal`.
    assert attended.calls == [((2, 4, 3, 2), (2, 4, 6, 2), (3, 6))] * 2


@pytest.mark.parametrize(
    ("mask", "sentence"),
    [
        (torch.ones(3, 3, dtype=torch.bool), r"mask of shape \(3, 3\) for 3 of 6 positions"),
        (torch.ones(2, 1, 3, 4, dtype=torch.bool), r"mask of shape \(2, 1, 3, 4\) for 3 of 6"),
        (torch.ones(2, 1, 6, 6, dtype=torch.bool), None),
        (torch.ones(2, 1, 3, 6, dtype=torch.bool), None),
        (torch.ones(2, 1, 6, 3, dtype=torch.bool), None),
        (torch.ones(2, 1, 1, 3), None),
        (torch.ones(2, 1, 1, 6, dtype=torch.bool), None),
    ],
)
def test_a_mask_is_cut_or_refused(mask: torch.Tensor, sentence: str | None, mesh: Any) -> None:
    class Block(nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            heads = hidden[:, None]
            return nn.functional.scaled_dot_product_attention(heads, heads, heads, mask)[:, 0]

    block = Block()
    apply_style(block, SharesAttention(), mesh)
    hidden = torch.randn(2, 3, 8)
    if sentence is None:
        assert block(hidden).shape == hidden.shape
        return
    with pytest.raises(TaskError, match=sentence):
        block(hidden)


def test_an_attention_over_something_else_is_refused(mesh: Any) -> None:
    class Block(nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            across = hidden.transpose(0, 1)  # over the examples of a batch
            return nn.functional.scaled_dot_product_attention(across, across, across)

    block = Block()
    apply_style(block, SharesAttention(), mesh)
    with pytest.raises(TaskError, match="is not over the 3 positions of a rank"):
        block(torch.randn(2, 3, 8))


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
    with pytest.raises(TaskError, match=r"shape \(2, 5, 8\) have no positions that 2 ranks"):
        model(WORDS[:, :5] % 11)


def test_layers_that_get_a_part_of_the_words_are_refused(mesh: Any) -> None:
    """As experts do, whose words are as many on each rank by chance only."""
    model = Decoder(1, tied=False)
    for module, style in plan(model):
        apply_style(module, style, mesh)
    block: Any = model.blocks[0]
    chosen = torch.ones(2, 3, dtype=torch.bool)
    block.call = lambda layer, given: layer(given[chosen] if layer is block.up else given)
    with pytest.raises(TaskError, match=r"a Linear in a block gets inputs of shape \(6, 8\)"):
        model(WORDS % 11)


@pytest.mark.parametrize("skipped", [0, 2])
def test_a_pass_without_the_first_or_the_last_block_is_refused(mesh: Any, skipped: int) -> None:
    """Layerdrop, which the sample may not show: means over positions would have the same shape."""
    model = Decoder(3, tied=False)
    for module, style in plan(model):
        apply_style(module, style, mesh)
    model(WORDS % 11)
    blocks = list(model.blocks)
    # A block between them is skipped without harm.
    model.blocks._modules = {"0": blocks[0], "2": blocks[2]}
    assert model(WORDS % 11).shape == (2, 6, 12)
    model.blocks._modules = {str(at): each for at, each in enumerate(blocks) if at != skipped}
    for _ in range(2):
        with pytest.raises(TaskError, match="left out one of these two"):
            model(WORDS % 11)
    model.blocks._modules = {str(at): each for at, each in enumerate(blocks)}
    assert model(WORDS % 11).shape == (2, 6, 12)


@pytest.mark.parametrize("share", ["plan", "shared"])
def test_hidden_states_that_only_a_later_pass_changes_are_refused(mesh: Any, share: str) -> None:
    model = Decoder(2, tied=False)
    styles = {"plan": plan, "shared": shared}[share](model)
    for module, style in styles:
        apply_style(module, style, mesh)
    model(WORDS % 11)
    for _, style in styles:
        if isinstance(style, ChecksCalls):
            style.end_comparison()
    assert model(WORDS % 11).shape == (2, 6, 12)
    model.blocks[0].register_forward_hook(
        lambda module, args, output: output - output.mean(1, True)
    )
    with pytest.raises(TaskError, match="changes hidden states between two blocks"):
        model(WORDS % 11)


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (TiedTransformer(12), "no block of the model has an attention that can be"),
        (nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 8)), "no block of the model has"),
    ],
)
@pytest.mark.parametrize("share", ["plan", "shared"])
def test_a_model_without_such_blocks_is_refused(
    model: nn.Module, sentence: str, share: str
) -> None:
    with pytest.raises(TaskError, match=sentence):
        {"plan": plan, "shared": shared}[share](model)


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
        r"with sequence_parallel the model fails \(.*\); attention .* sequence_parallel = false"
    )
    with pytest.raises(RuntimeError, match=failure):
        on_ranks(2, "train", [(command, {"op": "train_steps"}, str(tmp_path))])
