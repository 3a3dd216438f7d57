"""The driver of a group on Ray: it finds room, starts the nodes, and starts lost ones again.

Ray keeps the placement group whole: the bundle of a machine that is lost gets another one. Nodes
are started again as by Kubernetes: whatever ended one, after a pause that grows, and `RESTARTS`
times in all. What a group without a service runs on its nodes ends together, so all of them are.

Ray is imported by what uses it: it is an extra, and takes seconds.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import grpc

from isthmus.errors import UserError
from isthmus.identity.tls import split_address
from isthmus.printable import in_lines
from isthmus.transport.backoff import Backoff
from isthmus_datacenter.launch import RESTARTS, SHUTDOWN_SECONDS
from isthmus_datacenter.launch.ray_group import RayGroup
from isthmus_datacenter.launch.ray_node import RayNode

_LONGEST_PAUSE = 300.0
"""Longest pause before a node is started again, as of Kubernetes."""
_STABLE_SECONDS = 600.0
"""Time after which a node that ends is started again with the shortest pause, as of Kubernetes."""
_CONNECT_SECONDS = 10.0
_IS_ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"
"""A question to Ray's control service that changes nothing, and takes an empty message."""
_WORKER_SECONDS = 60.0
"""Time for a worker of Ray to start, where there is room for it."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_NAMED_MACHINES = 4
"""Kinds of machines that a sentence names."""
_TAIL_BYTES = 1 << 12
_LINE_CHARACTERS = 300

log = logging.getLogger(__name__)


def run_group(group: RayGroup) -> str:
    """Run a group until it ends; returns a line that says how.

    Raises:
        UserError: Ray is not reached or asks for no token, there is no room for the nodes, one
            cannot run the script, or they failed more than `RESTARTS` times.
    """
    import ray
    from ray.exceptions import RayError

    _connect(group)
    try:
        return _run_connected(group)
    except RayError as error:
        raise UserError(f"Ray failed: {_first_line(error)}") from error
    finally:
        ray.shutdown()


def _run_connected(group: RayGroup) -> str:
    from ray.util.placement_group import placement_group, remove_placement_group

    place = placement_group([group.bundle] * group.nodes, strategy=group.strategy, name=group.name)
    try:
        if not place.wait(group.wait_seconds):
            raise UserError(_no_room(group))
        return asyncio.run(_Nodes(group, place).until_ended())
    finally:
        remove_placement_group(place)


def _connect(group: RayGroup) -> None:
    """Become a driver of the cluster.

    Raises:
        UserError: there is none, it has another version, or it asks nobody for a token.
    """
    import ray

    address = group.address or os.environ.get("RAY_ADDRESS") or "auto"
    where = "on this machine" if address == "auto" else f"at {address}"
    try:
        if address != "auto":
            # Ray itself looks for a cluster that is not there for two minutes.
            with socket.create_connection(
                split_address(address, "RAY_ADDRESS"), timeout=_CONNECT_SECONDS
            ):
                pass
        with _quiet_native_code():
            ray.init(address=address, log_to_driver=False, logging_level=logging.CRITICAL)
    except UserError:
        raise
    except Exception as error:  # Ray raises exceptions of many kinds
        raise UserError(
            f"there is no Ray cluster {where} that this command can join: {_first_line(error)}; "
            "run it on a node of the cluster, with `ray start`, and name the cluster by "
            "--option address=HOST:PORT; where it asks for a token, set RAY_AUTH_MODE=token here "
            "too"
        ) from error
    if group.needs_token and not (_shows_token() and _asks_for_token()):
        ray.shutdown()
        raise UserError(
            "this Ray cluster asks nobody for a token: all who reach its ports can run programs "
            "on its machines, and read the keys in --state; start its nodes with "
            "RAY_AUTH_MODE=token and set it here too, or accept that by "
            "--option authentication=none"
        )


@contextlib.contextmanager
def _quiet_native_code() -> Iterator[None]:
    """Hide what Ray's native code writes to standard error while it tries to connect."""
    kept = os.dup(2)
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    os.close(nothing)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _shows_token() -> bool:
    """Whether this process shows Ray a token."""
    try:
        from ray._private.authentication.authentication_utils import is_token_auth_enabled
    except ImportError:
        return os.environ.get("RAY_AUTH_MODE", "").lower() == "token"
    return bool(is_token_auth_enabled())


def _asks_for_token() -> bool:
    """Whether the cluster refuses a caller that shows no token; with TLS it refuses such, too.

    Ray takes a token that nobody has asked for, so that this process's own says nothing.
    """
    import ray

    with grpc.insecure_channel(ray.get_runtime_context().gcs_address) as channel:
        call = channel.unary_unary(_IS_ALIVE, request_serializer=bytes, response_deserializer=bytes)
        try:
            call(b"", timeout=_CONNECT_SECONDS)
        except grpc.RpcError:
            return True
    return False


class _Failed(Exception):
    """A node has ended that should run; the message is the beginning of a sentence."""


class _Nodes:
    """The nodes of a group in their placement group."""

    def __init__(self, group: RayGroup, place: Any) -> None:
        import ray

        self._group = group
        self._place = place
        self._job = ray.get_runtime_context().get_job_id()
        self._actors: dict[int, Any] = {}
        """The actors that live, by the number of their node."""
        self._restarts = 0
        self._backoff = Backoff(_LONGEST_PAUSE)
        self._started = time.monotonic()
        self._leaving = False
        self._main: asyncio.Task[Any] | None = None

    async def until_ended(self) -> str:
        """Start the nodes, again if they fail; returns a line that says how they ended.

        Raises:
            UserError: see `run_group`.
        """
        self._main = asyncio.current_task()
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal)
        try:
            while True:
                failure = await self._run_all()
                if failure is None:
                    return "ray: the nodes left" if self._leaving else "ray: all nodes ended"
                if self._leaving:
                    raise UserError(f"{failure}; it was to end, and the same command continues")
                await self._pause_after(failure)
        except asyncio.CancelledError:
            raise UserError(
                "the nodes were ended at once; the same command continues from what is stored"
            ) from None

    async def _run_all(self) -> _Failed | None:
        """Run all nodes until the group ends, or has to start again."""
        group = self._group
        tasks = list[asyncio.Task[None]]()
        try:
            host, port = await self._start(0)
            control = f"{host}:{port}"
            tasks = [
                asyncio.create_task(self._keep(number, control)) for number in range(group.nodes)
            ]
            ending = tasks[:1] if group.has_service else tasks
            pending = set(tasks)
            while not all(task.done() for task in ending):
                ended, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    task.result()
        except _Failed as failure:
            return failure
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for number in list(self._actors):
                self._kill(number)
        return None

    async def _keep(self, number: int, control: str) -> None:
        """Run a node until it ends; a node besides that of a service is started again.

        Raises:
            _Failed: all nodes have to start again.
            UserError: it cannot run here, or failed too often.
        """
        while True:
            try:
                if number not in self._actors:
                    await self._start(number)
                await self._run(number, control)
            except _Failed as failure:
                if number == 0 or not self._group.has_service:
                    raise
                if self._leaving:
                    return
                await self._pause_after(failure)
            else:
                return

    async def _start(self, number: int) -> tuple[str, int]:
        """Start the actor of a node; returns its machine's address and a free port of it.

        Raises:
            _Failed: it was lost at once.
            UserError: there is no room for it, or Ray has another user there.
        """
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = dict(self._group.bundle)
        actor = (
            ray.remote(RayNode)
            .options(
                num_cpus=bundle.pop("CPU"),
                num_gpus=bundle.pop("GPU", 0),
                memory=bundle.pop("memory", None),
                resources=bundle,
                max_concurrency=3,  # one runs the script, and others answer
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=self._place, placement_group_bundle_index=number
                ),
            )
            .remote(number)
        )
        self._actors[number] = actor
        self._started = time.monotonic()
        longest = self._group.wait_seconds + _WORKER_SECONDS
        try:
            async with asyncio.timeout(longest):
                host, port, user = await self._answer(number, actor.place.remote())
        except TimeoutError:
            raise UserError(f"node {number} did not start: {_no_room(self._group)}") from None
        if user != os.getuid():
            raise UserError(
                f"Ray runs as user {user} on {host} and this command as user {os.getuid()}: what "
                "one writes into --state is not for the other to read; launch as Ray's user"
            )
        return host, port

    async def _run(self, number: int, control: str) -> None:
        """Run the script of a node.

        Raises:
            _Failed: the node was lost, or its script ended with another status than 0.
            UserError: the node could not start it.
        """
        group = self._group
        path = group.state / f"ray-{self._job}-{number}.log"
        run = self._actors[number].run
        try:
            status, refusal = await self._answer(
                number, run.remote(str(group.script), group.digest, str(path), control)
            )
        finally:
            self._kill(number)
        if refusal:
            raise UserError(
                f"{refusal}; --state or --run-dir has to be on a file system that all nodes share"
            )
        if status:
            raise _Failed(f"node {number} ended with status {status}: {_last_line(path)}")

    async def _answer(self, number: int, reference: Any) -> Any:
        """What a method of a node's actor returns.

        Raises:
            _Failed: the actor was lost.
        """
        from ray.exceptions import RayActorError

        try:
            return await asyncio.wrap_future(reference.future())
        except RayActorError as error:
            self._actors.pop(number, None)
            if isinstance(error.__cause__, ImportError) or "ModuleNotFoundError" in str(error):
                raise UserError(
                    f"node {number} has no Isthmus in the Python of its Ray: {_first_line(error)}"
                ) from None
            raise _Failed(f"node {number} was lost") from None

    async def _pause_after(self, failure: _Failed) -> None:
        """Note that a node is started again, and wait.

        Raises:
            UserError: this has happened too often.
        """
        self._restarts += 1
        if self._restarts > RESTARTS:
            raise UserError(f"{failure}; nodes were started again {RESTARTS} times before")
        what = "it starts" if self._group.has_service else "all nodes start"
        log.warning("%s; %s again (%d of %d)", failure, what, self._restarts, RESTARTS)
        lived = time.monotonic() - self._started
        self._backoff.broke(open_seconds=lived if lived > _STABLE_SECONDS else 0.0)
        await asyncio.sleep(self._backoff.pause())

    def _on_signal(self) -> None:
        """Have the group end in good order; end it at once at the second signal."""
        assert self._main is not None
        ending = [0] if self._group.has_service else range(self._group.nodes)
        actors = [self._actors[number] for number in ending if number in self._actors]
        if self._leaving or not actors:
            self._main.cancel()
            return
        self._leaving = True
        for actor in actors:
            actor.leave.remote()
        asyncio.get_running_loop().call_later(
            self._group.grace_seconds + SHUTDOWN_SECONDS, self._main.cancel
        )

    def _kill(self, number: int) -> None:
        """End a node's actor, and with it what its script has started."""
        actor = self._actors.pop(number, None)
        if actor is not None:
            import ray

            ray.kill(actor)


def _no_room(group: RayGroup) -> str:
    """A sentence with what was asked of Ray, and what it has."""
    import ray

    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    names = ("CPU", "GPU", *(name for name in group.bundle if name not in ("CPU", "GPU")))
    kinds = collections.Counter(_amounts(resources, names) for resources in alive)
    machines = [f"{count} with {amounts}" for amounts, count in kinds.most_common(_NAMED_MACHINES)]
    if len(kinds) > _NAMED_MACHINES:
        machines.append("others")
    each = " each" if group.nodes > 1 else ""
    apart = " on different machines" if group.strategy == "STRICT_SPREAD" else ""
    advice = "ask for less, or wait longer with --option wait=SECONDS"
    if "GPU" in group.bundle and not any(resources.get("GPU") for resources in alive):
        advice = "there are no GPUs: train on processors with --option gpus=0"
    elif apart and len(alive) < group.nodes:
        advice += ", or let nodes share a machine with --option colocate=true"
    return (
        f"Ray found no room within {group.wait_seconds:g} s: asked for {group.nodes} "
        f"node{'s' if group.nodes > 1 else ''} with {_amounts(group.bundle, names)}{each}{apart}; "
        f"its machines are {', '.join(machines) or 'none'}, of which "
        f"{_amounts(ray.available_resources(), names)} are free; {advice}"
    )


def _amounts(resources: dict[str, float], names: Iterable[str]) -> str:
    """Resources in words.

    >>> _amounts({"CPU": 8.0, "GPU": 2.0, "memory": 2.0**36}, ("CPU", "GPU", "memory", "a100"))
    '8 CPU, 2 GPU and 64 GiB memory'
    """
    words = list[str]()
    for name in names:
        if not (amount := resources.get(name, 0)):
            continue
        if name == "memory":
            words.append(f"{amount / 2**30:.4g} GiB memory")
        else:
            words.append(f"{amount:g} {name}")
    if len(words) < 2:
        return "".join(words) or "nothing"
    return f"{', '.join(words[:-1])} and {words[-1]}"


def _last_line(path: Path) -> str:
    """The last line of a node's log, for a sentence."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        lines = []
    useful = [line.strip() for line in lines if line.strip()]
    return f"{in_lines(useful[-1][:_LINE_CHARACTERS]) if useful else 'it said nothing'} ({path})"


def _first_line(error: Exception) -> str:
    """What Ray says, without the pages that follow."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return in_lines(lines[0][:_LINE_CHARACTERS].rstrip(".")) if lines else type(error).__name__
