"""The memory of a rank that is not there is that of a rank that is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import _chunk_with_empty

from isthmus.errors import TaskError, UserError
from isthmus.job.commands import job as job_command
from isthmus.task import Participant
from isthmus.task.scoring import build_model
from isthmus_datacenter import checks
from isthmus_datacenter.parallel.expert_parallel import _DividedExperts
from isthmus_datacenter.training import memory_report, one_rank
from isthmus_datacenter.training.memory_report import (
    RankMemory,
    _optimizer_bytes,
    examples_at_once,
    memory_of,
)

LAYOUTS = {
    "whole": {"zero_stage": 0},
    "zero1": {"zero_stage": 1, "accumulate": 2},
    "zero2": {"zero_stage": 2},
    "zero3": {"zero_stage": 3},
    "zero3 bf16": {"zero_stage": 3, "precision": "bf16"},
    "states bf16": {"zero_stage": 2, "optimizer_states": "bf16"},
    "recomputed": {"zero_stage": 2, "checkpoint_activations": True},
    "every second recomputed": {
        "zero_stage": 3,
        "checkpoint_activations": True,
        "checkpoint_every": 2,
    },
}


def report(setup: Any, ranks: int, **more: Any) -> RankMemory:
    data: Any = setup.task.local_data(Participant(name="test", regime="datacenter"))
    rows = [data[index] for index in range(examples_at_once(setup.job, ranks))]
    return memory_of(setup.task, setup.job, rows, ranks, **{"accelerators": False, **more})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_is_that_of_real_ranks(
    layout: str, make_setup: Any, on_ranks: Any, tmp_path: Path
) -> None:
    setup = make_setup("Masked", {}, batch_size=4, **LAYOUTS[layout])
    found = report(setup, 2)
    opening = setup.open_command()
    states = on_ranks(2, "memory_of_state", opening, str(tmp_path))
    most = [max(column) for column in zip(*states, strict=True)]
    assert [found.parameters, found.gradients, found.optimizer] == most
    rows = examples_at_once(setup.job, 2)
    assert_like_real_ranks(found, partial(on_ranks, 2, "memory_of_real_tensors", opening, rows))
    assert found.peak > found.parameters + found.optimizer + found.activations


PARTITIONED = [
    (2, "Padded", {"tensor_parallel": 2}),
    (2, "Padded", {"tensor_parallel": 2, "sequence_parallel": True}),
    (2, "Padded", {"context_parallel": 2}),
    (2, "Padded", {"tensor_parallel": 2, "precision": "bf16", "zero_stage": 2}),
    (2, "Padded", {"pipeline_parallel": 2}),
    (2, "Padded", {"pipeline_parallel": 2, "schedule": "gpipe", "microbatches": 4}),
    (2, "Padded", {"pipeline_parallel": 2, "accumulate": 2, "microbatches": 2}),
    (2, "MostlyFrozen", {}),
    (2, "MostlyFrozen", {"zero_stage": 3}),
    (2, "MostlyFrozen", {"tensor_parallel": 2}),
    (2, "MostlyFrozen", {"pipeline_parallel": 2}),
    (2, "PaddedMixture", {}),
    (2, "EvenMixture", {"expert_parallel": 2}),
    (2, "EvenMixture", {"expert_parallel": 2, "zero_stage": 3}),
    (4, "Padded", {"pipeline_parallel": 2, "zero_stage": 2}),
    (4, "Padded", {"pipeline_parallel": 2, "tensor_parallel": 2}),
    (4, "Padded", {"pipeline_parallel": 2, "zero_stage": 3, "precision": "bf16"}),
    (4, "EvenMixture", {"pipeline_parallel": 2, "expert_parallel": 2}),
]


@pytest.mark.parametrize(("ranks", "name", "layout"), PARTITIONED)
def test_partitioned_models_are_those_of_real_ranks(
    ranks: int,
    name: str,
    layout: dict[str, Any],
    make_setup: Any,
    on_ranks: Any,
    tmp_path: Path,
) -> None:
    setup = make_setup(name, {}, ranks=ranks, batch_size=4, **{"zero_stage": 0, **layout})
    found = report(setup, ranks)
    opening = setup.open_command()
    states = on_ranks(ranks, "memory_of_state", opening, str(tmp_path))
    most = [max(column) for column in zip(*states, strict=True)]
    assert [found.parameters, found.gradients, found.optimizer] == most
    rows = examples_at_once(setup.job, ranks)
    assert_like_real_ranks(found, partial(on_ranks, ranks, "memory_of_real_tensors", opening, rows))


UNEVEN = [
    (2, {"expert_parallel": 2}),
    (2, {"expert_parallel": 2, "zero_stage": 3}),
    (4, {"pipeline_parallel": 2, "expert_parallel": 2}),
]


@pytest.mark.parametrize(("ranks", "layout"), UNEVEN)
def test_only_uneven_tokens_make_it_another_than_that_of_real_ranks(
    ranks: int, layout: dict[str, Any], make_setup: Any, on_ranks: Any, monkeypatch: Any
) -> None:
    """With the tokens that each rank's experts really get, the report is that of the ranks."""
    more = {"zero_stage": 0, **layout}
    setup = make_setup("PaddedMixture", {}, ranks=ranks, batch_size=4, **more)
    even = report(setup, ranks)
    rows = examples_at_once(setup.job, ranks)
    measure = partial(on_ranks, ranks, "memory_and_parts_of_experts", setup.open_command(), rows)
    _, parts = zip(*measure(), strict=True)
    assert any(sum(received) != sum(sent) for each in parts for sent, received in each)
    members = []
    for member in range(2):
        # The report takes one rank of each stage; here it has the parts of that group's member.
        turns = [iter(parts[rank - rank % 2 + member]) for rank in range(ranks)]
        monkeypatch.setattr(
            _DividedExperts,
            "_even_parts",
            lambda experts, choices, turns=turns: next(turns[dist.get_rank()]),
        )
        members.append(dataclasses.asdict(report(setup, ranks)))
    found = {key: max(each[key] for each in members) for key in members[0]}
    assert_like_real_ranks(RankMemory(**found), lambda: [memory for memory, _ in measure()])
    assert all(found[key] >= count for key, count in dataclasses.asdict(even).items())


def test_the_command_says_so(make_setup: Any, tmp_path: Path) -> None:
    for experts in (1, 2):
        setup = make_setup("PaddedMixture", {}, batch_size=4, expert_parallel=experts)
        lines = checks.memory(setup.job, setup.task, tmp_path, 2, accelerators=False)
        assert ("tokens spread evenly over experts" in lines[-1]) == (experts > 1)


def assert_like_real_ranks(
    found: RankMemory,
    measure: Callable[[], Sequence[dict[str, int]]],
) -> None:
    """Compare a report with the ranks that need most of each, as often as they may have had more.

    A message between processors may be in memory for a moment after it has ended, which adds to
    what is measured; so the least of some measurements counts.
    """
    expected = {
        key: pytest.approx(count, rel=0.05) for key, count in dataclasses.asdict(found).items()
    }
    real: dict[str, int] = {}
    for _ in range(5):
        ranks = measure()
        for key in expected:
            most = max(each[key] for each in ranks)
            real[key] = min(most, real.get(key, most))
        if real == expected:
            break
    assert real == expected


@pytest.mark.parametrize(("rows", "parts"), [(7, 3), (6, 3), (2, 5), (1, 1), (8, 1024), (0, 2)])
def test_the_part_of_a_rank_is_that_of_all_parts(rows: int, parts: int) -> None:
    tensor = torch.arange(3.0 * rows).view(rows, 3)
    found = one_rank.Chunks(tensor, parts, dim=0)
    for index, expected in enumerate(_chunk_with_empty(tensor, parts, dim=0)):
        assert torch.equal(found[index], expected)


@pytest.mark.parametrize("accelerators", [False, True])
@pytest.mark.parametrize(
    ("hidden", "layout"),
    [
        ([256] * 18, "whole"),
        ([256] * 18, "zero1"),
        ([256] * 18, "zero2"),
        ([256] * 18, "zero3"),
        ([256, 300] * 16, "zero3 bf16"),
        ([400, 300, *[256] * 26], "recomputed"),
        ([256] * 32, "every second recomputed"),
    ],
)
def test_blocks_that_repeat_need_not_all_be_taken(
    hidden: list[int], layout: str, accelerators: bool, make_setup: Any, monkeypatch: Any
) -> None:
    """Every figure is exactly the one with all blocks."""
    setup = make_setup("Stacked", {"hidden": hidden}, batch_size=4, **LAYOUTS[layout])
    taken = []
    measured = memory_report._measured

    def counted(task: Any, model: Any, *rest: Any) -> Any:
        taken.append(len(model) - 2)
        return measured(task, model, *rest)

    monkeypatch.setattr(memory_report, "_measured", counted)
    few = report(setup, 4, accelerators=accelerators)
    assert len(taken) == 3
    assert max(taken) < len(hidden) / 2
    monkeypatch.setattr(memory_report, "find_repetition", lambda *_: None)
    assert report(setup, 4, accelerators=accelerators) == few
    assert taken[3:] == [len(hidden)]


def test_all_blocks_are_taken_where_the_model_wants_them(make_setup: Any, monkeypatch: Any) -> None:
    setup = make_setup("Stacked", {"hidden": [256] * 18}, batch_size=4, zero_stage=3)
    expected = report(setup, 4)

    def failing(*_: object) -> Any:
        raise IndexError

    monkeypatch.setattr(memory_report, "shortened", failing)
    assert report(setup, 4) == expected


def test_activations_are_what_autograd_keeps(make_setup: Any) -> None:
    setup = make_setup("Table", {}, ranks=1, batch_size=16, zero_stage=0)
    model = build_model(setup.task, setup.job.seed)
    data = setup.task.local_data(Participant(name="test", regime="datacenter"))
    inputs, target = (torch.stack(each) for each in zip(*[data[i] for i in range(16)], strict=True))
    known = {each.untyped_storage().data_ptr() for each in [*model.parameters(), inputs, target]}
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda each: each):
        total = setup.task.loss(model(inputs), target).sum()
    assert report(setup, 1).activations == pytest.approx(sum(kept.values()), rel=0.05)
    assert total.requires_grad


@pytest.mark.parametrize("ranks", [1, 2])
def test_parameters_that_are_not_trained_have_no_gradients(ranks: int, make_setup: Any) -> None:
    setup = make_setup("Table", {}, ranks=1, batch_size=16, zero_stage=0)
    task = setup.task
    data: Any = task.local_data(Participant(name="test", regime="datacenter"))
    rows = [data[index] for index in range(examples_at_once(setup.job, ranks))]
    whole = memory_of(task, setup.job, rows, ranks, accelerators=False)
    make_model = task.model

    def frozen() -> nn.Module:
        model: nn.Module = make_model()
        next(model.parameters()).requires_grad_(False)
        return model

    vars(task)["model"] = frozen
    trained = [each for each in frozen().parameters() if each.requires_grad]
    found = memory_of(task, setup.job, rows, ranks, accelerators=False)
    assert found.parameters == whole.parameters
    assert found.gradients == sum(each.numel() * each.element_size() for each in trained)
    assert found.peak < whole.peak


def test_more_ranks_have_less_each(make_setup: Any) -> None:
    """Of a model whose matrices they share; a thousand of them need no machine."""
    setup = make_setup("Masked", {}, batch_size=2, zero_stage=3)
    few, many = (report(setup, ranks, accelerators=True) for ranks in (2, 1024))
    assert many.parameters < few.parameters / 4
    assert many.optimizer < few.optimizer / 4
    assert many.activations == few.activations


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("SGD", {}),
        ("SGD", {"momentum": 0.9}),
        ("AdamW", {"amsgrad": True}),
        ("Adagrad", {}),
        ("RMSprop", {"centered": True}),
        ("Adafactor", {}),
    ],
)
def test_the_state_of_an_optimizer_is_counted_without_it(
    kind: str, options: dict[str, Any], make_setup: Any
) -> None:
    setup = make_setup("Table", {"optimizer": kind, "options": options})
    parameters = {
        "matrix": nn.Parameter(torch.randn(50, 30)),
        "vector": nn.Parameter(torch.randn(70)),
        "kernel": nn.Parameter(torch.randn(4, 3, 5, 6)),
    }
    optimizer = getattr(torch.optim, kind)(parameters.values(), **{"lr": 0.01, **options})
    for each in parameters.values():
        each.grad = torch.ones_like(each)
    optimizer.step()
    kept = [
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    assert _optimizer_bytes(setup.task, parameters) == sum(kept)


def test_what_is_not_known_is_refused(make_setup: Any) -> None:
    for section in ({"compile": True}, {"offload": "parameters"}):
        with pytest.raises(UserError, match=rf"is not known with datacenter\.{min(section)}"):
            report(make_setup("Table", {}, **section), 2)
    with pytest.raises(TaskError, match=r"reads some, or selects by them \(loss\(\) failed at"):
        report(make_setup("Gpt", {}), 2)
    with pytest.raises(UserError, match="global_batch=6 cannot be divided among 4 replicas"):
        examples_at_once(make_setup("Table", {}, global_batch=6, ranks=3).job, 4)


JOB = """
name = "table"

[task]
source = "small.py:Small"

[strategy]
policy = "datacenter"

[datacenter]
ranks = 2
zero_stage = 3
batch_size = 8
"""
TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
import isthmus


class Small(isthmus.Task):
    def model(self):
        return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64))

    def loss(self, output, target):
        return (output - target).square()

    def local_data(self, participant):
        return TensorDataset(torch.randn(8, 64), torch.randn(8, 64))

    def optimizer(self, parameters, participant):
        return torch.optim.AdamW(parameters)
"""


def test_the_command_prints_it_for_any_number_of_ranks(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "small.py").write_text(TASK)
    path = str(tmp_path / "job.toml")
    run = CliRunner().invoke(job_command, ["check", path, "--memory", "--ranks", "64"])
    assert run.exit_code == 0, run.output
    first, *rows = run.output.splitlines()
    assert first == "memory  on each of 64 ranks (GPUs), the most:"
    assert [row.split()[0] for row in rows] == [
        "parameters",
        "gradients",
        "optimizer",
        "activations",
        "peak",
    ]
    assert rows[3].endswith("of 8 examples at a time")
    run = CliRunner().invoke(job_command, ["check", path, "--ranks", "64"])
    assert "--ranks and --device are about --memory and --collectives; add one" in str(
        run.exception
    )
    run = CliRunner().invoke(
        job_command, ["check", path, "--memory", "--set", "datacenter.ranks=0"]
    )
    assert str(run.exception) == (
        "--memory needs a number of ranks, and datacenter.ranks=0; give --ranks"
    )
    run = CliRunner().invoke(
        job_command, ["check", path, "--memory", "--set", "datacenter.batch_size=9"]
    )
    assert "a replica trains 9 examples at a time, and local_data() has 8; lower" in str(
        run.exception
    )
