"""A place at a mirror or in a store that is one server's alone, and is empty when it begins."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

from isthmus.errors import UserError, cause_of
from isthmus.printable import in_a_line
from isthmus.transport.own_threads import in_own_thread
from isthmus_server.mirror.place import OwnedPlace

_CLOSE_SECONDS = 10.0
"""Longest time for removing everything when the server ends."""
_AT_ONCE = 2
"""Removals at the same time."""
_ADDRESS = re.compile(r"https?://[^\s\"']+")

log = logging.getLogger(__name__)


class ClaimedPlace:
    """A place that a server claims when it starts, and from which it removes blobs."""

    def __init__(self, place: OwnedPlace, named: str) -> None:
        """`named` is the place in sentences, such as `the mirror`."""
        self._place = place
        self._named = named
        self._room = asyncio.Semaphore(_AT_ONCE)
        self._removing: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def claimed(self, owner: str) -> AsyncIterator[None]:
        """Claim the place, remove what is there, and have it during the block.

        Removals that the block has begun are waited for, but no longer than ten seconds.

        Args:
            owner: fingerprint of the server.

        Raises:
            UserError: the place is another server's, or cannot be used.
        """
        await in_own_thread(lambda: self._place.claim(owner))
        try:
            left = await self.names()
        except OSError as error:
            raise UserError(f"{self._named} cannot be read: {cause_of(error)}") from None
        await self.remove(left)
        try:
            yield
        finally:
            await self._end()

    async def names(self) -> list[str]:
        """Names of the blobs that are there; raises what a store's library does."""
        return list(await in_own_thread(self._place.names))

    async def remove(self, names: Iterable[str]) -> None:
        """Remove blobs; a failure is said in the log alone."""

        def remove() -> None:
            for name in names:
                self._place.remove(name)

        try:
            async with self._room:
                await in_own_thread(remove)
        except Exception as error:  # noqa: BLE001 - libraries of stores may raise anything
            log.warning(
                "%s: a blob could not be removed, which is tried again when the server starts at "
                "the latest: %s",
                self._named,
                without_addresses(error),
            )

    def begin_removal(self, name: str, after: asyncio.Task[None] | None = None) -> None:
        """Remove a blob in the background, once `after` has ended, which puts it there."""
        task = asyncio.create_task(self._remove_after(name, after))
        self._removing.add(task)
        task.add_done_callback(self._removing.discard)

    async def _remove_after(self, name: str, after: asyncio.Task[None] | None) -> None:
        if after is not None:
            await asyncio.wait((after,))
        await self.remove((name,))

    async def _end(self) -> None:
        if not self._removing:
            return
        _, late = await asyncio.wait(self._removing, timeout=_CLOSE_SECONDS)
        if late:
            log.warning(
                "%s does not answer; what is left there is removed when the server starts again",
                self._named,
            )
        for task in late:
            task.cancel()


async def signed(sign: Callable[[], str], seconds: float) -> str:
    """An address that a store's library signs.

    In a thread: the library may have to renew its credentials.

    Args:
        sign: returns the address.
        seconds: longest time for it.

    Raises:
        TimeoutError: it took longer.
        Exception: what the library raises.
    """
    try:
        async with asyncio.timeout(seconds) as limit:
            return await in_own_thread(sign)
    except TimeoutError:
        if not limit.expired():
            raise
        raise TimeoutError(f"an address was not signed after {seconds:g} s") from None


def without_addresses(error: Exception) -> str:
    """What an error says, in a line, without addresses, whose signatures are secret.

    >>> without_addresses(OSError("503 of https://store.example.org/a?signature=secret"))
    '503 of its address'
    """
    return in_a_line(_ADDRESS.sub("its address", str(error)) or type(error).__name__)
