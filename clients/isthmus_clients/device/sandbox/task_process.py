"""One process of a task, seen from the agent: started, asked, cancelled and ended.

Everything that it sends is checked as input of a stranger.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import IO

from google.protobuf.message import DecodeError

from isthmus.errors import TaskError, TaskInterrupted, TaskProcessEnded
from isthmus.printable import in_a_line
from isthmus.system.channel import Channel, TooLarge
from isthmus.system.forked_process import described
from isthmus.system.private_files import remove_directory
from isthmus.transport.worker import ReportProgress
from isthmus.wire import link_pb2
from isthmus_clients.device.sandbox.settings import DATA_NUMBERS, WorkerSettings
from isthmus_clients.device.sandbox.usage import disk_excess, excess, processes_of
from isthmus_clients.training.withholding import INTERRUPTED

log = logging.getLogger(__name__)

PROGRAM = ("-m", "isthmus_clients.device.sandbox.worker")
"""What Python runs in the task's process: a new program, and not a fork of the agent or of a fork
server of its, as its memory would have the agent's key and its files would be the agent's."""

MAX_REPLY_BYTES = 256 << 10
"""Largest message that the agent reads: a reply has a few figures or one sentence."""

MAX_OUTPUT_BYTES = 1 << 20
"""Output of a task that is logged; more is discarded."""

_START_SECONDS = 120.0
_END_SECONDS = 2.0
"""Time between the end of the connection and that of the process."""
_WATCH_SECONDS = 0.2
"""Time between two looks at what a task's processes use."""
_THOROUGH_LOOKS = 10
"""Looks of which one is also at their files, and at what takes long to count."""
_MAX_LINE = 2000
_MOST_INDENT = 40
_PASSED_ON = ("LANG", "LC_", "TZ", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHASHSEED")
_NUMERICAL = (
    "OMP_",
    "MKL_",
    "KMP_",
    "GOMP_",
    "OPENBLAS_",
    "DNNL_",
    "ONEDNN_",
    "ATEN_",
    "CUDA_",
    "CUBLAS_",
)
"""Prefixes of variables that select numerical code, and so the bits of a result."""


class TaskProcess:
    """A process with the code of one run.

    `call` is for one thread at a time; `cancel` and `kill` are for any thread and do not block.

    Guarantees:
      * it ends, and all that it has started, soon after they have more memory, processes, threads
        or files together than the owner allows.
    """

    def __init__(self, settings: WorkerSettings, secret: bytes | None = None) -> None:
        """Start the process and wait until it is restricted.

        `secret` is what its task draws random numbers for this device's data from.

        Raises:
            TaskProcessEnded: it cannot be started.
            TaskError: a restriction that the owner requires is missing.
        """
        self._allowed = settings.confinement
        self._scratch = settings.confinement.scratch
        self._shared = (0, 0)
        """Bytes of memory that the last two requests came with."""
        try:
            self._channel, theirs = Channel.pair()
        except OSError as error:
            raise _not_started(error) from None
        with theirs:
            command = [sys.executable, "-P", *PROGRAM, str(theirs.fileno()), str(os.getpid())]
            command.append(settings.model_dump_json())
            try:
                self._popen = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                    env=_environment(settings, secret),
                    cwd=self._scratch,
                )
            except OSError as error:
                self._channel.close()
                raise _not_started(error) from None
        self._lock = threading.Lock()
        """Guards the fields below."""
        self._using = threading.Lock()
        """Held by a thread that may read from the connection."""
        self._sending = threading.Lock()
        self._current: str | None = None
        """ID of the request that is executed, as the server sent it."""
        self._count = 0
        """Requests so far: the process knows each by its number, as a lying server may repeat ids,
        and what it has cancelled once would then stop another request."""
        self._killed_because: str | None = None
        self._ended = threading.Event()
        self._timer: threading.Timer | None = None
        assert self._popen.stdout is not None
        self._threads = [
            threading.Thread(target=self._reap, daemon=True),
            threading.Thread(target=_log_output, args=[self._popen.stdout], daemon=True),
            threading.Thread(target=self._watch, daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        with self._using, self._limited(_START_SECONDS):
            first = self._receive()
        if first.HasField("reply"):
            self.kill("the sandbox is incomplete")
            raise TaskError(in_a_line(first.reply.failure.reason))
        log.info("task sandbox: %s", in_a_line(first.progress.note))

    @property
    def pid(self) -> int:
        """Process id; the task may run in a child of it."""
        return self._popen.pid

    @property
    def ended(self) -> bool:
        """Whether the process has ended."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Wait until the process has ended, its output is logged and its files are removed."""
        for thread in self._threads:
            thread.join()

    def call(
        self,
        request: link_pb2.Request,
        handles: Sequence[int] = (),
        progress: ReportProgress = lambda progress: None,
        limit: float | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> link_pb2.Reply:
        """Have the process execute a request, which gets another id; `limit` is in seconds.

        `cancelled` says whether the request was cancelled before `cancel` could know it.

        Raises:
            TaskError: the task failed.
            TaskInterrupted: the request was cancelled, the process lacks memory, or it ended or
                sent what it must not; in the last two cases it is ended.
        """
        with self._lock:
            self._current = request.id
            self._count += 1
            request.id = str(self._count)
            # The task may have the memory of the request before for a while.
            given = sum(os.fstat(handle).st_size for handle in handles)
            self._shared = (self._shared[1], given)
        try:
            if cancelled():
                raise TaskInterrupted(TaskInterrupted.GIVEN_UP)
            with self._using, self._limited(limit):
                try:
                    with self._sending:
                        sent = link_pb2.Envelope(request=request)
                        self._channel.send(sent.SerializeToString(), handles)
                except OSError:
                    raise self._lost() from None
                while True:
                    message = self._receive()
                    if message.HasField("progress"):
                        progress(message.progress)
                        continue
                    reply = message.reply
                    if reply.id != request.id:
                        raise self.misbehaved("it answered another request")
                    if reply.HasField("failure"):
                        interrupted = reply.failure.code == INTERRUPTED
                        kind = TaskInterrupted if interrupted else TaskError
                        raise kind(in_a_line(reply.failure.reason))
                    return reply
        finally:
            with self._lock:
                self._current = None
                if self._timer is not None:
                    self._timer.cancel()
                    self._timer = None

    def cancel(self, request_id: str, grace: float) -> None:
        """Ask the process to stop a request, and end it after `grace` seconds."""
        with self._lock:
            if self._current != request_id or self._timer is not None:
                return
            because = f"it did not stop within {grace:g} s after its request was cancelled"
            self._timer = threading.Timer(grace, self.kill, [because])
            self._timer.daemon = True
            self._timer.start()
            message = link_pb2.Envelope(cancel=link_pb2.Cancel(id=str(self._count)))
        if self._sending.acquire(blocking=False):
            try:
                self._channel.send(message.SerializeToString(), wait=False)
            except OSError:
                pass  # it does not read: the timer ends it
            finally:
                self._sending.release()

    def misbehaved(self, what: str) -> TaskError:
        """End a process that sent what it must not; returns the error to raise."""
        self.kill(what)
        return self._lost()

    def kill(self, because: str) -> None:
        """End the process and all that it started."""
        with self._lock:
            if self._killed_because is None:
                self._killed_because = because
            if not self.ended:
                _end_all(self._popen.pid)

    def _watch(self) -> None:
        """End the process when all of its processes use more than the owner allows."""
        looks = 0
        while not self._ended.wait(_WATCH_SECONDS):
            looks += 1
            thorough = looks % _THOROUGH_LOOKS == 0
            found = excess(self._popen.pid, self._allowed, sum(self._shared), thorough=thorough)
            if found is None and thorough:
                found = disk_excess(self._popen.pid, self._allowed)
            if found is not None:
                self.kill(found)

    def _receive(self) -> link_pb2.Envelope:
        try:
            # No descriptors: what the process could pass would be open in the agent.
            return link_pb2.Envelope.FromString(self._channel.receive(MAX_REPLY_BYTES))
        except TooLarge as error:
            raise self.misbehaved(str(error)) from None
        except DecodeError:
            raise self.misbehaved("a message cannot be read") from None
        except (EOFError, OSError):
            raise self._lost() from None

    def _lost(self) -> TaskProcessEnded:
        """The error for a process that has ended, or has closed its connection."""
        if self._ended.wait(_END_SECONDS) and self._killed_because is None:
            why = described(self._popen.returncode)
        else:
            self.kill("it closed its connection")
            self._ended.wait()
            why = self._killed_because or ""
        return TaskProcessEnded(f"the process of the task ended: {why}")

    @contextlib.contextmanager
    def _limited(self, seconds: float | None) -> Iterator[None]:
        if seconds is None:
            yield
            return
        timer = threading.Timer(seconds, self.kill, [f"it took longer than {seconds:g} s"])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _reap(self) -> None:
        """Wait for the end; then end what it has left behind, and remove its files."""
        os.waitid(os.P_PID, self._popen.pid, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(ProcessLookupError):  # its id is taken until it is waited for
            os.killpg(self._popen.pid, signal.SIGKILL)
        with self._lock:
            self._popen.wait()
            self._ended.set()
        remove_directory(self._scratch)
        self._channel.shut_down()
        with self._using:
            self._channel.close()


def _end_all(leader: int) -> None:
    """End a process, its group, and what it has started in other groups."""
    # Stopped processes start no others, so that all are found.
    stopped: set[int] = set()
    while started := set(processes_of(leader)) - stopped:
        for pid in started:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGSTOP)
        stopped |= started
    for pid in stopped:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _not_started(error: OSError) -> TaskProcessEnded:
    return TaskProcessEnded(f"the process of the task cannot be started: {error}")


def _environment(settings: WorkerSettings, secret: bytes | None) -> dict[str, str]:
    """The variables of a task's process: none that could contain a secret but its own.

    That is not in the command, which all users of this machine can read.
    """
    scratch = str(settings.confinement.scratch)
    kept = {name: text for name, text in os.environ.items() if name.startswith(_PASSED_ON)}
    kept |= {name: text for name, text in os.environ.items() if name.startswith(_NUMERICAL)}
    if secret is not None:
        kept[DATA_NUMBERS] = secret.hex()
        # The order of a set of text follows from it, by which a task may split its data. Else each
        # process had another, and a server has one device open a run again.
        words = hashlib.sha256(b"isthmus/order-of-sets/" + secret).digest()
        kept["PYTHONHASHSEED"] = str(int.from_bytes(words[:4], "little"))
    return kept | {
        "HOME": scratch,
        "TMPDIR": scratch,
        "PATH": "/usr/bin:/bin",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
    }


def _log_output(output: IO[bytes]) -> None:
    """Log what the task prints, up to a limit; the rest is read and discarded."""
    left = MAX_OUTPUT_BYTES
    with output:
        while line := output.readline(_MAX_LINE):
            if left > 0:
                left -= len(line)
                text = line.decode(errors="replace").rstrip()
                indent = " " * min(len(text) - len(text.lstrip(" ")), _MOST_INDENT)
                log.info("task: %s%s", indent, in_a_line(text))
                if left <= 0:
                    log.warning("further output of the task is discarded")
