"""The process of one rank: it joins the process group and executes the service's commands.

A failure ends in one of three ways. A failure that all ranks have agreed on is reported, and the
rank goes on. A failure of the user's code on this rank is reported and the rank exits, because
other ranks may be waiting for it: the group is restarted. Any other failure just ends the rank:
the service detects it, has the group restarted and repeats the command.
"""

from __future__ import annotations

import contextlib
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

from isthmus.errors import StorageError, UserError, causes
from isthmus.system.process import die_with_parent
from isthmus_datacenter.messages import (
    Command,
    ControlSignal,
    Incarnation,
    Outcome,
    ProgressReport,
)
from isthmus_datacenter.rank_messages import derived_key, set_key
from isthmus_datacenter.service.activity import STACKS_SIGNAL, MainThread, Pace
from isthmus_datacenter.service.control_store import HEARTBEAT_SECONDS, ControlStore
from isthmus_datacenter.training.consensus import ConsensusError
from isthmus_datacenter.training.engine import Engine, RankPlacement
from isthmus_datacenter.training.mean_gradient import mean_gradient
from isthmus_datacenter.training.round import train_round

_WAIT_SECONDS = 1.0
"""One wait for the next command, before the rank waits again."""
_COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""Time limit of one collective: longer than any pause of another rank that is still alive."""
_EXIT_DELAY_SECONDS = 5.0
"""Time for the agent to end a rank that lost another one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankSettings:
    """The arguments of a rank's process, the same for every rank of a group."""

    host: str
    port: int
    """Port of the control store."""
    generation: int
    participant: str
    """Name of the datacenter on the link."""
    state: str
    """Directory of the checkpoints."""
    key: str = dataclasses.field(repr=False)
    """Key of the control store, in hexadecimal digits."""

    def connect(self) -> ControlStore:
        """A new connection to the control store."""
        return ControlStore.connect(bytes.fromhex(self.key), self.host, self.port)

    def to_json(self) -> str:
        """Encode the settings as one argument of the process."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RankSettings:
        """Decode what `to_json` returned."""
        return cls(**json.loads(text))


def main(settings: str) -> None:
    """Entry point of a rank, called by the elastic agent."""
    # The fork inherited the agent's handlers, which wait for whatever this rank is blocked in.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    faulthandler.enable()  # a crash in native code leaves the stacks of Python in the log
    faulthandler.register(STACKS_SIGNAL)  # also where native code keeps Python's lock
    die_with_parent()
    rank = None
    try:
        rank = _Rank(RankSettings.from_json(settings))
        rank.join()
        rank.serve()
    except BaseException as error:  # noqa: BLE001 - the rank's process has no caller to raise to
        if rank is not None and rank.joined and _is_lost_peer(error):
            # The other rank's exit is the cause, and the agent reports the first exit it detects.
            with contextlib.suppress(OSError):
                print(f"lost another rank: {error}", file=sys.stderr, flush=True)
            time.sleep(_EXIT_DELAY_SECONDS)
        _print_traceback()
        _exit()


def share_processors(ranks: int) -> None:
    """Use this machine's processors with other ranks, or as many threads as its owner has set.

    Threads of several datacenters on one machine, or of other programs, would wait for each other.
    """
    if "OMP_NUM_THREADS" not in os.environ:  # which PyTorch has read
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))


class _Rank:
    """One member of the group during one incarnation."""

    def __init__(self, settings: RankSettings) -> None:
        self.settings = settings
        self.rank = int(os.environ["RANK"])
        self.ranks = int(os.environ["WORLD_SIZE"])
        restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        self.incarnation = Incarnation(settings.generation, restart)
        self.control = settings.connect()
        self.device = _device()
        self.number = 0
        """Number of the command that runs, or that is awaited."""
        self.engine: Engine | None = None
        self.run_id: str | None = None
        self.joined = False
        self._pace = Pace()
        self._runs = False
        """Whether a command runs."""
        self._signal = (0, ControlSignal.CONTINUE)
        """A command's number, and the strongest signal received for it."""

    def join(self) -> None:
        """Start the heartbeat and join the process group."""
        share_processors(int(os.environ["LOCAL_WORLD_SIZE"]))
        self.control.register_rank(self.incarnation, self.rank, os.getpid())
        self.control.send_heartbeat(self.incarnation, self.rank, 0)
        # Before the process group, whose start can take longer than the lease.
        threading.Thread(target=self._beat, daemon=True).start()
        # A connection of its own: one is not for two threads, and the main thread's is used for
        # commands.
        self.rendezvous = self.settings.connect()
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo",
            store=self.rendezvous.process_group_store(self.incarnation),
            rank=self.rank,
            world_size=self.ranks,
            timeout=_COLLECTIVE_TIMEOUT,
        )
        # A key for this incarnation only, so that nothing of an earlier one can be said again.
        set_key(derived_key(self.control.key, str(self.incarnation)))
        self.joined = True
        self.control.report_ready(self.incarnation, self.rank)

    def serve(self) -> NoReturn:
        """Execute commands until the process ends."""
        while True:
            command = self.control.wait_for_command(self.incarnation, self.number, _WAIT_SECONDS)
            if command is None:
                continue
            self._pace.begin(run=command.op == "open")
            self._runs = True
            outcome = self._execute(command)
            self._runs = False
            if outcome.failure is not None or self.rank == 0:
                self.control.send_outcome(self.incarnation, self.number, outcome)
            if outcome.rank_exits:
                _exit()
            self.number += 1

    def _execute(self, command: Command) -> Outcome:
        try:
            values = self._run(command)
            # All ranks have succeeded when rank 0 reports it: it reports for all.
            dist.barrier()
        except (ConsensusError, StorageError) as failure:
            return Outcome(failure=str(failure), failure_code=failure.code)
        except UserError as failure:
            # It came up in the user's code, and is not of it: new ranks will succeed.
            if _is_lost_peer(failure):
                raise
            _print_traceback()
            return Outcome(failure=str(failure), failure_code=failure.code, rank_exits=True)
        return Outcome(values=values)

    def _run(self, command: Command) -> dict[str, object]:
        if command.op == "open":
            self.engine = self.run_id = None
            placement = RankPlacement(
                rank=self.rank,
                ranks=self.ranks,
                device=self.device,
                participant=self.settings.participant,
                state=Path(self.settings.state) / command.run_id,
            )
            self.engine = Engine(command, placement)
            self.engine.evaluator.on_batch = lambda: self._pace.tick("evaluation")
            self.run_id = command.run_id
            return {"examples": self.engine.examples, "note": self.engine.note}
        if command.op == "close":
            self.engine = self.run_id = None
            return {}
        assert self.engine is not None
        assert self.run_id == command.run_id  # the service opens runs before it uses them
        if command.op == "train_steps":
            values = train_round(self.engine, command, self._send_progress, self._read_signal)
            return {**values, "profile": self.engine.figures}
        if command.op == "mean_gradient":
            return mean_gradient(self.engine, command, self._read_signal)
        self.engine.export(command)
        return {}

    def _read_signal(self) -> ControlSignal:
        self._pace.tick("step")
        number, control_signal = self._signal
        return control_signal if number == self.number else ControlSignal.CONTINUE

    def _send_progress(self, report: ProgressReport) -> None:
        self.control.send_progress(self.incarnation, self.number, report)

    def _beat(self) -> None:
        """Send heartbeats and receive signals, whatever the main thread is busy with."""
        control = self.settings.connect()
        main_thread = MainThread()
        count = 0
        while True:
            count += 1
            # Read once: the heartbeat's signal must be about the command that it was read for.
            number = self.number
            try:
                activity = None
                if self._runs:
                    activity = main_thread.sample(number, self._pace)
                else:
                    main_thread.rest()
                control.send_heartbeat(self.incarnation, self.rank, count, activity)
                self._signal = (number, control.signal(self.incarnation, number))
            except dist.DistError:
                _exit()  # the service has ended
            time.sleep(HEARTBEAT_SECONDS)


def _device() -> torch.device:
    local_rank = int(os.environ["LOCAL_RANK"])
    if torch.cuda.is_available() and local_rank < torch.cuda.device_count():
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def _is_lost_peer(error: BaseException) -> bool:
    """Whether an error means that another rank is lost, also one raised through user code."""
    return any(
        isinstance(each, dist.DistError) or _is_raised_by_gloo(each) for each in causes(error)
    )


def _is_raised_by_gloo(error: BaseException) -> bool:
    """Whether an error came out of PyTorch's own communication, which has no type of its own.

    The text alone does not say it: it may be of the user's code, which reads data of any kind.
    """
    # Not of a subclass, as which errors of reader processes are raised again.
    if type(error) is not RuntimeError or error.__traceback__ is None:
        return False
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not frames[-1].f_code.co_filename.startswith(_COMMUNICATING):
        return False
    return any(mark in str(error) for mark in ("gloo", "Connection closed by peer", "NCCL"))


_PACKAGE = Path(__file__).parent.parent
_TORCH = Path(torch.__file__).parent
_COMMUNICATING = tuple(
    map(
        str,
        (
            _PACKAGE,
            _TORCH / "distributed",
            _TORCH / "autograd",
            _TORCH / "_ops.py",
            _TORCH / "utils" / "checkpoint.py",
        ),
    )
)
"""Files whose calls communicate: a backward pass, and what waits for messages."""


def _print_traceback() -> None:
    """Print the exception that is handled, if the disk with the logs has room for it."""
    with contextlib.suppress(OSError):
        traceback.print_exc()


def _exit() -> NoReturn:
    """Exit at once: interpreter shutdown would wait for threads inside broken collectives."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(1)
