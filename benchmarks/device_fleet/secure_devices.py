"""Run many real device agents in a few processes, for rounds with secure aggregation.

Each device is an `isthmus_clients` agent with its own membership, identity, history file, mutual
TLS connection and stream, as `isthmus client start` runs it, except that the devices of a process
share its memory and its task's code.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing
import multiprocessing.connection
import os
import resource
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from harness.processes import ProcessTree

from isthmus.identity.membership import Membership
from isthmus.task import Participant
from isthmus.wire import link_pb2
from isthmus_clients.device.agent import Agent, serve
from isthmus_clients.training.history_files import begin_history

_CONNECTING = 20
"""Devices of one process that connect at the same time."""
_SWITCH_SECONDS = 0.0005
"""A tenth of what is usual. For each ping the event loop waits several times for Python's lock."""


class ConnectedAgent(Agent):
    """An agent that records its first connection."""

    connected: asyncio.Event

    def welcomed(self, welcome: link_pb2.Welcome) -> None:
        super().welcomed(welcome)
        self.connected.set()


class SecureDevices:
    """Device agents in separate processes; they end with the block."""

    def __init__(
        self, addresses: Sequence[str], members: Sequence[Path], tasks: Path, processes: int
    ) -> None:
        """Start the agents of the membership directories `members`; they connect at once.

        Args:
            addresses: of the server, or of aggregators, which the devices are divided among.
            members: a membership directory for each device.
            tasks: directory of the installed tasks.
            processes: number of processes.
        """
        context = multiprocessing.get_context("forkserver")
        self._processes = []
        self._pipes: list[multiprocessing.connection.Connection] = []
        for number in range(processes):
            pipe, child_pipe = context.Pipe()
            assigned = [
                (addresses[i // processes % len(addresses)], member)
                for i, member in enumerate(members)
                if i % processes == number
            ]
            process = context.Process(target=_run_process, args=(assigned, tasks, child_pipe))
            process.start()
            child_pipe.close()
            self._processes.append(process)
            self._pipes.append(pipe)
        self.tree = ProcessTree(*(each.pid for each in self._processes if each.pid is not None))

    def wait_until_connected(self, seconds: float) -> None:
        """Wait until the server has welcomed all devices.

        Raises:
            RuntimeError: it has not, or a device has given up.
        """
        for pipe in self._pipes:
            if not pipe.poll(seconds):
                raise RuntimeError(f"the devices have not connected within {seconds:g} s")
            if reason := pipe.recv():
                raise RuntimeError(reason)

    def check(self) -> None:
        """Check that no device has given up.

        Raises:
            RuntimeError: a device has, with its reason.
        """
        for pipe in self._pipes:
            if pipe.poll():
                raise RuntimeError(pipe.recv())

    def __enter__(self) -> SecureDevices:
        return self

    def __exit__(self, *exception: object) -> None:
        for pipe in self._pipes:
            pipe.close()  # ends the process
        for process in self._processes:
            process.join(20)
            if process.is_alive():
                process.kill()
                process.join()


def _run_process(
    members: list[tuple[str, Path]], tasks: Path, pipe: multiprocessing.connection.Connection
) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    torch.set_num_threads(1)
    # As in the server. A real device has no garbage of hundreds of others to collect.
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)
    asyncio.run(_devices(members, tasks, pipe))


async def _devices(
    members: list[tuple[str, Path]], tasks: Path, pipe: multiprocessing.connection.Connection
) -> None:
    # Devices take turns: threads compete for Python's lock with the event loop, which answers the
    # pings of all devices of this process.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    sys.setswitchinterval(_SWITCH_SECONDS)
    stopped = asyncio.Event()
    connecting = asyncio.Semaphore(_CONNECTING)

    async def device(address: str, directory: Path) -> None:
        async with connecting:
            member = Membership(directory)
            agent = ConnectedAgent(
                Participant(name=member.name, regime="federated"),
                None,
                signing_key=member.identity,
                history_file=begin_history(member),
                tasks=tasks,
            )
            agent.connected = asyncio.Event()
            running.append(asyncio.create_task(serve(agent.uplink(address, member), agent)))
            running[-1].add_done_callback(ended)
            await agent.connected.wait()

    def ended(task: asyncio.Task[None]) -> None:
        with contextlib.suppress(OSError):
            pipe.send(f"a device has given up: {task.exception()!r}")

    asyncio.get_running_loop().add_reader(pipe.fileno(), stopped.set)
    running: list[asyncio.Task[None]] = []
    await asyncio.gather(*(device(*each) for each in members))
    pipe.send("")
    await stopped.wait()
    os._exit(0)  # like a power cut; closing hundreds of connections takes long
