"""What the service and the ranks say to each other, through keys of one TCPStore.

The service hosts the store and outlives every rank. A *generation* is one agent process, an
*attempt* one start of all ranks under it; commands are numbered within an attempt. Ranks wait for
the next command in short slices and never inside a collective, so an idle group costs nothing and
cannot time out. The first word about a command stands; weights never go through the store.
"""

from __future__ import annotations

import dataclasses
import json
import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]  # public, but not in an __all__
    PrefixStore,
    Store,
    TCPStore,
)

BEAT_SECONDS = 0.5
"""How often each rank says that it is alive."""

_STORE_TIMEOUT = timedelta(seconds=60)
"""For the store itself to answer; it is a process of ours on a fast network."""


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One start of all ranks."""

    generation: int
    restart: int

    def __str__(self) -> str:
        return f"{self.generation}.{self.restart}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """What all ranks are to do together."""

    op: Literal["open", "train", "gradient", "export", "close"]
    run_id: str
    job: str = ""
    """open: the validated job as JSON."""
    base: str = ""
    """open: directory that relative task paths start from."""
    data: str | None = None
    """open: where the ranks read their data."""
    layout: str = ""
    """open: the exchange set's safetensors header, as latin-1."""
    frozen: Mapping[str, Sequence[float]] = dataclasses.field(default_factory=dict)
    """open: some values of each parameter that is not exchanged."""
    from_step: int = 0
    """train, export: the step to be at before anything else; gradient: the first step whose batch
    is used."""
    until_step: int = 0
    """train: the absolute step to stop at, so that a repetition is exact; gradient: the first one
    whose batch is not used."""
    model: str | None = None
    """train, gradient: file of a model to load first."""
    model_digest: str = ""
    """train: what that model is, in hexadecimal digits."""
    evaluate: bool = False
    result: str | None = None
    """train, export, gradient: file to write the model, or the gradient, into."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a command."""

    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    failure: str | None = None
    """One sentence for a person; None if it was done."""
    leaving: bool = False
    """The rank that failed ends, and the group with it: others may be waiting for it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """How far a training command got."""

    steps: int
    total_steps: int
    loss: float
    """Mean over the units scored since the last report, on the replica that reports."""
    examples_per_second: float
    """Of all replicas, since the last report."""
    units_per_second: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Death:
    """How an attempt ended, as its agent saw it."""

    rank: int
    exit_code: int
    last_words: str
    """The last useful line of the rank's standard error."""

    def __str__(self) -> str:
        if self.exit_code < 0:
            return f"rank {self.rank} died (signal {-self.exit_code})"
        words = f": {self.last_words}" if self.last_words else ""
        return f"rank {self.rank} ended (exit code {self.exit_code}){words}"


class Control:
    """One connection to the control store. Not for use by two threads at once."""

    def __init__(self, store: TCPStore) -> None:
        self._store = store

    @classmethod
    def host(cls, host: str = "127.0.0.1", port: int = 0) -> Control:
        """Start the store in this process; alone, on a free port of the loopback interface."""
        listener = socket.create_server((host, port))
        port = listener.getsockname()[1]
        return cls(
            TCPStore(
                host,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=_STORE_TIMEOUT,
                master_listen_fd=listener.detach(),
            )
        )

    @classmethod
    def connect(cls, host: str, port: int) -> Control:
        """Connect to the service's store."""
        return cls(
            TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_STORE_TIMEOUT)
        )

    @property
    def port(self) -> int:
        """Where the store listens."""
        return int(self._store.port)

    def group_store(self, attempt: Attempt) -> Store:
        """The keys a process group of this attempt meets under.

        Never those of another attempt: ranks that read the addresses of dead ones hang.
        """
        return PrefixStore(f"group/{attempt}", self._store)

    # -- service to the agents of several nodes -------------------------------------------------

    def publish(self, generation: int, settings: str) -> None:
        """Have every node start an agent with these settings."""
        self._store.set(f"settings/{generation}", settings)
        self._store.set("newest", str(generation))

    def newest(self) -> int | None:
        """The generation that was published last."""
        found = self._peek("newest")
        return None if found is None else int(found)

    def published(self, generation: int) -> str:
        """The settings of a generation."""
        return self._store.get(f"settings/{generation}").decode()

    def retire(self, generation: int) -> None:
        """A generation must end, on every node."""
        self._store.set(f"retired/{generation}", "1")

    def is_retired(self, generation: int) -> bool:
        """Whether a generation must end."""
        return bool(self._store.check([f"retired/{generation}"]))

    def declare_over(self, generation: int) -> None:
        """The agent of this node is gone."""
        self._store.set(f"over/{generation}", "1")

    def is_over(self, generation: int) -> bool:
        """Whether the agent of some node is gone."""
        return bool(self._store.check([f"over/{generation}"]))

    def ask_to_leave(self) -> None:
        """This node is about to be taken away."""
        self._store.set("leave", "1")

    def must_leave(self) -> bool:
        """Whether some node is about to be taken away."""
        return bool(self._store.check(["leave"]))

    # -- agent to service ---------------------------------------------------------------------

    def begin(self, attempt: Attempt) -> None:
        """The agent is about to start the ranks of this attempt."""
        self._store.set(f"attempt/{attempt.generation}", str(attempt.restart))

    def current(self, generation: int) -> Attempt | None:
        """The newest attempt of a generation, once there is one."""
        restart = self._peek(f"attempt/{generation}")
        return None if restart is None else Attempt(generation, int(restart))

    def report_death(self, attempt: Attempt, death: Death) -> None:
        """The attempt is over."""
        self._store.set(f"death/{attempt}", json.dumps(dataclasses.asdict(death)))

    def death(self, attempt: Attempt) -> Death | None:
        """How the attempt ended, if it did."""
        found = self._peek(f"death/{attempt}")
        return None if found is None else Death(**json.loads(found))

    # -- ranks to service -----------------------------------------------------------------------

    def join(self, attempt: Attempt, rank: int, pid: int) -> None:
        """This rank runs."""
        self._store.set(f"pid/{attempt}/{rank}", str(pid))

    def pids(self, attempt: Attempt, ranks: int) -> dict[int, int]:
        """Processes of the ranks that run."""
        found = {rank: self._peek(f"pid/{attempt}/{rank}") for rank in range(ranks)}
        return {rank: int(pid) for rank, pid in found.items() if pid is not None}

    def ready(self, attempt: Attempt) -> None:
        """This rank is in the process group and waits for commands."""
        self._store.add(f"ready/{attempt}", 1)

    def ready_count(self, attempt: Attempt) -> int:
        """How many ranks wait for commands."""
        return int(self._peek(f"ready/{attempt}") or 0)

    def beat(self, attempt: Attempt, rank: int, count: int) -> None:
        """This rank is alive: the count differs from the last one."""
        self._store.set(f"beat/{attempt}/{rank}", str(count))

    def beats(self, attempt: Attempt, ranks: int) -> list[bytes]:
        """The latest count of each rank; all ranks must be ready."""
        return list(self._store.multi_get([f"beat/{attempt}/{rank}" for rank in range(ranks)]))

    # -- commands -------------------------------------------------------------------------------

    def send(self, attempt: Attempt, number: int, command: Command) -> None:
        """Tell all ranks what to do next."""
        self._store.set(f"cmd/{attempt}/{number}", json.dumps(dataclasses.asdict(command)))

    def receive(self, attempt: Attempt, number: int, seconds: float) -> Command | None:
        """The command of that number, if it comes in time."""
        found = self._wait(f"cmd/{attempt}/{number}", seconds)
        return None if found is None else Command(**json.loads(found))

    def finish(self, attempt: Attempt, number: int, outcome: Outcome) -> None:
        """Say what became of a command, unless another rank already did."""
        text = json.dumps(dataclasses.asdict(outcome))
        self._store.compare_set(f"out/{attempt}/{number}", "", text)

    def outcome(self, attempt: Attempt, number: int, seconds: float) -> Outcome | None:
        """What became of a command, if that is known in time."""
        found = self._wait(f"out/{attempt}/{number}", seconds)
        return None if found is None else Outcome(**json.loads(found))

    def report_progress(self, attempt: Attempt, number: int, report: Report) -> None:
        """How far a command got."""
        self._store.set(f"progress/{attempt}/{number}", json.dumps(dataclasses.asdict(report)))

    def progress(self, attempt: Attempt, number: int) -> Report | None:
        """How far a command got, if anything is known."""
        found = self._peek(f"progress/{attempt}/{number}")
        return None if found is None else Report(**json.loads(found))

    def abort(self, attempt: Attempt, number: int) -> None:
        """Ask the ranks to stop this command at the next step they agree on."""
        self._store.set(f"abort/{attempt}/{number}", "1")

    def ask_to_save(self, attempt: Attempt, number: int) -> None:
        """Ask the ranks to save their state at the next step they agree on, and stop."""
        self._store.set(f"save/{attempt}/{number}", "1")

    def must_save(self, attempt: Attempt, number: int) -> bool:
        """Whether the command should save and stop."""
        return bool(self._store.check([f"save/{attempt}/{number}"]))

    def aborted(self, attempt: Attempt, number: int) -> bool:
        """Whether the command should stop."""
        return bool(self._store.check([f"abort/{attempt}/{number}"]))

    def forget(self, attempt: Attempt, number: int) -> None:
        """Drop the keys of a command that every rank has done."""
        for kind in ("cmd", "out", "progress", "abort", "save"):
            self._store.delete_key(f"{kind}/{attempt}/{number}")

    def _peek(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _wait(self, key: str, seconds: float) -> str | None:
        try:
            self._store.wait([key], timedelta(seconds=seconds))
        except dist.DistNetworkError:
            raise
        except dist.DistStoreError:
            return None
        found: str = self._store.get(key).decode()
        return found
