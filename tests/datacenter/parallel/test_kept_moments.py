"""Moments that are kept in bfloat16 or in the host's memory between an optimizer's steps.

That runs with them train like one process is told by test_parallelize.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.datacenter.conftest import HERE
from torch import nn

from isthmus.errors import TaskError, UserError
from isthmus_datacenter.checks import check
from isthmus_datacenter.parallel import kept_moments
from isthmus_datacenter.parallel.kept_moments import KeptMoments, round_stochastically
from isthmus_datacenter.parallel.model_shard import ModelShard
from isthmus_datacenter.parallel.optimizer import ShardedOptimizer
from isthmus_datacenter.parallel.parallel_dims import ParallelDims

KEPT = {
    "bf16": {"optimizer_states": "bf16"},
    "host": {"offload": "optimizer"},
    "both": {"optimizer_states": "bf16", "offload": "optimizer"},
}


def test_rounding_keeps_the_mean_and_what_needs_no_rounding() -> None:
    values = torch.full((200_000,), -1.001)
    rounded = round_stochastically(values, "weight exp_avg 0").float()
    # The two nearest numbers of bfloat16; the mean of many draws is the value.
    assert set(rounded.tolist()) == {-1.0, -1.0078125}
    assert float(rounded.mean()) == pytest.approx(-1.001, abs=5e-5)
    assert rounded.equal(round_stochastically(values, "weight exp_avg 0").float())
    assert not rounded.equal(round_stochastically(values, "weight exp_avg 1").float())
    exact = torch.tensor([0.0, -0.0, 1.5, -3e38, float("inf"), 1e-40]).bfloat16()
    assert round_stochastically(exact.float(), "exact").equal(exact)


def test_second_moments_keep_moving() -> None:
    """Rounded to the nearest, they would stay where a step changes them by less than a half bit."""
    parameters = [nn.Parameter(torch.zeros(4096)) for _ in range(2)]
    names = {id(each): "weight" for each in parameters}
    kept = KeptMoments(names, rounded=True, on_host=False)
    optimizers = [torch.optim.AdamW([each], lr=1e-3) for each in parameters]
    generator = torch.Generator().manual_seed(0)
    for step in range(300):
        # After some steps gradients are ten times as small.
        gradient = torch.randn(4096, generator=generator) * (1.0 if step < 100 else 0.1)
        for parameter in parameters:
            parameter.grad = gradient.clone()
        optimizers[0].step()
        kept.step(optimizers[1])
    exact, rounded = (
        optimizer.state[parameter]["exp_avg_sq"]
        for optimizer, parameter in zip(optimizers, parameters, strict=True)
    )
    assert rounded.dtype == torch.bfloat16
    assert float(rounded.float().mean()) == pytest.approx(float(exact.mean()), rel=2e-3)
    first, second = (each.detach() for each in parameters)
    assert float((first - second).norm() / first.norm()) < 0.01


@pytest.mark.parametrize("kind", ["SGD", "Adam", "NAdam", "RMSprop", "Adagrad", "ASGD"])
def test_moments_on_the_host_change_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_moments, "_BUCKET_BYTES", 40)  # some parameters at a time
    results = []
    for on_host in (False, True):
        generator = torch.Generator().manual_seed(0)
        parameters = [nn.Parameter(torch.randn(5, generator=generator)) for _ in range(5)]
        optimizer: Any = getattr(torch.optim, kind)(
            [{"params": parameters[:2], "lr": 0.1}, {"params": parameters[2:]}], lr=0.01
        )
        kept = KeptMoments({id(each): "name" for each in parameters}, rounded=False, on_host=True)
        for step in range(4):
            for number, parameter in enumerate(parameters):
                # One of them has no gradient in some steps.
                if number != step:
                    parameter.grad = torch.randn(5, generator=generator)
            kept.step(optimizer) if on_host else optimizer.step()
            optimizer.zero_grad()
        results.append(torch.stack([each.detach() for each in parameters]))
    assert results[0].equal(results[1])


def test_moments_that_are_there_before_the_first_step_are_rounded_then() -> None:
    """A restart rounds all of them: also of a parameter that has had no gradient by then."""
    stage = nn.ParameterDict({"used": torch.zeros(3), "unused": torch.zeros(3)})
    names = {name: name for name in stage}
    shard = ModelShard(ParallelDims(ranks=1, zero_stage=0), {0: stage}, {0: names})
    optimizer = ShardedOptimizer(
        shard,
        lambda given: torch.optim.Adagrad(given, initial_accumulator_value=0.1),
        None,
        False,
        rounded_moments=True,
    )
    before = optimizer.state_of(stage["unused"])["sum"].clone()
    assert before.dtype == torch.bfloat16
    stage["used"].grad = torch.ones(3)
    optimizer.step(1.0)
    state = {name: dict(optimizer.state_of(stage[name])) for name in stage}
    optimizer.load_state(optimizer.group_options(), state, None)
    assert optimizer.state_of(stage["unused"])["sum"].equal(before)


@pytest.mark.parametrize("kind", ["NAdam", "ASGD"])
def test_numbers_of_a_step_are_no_moments(kind: str) -> None:
    """They have the shape of a parameter that has no dimension."""
    parameter = nn.Parameter(torch.tensor(1.0))
    kept = KeptMoments({id(parameter): "scale"}, rounded=True, on_host=False)
    optimizer = getattr(torch.optim, kind)([parameter], lr=0.013)
    parameter.grad = torch.tensor(0.5)
    kept.step(optimizer)
    types = {name: each.dtype for name, each in optimizer.state[parameter].items()}
    moments = {"exp_avg", "exp_avg_sq", "ax"}
    assert {
        name for name, each in types.items() if each == torch.bfloat16
    } == moments & types.keys()


@pytest.mark.parametrize("key", KEPT)
def test_a_run_goes_on_bit_for_bit(
    key: str, make_setup: Any, on_ranks: Any, tmp_path: Path
) -> None:
    prepared = make_setup("Gpt", zero_stage=3, **KEPT[key])
    operations = []
    for name in ("straight", "interrupted"):
        result = tmp_path / name
        result.write_bytes(prepared.layout.header + bytes(4 * prepared.layout.size))
        command = {"op": "train_steps", "run_id": "run", "until_step": 4, "result": str(result)}
        operations.append((prepared.open_command(), command, str(tmp_path / f"{name}.state")))
    on_ranks(2, "train", operations[:1])
    on_ranks(2, "train_interrupted", operations[1], 2)
    assert (tmp_path / "straight").read_bytes() == (tmp_path / "interrupted").read_bytes()


@pytest.mark.parametrize("key", ["bf16", "host"])
def test_an_optimizer_that_may_need_all_states_is_refused(key: str, make_setup: Any) -> None:
    prepared = make_setup("Table", {"optimizer": "Rprop"}, zero_stage=0, **KEPT[key])
    if key == "host":  # which a check of a job leaves out
        parameters = [nn.Parameter(torch.zeros(2))]
        kept = KeptMoments({}, rounded=False, on_host=True)
        with pytest.raises(TaskError, match=r'datacenter\.offload = "optimizer" works with SGD'):
            kept.check(torch.optim.Rprop(parameters))
        return
    with pytest.raises(UserError, match="returned Rprop, which may need all of its states at"):
        check(prepared.job, prepared.task, HERE)


def test_hooks_of_steps_are_refused() -> None:
    """A step is taken of some parameters at a time, and a hook may clip all gradients together."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))])
    kept = KeptMoments({}, rounded=True, on_host=False)
    kept.check(optimizer)
    handle = optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(TaskError, match=r"returned SGD with a hook of its steps, .*remove one of"):
        kept.check(optimizer)
    handle.remove()
    kept.check(optimizer)


def test_offload_on_processors_is_said_to_save_nothing(
    make_setup: Any, on_ranks: Any, tmp_path: Path
) -> None:
    openings = [make_setup("Table", offload=each) for each in ("none", "optimizer", "parameters")]
    for prepared, saves in zip(openings, (True, False, False), strict=True):
        notes = on_ranks(2, "note", prepared.open_command(), str(tmp_path))
        for note in notes:
            assert ("saves nothing here: ranks on processors" in note) == (not saves)
