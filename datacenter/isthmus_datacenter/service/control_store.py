"""The control store: the keys of one TCPStore through which service, agents and ranks communicate.

The service hosts the store, which outlives every rank. A *generation* is one agent process on each
node; an *incarnation* is one start of all ranks under it; commands are numbered within an
incarnation. Ranks wait for the next command in short slices and never inside a collective, so an
idle group costs nothing and cannot time out. The first outcome of a command stands. Models never
pass through the store. Its values are signed (`signed_store`): any program that can reach its port
could otherwise command the ranks.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import secrets
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Concatenate, ParamSpec, TypeVar

import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]  # public, but not in an __all__
    PrefixStore,
    Store,
    TCPStore,
)

from isthmus.errors import IsthmusError
from isthmus_datacenter.messages import (
    Activity,
    Collective,
    Command,
    ControlSignal,
    Incarnation,
    Outcome,
    ProgressReport,
    RankFailure,
)
from isthmus_datacenter.service.signed_store import SignedStore

HEARTBEAT_SECONDS = 0.5
"""Interval of the ranks' heartbeats."""

_STORE_TIMEOUT = timedelta(seconds=60)
"""Time limit of a reply of the store, which is a process on a fast network."""

P = ParamSpec("P")
T = TypeVar("T")


class ControlStore:
    """One connection to the control store. Not for use by two threads at once.

    Every method raises `torch.distributed.DistNetworkError` when the service that hosts the store
    has ended, and those that read raise `ForgedValueError` for a value that is not signed.
    """

    def __init__(self, store: TCPStore, key: bytes) -> None:
        """`key` is that of this datacenter, by which values are signed."""
        self.port = int(store.port)
        """The port that the store listens on."""
        self.key = key
        self._store = SignedStore(store, key)

    @classmethod
    def host(cls, key: bytes, host: str = "127.0.0.1", port: int = 0) -> ControlStore:
        """Start the store in this process; by default on a free port of the loopback interface."""
        # Given to the store, because by itself it would listen on all interfaces.
        listener = socket.create_server((host, port))
        port = listener.getsockname()[1]
        store = TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=_STORE_TIMEOUT,
            master_listen_fd=listener.detach(),
        )
        return cls(store, key)

    @classmethod
    def connect(cls, key: bytes, host: str, port: int) -> ControlStore:
        """Connect to the service's store."""
        store = TCPStore(
            host, port, is_master=False, wait_for_workers=False, timeout=_STORE_TIMEOUT
        )
        return cls(store, key)

    def process_group_store(self, incarnation: Incarnation) -> Store:
        """The keys for the rendezvous of this incarnation's process groups.

        They are separate for each incarnation: ranks that read the addresses of dead ranks hang.
        Keep this object while there are groups.
        """
        return PrefixStore(f"group/{incarnation}", self._store)

    def node_store(self, generation: int) -> Store:
        """The keys by which the agents of a generation agree on the numbers of their ranks."""
        return PrefixStore(f"nodes/{generation}", self._store)

    def claim_node(self, generation: int, nodes: int) -> int:
        """A number from 0 to `nodes` - 1 that no other agent of the generation has.

        Raises:
            IsthmusError: all are taken.
        """
        claim = secrets.token_hex(16)
        for number in range(nodes):
            key = f"node/{generation}/{number}"
            if self._store.compare_set(key, "", claim).decode() == claim:
                return number
        raise IsthmusError(f"more than {nodes} nodes run an agent of this datacenter")

    # -- service and the agents of several nodes ------------------------------------------------

    def publish_generation(self, generation: int, settings: str) -> None:
        """Make every node start an agent with these settings."""
        self._store.set(f"settings/{generation}", settings)
        self._store.set("newest", str(generation))

    def newest_generation(self) -> int | None:
        """The generation that was published last; None before the first."""
        generation = self._get("newest")
        return None if generation is None else int(generation)

    def generation_settings(self, generation: int) -> str:
        """The settings of a published generation."""
        return self._store.get(f"settings/{generation}").decode()

    def retire_generation(self, generation: int) -> None:
        """Make every node end its agent of this generation."""
        self._store.set(f"retired/{generation}", "1")

    def is_retired(self, generation: int) -> bool:
        """Whether the agents of this generation must end."""
        return self._store.check([f"retired/{generation}"])

    def report_agent_ended(self, generation: int) -> None:
        """Report that the agent of this node has ended."""
        self._store.set(f"over/{generation}", "1")

    def has_agent_ended(self, generation: int) -> bool:
        """Whether the agent of some node has ended."""
        return self._store.check([f"over/{generation}"])

    def request_leave(self) -> None:
        """Report that this node is about to be taken from the datacenter."""
        self._store.set("leave", "1")

    def is_leave_requested(self) -> bool:
        """Whether some node is about to be taken from the datacenter."""
        return self._store.check(["leave"])

    # -- agent to service -----------------------------------------------------------------------

    def begin_incarnation(self, incarnation: Incarnation) -> None:
        """Report that the agent is about to start the ranks of this incarnation."""
        self._store.set(f"incarnation/{incarnation.generation}", str(incarnation.restart))

    def newest_incarnation(self, generation: int) -> Incarnation | None:
        """The newest incarnation of a generation; None before the first."""
        restart = self._get(f"incarnation/{generation}")
        return None if restart is None else Incarnation(generation, int(restart))

    def report_rank_failure(self, incarnation: Incarnation, failure: RankFailure) -> None:
        """Report why the incarnation has ended."""
        self._store.set(f"failure/{incarnation}", json.dumps(dataclasses.asdict(failure)))

    def rank_failure(self, incarnation: Incarnation) -> RankFailure | None:
        """Why the incarnation has ended; None while it runs."""
        text = self._get(f"failure/{incarnation}")
        return None if text is None else RankFailure(**json.loads(text))

    # -- ranks to service -----------------------------------------------------------------------

    def register_rank(self, incarnation: Incarnation, rank: int, pid: int) -> None:
        """Report the process of a rank."""
        self._store.set(f"pid/{incarnation}/{rank}", str(pid))

    def rank_pids(self, incarnation: Incarnation, ranks: int) -> dict[int, int]:
        """Process ids of the registered ranks, by rank."""
        pids = {rank: self._get(f"pid/{incarnation}/{rank}") for rank in range(ranks)}
        return {rank: int(pid) for rank, pid in pids.items() if pid is not None}

    def report_ready(self, incarnation: Incarnation, rank: int) -> None:
        """Report that this rank is in the process group and waits for commands."""
        self._store.set(f"ready/{incarnation}/{rank}", "1")

    def is_ready(self, incarnation: Incarnation, ranks: int) -> bool:
        """Whether all ranks wait for commands."""
        return self._store.check([f"ready/{incarnation}/{rank}" for rank in range(ranks)])

    def send_heartbeat(
        self, incarnation: Incarnation, rank: int, count: int, activity: Activity | None = None
    ) -> None:
        """Report that this rank is alive, by a count that differs from the last one.

        `activity` is what it does; None while no command runs.
        """
        values = None if activity is None else dataclasses.asdict(activity)
        self._store.set(f"heartbeat/{incarnation}/{rank}", json.dumps([count, values]))

    def heartbeats(self, incarnation: Incarnation, ranks: int) -> list[bytes]:
        """The latest heartbeat of each rank, for `activity_in`; all ranks must be ready."""
        keys = [f"heartbeat/{incarnation}/{rank}" for rank in range(ranks)]
        return self._store.multi_get(keys)

    @staticmethod
    def activity_in(heartbeat: bytes) -> Activity | None:
        """What a rank did at a heartbeat; None if no command ran."""
        _, values = json.loads(heartbeat)
        if values is None:
            return None
        values["collectives"] = [Collective(**each) for each in values["collectives"]]
        return Activity(**values)

    # -- commands -------------------------------------------------------------------------------

    def send_command(self, incarnation: Incarnation, number: int, command: Command) -> None:
        """Send a command to all ranks."""
        self._store.set(f"command/{incarnation}/{number}", json.dumps(dataclasses.asdict(command)))

    def wait_for_command(
        self, incarnation: Incarnation, number: int, seconds: float
    ) -> Command | None:
        """The command of that number; None if it does not arrive in time."""
        text = self._wait_for(f"command/{incarnation}/{number}", seconds)
        return None if text is None else Command(**json.loads(text))

    def send_outcome(self, incarnation: Incarnation, number: int, outcome: Outcome) -> None:
        """Send the outcome of a command, unless another rank already has."""
        text = json.dumps(dataclasses.asdict(outcome))
        # The first one stands: the failure that ends a rank comes before what others report because
        # of it.
        self._store.compare_set(f"outcome/{incarnation}/{number}", "", text)

    def wait_for_outcome(
        self, incarnation: Incarnation, number: int, seconds: float
    ) -> Outcome | None:
        """The outcome of a command; None if it does not arrive in time."""
        text = self._wait_for(f"outcome/{incarnation}/{number}", seconds)
        return None if text is None else Outcome(**json.loads(text))

    def send_progress(self, incarnation: Incarnation, number: int, report: ProgressReport) -> None:
        """Replace the progress report of a command."""
        text = json.dumps(dataclasses.asdict(report))
        self._store.set(f"progress/{incarnation}/{number}", text)

    def progress(self, incarnation: Incarnation, number: int) -> ProgressReport | None:
        """The latest progress report of a command, if there is one."""
        text = self._get(f"progress/{incarnation}/{number}")
        return None if text is None else ProgressReport(**json.loads(text))

    def send_signal(self, incarnation: Incarnation, number: int, signal: ControlSignal) -> None:
        """Signal the ranks that work on a command; they act at the next step they agree on."""
        self._store.set(f"signal/{incarnation}/{number}/{signal.name}", "1")

    def signal(self, incarnation: Incarnation, number: int) -> ControlSignal:
        """The strongest signal that was sent for a command."""
        # One key for each signal, only checked: reading a value blocks if the key was just deleted.
        for signal in (ControlSignal.CANCEL, ControlSignal.SAVE):
            if self._store.check([f"signal/{incarnation}/{number}/{signal.name}"]):
                return signal
        return ControlSignal.CONTINUE

    def delete_command(self, incarnation: Incarnation, number: int) -> None:
        """Delete the keys of a command that every rank has completed."""
        for kind in ("command", "outcome", "progress"):
            self._store.delete_key(f"{kind}/{incarnation}/{number}")
        for signal in (ControlSignal.SAVE, ControlSignal.CANCEL):
            self._store.delete_key(f"signal/{incarnation}/{number}/{signal.name}")

    def _get(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _wait_for(self, key: str, seconds: float) -> str | None:
        try:
            self._store.wait([key], timedelta(seconds=seconds))
        except dist.DistNetworkError:
            raise
        except dist.DistStoreError:
            return None
        return self._store.get(key).decode()


class ControlStoreThread:
    """A connection to the control store for coroutines: every call runs in one thread."""

    def __init__(self, store: ControlStore) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="control")

        self.port = store.port
        """The port that the store listens on."""

    async def call(
        self,
        method: Callable[Concatenate[ControlStore, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Call a method of the store in its thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._thread, lambda: method(self._store, *args, **kwargs)
        )

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()
