"""Where gRPC dials to get to the end of a road.

gRPC gets through a proxy by itself. Through a balancer that ends TLS it does not: there it dials a
socket of this process that only this user can open, from which each connection is passed on in a
WebSocket of its own. TLS is between gRPC and the server as on every other road.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from isthmus.identity.obstacles import closed
from isthmus.identity.proxies import Road, RoadBlocked
from isthmus.system.private_socket import private_socket

if TYPE_CHECKING:
    from isthmus.identity.tunnel import Ended, Tunnel

_SECONDS = 15.0
"""Time to open a WebSocket."""
_WAITING = 16
"""Connections that wait to be accepted: one channel has one at a time."""
_PAUSE_SECONDS = 1.0
"""Pause after a connection that could not be accepted."""

log = logging.getLogger(__name__)


class Approach:
    """What a gRPC channel needs to reach the end of a road."""

    def __init__(self, road: Road, target: str) -> None:
        self.road = road
        self.target = target
        """What to dial."""
        self.blocked: RoadBlocked | None = None
        """What ended the last connection through a balancer, or kept it from coming about."""

    def options(self) -> tuple[tuple[str, str], ...]:
        """The options of a channel to `target`, which leave TLS between here and the server.

        Raises:
            RoadBlocked: the file with the login cannot be used.
        """
        if self.road.balancer is None:
            return self.road.options()
        return (("grpc.default_authority", self.road.place),)


@contextlib.contextmanager
def approach_to(road: Road) -> Iterator[Approach]:
    """The approach to the end of a road, which is open during the block.

    Raises:
        UserError: there can be no socket in the temporary folder.
    """
    if road.balancer is None:
        yield Approach(road, road.target)
        return
    with private_socket() as address:
        approach = Approach(road, address)
        with _Passage(approach, address.removeprefix("unix:")):
            yield approach


class _Lookups(ThreadPoolExecutor):
    """Threads that the end of the process does not wait for.

    A name server that does not answer keeps a look-up for a quarter of a minute.
    """

    def submit(self, work: Callable[..., Any], /, *args: Any, **more: Any) -> Future[Any]:
        """Begin a look-up in a thread of its own."""
        future: Future[Any] = Future()

        def look_up() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                found = work(*args, **more)
            except BaseException as error:  # noqa: BLE001 - the one who waits is told
                future.set_exception(error)
            else:
                future.set_result(found)

        threading.Thread(target=look_up, name="look-up", daemon=True).start()
        return future


class _Passage:
    """Passes connections on, in a thread of its own: channels may have an event loop or none."""

    def __init__(self, approach: Approach, path: str) -> None:
        self._approach = approach
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(_WAITING)
        self._listener.setblocking(False)
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(_Lookups())
        self._accepting = self._loop.create_task(self._accept())
        self._crossing: set[asyncio.Task[None]] = set()
        self._tunnels: weakref.WeakSet[Tunnel] = weakref.WeakSet()
        """Tunnels whose connections may be open."""
        self._thread = threading.Thread(target=self._run, name="balancer", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._accepting.cancel)
        if threading.current_thread() is not self._thread:  # which may collect its own channel
            self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            with contextlib.suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._accepting)
            # One that has not begun would leave its socket open.
            self._loop.run_until_complete(asyncio.sleep(0))
            for task in self._crossing:
                task.cancel()
            self._loop.run_until_complete(_ended(self._crossing, self._tunnels))
        finally:
            self._listener.close()
            self._loop.close()

    async def _accept(self) -> None:
        while True:
            await self._connected()
            try:
                # Not by the loop: one that it accepts while this ends would be nobody's.
                near, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                continue
            except OSError as error:  # there are too many open files, or too little memory
                self._approach.blocked = RoadBlocked(
                    f"this machine opens no further connection: {error.strerror}"
                )
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            task = self._loop.create_task(self._pass_on(near))
            self._crossing.add(task)
            task.add_done_callback(self._crossing.discard)

    async def _connected(self) -> None:
        """Wait for a connection that can be accepted."""
        waits = self._loop.create_future()
        self._loop.add_reader(self._listener, _wake, waits)
        try:
            await waits
        finally:
            self._loop.remove_reader(self._listener)

    async def _pass_on(self, near: socket.socket) -> None:
        """Pass a connection on until it has ended."""
        near.setblocking(False)
        over = self._loop.create_future()
        try:
            tunnel = await self._crossed(near, functools.partial(_tell, over))
            self._tunnels.add(tunnel)
            self._approach.blocked = None
            why = await over
        except RoadBlocked:
            pass  # `_crossed` has noted it
        except OSError as error:
            log.debug("a connection through a balancer failed", exc_info=error)
        else:
            if why:
                balancer = self._approach.road.balancer
                self._approach.blocked = RoadBlocked(f"{balancer} {why}")

    async def _crossed(self, near: socket.socket, ended: Ended) -> Tunnel:
        """Connect a connection of gRPC with the server; what is in the way is noted."""
        from isthmus.identity.crossing import cross

        try:
            return await cross(self._approach.road, near, _SECONDS, ended)
        except BaseException as error:
            # First: gRPC sees at once that it is closed, and this participant asks for the reason.
            if isinstance(error, RoadBlocked):
                self._approach.blocked = error
            near.close()
            raise


async def _ended(tasks: Iterable[asyncio.Task[None]], tunnels: Iterable[Tunnel]) -> None:
    """Wait for tasks that were cancelled, and close their connections, and those that they left.

    A connection that has ended stays open until the balancer has said goodbye.
    """
    await asyncio.gather(*tasks, return_exceptions=True)
    for tunnel in list(tunnels):
        tunnel.abort()
    await closed()


def _wake(waits: asyncio.Future[None]) -> None:
    if not waits.done():
        waits.set_result(None)


def _tell(over: asyncio.Future[str], why: str) -> None:
    if not over.done():
        over.set_result(why)
