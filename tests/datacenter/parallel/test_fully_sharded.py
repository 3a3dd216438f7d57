"""Sharding units are compiled, of users and of PyTorch; what cannot be sharded is refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from isthmus import TaskError
from isthmus.task.scoring import build_model
from isthmus_datacenter.parallel.equivalence_check import run_in_eval_mode
from isthmus_datacenter.parallel.fully_sharded import wrap_unit
from isthmus_datacenter.parallel.parallel_dims import ParallelDims
from isthmus_datacenter.parallel.parallelize import parallelize


@pytest.mark.parametrize(("task", "recompute"), [("Gpt", True), ("Language", False)])
def test_blocks_of_users_and_of_pytorch_are_compiled(
    task: str, recompute: bool, make_setup: Any
) -> None:
    prepared = make_setup(task, ranks=1, compile=True, checkpoint_activations=recompute)
    dims = ParallelDims.from_section(prepared.job.datacenter, 1)
    sample = torch.stack([prepared.task.local_data(None)[index][0] for index in range(2)])
    expected = run_in_eval_mode(build_model(prepared.task, 5), sample)
    counter = CompileCounter()
    shard = parallelize(
        prepared.task,
        build_model(prepared.task, 5),
        dims,
        0,
        torch.device("cpu"),
        sample=lambda: sample,
        smallest_unit=1,
        backend=counter,
    )
    (model,) = shard.stages.values()
    assert (run_in_eval_mode(model, sample) - expected).abs().max() < 1e-6
    assert counter.frame_count > 0
    assert {name for name, _ in model.named_parameters()} == set(shard.parameters())


def test_sparse_gradients_are_refused(make_setup: Any) -> None:
    task = make_setup("Gpt", ranks=2).task
    model = nn.Sequential(nn.Embedding(3, 2, sparse=True))
    dims = ParallelDims(ranks=2, zero_stage=0)
    with pytest.raises(
        TaskError, match=r"^module '0' has sparse=True, and gradients of several ranks"
    ):
        parallelize(task, model, dims, 0, torch.device("cpu"), sample=list)


@pytest.mark.parametrize(("stage", "precision"), [(1, "fp32"), (3, "fp32"), (0, "bf16")])
def test_a_parameter_without_elements_is_refused(
    make_setup: Any, stage: int, precision: Any
) -> None:
    """Before the first step, whose backward pass would fail."""
    task = make_setup("Gpt", ranks=2).task
    model = nn.Linear(2, 3)
    model.register_parameter("extra", nn.Parameter(torch.zeros(0, 4)))
    dims = ParallelDims(ranks=2, zero_stage=stage, precision=precision)
    with pytest.raises(TaskError, match=r"^parameter 'extra' has no elements .* and its gradient"):
        parallelize(task, model, dims, 0, torch.device("cpu"), sample=list)


class Counting(nn.Module):
    """Keeps its number of calls in an iterator."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = itertools.count(1)
        self.layer = nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(inputs / next(self.calls))
        return output


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_block_that_computes_something_else_when_it_is_recomputed_is_refused(stage: Any) -> None:
    unit = Counting()
    dims = ParallelDims(ranks=2, zero_stage=stage, checkpoint_activations=True)
    wrap_unit(unit, 0, dims, None)
    with pytest.raises(TaskError, match="a Counting computes something else when it is called"):
        unit(torch.ones(2, 4))
