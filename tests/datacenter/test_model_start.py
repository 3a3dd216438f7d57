"""Ranks that start from files, in every layout, against the same values in one process."""

from pathlib import Path
from typing import Any

import pytest
import torch

from isthmus.job import with_changes
from isthmus.task.scoring import build_model

IN_PARTS = [
    {"zero_stage": 1},
    {"zero_stage": 3},
    {"zero_stage": 0, "precision": "bf16"},
    {"tensor_parallel": 2},
    {"tensor_parallel": 2, "sequence_parallel": True},
    {"context_parallel": 2},
    {"pipeline_parallel": 2},
]
"""Layouts in which a rank reads its part only."""
WHOLE = [{"zero_stage": 0}]


@pytest.fixture
def train(on_ranks: Any, tmp_path: Path) -> Any:
    """Train on two ranks: the model, whether a rank built all of it, and how much ranks grew."""

    def train(
        prepared: Any, steps: int, name: str, *, whole: bool = False
    ) -> tuple[torch.Tensor, list[bool], list[int]]:
        target = tmp_path / name
        target.write_bytes(prepared.layout.header + bytes(4 * prepared.layout.size))
        arguments = (prepared.open_command(), steps, str(target), whole)
        results = on_ranks(2, "trained_from_start", *arguments)
        vector = prepared.layout.decode(bytearray(target.read_bytes()))
        return vector, [built for built, _ in results], [grown for _, grown in results]

    return train


@pytest.mark.parametrize("layout", [*IN_PARTS, *WHOLE], ids=str)
def test_without_a_file_the_first_step_begins_with_the_values_of_the_seed(
    layout: dict[str, Any], make_setup: Any, train: Any, tmp_path: Path
) -> None:
    prepared = make_setup("Gpt", **layout)
    vector, built, _ = train(prepared, 0, "initial")
    assert vector.equal(prepared.layout.gather(build_model(prepared.task, prepared.job.seed)))
    assert built == [layout in WHOLE] * 2
    assert not any((tmp_path / "initial.state").glob("*seeded*"))


@pytest.mark.parametrize("name", ["Gpt", "Normalised", "Language", "Drawn"])
def test_training_from_the_seed_is_the_same_if_no_rank_has_the_whole_model(
    name: str, make_setup: Any, train: Any
) -> None:
    prepared = make_setup(name, zero_stage=3)
    parts, built, _ = train(prepared, 3, "parts")
    assert built == [name not in ("Gpt", "Normalised")] * 2
    whole, _, _ = train(prepared, 3, "whole", whole=True)
    assert parts.equal(whole)


@pytest.mark.parametrize("layout", [*IN_PARTS, *WHOLE], ids=str)
def test_the_first_step_begins_with_the_values_of_the_file(
    layout: dict[str, Any], start_setup: Any, train: Any
) -> None:
    prepared, values = start_setup(**layout)
    vector, built, _ = train(prepared, 0, "initial")
    assert vector.equal(values)
    assert built == [layout in WHOLE] * 2


@pytest.mark.parametrize("name", ["Gpt", "Normalised", "Language", "Drawn"])
def test_training_is_the_same_if_no_rank_has_the_whole_model(
    name: str, start_setup: Any, train: Any
) -> None:
    """What needs values that the files do not have, or in other places, is built whole."""
    prepared, _ = start_setup(name, zero_stage=3)
    parts, built, _ = train(prepared, 3, "parts")
    assert built == [name not in ("Gpt", "Normalised")] * 2
    whole, _, _ = train(prepared, 3, "whole", whole=True)
    assert parts.equal(whole)


@pytest.mark.parametrize("layout", [each for each in IN_PARTS if "zero_stage" not in each], ids=str)
def test_a_partitioned_model_trains_the_same_if_no_rank_has_the_whole_model(
    layout: dict[str, Any], start_setup: Any, train: Any
) -> None:
    prepared, _ = start_setup(**layout)
    parts, built, _ = train(prepared, 3, "parts")
    assert built == [False, False]
    whole, _, _ = train(prepared, 3, "whole", whole=True)
    assert parts.equal(whole)


def test_ranks_read_the_experts_that_they_have(start_setup: Any, train: Any) -> None:
    prepared, values = start_setup("Mixture", zero_stage=3, expert_parallel=2)
    vector, built, _ = train(prepared, 0, "initial")
    assert vector.equal(values)
    assert built == [False, False]
    parts, _, _ = train(prepared, 3, "parts")
    whole, _, _ = train(prepared, 3, "whole", whole=True)
    assert parts.equal(whole)


def test_a_model_that_uses_parameters_of_modules_it_does_not_call_is_built_whole(
    start_setup: Any, make_setup: Any, train: Any
) -> None:
    prepared, values = start_setup("Outside", zero_stage=3)
    seeded = make_setup("Outside", zero_stage=3)
    drawn = seeded.layout.gather(build_model(seeded.task, seeded.job.seed))
    for each, expected in ((prepared, values), (seeded, drawn)):
        vector, built, _ = train(each, 0, "initial")
        assert vector.equal(expected)
        assert built == [True, True]


@pytest.mark.parametrize(
    "layout", [{"zero_stage": 3}, {"tensor_parallel": 2}, {"pipeline_parallel": 2}], ids=str
)
def test_a_rank_holds_its_part_and_not_the_model(
    layout: dict[str, Any], start_setup: Any, train: Any
) -> None:
    """It is compared with the model of which it is a part, with a layer or two in memory."""
    prepared, values = start_setup("Deep", **layout)
    vector, _, in_parts = train(prepared, 0, "parts")
    assert vector.equal(values)
    _, _, with_all = train(prepared, 0, "whole", whole=True)
    model = 4 * prepared.layout.size
    assert min(with_all) > model
    assert max(in_parts) < 0.8 * model


def test_a_rank_that_did_not_draw_the_model_never_holds_it(make_setup: Any, train: Any) -> None:
    prepared = make_setup("Deep", zero_stage=3)
    vector, _, (_, other) = train(prepared, 0, "parts")
    assert vector.equal(prepared.layout.gather(build_model(prepared.task, prepared.job.seed)))
    assert other < 0.8 * 4 * prepared.layout.size


@pytest.mark.parametrize("stage", [0, 3])
def test_files_that_differ_on_a_node_are_refused_on_all_ranks(
    stage: int, start_setup: Any, on_ranks: Any, tmp_path: Path
) -> None:
    prepared, _ = start_setup(zero_stage=stage)
    path = tmp_path / "start.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    messages = on_ranks(2, "refusals", [prepared.open_command()], str(tmp_path / "state"))
    for (message,) in messages:
        assert "has the digest" in message
        assert f"and the job is for {prepared.job.model.sha256}" in message


@pytest.mark.parametrize("stage", [0, 3])
def test_files_that_differ_on_one_node_only_are_refused_on_all_ranks(
    stage: int, start_setup: Any, on_ranks: Any, tmp_path: Path
) -> None:
    prepared, _ = start_setup(zero_stage=stage)
    other = tmp_path / "other.safetensors"
    data = (tmp_path / "start.safetensors").read_bytes()
    other.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    on_other_node = type(prepared)(with_changes(prepared.job, {"model.start": str(other)}))
    opening = [prepared.open_command(), on_other_node.open_command()]
    messages = on_ranks(2, "refusals_apart", opening, str(tmp_path / "state"))
    assert messages[0] == messages[1]
    assert f"{other} has the digest" in messages[0]


def test_parameters_that_the_file_does_not_have_are_those_of_the_seed(
    start_setup: Any, train: Any
) -> None:
    fresh = {"model.fresh": ["3.bias"], "model.unused": ["3.bias"]}
    prepared, values = start_setup("Table", fresh, zero_stage=3)
    vector, built, _ = train(prepared, 0, "initial")
    seeded = prepared.layout.gather(build_model(prepared.task, prepared.job.seed))
    for (name, part), (_, stored), (_, drawn) in zip(
        *(prepared.layout.parts(each) for each in (vector, values, seeded)), strict=True
    ):
        assert part.equal(drawn if name == "3.bias" else stored)
    assert built == [True, True]
