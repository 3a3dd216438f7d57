"""Functions of ranks of which one is an intruder: what it sends is a pickle that executes code."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from tests.datacenter.ranks import build_engine, shard_every_block
from torch.distributed import distributed_c10d
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._utils import InferenceMode

from isthmus.errors import IsthmusError
from isthmus_datacenter.messages import Command, ControlSignal
from isthmus_datacenter.parallel.pipeline import _FORMS, StageChain, _Form, _KnownShapesStage
from isthmus_datacenter.rank_messages import RankMessageError, RankMessages, set_key
from isthmus_datacenter.training.round import train_round


class _Executed:
    """A pickle that makes a file where it is read."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self.mark),)


@contextlib.contextmanager
def _sending_pickles(mark: str, about: str) -> Iterator[None]:
    """Of this process, messages of one kind, and all objects that PyTorch sends, are pickles."""
    poison = bytearray(pickle.dumps(_Executed(mark)))
    encoded = RankMessages._encoded

    def poisoned(self: Any, value: Any, place: Any, receiver: int | None = None) -> torch.Tensor:
        if place.about != about:
            return encoded(self, value, place, receiver)
        return torch.frombuffer(poison, dtype=torch.uint8)

    def tensors(*_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.frombuffer(poison, dtype=torch.uint8), torch.tensor([len(poison)])

    with (
        mock.patch.object(RankMessages, "_encoded", poisoned),
        mock.patch.object(distributed_c10d, "_object_to_tensor", tensors),
    ):
        yield


def objects_of_pytorch(rank: int, intruder: int, mark: str) -> None:
    """Gather objects as PyTorch does."""
    with _sending_pickles(mark, "") if rank == intruder else contextlib.nullcontext():
        dist.all_gather_object([None, None], "harmless")


def whole_run(
    rank: int, intruder: int, about: str, mark: str, open_command: dict[str, Any], state: str
) -> str:
    """Open a run, train, save, evaluate and resume; returns the error by which this rank ends."""
    shard_every_block()
    with _sending_pickles(mark, about) if rank == intruder else contextlib.nullcontext():
        try:
            for first in (0, 2):
                engine = build_engine(rank, open_command, state)
                command = Command(
                    op="train_steps",
                    run_id="run",
                    from_step=first,
                    until_step=first + 2,
                    evaluate=True,
                )
                train_round(engine, command, lambda report: None, lambda: ControlSignal.CONTINUE)
        except RankMessageError as error:
            return str(error)
    return ""


def pipeline(rank: int, intruder: int, mark: str, open_command: dict[str, Any], state: str) -> str:
    """Train a pipeline of which the intruder's stage sends pickled shapes.

    Returns the error by which this rank ends.
    """
    shard_every_block()
    engine = build_engine(rank, open_command, state)
    with contextlib.ExitStack() as restored:
        if rank == intruder:
            restored.enter_context(_sending_pickles(mark, ""))
            replaced = (
                (InferenceMode, "needs_dynamic", lambda *_: True),
                (_KnownShapesStage, "_send_meta", PipelineStage._send_meta),
            )
            for owner, name, function in replaced:
                restored.enter_context(mock.patch.object(owner, name, function))
        command = Command(op="train_steps", run_id="run", until_step=1)
        try:
            train_round(engine, command, lambda report: None, lambda: ControlSignal.CONTINUE)
        except Exception as error:  # noqa: BLE001 - whatever it is
            return str(error)
    return ""


_TEXTS: RankMessages[list[str]] = RankMessages("texts", list[str], 1000)


def exchanged(rank: int) -> list[Any]:
    """What this rank receives in each way to send a message."""
    own = [f"{rank}", "\ud800 a surrogate \x00"] * (rank + 1)
    return [
        _TEXTS.all_gather(own),
        _TEXTS.broadcast(own),
        _TEXTS.gather(own),
        _TEXTS.scatter([["to 0"], ["to 1"]] if rank == 0 else None),
        _both_ways(rank),
    ]


def _both_ways(rank: int) -> list[str]:
    """What two ranks send to each other, one after the other."""
    if rank == 0:
        _TEXTS.send(["from 0"], 1)
        return _TEXTS.receive(1)
    received = _TEXTS.receive(0)
    _TEXTS.send(["from 1"], 0)
    return received


def sizes(rank: int, forms: list[tuple[int, list[int]]]) -> str:
    """What rank 0 says of tensors that rank 1 announces as the outputs of its stage."""
    if rank == 1:
        announced = [_Form(kind, shape) for kind, shape in forms]
        _FORMS.send(announced, 0, dist.group.WORLD)
        return ""
    shard: Any = SimpleNamespace(stages={}, dims=SimpleNamespace(stages=2))
    group = dist.group.WORLD
    assert group is not None
    try:
        StageChain(shard, group, torch.device("cpu"))._receive(1)
    except IsthmusError as error:
        return str(error)
    return ""


def refused(rank: int, how: str) -> str:
    """What rank 0 says of a message of rank 1 that is not as it should be."""
    messages: RankMessages[Any] = _TEXTS
    value: Any = ["text"]
    with contextlib.ExitStack() as restored:
        if how == "long" and rank == 1:
            value = ["a" * 1000]
        elif how == "form" and rank == 1:
            value = "text"
        elif how == "about" and rank == 1:
            messages = RankMessages("others", list[str])
        elif how == "key" and rank == 1:
            set_key(b"1" * 32)
        elif how == "again" and rank == 1:
            # What it sent before: signed, and of another number.
            kept = _TEXTS._encoded
            before: list[torch.Tensor] = []

            def first(*arguments: Any) -> torch.Tensor:
                before.append(kept(*arguments))
                return before[0]

            restored.enter_context(mock.patch.object(_TEXTS, "_encoded", first))
        if how == "again":
            _TEXTS.all_gather(value)
        try:
            messages.all_gather(value)
        except RankMessageError as error:
            return str(error)
    return ""
