"""Start and supervise the devices and the datacenter of a local run, one process each.

Every process runs the same command as a user would, with its output in the run's `logs/`. A
process that dies is restarted. When the server dies, for any reason, its processes die too.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from isthmus.errors import UserError
from isthmus.job import Job
from isthmus.system.private_files import make_state_directory
from isthmus.system.process import signal_name
from isthmus.wire import link_pb2
from isthmus_server.runs.local.fork_server import ParticipantForkServer, Program

MAX_STARTS = 5
"""Number of starts after which a process is not restarted."""

OnFailure = Callable[[str, link_pb2.Role, str], None]
"""Called with the name, role and reason of a participant that is not restarted."""

ERROR = "isthmus: "
"""What the sentence begins with by which a command ends."""

_GRACE_SECONDS = 5.0


def participant_commands(job: Job, server: str, directory: Path) -> dict[str, list[str]]:
    """Return the arguments of `isthmus` for each local participant of a job, by name."""
    commands: dict[str, list[str]] = {}
    tail = ["--server", server, "--die-with-parent"]
    if job.datacenter.ranks:
        name = "datacenter-0"
        commands[name] = ["datacenter", "launch", "--scheduler", "local", "--name", name]
        commands[name] += ["--ranks", str(job.datacenter.ranks)]
        commands[name] += ["--state", str(directory / "datacenter"), *tail]
    count = job.federated.clients
    for index in range(count):
        name = f"client-{index}"
        commands[name] = ["client", "start", "--name", name, "--shard", f"{index}/{count}", *tail]
        commands[name] += ["--log-file", str(log_file(directory, name))]
        if job.exchange.has_personal or job.federated.privacy is not None:
            commands[name] += ["--state", str(directory / "devices" / name)]
        if job.federated.device != "cpu":
            commands[name] += ["--device", job.federated.device]
    return commands


def log_file(directory: Path, name: str) -> Path:
    """Output of a local participant."""
    return directory / "logs" / f"{name}.log"


def started_roles(job: Job) -> dict[str, link_pb2.Role]:
    """Return the names and roles of a job's local participants."""
    commands = participant_commands(job, "", Path())
    return {name: _role(arguments) for name, arguments in commands.items()}


class LocalProcesses:
    """Starts, restarts and stops the processes of a local run."""

    def __init__(
        self,
        job: Job,
        address: str,
        directory: Path,
        fork_server: ParticipantForkServer,
        on_failure: OnFailure,
    ) -> None:
        """Set up; `start` starts the processes.

        Args:
            job: the job, which determines the participants.
            address: where the server listens.
            directory: the run directory.
            fork_server: starts the processes.
            on_failure: called for a process that is not restarted.
        """
        self.job = job
        self.address = address
        self.directory = directory.absolute()
        self.fork_server = fork_server
        self._on_failure = on_failure
        self._supervisors: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start all processes."""
        make_state_directory(self.directory / "logs")
        commands = participant_commands(self.job, self.address, self.directory)
        for name, arguments in commands.items():
            self._supervisors.append(asyncio.create_task(self._supervise(name, arguments)))

    async def stop(self) -> None:
        """Stop all processes, and wait until they have ended."""
        for supervisor in self._supervisors:
            supervisor.cancel()
        await asyncio.gather(*self._supervisors, return_exceptions=True)

    async def _supervise(self, name: str, arguments: Sequence[str]) -> None:
        log = log_file(self.directory, name)
        for _ in range(MAX_STARTS):
            try:
                program = await self.fork_server.start(arguments, log)
            except UserError as error:
                self._on_failure(name, _role(arguments), str(error))
                return
            try:
                code = await asyncio.shield(program.ended)
            except asyncio.CancelledError:
                await _end(program)
                raise
            if code == 1:  # an error of the user, which would occur again
                break
        self._on_failure(name, _role(arguments), _why_it_ended(code, log))


def _role(arguments: Sequence[str]) -> link_pb2.Role:
    return link_pb2.DATACENTER if arguments[0] == "datacenter" else link_pb2.CLIENT


async def _end(program: Program) -> None:
    program.send_signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(_GRACE_SECONDS):
            await asyncio.shield(program.ended)
    except TimeoutError:
        program.send_signal(signal.SIGKILL)
        await program.ended


def _why_it_ended(code: int, log: Path) -> str:
    """The error with which a program ended, or how its process ended if it could give none."""
    text = log.read_text(errors="replace").strip() if log.exists() else ""
    _, error, sentence = ("\n" + text).rpartition("\n" + ERROR)
    if code > 0 and error:
        return f"its process ended: {ERROR}{' '.join(sentence.split())}"
    # A task's code may end the process, by os._exit or in a library; what it logged last is about
    # something else.
    how = f"was ended by {signal_name(-code)}" if code < 0 else f"ended with exit status {code}"
    return f"its process {how}; see {log}"
