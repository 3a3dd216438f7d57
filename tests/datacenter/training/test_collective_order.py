"""Ranks that would wait for each other forever are named without starting one."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from tests.datacenter.task_models import Decoder
from torch import nn

from isthmus.errors import TaskError
from isthmus.job.commands import job as job_command
from isthmus.task import Participant
from isthmus.task.scoring.host_generators import HostGenerators
from isthmus_datacenter.parallel.parallel_dims import LayoutError
from isthmus_datacenter.training.collective_order import (
    MOST_RANKS,
    CollectiveMismatchError,
    ComparedRanks,
    compare,
    compare_collectives,
)
from isthmus_datacenter.training.collective_trace import TracedCollective
from isthmus_datacenter.training.memory_report import examples_at_once
from isthmus_server.cli.plan import plan as plan_command

Forward = Callable[[torch.Tensor], Any]


def rows_for(setup: Any, ranks: int) -> list[Any]:
    data: Any = setup.task.local_data(Participant(name="test", regime="datacenter"))
    return [data[index] for index in range(examples_at_once(setup.job, ranks))]


def compared(
    setup: Any, ranks: int, model: Callable[[], nn.Module] | None = None, **more: Any
) -> ComparedRanks:
    """Compare the ranks of a job, whose task may have another model."""
    task = setup.task
    if model is not None:
        vars(task)["model"] = model
    rows = rows_for(setup, ranks)
    before = HostGenerators.now()
    found = compare_collectives(task, setup.job, rows, ranks, **{"accelerators": True, **more})
    assert HostGenerators.now() == before
    # Hooks that stay would be called for every module of this process from now on.
    assert not torch.nn.modules.module._has_any_global_hook()
    return found


LAYOUTS = [
    (2, "Masked", {"zero_stage": 0}),
    (2, "Masked", {"zero_stage": 1, "accumulate": 2}),
    (2, "Masked", {"zero_stage": 3, "checkpoint_activations": True}),
    (4, "Masked", {"zero_stage": 3, "shard_groups": 2}),
    (4, "Padded", {"tensor_parallel": 2, "sequence_parallel": True, "zero_stage": 3}),
    (2, "Padded", {"context_parallel": 2}),
    (4, "Padded", {"pipeline_parallel": 2, "zero_stage": 2}),
    (2, "Padded", {"pipeline_parallel": 2, "schedule": "gpipe", "microbatches": 4}),
    (2, "Padded", {"pipeline_parallel": 2, "schedule": "interleaved", "microbatches": 2}),
    (4, "Padded", {"pipeline_parallel": 2, "tensor_parallel": 2, "zero_stage": 3}),
    (4, "PaddedMixture", {"expert_parallel": 2, "zero_stage": 3}),
    (4, "PaddedMixture", {"pipeline_parallel": 2, "expert_parallel": 2}),
    (2, "MostlyFrozen", {"zero_stage": 3}),
]


@pytest.mark.parametrize(("ranks", "name", "layout"), LAYOUTS)
def test_layouts_that_train_are_not_suspected(
    ranks: int, name: str, layout: dict[str, Any], make_setup: Any
) -> None:
    section = {"zero_stage": 0, **layout}
    # One for each stage.
    settings = {"blocks": 4} if section.get("schedule") == "interleaved" else {}
    setup = make_setup(name, settings, ranks=ranks, batch_size=4, **section)
    found = compared(setup, ranks)
    assert found.traced == list(range(ranks))
    assert found.collectives
    assert f"all of {ranks} ranks" in found.text


def test_processors_have_other_collectives_and_are_not_suspected(make_setup: Any) -> None:
    """Whole replicas sum their gradients in another way, and units send one by one."""
    for stage in (0, 3):
        setup = make_setup("Masked", {}, ranks=2, batch_size=4, zero_stage=stage)
        assert compared(setup, 2, accelerators=False).traced == [0, 1]


class _Calls(nn.Module):
    """A layer, and what is called after it."""

    def __init__(self, call: Forward) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.call = call

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.layer(inputs)
        self.call(hidden.detach())
        return hidden


def on_rank_0_only(hidden: torch.Tensor) -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(hidden)


def in_another_order(hidden: torch.Tensor) -> None:
    gathered = [torch.empty_like(hidden) for _ in range(dist.get_world_size())]
    if dist.get_rank() == 1:
        dist.all_reduce(hidden)
        dist.all_gather(gathered, hidden)
    else:
        dist.all_gather(gathered, hidden)
        dist.all_reduce(hidden)


def of_another_shape(hidden: torch.Tensor) -> None:
    dist.all_reduce(hidden[: 1 + dist.get_rank()])


def of_another_type(hidden: torch.Tensor) -> None:
    dist.all_reduce(hidden.double() if dist.get_rank() == 2 else hidden)


def with_another_reduction(hidden: torch.Tensor) -> None:
    dist.all_reduce(hidden, op=dist.ReduceOp.MAX if dist.get_rank() else dist.ReduceOp.SUM)


def from_another_root(hidden: torch.Tensor) -> None:
    dist.broadcast(hidden, dist.get_rank() % 2)


def by_an_environment_variable(hidden: torch.Tensor) -> None:
    if os.environ["RANK"] == "3":
        dist.barrier()


def without_a_receiver(hidden: torch.Tensor) -> None:
    if dist.get_rank() == 0:
        dist.send(hidden, 1)


def with_a_receiver(hidden: torch.Tensor) -> None:
    if dist.get_rank() == 0:
        dist.send(hidden, 1)
    if dist.get_rank() == 1:
        dist.recv(hidden, 0)


def the_same_everywhere(hidden: torch.Tensor) -> None:
    dist.all_reduce(hidden)
    dist.all_gather([torch.empty_like(hidden) for _ in range(4)], hidden)
    dist.broadcast(hidden, 2)
    dist.barrier()


def compared_with(make_setup: Any, call: Forward, ranks: int = 4, **layout: Any) -> ComparedRanks:
    """Compare the ranks of a model that calls something after its second layer."""
    setup = make_setup("Table", {}, **{"ranks": ranks, "batch_size": 4, "zero_stage": 3, **layout})

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), _Calls(call), nn.Linear(8, 3))

    return compared(setup, ranks, model)


MISMATCHES = [
    (on_rank_0_only, r"rank 0 issues all_reduce of float32 \[4, 8\] \(SUM\) in 1 \(.*py:\d+\)"),
    (in_another_order, r"ranks 0, 2 and 3 issue all_gather .*, and rank 1 issues all_reduce"),
    (of_another_shape, r"rank 0 issues .*\[1, 8\].*, and rank 1 issues .*\[2, 8\]"),
    (of_another_type, r"ranks 0, 1 and 3 issue .*float32.*, and rank 2 issues .*float64"),
    (with_another_reduction, r"rank 0 issues .*SUM.*, and ranks 1, 2 and 3 issue .*MAX"),
    (from_another_root, r"ranks 0 and 2 issue .*root 0.*, and ranks 1 and 3 issue .*root 1"),
    (by_an_environment_variable, r"rank 3 issues barrier in 1"),
    (without_a_receiver, r"from rank 0 to rank 1, rank 0 issues send .* rank 1 receives none"),
]


@pytest.mark.parametrize(("call", "expected"), MISMATCHES)
def test_a_mismatch_is_named(call: Forward, expected: str, make_setup: Any) -> None:
    with pytest.raises(CollectiveMismatchError) as caught:
        compared_with(make_setup, call)
    assert re.search(expected, str(caught.value)), str(caught.value)
    assert not dist.is_initialized()


@pytest.mark.parametrize("call", [with_a_receiver, the_same_everywhere])
def test_collectives_of_a_task_that_match_are_fine(call: Forward, make_setup: Any) -> None:
    found = compared_with(make_setup, call)
    # Two or four of the task, and at least a gathering of each layer and a reduction.
    assert found.collectives >= 4


def test_the_backward_pass_is_compared_too(make_setup: Any) -> None:
    class Reduced(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, inputs: torch.Tensor) -> torch.Tensor:
            return inputs.clone()

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
            if dist.get_rank() != 2:
                dist.all_reduce(gradient)
            return gradient

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return Reduced.apply(self.layer(inputs))  # type: ignore[no-any-return, no-untyped-call]

    setup = make_setup("Table", {}, ranks=4, batch_size=4, zero_stage=3)
    with pytest.raises(CollectiveMismatchError, match=r"all_reduce .* in the backward pass"):
        compared(setup, 4, Model)


def test_the_first_step_is_compared_too(make_setup: Any) -> None:
    """What a layer does once, as it is first trained, is issued in no later step."""

    class Once:
        def __init__(self) -> None:
            self.called = False

        def __call__(self, hidden: torch.Tensor) -> None:
            if self.called or not torch.is_grad_enabled():  # a sample passes before the steps
                return
            self.called = True
            if dist.get_rank() == 1:
                dist.all_reduce(hidden)

    setup = make_setup("Table", {}, ranks=2, batch_size=4, zero_stage=3)
    expected = r"of the first step in the group of ranks 0 and 1, .* rank 1 issues all_reduce .*SUM"
    with pytest.raises(CollectiveMismatchError, match=expected):
        compared(setup, 2, lambda: nn.Sequential(nn.Linear(6, 8), _Calls(Once()), nn.Linear(8, 3)))


def test_building_the_model_is_compared_too(make_setup: Any) -> None:
    setup = make_setup("Table", {}, ranks=2, batch_size=4, zero_stage=3)

    def model() -> nn.Module:
        made = nn.Linear(6, 3)
        if os.environ["RANK"] == "1":
            dist.broadcast(made.weight.detach(), 1)
        return made

    expected = r"as collective 1 of model\(\) in the group of ranks 0 and 1, rank 0 issues none, "
    expected += r"and rank 1 issues broadcast of float32 \[3, 6\] \(root 1\) in model\(\) \("
    with pytest.raises(CollectiveMismatchError, match=expected):
        compared(setup, 2, model)


class _LayerDrop(Decoder):
    """A decoder that leaves out a block where `draw` gives less than 0.3."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__(4, tied=True)
        self.draw = draw

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(words=words)
        for block in self.blocks:
            if self.draw() >= 0.3:
                hidden = block(hidden=hidden)
        output: torch.Tensor = self.head(self.norm(hidden))
        return output


@pytest.mark.parametrize("draw", [random.random, np.random.random])
def test_layers_that_all_ranks_of_a_model_drop_are_not_suspected(
    draw: Callable[[], float], make_setup: Any
) -> None:
    """Tensor-parallel ranks draw the same numbers, whatever was drawn before."""
    setup = make_setup("Padded", {}, ranks=2, batch_size=4, zero_stage=0, tensor_parallel=2)
    assert compared(setup, 2, lambda: _LayerDrop(draw)).collectives


@pytest.mark.parametrize("generator", ["python", "numpy"])
def test_layers_that_a_rank_drops_by_its_number_are_a_mismatch(
    generator: str, make_setup: Any
) -> None:
    def model() -> nn.Module:
        own = int(os.environ["RANK"])
        python = random.Random(own).random
        return _LayerDrop(python if generator == "python" else np.random.default_rng(own).random)

    setup = make_setup("Padded", {}, ranks=2, batch_size=4, zero_stage=0, tensor_parallel=2)
    with pytest.raises(CollectiveMismatchError, match=r"of the first step in the group of ranks 0"):
        compared(setup, 2, model)


def test_replicas_draw_other_numbers(make_setup: Any) -> None:
    """As they do in a run, from the job's seed."""

    def call(hidden: torch.Tensor) -> None:
        for _ in range(int(8 * random.random())):
            dist.all_reduce(hidden)

    expected = r"of the first step in the group of ranks 0, 1, 2 and 3, .* all_reduce of float32"
    with pytest.raises(CollectiveMismatchError, match=expected):
        compared_with(make_setup, call)


def test_many_ranks_are_taken_in_part(make_setup: Any) -> None:
    """A condition on the first or the last rank is seen, and on one in between it is not."""

    def on_rank(rank: int) -> Forward:
        def call(hidden: torch.Tensor) -> None:
            if dist.get_rank() == rank:
                dist.all_reduce(hidden)

        return call

    few = compared_with(make_setup, on_rank(9), 64, batch_size=1)
    assert few.traced == [0, 1, 63]
    assert few.text.startswith("3 traced of 64 ranks")
    for rank in (0, 63):
        with pytest.raises(CollectiveMismatchError, match=f"rank {rank} issues all_reduce"):
            compared_with(make_setup, on_rank(rank), 64, batch_size=1)
    assert len(few.traced) < MOST_RANKS


def one(operation: str, ranks: tuple[int, ...], *, peer: int | None = None) -> TracedCollective:
    return TracedCollective(
        operation=operation,
        ranks=ranks,
        tensors=(("float32", (2,)),),
        how="",
        peer=peer,
        size=8,
        place="the model",
    )


def test_groups_are_compared_by_themselves() -> None:
    """Each of two pairs has its own collectives, and another group's come in between."""
    first = [one("all_reduce", (0, 1)), one("barrier", (0, 1, 2, 3))]
    second = [one("barrier", (0, 1, 2, 3)), one("all_gather", (2, 3))]
    compare({0: first, 1: first, 2: second, 3: second})
    with pytest.raises(CollectiveMismatchError, match=r"in the group of ranks 2 and 3, rank 2 is"):
        compare({0: first, 1: first, 2: second, 3: second[:1]})


def test_messages_go_from_one_rank_to_another() -> None:
    there = one("send", (0, 1), peer=1)
    here = one("recv", (0, 1), peer=0)
    compare({0: [there, there], 1: [here, here]})
    compare({0: [there]})  # what the other rank does is not known
    compare({0: [there], 1: [one("recv_any_source", (0, 1))]})
    with pytest.raises(CollectiveMismatchError, match="as message 2 of a step from rank 0"):
        compare({0: [there], 1: [here, here]})


def test_code_that_reads_values_is_refused(make_setup: Any) -> None:
    def read(hidden: torch.Tensor) -> None:
        if hidden.sum() > 0:
            dist.barrier()

    with pytest.raises(TaskError, match="the collectives of a step are found with tensors that"):
        compared_with(make_setup, read)


def test_layouts_that_are_not_known_are_refused(make_setup: Any) -> None:
    setup = make_setup("Table", {}, ranks=2, batch_size=4, layout="auto")
    with pytest.raises(LayoutError, match="the collectives of a step are known for layout='given'"):
        compare_collectives(setup.task, setup.job, [], 2, accelerators=True)


def test_compiled_blocks_are_taken_as_they_are_without(make_setup: Any) -> None:
    setup = make_setup("Table", {}, ranks=2, batch_size=4, zero_stage=3, compile=True)
    assert compared(setup, 2).collectives


TASK = """
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from isthmus.task import Task


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, inputs):
        hidden = self.layer(inputs)
        if not dist.is_initialized() or dist.get_rank() % 2 == REMAINDER:
            return hidden
        dist.all_reduce(hidden.detach())
        return hidden


class Odd(Task):
    def optimizer(self, parameters, participant):
        return torch.optim.SGD(parameters.values(), lr=0.1)

    def model(self):
        return Model()

    def local_data(self, participant):
        return TensorDataset(torch.zeros(32, 4), torch.zeros(32).long())

    def loss(self, output, target):
        return nn.functional.cross_entropy(output, target, reduction="none")
"""


@pytest.mark.parametrize("remainder", [0, 5])
def test_the_command_names_them(remainder: int, tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(TASK.replace("REMAINDER", str(remainder)))
    job = tmp_path / "job.toml"
    job.write_text(
        'name = "odd"\n[task]\nsource = "odd.py:Odd"\n[strategy]\npolicy = "datacenter"\n'
        "[datacenter]\nranks = 4\nbatch_size = 4\n"
    )
    run = CliRunner().invoke(job_command, ["check", str(job), "--collectives"])
    if remainder == 5:
        assert run.output.startswith("collectives  all of 4 ranks issue the same in the same order")
        return
    assert isinstance(run.exception, CollectiveMismatchError)
    said = str(run.exception)
    assert "ranks 1 and 3 issue all_reduce of float32 [4, 2] (SUM) in the model (odd.py:" in said
    found = CliRunner().invoke(plan_command, [str(job), "--collectives"])
    assert str(found.exception) == said
