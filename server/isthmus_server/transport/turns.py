"""Which job a participant works for: jobs take turns, in proportion to their shares.

A participant works for one job at a time. A job asks for the participants of a whole round at once,
and nobody waits while holding some, so that no two jobs wait for each other.

Turns are given by start-time fair queueing (Goyal, Vin and Cheng 1996): every job has a virtual
time, which advances by the participant-seconds that it uses, over its share, and the one that is
behind has the next turn. A job that has been away begins at the virtual time of the latest turn: it
cannot save up turns. One whose round has just ended gets a moment to ask again (Iyer and Druschel
2001, "Anticipatory Scheduling"): the others, which wait already, would otherwise always be given
its participants.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import AsyncIterator, Callable, Collection, Sequence

ANTICIPATION_SECONDS = 0.25
"""Time between two rounds of a job that others wait for."""


@dataclasses.dataclass(eq=False)
class Account:
    """What one job has used."""

    name: str
    share: float
    virtual_time: float
    project: str = ""
    """Project whose operators may know of the job; empty for none."""
    used: float = 0.0
    """Participant-seconds."""
    held: frozenset[str] = frozenset()
    """The participants of its running round."""
    turns: int = 0
    """Rounds, and other uses of several participants."""
    participations: int = 0
    """Participants in all of these."""
    _returns_until: float = 0.0
    _last: frozenset[str] = frozenset()


@dataclasses.dataclass(eq=False)
class _Wish:
    """A job that waits for participants."""

    account: Account
    names: frozenset[str]
    short: bool
    number: int
    granted: asyncio.Future[None]

    @property
    def order(self) -> tuple[bool, float, int]:
        return not self.short, self.account.virtual_time, self.number


class Turns:
    """Gives participants to jobs.

    Guarantees:
      * no participant is held twice;
      * of jobs that always want the same participants, each gets them in proportion to its share,
        up to the length of one turn;
      * a wish is not overtaken for ever: participants that are free are kept for the job that is
        furthest behind.
    """

    def __init__(self, now: Callable[[], float] | None = None) -> None:
        """`now` is the time in seconds; None for that of the event loop."""
        self._now = now or (lambda: asyncio.get_running_loop().time())
        self._holders: dict[str, Account] = {}
        self._accounts: list[Account] = []
        self._virtual_time = 0.0
        """Virtual time of the job that had the latest turn."""
        self._wishes: list[_Wish] = []
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, name: str, share: float, project: str = "") -> Account:
        """Let a job take part.

        Args:
            name: of the job, for others that wait for it.
            share: above 0; of two jobs, one with twice the share gets twice the time.
            project: of the job, whose name is told in no other project.
        """
        assert share > 0
        account = Account(name, share, self._virtual_time, project)
        self._accounts.append(account)
        return account

    def end(self, account: Account) -> None:
        """The job has ended; it holds nothing."""
        self._accounts.remove(account)
        self._grant()

    def holder(self, participant: str) -> Account | None:
        """The job that a participant works for now."""
        return self._holders.get(participant)

    def waits_for(self, account: Account) -> list[Account]:
        """The jobs whose participants a job waits for, by name; itself may be one of them."""
        wanted = {name for wish in self._wishes if wish.account is account for name in wish.names}
        holders = {self._holders[name] for name in wanted & self._holders.keys()}
        return sorted(holders, key=lambda holder: holder.name)

    @contextlib.asynccontextmanager
    async def turn(self, account: Account, names: Collection[str]) -> AsyncIterator[None]:
        """Wait for participants, and hold them all for the block: a round."""
        assert not account.held, "a job that holds participants may not wait for more"
        wanted = frozenset(names)
        # The first turn has what a device does once, such as loading code for the first step. It
        # may take as long as many rounds, after which the job would wait for as many of others.
        charged = account.turns > 0
        async with self._holding(account, wanted, short=False, charged=charged):
            account.held = wanted
            account.turns += 1
            account.participations += len(wanted)
            try:
                yield
            finally:
                account.held = frozenset()
                account._last = wanted
                account._returns_until = self._now() + ANTICIPATION_SECONDS

    @contextlib.asynccontextmanager
    async def moment(
        self, account: Account, name: str, *, charged: bool = True
    ) -> AsyncIterator[None]:
        """Wait for one participant before all that wait for a turn, and hold it for the block.

        What is not `charged` delays no later turn of the job.
        """
        async with self._holding(account, frozenset([name]), short=True, charged=charged):
            yield

    @contextlib.asynccontextmanager
    async def _holding(
        self, account: Account, names: frozenset[str], *, short: bool, charged: bool = True
    ) -> AsyncIterator[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if not short:
            account.virtual_time = max(account.virtual_time, self._virtual_time)
        wish = _Wish(account, names, short, next(self._numbers), future)
        self._wishes.append(wish)
        self._grant()
        try:
            await future
        except asyncio.CancelledError:
            if wish in self._wishes:
                self._wishes.remove(wish)
            else:
                self._release(names)
            self._grant()
            raise
        begun = self._now()
        try:
            yield
        finally:
            used = (self._now() - begun) * len(names)
            account.used += used
            if charged:
                account.virtual_time += used / account.share
            self._release(names)
            # After what the job does next in this step of the event loop.
            asyncio.get_running_loop().call_soon(self._grant)

    def _release(self, names: frozenset[str]) -> None:
        for name in names:
            del self._holders[name]

    def _grant(self) -> None:
        """Give free participants to those that wait, in order of their virtual times."""
        now = self._now()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting = {wish.account for wish in self._wishes if not wish.short}
        returning = [
            account
            for account in self._accounts
            if account._returns_until > now and account not in waiting and not account.held
        ]
        taken = set(self._holders)
        for wish in sorted(self._wishes, key=lambda each: each.order):
            if wish.granted.done():
                continue  # it was cancelled just now
            ahead = [each for each in returning if each.virtual_time < wish.account.virtual_time]
            kept = set() if wish.short else {name for each in ahead for name in each._last}
            if not wish.names & (taken | kept):
                self._wishes.remove(wish)
                self._holders.update(dict.fromkeys(wish.names, wish.account))
                wish.granted.set_result(None)
                if not wish.short:
                    self._virtual_time = max(self._virtual_time, wish.account.virtual_time)
            elif not wish.short and not wish.names & taken:
                until = max(each._returns_until for each in ahead)
                loop = asyncio.get_running_loop()
                self._timer = self._timer or loop.call_later(until - now, self._grant)
            taken |= wish.names


class AllTurns:
    """The turns of a link that one job has for itself, with all participants."""

    @contextlib.asynccontextmanager
    async def turn(self, names: Collection[str]) -> AsyncIterator[None]:
        """Have participants to itself for the block."""
        yield

    @property
    def waits_for(self) -> Sequence[Account]:
        """The other jobs whose participants this one waits for."""
        return ()

    def admits(self, name: str) -> bool:
        """Whether the job that uses this link may ask the participant of a name."""
        return True
