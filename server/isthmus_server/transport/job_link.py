"""The link as one job uses it: which participants it may use, and when, next to other jobs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Sequence

from isthmus.errors import ParticipantLost
from isthmus.wire import link_pb2
from isthmus_server.transport.blob_store import BlobStore
from isthmus_server.transport.link import Link
from isthmus_server.transport.peer import ParticipantListener, Peer
from isthmus_server.transport.turns import Account, Turns


class SharedLink:
    """A server's link, its turns, and which run is open on each participant."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.turns = Turns()
        self._open: dict[str, tuple[str, Account]] = {}

    def has_open(self, peer: Peer, account: Account) -> bool:
        """Whether a process of a participant has opened the run of a job as the last one."""
        return self._open.get(peer.name) == (peer.instance, account)

    def note_open(self, peer: Peer, account: Account | None) -> None:
        """Note which run a participant has opened; None: it may have none, or another."""
        if account is None:
            self._open.pop(peer.name, None)
        else:
            self._open[peer.name] = (peer.instance, account)


class LinkView(Link):
    """A job's view of the server's link, with the participants that it may use."""

    def __init__(self, link: Link, admits: Callable[[str], bool]) -> None:
        """Begin to pass on what happens on `link`; `admits` says of a name who may be used."""
        super().__init__(link.lease_seconds, link.enrolments)
        self.peers = link.peers
        self.aggregating = link.aggregating
        self.aggregators = link.aggregators
        self.check_ins = link.check_ins
        self._blobs = BlobStore(link._blobs)
        self.uploads = link.uploads
        self._ids = link._ids
        self._instance = link._instance
        self._admits = admits
        self.downloads: set[str] = set()
        """Ids of requests to get files, which participants do besides their work."""
        self._whole = link
        self._relay = _Relay(self)
        link.listeners.attach(self._relay)

    def end(self) -> None:
        """Pass on nothing more."""
        self._whole.listeners.detach(self._relay)

    def admits(self, name: str) -> bool:
        """See `AllTurns.admits`."""
        return self._admits(name)

    def works_here(self, name: str) -> bool:
        """Whether what a participant reports now is about this job."""
        return self.admits(name)

    def forget(self, name: str) -> None:
        """A participant has left."""


class JobLink(LinkView):
    """A job's view of a link that several jobs share: they take turns with its participants.

    Guarantees:
      * a request reaches a participant only while the job holds it, and after its run was opened
        there again if another job's was open meanwhile;
      * a job that holds the participants of a round does not wait for others;
      * a participant that does not open a run keeps the others waiting for a limited time.
    """

    def __init__(
        self,
        shared: SharedLink,
        name: str,
        share: float,
        open_seconds: float = 60.0,
        admits: Callable[[str], bool] = lambda name: True,
        project: str = "",
    ) -> None:
        """Begin to take turns.

        Args:
            shared: the server's link.
            name: see `Turns.begin`.
            share: likewise.
            open_seconds: limit for a participant to open the run, which others wait for meanwhile.
            admits: says of a name whether the job may use that participant.
            project: see `Turns.begin`.
        """
        super().__init__(shared.link, admits)
        self._shared = shared
        self._open_seconds = open_seconds
        self._turns = shared.turns
        self.account = self._turns.begin(name, share, project)
        self._openings: dict[str, link_pb2.OpenRun] = {}

    def end(self) -> None:
        """Leave the turns to the others."""
        super().end()
        self._turns.end(self.account)

    def works_here(self, name: str) -> bool:
        """See `LinkView.works_here`."""
        return self._turns.holder(name) is self.account

    def forget(self, name: str) -> None:
        """See `LinkView.forget`."""
        self._openings.pop(name, None)

    @contextlib.asynccontextmanager
    async def turn(self, names: Collection[str]) -> AsyncIterator[None]:
        """Wait until no other job has these participants, and hold them for the block.

        Inside of another turn it does nothing.
        """
        if self.account.held:
            yield
            return
        async with self._turns.turn(self.account, names):
            yield

    @property
    def waits_for(self) -> Sequence[Account]:
        """The other jobs whose participants this one waits for."""
        return [each for each in self._turns.waits_for(self.account) if each is not self.account]

    async def ask(self, name: str, request: link_pb2.Request) -> link_pb2.Reply:
        """Send a request when the participant works for this job; see `Link.ask`.

        Raises:
            ParticipantLost: likewise; or it works for another job while this one has a turn.
        """
        if request.HasField("prepare"):  # in the background, and for as long as it takes
            return await self._download(name, request)
        if request.HasField("open"):
            return await self._open(name, request)
        peer = self._peer(name)
        if request.HasField("close") and not self._shared.has_open(peer, self.account):
            return await super().ask(name, request)  # deletes what it has kept of the run
        async with self._moment(name):
            await self._reopen(name)
            return await super().ask(name, request)

    async def _download(self, name: str, request: link_pb2.Request) -> link_pb2.Reply:
        self.downloads.add(request.id)
        try:
            return await super().ask(name, request)
        finally:
            self.downloads.discard(request.id)

    async def _open(self, name: str, request: link_pb2.Request) -> link_pb2.Reply:
        # Once for each participant: starting PyTorch may take as long as a hundred rounds, and a
        # job with a small share would then wait for its first. Opening a run again is charged: a
        # job that needs it in each round would otherwise take the time of those that do not.
        async with self._turns.moment(self.account, name, charged=False):
            peer = self._peer(name)
            self._shared.note_open(peer, None)
            reply = await self._opened(name, request)
            if reply.HasField("opened"):
                self._openings[name] = request.open
                self._shared.note_open(peer, self.account)
            return reply

    async def _opened(self, name: str, request: link_pb2.Request) -> link_pb2.Reply:
        try:
            async with asyncio.timeout(self._open_seconds) as limit:
                return await super().ask(name, request)
        except TimeoutError:
            if not limit.expired():
                raise
            raise ParticipantLost(
                f"{name} did not open the run within {self._open_seconds:g} s, for which other "
                "jobs have waited",
                reached=True,
            ) from None

    @contextlib.asynccontextmanager
    async def _moment(self, name: str) -> AsyncIterator[None]:
        holder = self._turns.holder(name)
        if name in self.account.held:
            yield
        elif self.account.held and holder not in (None, self.account):
            assert holder is not None
            # In the job's log, which its own project reads.
            same = holder.project == self.account.project
            job = f"the job {holder.name}" if same else "a job of another project"
            raise ParticipantLost(f"{name} works for {job}", reached=False)
        else:
            async with self._turns.moment(self.account, name):
                yield

    async def _reopen(self, name: str) -> None:
        peer = self._peer(name)
        if self._shared.has_open(peer, self.account):
            return
        if name not in self._openings:
            raise ParticipantLost(f"{name} has not opened the run yet", reached=False)
        self._shared.note_open(peer, None)
        request = link_pb2.Request(id=self.new_id(), open=self._openings[name])
        reply = await self._opened(name, request)
        opened = reply.HasField("opened")
        self.acknowledge(name, request.id, opened)
        if not opened:
            raise ParticipantLost(f"{name} did not open the run again", reached=True)
        self._shared.note_open(peer, self.account)


class _Relay(ParticipantListener):
    """Passes changes on to the listeners of one job, and progress only of its own requests."""

    def __init__(self, view: LinkView) -> None:
        self._view = view

    def joined(self, peer: Peer) -> None:
        if self._view.admits(peer.name):
            self._view.listeners.joined(peer)

    def left(self, peer: Peer, reason: str) -> None:
        self._view.forget(peer.name)
        self._view.listeners.left(peer, reason)

    def progressed(self, name: str, progress: link_pb2.Progress) -> None:
        if self._view.works_here(name) or progress.id in self._view.downloads:
            self._view.listeners.progressed(name, progress)
