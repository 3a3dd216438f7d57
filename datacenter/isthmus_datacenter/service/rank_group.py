"""A group of warm ranks that executes commands and recovers from the loss of ranks.

Nothing here runs between commands: a rank that dies is restarted by its agent; a dead agent and a
hung rank are detected by the next command.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from isthmus.errors import IsthmusError, UserError
from isthmus_datacenter.messages import (
    Command,
    ControlSignal,
    Incarnation,
    ProgressReport,
)
from isthmus_datacenter.service.activity import STACKS_SIGNAL
from isthmus_datacenter.service.agent_settings import AgentSettings
from isthmus_datacenter.service.agents import Agents, LocalAgent, RemoteAgents
from isthmus_datacenter.service.command_monitor import (
    CancelIgnoredError,
    CommandMonitor,
    IncarnationLostError,
    RanksHangError,
)
from isthmus_datacenter.service.control_store import ControlStore, ControlStoreThread
from isthmus_datacenter.service.fork_server import AgentForkServer
from isthmus_datacenter.service.hangs import HangLimits
from isthmus_datacenter.service.signed_store import ForgedValueError, new_key, write_key_file

KEY_FILE = "control.key"
"""File of the state directory with the key of the control store, for the nodes of a cluster."""
_STACKS_SECONDS = 0.3
"""Time for ranks to write their stacks to their logs before they are killed."""
MAX_RESTARTS = 3
"""Restarts of the ranks within one command before it fails."""
START_SECONDS = 120.0
"""Time from the start of an incarnation until all ranks must be in their process group."""
_READY_CHECK_SECONDS = 0.05
"""Interval of the checks for ranks that are ready."""
_AGENT_RESTARTS = 100
"""Restarts before the agent ends itself, which costs the next command a cold start."""

log = logging.getLogger(__name__)


class RankGroupError(IsthmusError):
    """The ranks failed repeatedly; restarting them does not help."""


class CommandError(UserError):
    """The ranks could not execute a command; repeating it at once would not help."""

    def __init__(self, reason: str, code: str = "") -> None:
        """`code` is that of the ranks' error."""
        super().__init__(reason)
        self.code = code


@dataclasses.dataclass(frozen=True, kw_only=True)
class Nodes:
    """The nodes of a cluster that run the ranks, and the address of the service for them."""

    count: int
    host: str
    """This machine's name, resolvable on the nodes."""
    port: int


class RankGroup:
    """N ranks under elastic agents, commanded through the control store.

    Guarantees:
      * when this process ends, for whatever reason, the local agent and all ranks end too;
      * a command is repeated exactly when ranks die or fall silent while they execute it; where
        they hang it fails, as a repetition may hang for as long;
      * every wait is bounded: by the lease for silence, by `START_SECONDS` for a start.
    """

    def __init__(
        self,
        participant: str,
        ranks: int,
        state: Path,
        nodes: Nodes | None = None,
        fork_server: AgentForkServer | None = None,
    ) -> None:
        """Host the control store; the ranks are started by `start`.

        Args:
            participant: name of the datacenter on the link.
            ranks: number of ranks on this machine, or on each of the `nodes`.
            state: directory of checkpoints and logs.
            nodes: the cluster that runs the ranks; None for this machine.
            fork_server: starts the agent of this machine, and is closed with this group; by
                default a new one.
        """
        self.participant = participant
        self.nodes = nodes
        self.ranks = ranks if nodes is None else ranks * nodes.count
        self.state = state
        self.limits = HangLimits()
        """Times after which ranks count as hung, of the open run's job."""
        self._fork_server = None
        if nodes is None:
            self._fork_server = fork_server or AgentForkServer("forkserver")
        if nodes is None:
            # The ranks have it from this process, through their fork server.
            key = new_key()
            store = ControlStore.host(key)
        else:
            key = write_key_file(state / KEY_FILE)
            store = ControlStore.host(key, nodes.host, nodes.port)
        self._key = key
        self._store = ControlStoreThread(store)
        self._agents: Agents | None = None
        self._generation = int(time.time())
        self._lost: set[Incarnation] = set()
        """Incarnations whose end is known."""
        self._open: Command | None = None
        """The command that opened the current run."""
        self._opened_in: Incarnation | None = None
        """The incarnation in which `_open` was executed."""
        self._next_number: dict[Incarnation, int] = {}
        """Number of the next command, for the current incarnation only."""
        self._signal = ControlSignal.CONTINUE
        """Strongest signal for the running command."""

    def start(self) -> None:
        """Start the agents and their ranks; returns before they are ready."""
        self._generation += 1
        nodes = self.nodes
        settings = AgentSettings(
            host="127.0.0.1" if nodes is None else nodes.host,
            port=self._store.port,
            generation=self._generation,
            participant=self.participant,
            state=str(self.state),
            ranks=self.ranks if nodes is None else self.ranks // nodes.count,
            nodes=1 if nodes is None else nodes.count,
            restarts=_AGENT_RESTARTS if nodes is None else 0,
            logs=str(self.state / "logs"),
            key=self._key.hex(),
        )
        if self._fork_server is None:
            self._agents = RemoteAgents(settings)
        else:
            self._agents = LocalAgent(settings, self._fork_server)

    def stop(self) -> None:
        """End the agents and all ranks; `start` and `execute` start new ones."""
        agents = self._agents
        self._agents = None
        if agents is not None:
            agents.end()
        self._opened_in = None

    def close(self) -> None:
        """End the agents, all ranks and the fork server."""
        self.stop()
        if self._fork_server is not None:
            self._fork_server.close()
        self._store.close()

    async def is_leave_requested(self) -> bool:
        """Whether a node of the cluster is about to be taken from the datacenter."""
        return self.nodes is not None and await self._store.call(ControlStore.is_leave_requested)

    async def rank_pids(self) -> dict[int, int]:
        """Process ids of the current ranks on their nodes, by rank; empty before they start."""
        incarnation = await self._newest_incarnation()
        if incarnation is None:
            return {}
        return await self._store.call(ControlStore.rank_pids, incarnation, self.ranks)

    def send_signal(self, control_signal: ControlSignal) -> None:
        """Signal the command that runs, if one does; a weaker signal than the last is ignored."""
        self._signal = max(self._signal, control_signal)

    async def execute(
        self,
        command: Command,
        send_progress: Callable[[ProgressReport], None] = lambda report: None,
    ) -> tuple[dict[str, Any], list[str]]:
        """Execute a command on all ranks, on new ranks if some are lost.

        Returns:
            The values of the outcome, and a description of each loss of ranks.

        Raises:
            CommandError: the ranks failed to execute it or hung, or it was cancelled.
            RankGroupError: the ranks were restarted `MAX_RESTARTS` times and failed again.
        """
        self._signal = ControlSignal.CONTINUE
        if command.op == "open":
            self._opened_in = None
            self._open = command
        losses: list[str] = []
        lost_at: float | None = None
        # Ranks that were lost between commands are no loss of this one.
        await self._note_earlier_failure()
        while True:
            incarnation = None
            try:
                incarnation = await self._ready_incarnation()
                # New ranks know nothing of the run: its command is repeated to them before this
                # one.
                if command.op != "open" and self._opened_in != incarnation:
                    assert self._open is not None
                    await self._send(incarnation, self._open, send_progress)
                    self._opened_in = incarnation
                if lost_at is not None:
                    losses[-1] += f" and was replaced in {time.monotonic() - lost_at:.1f} s"
                    lost_at = None
                values = await self._send(incarnation, command, send_progress)
                if command.op == "open":
                    self._opened_in = incarnation
                return values, losses
            except (IncarnationLostError, ForgedValueError) as lost:
                if isinstance(lost, ForgedValueError):
                    self.stop()  # the next generation has other keys
                self._opened_in = None
                losses.append(str(lost))
                lost_at = time.monotonic()
                log.warning("%s", lost)
                if len(losses) > MAX_RESTARTS:
                    if incarnation is None:
                        self.stop()  # otherwise the agent would keep restarting these ranks
                    raise RankGroupError(
                        f"the datacenter's ranks failed {len(losses)} times in one request; "
                        f"the last time, {lost}; their output is in {self.state / 'logs'}"
                    ) from None

    # -- the incarnation ------------------------------------------------------------------------

    async def _newest_incarnation(self) -> Incarnation | None:
        return await self._store.call(ControlStore.newest_incarnation, self._generation)

    async def _note_earlier_failure(self) -> None:
        """Record a failure between commands, so that the next command does not report it."""
        if self._agents is None or self._agents.ended():
            return
        try:
            incarnation = await self._newest_incarnation()
            if incarnation is not None:
                await self._raise_if_failed(incarnation)
        except IncarnationLostError:
            pass
        except ForgedValueError as forged:
            log.warning("%s", forged)
            self.stop()

    async def _ready_incarnation(self) -> Incarnation:
        """Wait for ranks that accept commands; starts agents if there are none.

        Raises:
            IncarnationLostError: they died, or were not ready in time.
        """
        agents = self._agents
        if agents is None or agents.ended():
            agents = self._restart()
        deadline = time.monotonic() + START_SECONDS
        while True:
            # Before the incarnation is read: what an agent that has ended left in the store is then
            # complete.
            ended = agents.ended()
            incarnation = await self._newest_incarnation()
            if incarnation is not None and incarnation not in self._lost:
                await self._raise_if_failed(incarnation)
                if await self._store.call(ControlStore.is_ready, incarnation, self.ranks):
                    return incarnation
            if ended:
                # Its failure was reported before. That the agent ended as well is no further loss.
                if incarnation in self._lost:
                    agents = self._restart()
                    continue
                last_line = agents.last_line()
                self.stop()
                raise IncarnationLostError(f"the agent of the ranks ended: {last_line}")
            if time.monotonic() > deadline:
                if incarnation is not None:
                    await self._log_stacks(incarnation)
                self.stop()
                raise IncarnationLostError(f"the ranks were not ready after {START_SECONDS:.0f} s")
            await asyncio.sleep(_READY_CHECK_SECONDS)

    def _restart(self) -> Agents:
        self.stop()
        self.start()
        assert self._agents is not None
        return self._agents

    async def _raise_if_failed(self, incarnation: Incarnation) -> None:
        failure = await self._store.call(ControlStore.rank_failure, incarnation)
        if failure is not None:
            self._lost.add(incarnation)
            raise IncarnationLostError(str(failure))

    # -- one command ----------------------------------------------------------------------------

    async def _send(
        self,
        incarnation: Incarnation,
        command: Command,
        send_progress: Callable[[ProgressReport], None],
    ) -> dict[str, Any]:
        """Send a command to the ranks of an incarnation and wait for its outcome.

        Raises:
            CommandError: as `execute`.
            IncarnationLostError: ranks died or did not answer.
        """
        number = self._next_number.get(incarnation, 0)
        # Numbers of this incarnation only: another one begins to count anew.
        self._next_number = {incarnation: number + 1}
        await self._store.call(ControlStore.send_command, incarnation, number, command)
        assert self._agents is not None
        monitor = CommandMonitor(
            self._store,
            self._agents,
            incarnation,
            number,
            ranks=self.ranks,
            trains=command.op not in ("open", "close"),
            limits=self.limits,
            send_progress=send_progress,
            read_signal=lambda: self._signal,
        )
        try:
            outcome = await monitor.wait_for_outcome()
        except RanksHangError as hang:
            # Not repeated at once: it may hang again, for as long, and the whole attempt has a
            # limit. The next one begins with new ranks.
            self._lost.add(incarnation)
            await self._kill_ranks(incarnation)
            raise CommandError(
                f"{hang}; the stack of each rank is in {self.state / 'logs'}"
            ) from None
        except IncarnationLostError as lost:
            self._lost.add(incarnation)
            if lost.ranks_run:
                await self._kill_ranks(incarnation)
            raise
        except CancelIgnoredError:
            self._lost.add(incarnation)
            await self._kill_ranks(incarnation)
            raise CommandError("the ranks were ended because the result is not wanted") from None
        # The ranks end themselves after such an outcome, and the next command must not wait for
        # them.
        if outcome.rank_exits:
            self._lost.add(incarnation)
            self._opened_in = None
        else:
            await self._store.call(ControlStore.delete_command, incarnation, number)
        if outcome.failure is not None:
            raise CommandError(outcome.failure, outcome.failure_code)
        return outcome.values

    async def _kill_ranks(self, incarnation: Incarnation) -> None:
        """Kill all ranks: the agent would wait for a stopped one, which cannot respond."""
        self._opened_in = None
        # Their processes are on other machines: only their agents can end them.
        if self.nodes is not None:
            self.stop()
            return
        await self._log_stacks(incarnation)
        await self._signal_ranks(incarnation, signal.SIGKILL)

    async def _log_stacks(self, incarnation: Incarnation) -> None:
        """Have the ranks of this machine write their stacks, before they are ended."""
        if self.nodes is None:
            await self._signal_ranks(incarnation, STACKS_SIGNAL)
            await asyncio.sleep(_STACKS_SECONDS)  # a log has no notification

    async def _signal_ranks(self, incarnation: Incarnation, number: int) -> None:
        pids = await self._store.call(ControlStore.rank_pids, incarnation, self.ranks)
        for pid in pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
