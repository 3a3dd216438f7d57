"""Messages between ranks: a program that takes a rank's place executes nothing."""

from __future__ import annotations

import ast
import importlib
import math
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.warm_ranks import Ranks

import isthmus_datacenter
from isthmus_datacenter import rank_messages
from isthmus_datacenter.rank_messages import RankMessages

SOURCE = Path(__file__).parent / "intruders.py"
ROOT = Path(__file__).parents[2]

SENDERS = {
    "failures": 1,
    "means": 1,
    "positions": 0,
    "gradients": 1,
    "refusals of a model": 1,
    "the calls of modules": 1,
    "the directory of a checkpoint": 0,
    "the newest checkpoint": 0,
    "whether ranks could use a checkpoint": 1,
    "the parts of a checkpoint": 1,
    "who writes a checkpoint": 0,
    "the files of a checkpoint": 1,
    "the end of a checkpoint": 0,
    "the outputs of a stage": 0,
    "parameters of stages": 1,
    "optimizers of stages": 1,
    "models without memory": 1,
    "experts": 1,
}
"""For each kind of message a rank that sends it, and whose place the intruder has."""


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    with Ranks(2, seconds=120.0) as ranks:
        yield ranks


def test_the_attack_is_real(tmp_path: Path) -> None:
    """It executes code in a rank that gathers objects as PyTorch does."""
    mark = tmp_path / "executed"
    with Ranks(2, seconds=60.0) as ranks:
        ranks.run_until(0, SOURCE, "objects_of_pytorch", 1, str(mark))
    assert mark.exists()


@pytest.mark.parametrize("about", SENDERS)
def test_a_pickle_in_place_of_a_message_ends_the_rank_and_executes_nothing(
    about: str, make_setup: Any, start_setup: Any, tmp_path: Path
) -> None:
    mark = tmp_path / "executed"
    pipeline = {"pipeline_parallel": 2, "zero_stage": 0}
    layouts = {
        "gradients": {"tensor_parallel": 2},
        "the outputs of a stage": pipeline,
        "parameters of stages": pipeline,
        "optimizers of stages": pipeline,
        "experts": {"expert_parallel": 2},
    }
    if about == "models without memory":
        setup, _ = start_setup("Gpt", zero_stage=3)
    else:
        task = "Mixture" if about == "experts" else "Gpt"
        setup = make_setup(task, **layouts.get(about, {"zero_stage": 3}))
    command = setup.open_command()
    intruder = SENDERS[about]
    with Ranks(2, seconds=60.0) as ranks:
        said = ranks.run_until(
            1 - intruder,
            SOURCE,
            "whole_run",
            *(intruder, about, str(mark), command, str(tmp_path / "state")),
        )
    assert not mark.exists()
    assert said == (
        f"a message about {about!r} is not signed by rank {intruder} of the group: another program "
        "has taken that rank's place, or the ranks are not at the same point"
    )


def test_a_stage_of_a_pipeline_is_not_asked_for_pickled_shapes(
    make_setup: Any, tmp_path: Path
) -> None:
    mark = tmp_path / "executed"
    command = make_setup("Table", pipeline_parallel=2, zero_stage=0).open_command()
    arguments = (0, str(mark), command, str(tmp_path / "state"))
    with Ranks(2, seconds=60.0) as ranks:
        said = ranks.run_until(1, SOURCE, "pipeline", *arguments)
    assert "another stage of the pipeline asks for the shapes of tensors" in said
    assert not mark.exists()


def test_no_kind_of_message_is_left_out() -> None:
    kinds = set()
    for module in pkgutil.walk_packages(isthmus_datacenter.__path__, "isthmus_datacenter."):
        for each in vars(importlib.import_module(module.name)).values():
            if isinstance(each, RankMessages):
                kinds.add(each._about)
    assert kinds == set(SENDERS)


def test_values_arrive_as_they_were_sent(pair: Ranks) -> None:
    own = [["0", "\ud800 a surrogate \x00"], ["1", "\ud800 a surrogate \x00"] * 2]
    assert pair.run(SOURCE, "exchanged") == [
        [own, own[0], own, ["to 0"], ["from 1"]],
        [own, own[0], None, ["to 1"], ["from 0"]],
    ]


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("long", "rank 1 of a group announced 1036 bytes about 'texts'; the maximum is 1000"),
        ("form", "a message about 'texts' of rank 1 of the group has another form"),
        ("about", "a message about 'texts' is not signed by rank 1 of the group: "),
        ("key", "a message about 'texts' is not signed by rank 1 of the group: "),
        ("again", "a message about 'texts' is not signed by rank 1 of the group: "),
    ],
)
def test_other_messages_are_refused(how: str, sentence: str) -> None:
    with Ranks(2, seconds=60.0) as ranks:
        assert ranks.run_until(0, SOURCE, "refused", how).startswith(sentence)


@pytest.mark.parametrize(
    ("forms", "sentence"),
    [
        (
            [[0, [1 << 60, 2]]],
            r"a pipeline stage returns 9223372036854775808 bytes, and the next .*",
        ),
        (
            [[0, [1 << 40]]],
            r"a pipeline stage returns 4398046511104 bytes, and the next one has .*",
        ),
        ([[0, [-1, 2]]], r"a message about 'the outputs of a stage' of rank 1 .* has another form"),
        ([[10, [2]]], r"a message about 'the outputs of a stage' of rank 1 .* has another form"),
        ([[-1, [2]]], r"a message about 'the outputs of a stage' of rank 1 .* has another form"),
        ([[0, [1] * 65]], r"a message about 'the outputs of a stage' of rank 1 .* another form"),
        ([[0, [1]]] * 65, r"a message about 'the outputs of a stage' of rank 1 .* another form"),
    ],
)
def test_a_stage_allocates_no_more_than_there_can_be(
    forms: list[Any], sentence: str, pair: Ranks
) -> None:
    assert re.fullmatch(sentence, pair.run(SOURCE, "sizes", forms)[0])


def test_numbers_keep_their_bits() -> None:
    """Also those that JSON has no word for."""
    numbers: RankMessages[list[float]] = RankMessages("numbers", list[float])
    place = rank_messages._Place("numbers", None, "group", 1, 0, 2)
    rank_messages.set_key(bytes(32))
    values = [0.1, 1 / 3, 5e-324, -0.0, 1.7976931348623157e308, math.inf, -math.inf, 3.0]
    received = numbers._decoded(numbers._encoded([*values, math.nan], place), place, 0)
    assert list(map(float.hex, received[:-1])) == list(map(float.hex, values))
    assert math.isnan(received[-1])


def test_a_rank_without_a_key_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_messages._Key, "value", None)
    place = rank_messages._Place("texts", None, "group", 1, 0, 2)
    with pytest.raises(RuntimeError, match="has no key"):
        RankMessages("texts", str)._encoded("text", place)


UNPICKLING = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
    "async_save",
    "state_dict_loader",
    "state_dict_saver",
}
"""Names of PyTorch whose messages are pickles."""


def names(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name):
                yield node.lineno, name
            case ast.Import(names=aliases):
                yield from (
                    (node.lineno, part) for each in aliases for part in each.name.split(".")
                )
            case ast.ImportFrom(module=module, names=aliases):
                yield from ((node.lineno, part) for part in (module or "").split("."))
                yield from ((node.lineno, each.name) for each in aliases)


@pytest.mark.parametrize("folder", ["datacenter", "simulation", "flower", "benchmarks"])
def test_no_code_sends_objects_as_pickles(folder: str) -> None:
    files = list((ROOT / folder).rglob("*.py"))
    assert files
    found = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in files
        for line, name in names(path)
        if name in UNPICKLING
    ]
    assert found == []


def test_the_check_of_code_finds_what_it_looks_for(tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    file.write_text(
        "import torch.distributed as dist\n"
        "from torch.distributed import gather_object as quiet\n"
        "dist.all_gather_object([], 1)\n"
        "import torch.distributed.checkpoint.state_dict_saver\n"
    )
    found = {name for _, name in names(file)} & UNPICKLING
    assert found == {"gather_object", "all_gather_object", "state_dict_saver"}
