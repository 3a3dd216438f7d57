"""Where devices get what is at the mirror: from there, or from the server all the same.

A mirror that has failed costs nobody a round, so that nothing would say so where it is run: devices
tell their owners alone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter

from isthmus.printable import counted
from isthmus.transport.requests import changes_of, model_of
from isthmus.wire import link_pb2

FROM_MIRROR = "mirror"
FROM_LINK = "link"
GATHER_SECONDS = 30.0
"""From the first device to the line of the log, which is then about the others of its round too."""
QUIET_SECONDS = 600.0
"""Between two lines of the log."""
_REMEMBERED = 4
"""Blobs that are remembered of each device, which keeps one model."""
_MOST_DEVICES = 100_000
"""Devices of which blobs are remembered, the last ones: some 40 MB."""

log = logging.getLogger(__name__)


class MirrorUse:
    """Counts where devices get what requests have named at the mirror, and says it in the log.

    Whether an owner allows the mirror is not known to the server. Of a device that has got
    something there before it is; the others are counted, and told of once.

    Guarantees:
      * there is at most one line of the log in `QUIET_SECONDS`.
    """

    def __init__(self) -> None:
        """Begin without devices."""
        self.taken: Counter[str] = Counter({FROM_MIRROR: 0, FROM_LINK: 0})
        """Blobs that devices got while the mirror had them, by where; read by other threads."""
        self._asked: dict[bytes, dict[str, bool]] = {}
        """By SHA-256 and device: whether it has answered since it was told an address of the blob,
        for all blobs that are at the mirror."""
        self._got: dict[str, tuple[bytes, ...]] = {}
        """By device: SHA-256 of the last blobs of which it has got something, from anywhere."""
        self._users: set[str] = set()
        """Devices that have got something from the mirror."""
        self._others: set[str] = set()
        """Devices that were told of although they have got nothing there."""
        self._new_users: set[str] = set()
        self._new_others: set[str] = set()
        """Devices for the next line of the log."""
        self._line: asyncio.TimerHandle | None = None
        self._said_at = -QUIET_SECONDS

    def told(self, device: str, request: link_pb2.Request, blob: link_pb2.Blob) -> None:
        """Note that a device was told an address.

        Args:
            device: its name.
            request: what it was asked.
            blob: of the request, with the address.
        """
        asked = self._asked.setdefault(bytes(blob.sha256), {})
        # A device that is sent changes of models may have made this one of them.
        may_be_made = bool(changes_of(request)) and model_of(request) == blob
        # It may have kept what it got, also while the mirror did not have it.
        may_be_kept = device in asked or blob.sha256 in self._got.get(device, ())
        asked[device] = may_be_made or may_be_kept

    def pulled(self, device: str, sha256: bytes, *, is_whole: bool) -> None:
        """Note what a device asks the server for; `is_whole`: it says that it has all of it."""
        self._remember(device, sha256)
        asked = self._asked.get(sha256, {})
        is_known = asked.get(device)
        if is_known is None:
            return
        if not is_whole:
            self._from_link(device, sha256)
        elif not is_known:
            asked[device] = True
            self.taken[FROM_MIRROR] += 1
            self._users.add(device)

    def _remember(self, device: str, sha256: bytes) -> None:
        got = [each for each in self._got.pop(device, ()) if each != sha256]
        self._got[device] = (*got[1 - _REMEMBERED :], sha256)
        if len(self._got) > _MOST_DEVICES:
            del self._got[next(iter(self._got))]  # the one that asked longest ago

    def forget(self, sha256: bytes) -> None:
        """Note that a blob is not at the mirror any more."""
        self._asked.pop(sha256, None)

    def end(self) -> None:
        """Say what was not said yet."""
        if self._line is not None:
            self._line.cancel()
            self._line = None
            if time.monotonic() - self._said_at >= QUIET_SECONDS:
                self._say()

    def _from_link(self, device: str, sha256: bytes) -> None:
        # Until it is told an address again: a transfer that breaks is asked for again and again.
        del self._asked[sha256][device]
        self.taken[FROM_LINK] += 1
        if device in self._users:
            self._new_users.add(device)
        elif device not in self._others:
            self._others.add(device)
            self._new_others.add(device)
        if self._line is None and (self._new_users or self._new_others):
            rest = self._said_at + QUIET_SECONDS - time.monotonic()
            loop = asyncio.get_running_loop()
            self._line = loop.call_later(max(GATHER_SECONDS, rest), self._say)

    def _say(self) -> None:
        self._line = None
        self._said_at = time.monotonic()
        said = []
        if count := len(self._new_users):
            said.append(
                f"{counted(count, 'device')} that had got models from the mirror got one from this "
                "server, although the mirror has it: look at its web server"
            )
        if count := len(self._new_others):
            said.append(
                f"{counted(count, 'device')} that had got nothing from the mirror so far got a "
                "model from this server, although the mirror has it: if their owners allow the "
                "mirror (server_sources), look at its web server"
            )
        self._new_users.clear()
        self._new_others.clear()
        log.warning("%s", "; ".join(said))
