"""Keeps a group of warm ranks, and sees a command through whatever happens to them.

Nothing here runs between commands: a dead rank is restarted by its agent, a dead agent and a
hung rank are found by the next command.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from isthmus.errors import IsthmusError, UserError
from isthmus_datacenter.service.agent_settings import AgentSettings
from isthmus_datacenter.service.agents import Agents, LocalAgent, RemoteAgents
from isthmus_datacenter.service.control_store import Attempt, Command, Control, Report
from isthmus_datacenter.service.fork_server import AgentForkServer

RESTARTS = 3
"""Restarts of the ranks within one command before it is given up."""
START_SECONDS = 120.0
"""For all ranks to be in their process group, from the start of an attempt."""
_SLICE_SECONDS = 0.1
"""Between two looks at the ranks' health while a command runs."""
_LOOK_SECONDS = 0.5
"""Between two looks at heartbeats and progress."""

_AGENT_RESTARTS = 100
"""Before the agent ends itself, which costs the next command a cold start."""

log = logging.getLogger(__name__)
T = TypeVar("T")


class GroupError(IsthmusError):
    """The ranks failed again and again; restarting them does not help."""


class CommandError(UserError):
    """The ranks say why they could not do what they were told; trying again would not help."""


class _GroupLostError(Exception):
    """The attempt that worked on a command is over."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Nodes:
    """The nodes of a cluster that ranks run on, and where they find the service."""

    count: int
    host: str
    """This machine, as the nodes know it."""
    port: int


class Group:
    """N ranks under an elastic agent, commanded through the control store.

    Guarantees:
      * when this process ends, however it ends, so do the agent and all ranks;
      * a command is repeated, exactly, when the ranks die or hang while they work on it;
      * every wait is bounded: by the lease for silence, by `START_SECONDS` for a start.
    """

    def __init__(
        self,
        participant: str,
        ranks: int,
        state: Path,
        nodes: Nodes | None = None,
        template: AgentForkServer | None = None,
    ) -> None:
        """`participant` is the name on the link; checkpoints and logs go under `state`.

        `ranks` are started on this machine, from the `template`, which is then ours; or on each
        of the `nodes`.
        """
        self.participant = participant
        self.nodes = nodes
        self._template = None if nodes is not None else template or AgentForkServer("forkserver")
        self.ranks = ranks if nodes is None else ranks * nodes.count
        self.state = state
        self.lease_seconds = 10.0
        """Silence after which a rank counts as hung."""
        self._control = Control.host() if nodes is None else Control.host(nodes.host, nodes.port)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="control")
        self._agent: Agents | None = None
        self._generation = int(time.time())
        self._known_lost: set[Attempt] = set()
        self._opened: tuple[Attempt, Command] | None = None
        self._open: Command | None = None
        self._numbers: dict[Attempt, int] = {}
        self._cancelled = asyncio.Event()
        self._saving = asyncio.Event()

    def start(self) -> None:
        """Start the agent and its ranks; they get ready while we go on."""
        self._generation += 1
        nodes = self.nodes
        settings = AgentSettings(
            host="127.0.0.1" if nodes is None else nodes.host,
            port=self._control.port,
            generation=self._generation,
            participant=self.participant,
            state=str(self.state),
            ranks=self.ranks if nodes is None else self.ranks // nodes.count,
            nodes=1 if nodes is None else nodes.count,
            restarts=_AGENT_RESTARTS if nodes is None else 0,
            logs=str(self.state / "logs"),
        )
        if self._template is None:
            self._agent = RemoteAgents(settings)
        else:
            self._agent = LocalAgent(settings, self._template)

    def stop(self) -> None:
        """End the agent and all ranks."""
        agent, self._agent = self._agent, None
        if agent is not None:
            agent.end()
        self._opened = None

    def close(self) -> None:
        """End everything, for good."""
        self.stop()
        if self._template is not None:
            self._template.close()
        self._thread.shutdown()

    async def must_leave(self) -> bool:
        """Whether a node of several is about to be taken away."""
        return self.nodes is not None and await self._call(self._control.must_leave)

    def cancel(self) -> None:
        """Stop the command that runs, if one does."""
        self._cancelled.set()

    def save(self) -> None:
        """Have the command that runs, if one does, save its state at its next step and stop."""
        self._saving.set()

    async def do(
        self, command: Command, progress: Callable[[Report], None] = lambda report: None
    ) -> tuple[dict[str, Any], list[str]]:
        """Have the ranks do something; what they say, and what happened to them meanwhile.

        Raises:
            CommandError: the ranks said no; also when cancelled.
            GroupError: they were restarted `RESTARTS` times and failed again.
        """
        self._cancelled.clear()
        self._saving.clear()
        if command.op == "open":
            self._opened = None
            self._open = command
        losses: list[str] = []
        lost_at: float | None = None
        await self._acknowledge()
        while True:
            attempt = None
            try:
                attempt = await self._ready_attempt()
                if command.op != "open" and self._opened != (attempt, self._open):
                    assert self._open is not None
                    await self._ask(attempt, self._open, progress)
                    self._opened = (attempt, self._open)
                if lost_at is not None:
                    losses[-1] += f" and was replaced in {time.monotonic() - lost_at:.1f} s"
                    lost_at = None
                values = await self._ask(attempt, command, progress)
                if command.op == "open":
                    self._opened = (attempt, command)
                return values, losses
            except _GroupLostError as lost:
                self._opened = None
                losses.append(str(lost))
                lost_at = time.monotonic()
                log.warning("%s", lost)
                if len(losses) > RESTARTS:
                    if attempt is None:
                        self.stop()  # or it would go on trying to start ranks that cannot
                    raise GroupError(
                        f"the datacenter's ranks failed {len(losses)} times in one request; "
                        f"the last time, {lost}; their output is in {self.state / 'logs'}"
                    ) from None

    # -- the attempt ----------------------------------------------------------------------------

    async def _acknowledge(self) -> None:
        """What died before this command is no news."""
        if self._agent is not None and not self._agent.ended():
            attempt = await self._call(lambda: self._control.current(self._generation))
            if attempt is not None:
                with contextlib.suppress(_GroupLostError):
                    await self._raise_if_dead(attempt)

    async def _ready_attempt(self) -> Attempt:
        """The attempt whose ranks wait for commands; starts an agent where there is none."""
        if self._agent is None or self._agent.ended():
            self.stop()
            self.start()
        deadline = time.monotonic() + START_SECONDS
        while True:
            assert self._agent is not None
            ended = self._agent.ended()
            attempt = await self._call(lambda: self._control.current(self._generation))
            if attempt is not None and attempt not in self._known_lost:
                await self._raise_if_dead(attempt)
                if await self._call(lambda: self._control.ready_count(attempt)) == self.ranks:  # noqa: B023 - awaited here
                    return attempt
            if ended:
                if attempt is not None and attempt in self._known_lost:
                    self.stop()
                    self.start()
                    continue
                words = self._agent.last_words()
                self.stop()
                raise _GroupLostError(f"the agent of the ranks ended: {words}")
            if time.monotonic() > deadline:
                self.stop()
                raise _GroupLostError(f"the ranks were not ready after {START_SECONDS:.0f} s")
            await asyncio.sleep(0.05)

    async def _raise_if_dead(self, attempt: Attempt) -> None:
        death = await self._call(lambda: self._control.death(attempt))
        if death is not None:
            self._known_lost.add(attempt)
            raise _GroupLostError(str(death))

    # -- one command ----------------------------------------------------------------------------

    async def _ask(
        self, attempt: Attempt, command: Command, progress: Callable[[Report], None]
    ) -> dict[str, Any]:
        number = self._numbers.get(attempt, 0)
        self._numbers = {attempt: number + 1}
        await self._call(lambda: self._control.send(attempt, number, command))
        watch = _Watch(self, attempt, number, progress)
        while True:
            outcome = await self._call(
                lambda: self._control.outcome(attempt, number, _SLICE_SECONDS)
            )
            if outcome is not None:
                break
            await watch.look()
        if outcome.leaving:
            self._known_lost.add(attempt)
            self._opened = None
        else:
            await self._call(lambda: self._control.forget(attempt, number))
        if outcome.failure is not None:
            raise CommandError(outcome.failure)
        return outcome.values

    async def _call(self, work: Callable[[], T]) -> T:
        """Talk to the store in the one thread that may."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


class _Watch:
    """Looks after the ranks while they work on one command."""

    def __init__(
        self, group: Group, attempt: Attempt, number: int, progress: Callable[[Report], None]
    ) -> None:
        self._group = group
        self._attempt = attempt
        self._number = number
        self._progress = progress
        self._shown: Report | None = None
        self._beats: list[bytes] = [b""] * group.ranks
        self._heard = [time.monotonic()] * group.ranks
        self._looked = 0.0
        self._aborted_at: float | None = None
        self._told_to_save = False

    async def look(self) -> None:
        """One look.

        Raises:
            _GroupLostError: a rank died or hangs, or the agent is gone.
            CommandError: nobody wants the result, and the ranks had their time to stop.
        """
        group, control = self._group, self._group._control
        await group._raise_if_dead(self._attempt)
        if group._agent is None or group._agent.ended():
            group._known_lost.add(self._attempt)
            raise _GroupLostError("the agent of the ranks died")
        now = time.monotonic()
        if now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        beats = await group._call(lambda: control.beats(self._attempt, group.ranks))
        for rank, (old, new) in enumerate(zip(self._beats, beats, strict=True)):
            if old != new:
                self._heard[rank] = now
        self._beats = beats
        silent = [rank for rank, at in enumerate(self._heard) if now - at > group.lease_seconds]
        if silent:
            await self._end_ranks()
            raise _GroupLostError(
                f"rank {silent[0]} did not answer for {group.lease_seconds:g} s and was ended"
            )
        shown = await group._call(lambda: control.progress(self._attempt, self._number))
        if shown is not None and shown != self._shown:
            self._shown = shown
            self._progress(shown)
        if group._saving.is_set() and not self._told_to_save:
            self._told_to_save = True
            await group._call(lambda: control.ask_to_save(self._attempt, self._number))
        if group._cancelled.is_set():
            await self._abort(now)

    async def _abort(self, now: float) -> None:
        """Ask the ranks to stop; end them if they do not."""
        if self._aborted_at is None:
            self._aborted_at = now
            control = self._group._control
            await self._group._call(lambda: control.abort(self._attempt, self._number))
        elif now - self._aborted_at > self._group.lease_seconds:
            await self._end_ranks()
            raise CommandError("the ranks were ended because the result is not wanted")

    async def _end_ranks(self) -> None:
        """Kill all of them: the agent would wait for one that is stopped and cannot answer."""
        group = self._group
        group._known_lost.add(self._attempt)
        group._opened = None
        if group.nodes is not None:
            group.stop()
            return
        pids = await group._call(lambda: group._control.pids(self._attempt, group.ranks))
        for pid in pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
