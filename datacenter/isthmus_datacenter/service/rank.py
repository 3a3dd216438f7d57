"""One rank: joins the group, then does what the service asks until nobody is left to ask.

Whatever goes wrong here ends in one of three ways. A failure all ranks know of is reported and
the rank goes on. A failure of the user's code on this rank is reported and the rank ends, so that
the others, who may be waiting for it, are restarted. Anything else just ends the rank: the
service sees it, has the group restarted and repeats the command.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from isthmus.errors import UserError
from isthmus.system.process import die_with_parent
from isthmus_datacenter.service.control_store import (
    BEAT_SECONDS,
    Attempt,
    Command,
    Control,
    Outcome,
    Report,
)
from isthmus_datacenter.training.agreement import AgreedError, ControlSignal
from isthmus_datacenter.training.engine import Engine, Place
from isthmus_datacenter.training.mean_gradient import mean_gradient

_SLICE_SECONDS = 1.0
_COLLECTIVE = timedelta(minutes=30)
"""For one collective: longer than any pause of another rank that is still alive."""
_LAST_SECONDS = 5.0
"""For the agent to end a rank that lost another one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What every rank of a group is started with."""

    host: str
    port: int
    generation: int
    participant: str
    state: str

    def to_json(self) -> str:
        """For the agent to hand on."""
        return json.dumps(dataclasses.asdict(self))


def main(settings: str) -> None:
    """Entry point of a rank, called by the elastic agent."""
    # The agent's handlers came along; they would wait for whatever this rank is stuck in.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    faulthandler.enable()  # a crash in native code leaves the stacks of Python in the log
    die_with_parent()
    rank = None
    try:
        rank = _Rank(Settings(**json.loads(settings)))
        rank.join()
        rank.serve()
    except BaseException as error:  # noqa: BLE001 - a rank has nobody above it to tell
        if rank is not None and rank.joined and _lost_a_peer(error):
            # The peer's end is the news. Ours would hide it if the agent saw us first.
            print(f"lost another rank: {error}", file=sys.stderr, flush=True)
            time.sleep(_LAST_SECONDS)
        traceback.print_exc()
        _leave()


class _Rank:
    """One member of the group for one attempt."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.rank = int(os.environ["RANK"])
        self.ranks = int(os.environ["WORLD_SIZE"])
        restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        self.attempt = Attempt(settings.generation, restart)
        self.control = Control.connect(settings.host, settings.port)
        self.device = _device()
        self.number = 0
        self.engine: Engine | None = None
        self.run_id: str | None = None
        self.joined = False
        self._unwanted: int | None = None
        """Number of the command that should stop."""
        self._to_save: int | None = None
        """Number of the command that should save its state and stop."""

    def join(self) -> None:
        """Start to beat, and meet the other ranks."""
        processors = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, processors // int(os.environ["LOCAL_WORLD_SIZE"])))
        self.control.join(self.attempt, self.rank, os.getpid())
        self.control.beat(self.attempt, self.rank, 0)
        threading.Thread(target=self._beat, daemon=True).start()
        rendezvous = Control.connect(self.settings.host, self.settings.port)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo",
            store=rendezvous.group_store(self.attempt),
            rank=self.rank,
            world_size=self.ranks,
            timeout=_COLLECTIVE,
        )
        self.joined = True
        self.control.ready(self.attempt)

    def serve(self) -> None:
        """Take commands for ever."""
        while True:
            command = self.control.receive(self.attempt, self.number, _SLICE_SECONDS)
            if command is None:
                continue
            outcome = self._do(command)
            if outcome.failure is not None or self.rank == 0:
                self.control.finish(self.attempt, self.number, outcome)
            if outcome.leaving:
                _leave()
            self.number += 1

    def _do(self, command: Command) -> Outcome:
        try:
            values = self._work(command)
            dist.barrier()
        except AgreedError as failure:
            return Outcome(failure=str(failure))
        except UserError as failure:
            if _lost_a_peer(failure):
                raise
            traceback.print_exc()
            return Outcome(failure=str(failure), leaving=True)
        return Outcome(values=values)

    def _work(self, command: Command) -> dict[str, object]:
        if command.op == "open":
            self.engine = self.run_id = None
            place = Place(
                rank=self.rank,
                ranks=self.ranks,
                device=self.device,
                participant=self.settings.participant,
                state=Path(self.settings.state) / command.run_id,
            )
            self.engine = Engine(command, place)
            self.run_id = command.run_id
            return {"examples": self.engine.examples, "note": self.engine.note}
        if command.op == "close":
            self.engine = self.run_id = None
            return {}
        assert self.engine is not None
        assert self.run_id == command.run_id  # the service opens runs before it uses them
        if command.op == "train":
            done = self.engine.train(command, self._report, self._wish)
            return {**done, "profile": self.engine.figures}
        if command.op == "gradient":
            return mean_gradient(self.engine, command, self._wish)
        self.engine.export(command)
        return {}

    def _wish(self) -> ControlSignal:
        if self._unwanted == self.number:
            return ControlSignal.ABORT
        return ControlSignal.SAVE if self._to_save == self.number else ControlSignal.GO_ON

    def _report(self, report: Report) -> None:
        self.control.report_progress(self.attempt, self.number, report)

    def _beat(self) -> None:
        """Say that this process runs, whatever the main thread is busy with."""
        control = Control.connect(self.settings.host, self.settings.port)
        count = 0
        while True:
            count += 1
            number = self.number
            try:
                control.beat(self.attempt, self.rank, count)
                if control.aborted(self.attempt, number):
                    self._unwanted = number
                if control.must_save(self.attempt, number):
                    self._to_save = number
            except dist.DistError:
                _leave()  # nobody is left to work for
            time.sleep(BEAT_SECONDS)


def _device() -> torch.device:
    local = int(os.environ["LOCAL_RANK"])
    if torch.cuda.is_available() and local < torch.cuda.device_count():
        torch.cuda.set_device(local)
        return torch.device("cuda", local)
    return torch.device("cpu")


def _lost_a_peer(error: BaseException | None) -> bool:
    """Whether an error says that another rank is gone: also when user code was on the stack."""
    while error is not None:
        text = str(error)
        if isinstance(error, dist.DistError) or any(
            mark in text for mark in ("gloo", "Connection closed by peer", "NCCL")
        ):
            return True
        error = error.__cause__
    return False


def _leave() -> NoReturn:
    """End at once: interpreter shutdown would wait for threads inside broken collectives."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
