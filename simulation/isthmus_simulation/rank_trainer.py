"""The process of a rank that trains simulated devices; rank 0 has one besides the coordinator."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import signal
import sys
import threading
from pathlib import Path
from typing import NoReturn

import torch

from isthmus.errors import IsthmusError, UserError
from isthmus.system.channel import Channel
from isthmus.system.forked_process import ForkedProcess, fork
from isthmus.system.process import keep_freed_memory
from isthmus.wire import link_pb2
from isthmus_clients.training.local_run import DeviceRun
from isthmus_simulation.devices.messages import PieceAnswer, PieceRequest
from isthmus_simulation.devices.piece_trainer import PieceTrainer
from isthmus_simulation.devices.stacks.training import StackedTraining
from isthmus_simulation.rank_description import RankDescription
from isthmus_simulation.rank_greeting import introduce
from isthmus_simulation.rank_place import RankPlace, channel_of


def fork_trainer(place: RankPlace, about: RankDescription, base: Path) -> ForkedProcess:
    """Start the process that trains for rank 0, before this one has threads or uses a GPU."""

    def train() -> None:
        with contextlib.suppress(UserError):  # the coordinator says that this process has ended
            train_for(place, about, base)

    return fork(train)


def train_for(place: RankPlace, about: RankDescription, base: Path) -> NoReturn:
    """Train devices until the coordinator ends.

    Args:
        place: of this rank.
        about: what it has loaded.
        base: directory of the job's relative paths.

    Raises:
        UserError: the coordinator cannot be reached, or something else is in its place.
    """
    torch.set_num_threads(1)  # as real devices
    keep_freed_memory()
    device = _device(place)
    about = dataclasses.replace(about, device=torch.device(device).type)
    connected = place.connect()
    for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 decides; see `_end_with`
        signal.signal(number, signal.SIG_IGN)
    channel = channel_of(connected)
    try:
        introduce(connected, place.key, place.rank, vars(about))
        connected.settimeout(None)
        _end_with(channel, place)  # not before: a program in its place would end this one silently
        _serve(channel, base, device)
    except (EOFError, OSError):
        _give_up(place)


def _end_with(channel: Channel, place: RankPlace) -> None:
    """Have this process end with the coordinator, whatever it does then."""

    def wait() -> None:
        poll = select.poll()
        poll.register(channel.fileno(), select.POLLRDHUP)
        poll.poll()
        _give_up(place)

    threading.Thread(target=wait, daemon=True).start()


def _give_up(place: RankPlace) -> NoReturn:
    """End because the coordinator has, before the simulation.

    On another machine the exit status tells whatever has started the ranks that they are needed
    again. On that of rank 0 its own does, and a failure of another rank might be reported instead.
    """
    _end(0 if place.has_rank_0 else 1)


def _end(status: int = 0) -> NoReturn:
    """End without a word: the coordinator says what has happened."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _serve(channel: Channel, base: Path, device: str) -> NoReturn:
    trainer = None
    received = bytearray()
    most = 0
    while True:
        request = PieceRequest.decode(channel.receive())
        if request.kind == "model":
            if request.received > most:
                raise OSError(f"a model of {request.received} bytes")
            received = bytearray(request.received)
            channel.receive_into(received)
            continue
        if request.kind == "end":
            _end()
        if request.kind == "open":
            try:
                run = _opened(request, base, device)
                trainer = PieceTrainer(run, StackedTraining(run) if request.is_stacked else None)
                most = 2 * run.layout.nbytes  # a model, and a gradient with some jobs
                channel.send(PieceAnswer().encode())
            except IsthmusError as error:
                channel.send(PieceAnswer(str(error)).encode())
            continue
        assert trainer is not None
        memories = [bytearray(request.room) + received for _ in request.participants]
        answer = trainer.answer(request, memories)
        channel.send(answer.encode())
        for memory, result in zip(memories, answer.results, strict=False):
            channel.send_vector(memoryview(memory)[: result.size])


def _opened(request: PieceRequest, base: Path, device: str) -> DeviceRun:
    work = link_pb2.OpenRun.FromString(request.work)
    work.base = str(base)
    return DeviceRun(work, request.participants[0], None, device=device)


def _device(place: RankPlace) -> str:
    """The GPU of this rank, if the machine has that many."""
    has_gpu = place.local_rank < torch.cuda.device_count()
    return f"cuda:{place.local_rank}" if has_gpu else "cpu"
