"""A standby takes over from a server that is killed, or that is stopped and comes back."""

from __future__ import annotations

import contextlib
import io
import re
import signal
import socket
import socketserver
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from rich.console import Console
from tests.end_to_end.conftest import JOB, TASK
from tests.end_to_end.loopback_fleet import LoopbackFleet
from tests.free_ports import free_ports

from isthmus.system.clocks import utc
from isthmus_server.read.report.report import read_report, show
from isthmus_server.storage import audit, recovery
from isthmus_server.storage.events import ServerTakenOver
from isthmus_server.storage.fence import QUEUE, STANDBY
from isthmus_server.storage.records import RoundRecord
from isthmus_server.storage.store import Store

ROUNDS = 4
PLAIN = "secure_aggregation = false"
CHANGES = (
    *("federated.clients=0", "datacenter.ranks=0", "federated.cohort=3", "federated.quorum=3"),
    *("strategy.policy=federated", "strategy.schedule=[]", f"rounds={ROUNDS}"),
    *("time.lease_seconds=10", "federated.local_epochs=40"),
)


class FloatingAddress:
    """One port, whose connections go to the first of several others that takes them.

    As an address that moves between two machines, or a balancer in front of them.
    """

    def __init__(self, ports: Sequence[int]) -> None:
        self.ports = list(ports)
        passing = self

        class Passed(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                passing._pass_on(self.request)

        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Passed)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._open: set[socket.socket] = set()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def __enter__(self) -> FloatingAddress:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        for each in list(self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _pass_on(self, near: socket.socket) -> None:
        for port in self.ports:
            with contextlib.suppress(OSError):
                far = socket.create_connection(("127.0.0.1", port), 5)
                break
        else:
            return
        far.settimeout(None)
        self._open |= {near, far}
        with far:
            back = threading.Thread(target=self._pump, args=(far, near))
            back.start()
            self._pump(near, far)
            back.join()
        self._open -= {near, far}

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


class Pair(NamedTuple):
    """A server and its standby, with devices."""

    fleet: LoopbackFleet
    address: FloatingAddress
    job: str
    metrics: int
    """Port of the standby's metrics and health."""


def answer(port: int, page: str) -> int | None:
    """The status of a page of the standby; None if nothing listens."""
    try:
        with urlopen(f"http://127.0.0.1:{port}/{page}", timeout=20) as found:
            return int(found.status)
    except HTTPError as refused:
        return refused.code
    except OSError:
        return None


def figure(port: int, name: str) -> float | None:
    """A metric of the standby without labels; None if it is absent."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as found:
        shown = dict(line.rsplit(" ", 1) for line in found.read().decode().splitlines())
    return float(shown[name]) if name in shown else None


def prepare(folder: Path) -> Path:
    (folder / "tasks").mkdir(parents=True)
    (folder / "tasks/task.py").write_text(TASK)
    (folder / "job.toml").write_text(JOB)
    return folder


def result(fleet: LoopbackFleet, job: str) -> tuple[list[tuple[int, str | None]], str]:
    """The rounds that were committed, with the digests of their models, and the final one."""
    with contextlib.closing(Store.open(fleet.directory(job))) as store:
        rows = [row for row in store.attempts() if isinstance(row, RoundRecord)]
        final = store.status()[2]
        assert final is not None
        return [(row.round, row.model_sha256) for row in rows], final.model_sha256


def committed_digest(fleet: LoopbackFleet, job: str) -> str | None:
    """The digest of the model of the first round."""
    with contextlib.closing(Store.open(fleet.directory(job))) as store:
        (row,) = [row for row in store.attempts() if isinstance(row, RoundRecord)]
        return row.model_sha256


def finished(fleet: LoopbackFleet, job: str) -> bool:
    with contextlib.closing(Store.open(fleet.directory(job))) as store:
        return store.status()[0] == "finished"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The result of the job on a server that nothing happens to."""
    folder = prepare(tmp_path_factory.mktemp("undisturbed"))
    with LoopbackFleet(folder, devices=3, privacy=PLAIN) as fleet:
        job = fleet.submit("job.toml", *CHANGES, "federated.secure_aggregation=false")
        fleet.until(lambda: fleet.committed(job) == ROUNDS and finished(fleet, job))
        return result(fleet, job)


@pytest.fixture
def pair(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A fleet of two servers, of which the second one waits, in the second round of a job."""
    secure = request.param == "secure"
    first = free_ports(3)
    second = first + 1
    metrics = first + 2
    options = [("--standby", "--one-port", "--address", f"127.0.0.1:{p}") for p in (first, second)]
    options[1] += ("--metrics", f"127.0.0.1:{metrics}")
    with (
        FloatingAddress([second, first]) as address,
        LoopbackFleet(
            prepare(tmp_path / "fleet"),
            devices=3,
            serving=options[0],
            address=f"localhost:{address.port}",
            privacy="clients_min = 2" if secure else PLAIN,
        ) as fleet,
    ):
        fleet.start_server("standby", *options[1])
        fleet.until(lambda: re.search(r"waits as a standby: process \d+ on", fleet.log("standby")))
        how = f"federated.secure_aggregation={str(secure).lower()}"
        job = fleet.submit("job.toml", *CHANGES, how)
        fleet.until(lambda: (2, "planned") in fleet.attempts(job))
        yield Pair(fleet, address, job, metrics)


def test_a_fleet_is_closed_of_which_a_process_has_ended(tmp_path: Path) -> None:
    fleet = LoopbackFleet(tmp_path, devices=0)
    fleet.start("first", "--version")
    fleet._running["first"].join()
    fleet.start("second", "--version")
    fleet.close()
    assert fleet._running["first"].exitcode == 0
    assert not any(process.is_alive() for process in fleet._running.values())


def check_recorded(fleet: LoopbackFleet, job: str, why: str, at: float | None = None) -> None:
    """The report and the audit log say who took over from whom, when, and in which attempt."""
    with contextlib.closing(Store.open(fleet.directory(job))) as store:
        (event,) = store.events("taken_over")
        assert isinstance(event, ServerTakenOver)
        report = read_report(store)
    assert event.round >= 2  # rounds are short
    where = f"after round {event.round}"
    if event.attempt:
        where = f"in round {event.round}, attempt {event.attempt}"
    assert event.why == why
    assert at in (None, event.at)
    shown = Console(file=io.StringIO(), width=200)
    show(report, shown)
    assert isinstance(shown.file, io.StringIO)
    assert f"{event.sentence} ({utc(event.at)})" in shown.file.getvalue()
    entries = audit.read(fleet.directory(job).parents[1])
    (entry,) = [entry for entry in entries if entry.action == "takeover"]
    assert entry.by == event.by
    assert entry.details == {
        "before": event.before,
        "why": why,
        "jobs": f"{job} {where}",
    }


@pytest.mark.parametrize("pair", ["secure"], indirect=True)
def test_a_standby_goes_on_after_a_server_that_was_killed(
    pair: Pair,
) -> None:
    """The digests are not those of another fleet: each device rounds with a secret of its own."""
    fleet, _, job, metrics = pair
    first = committed_digest(fleet, job)
    fleet.start("followed", "logs", "-f", job, "--state", "alice")
    fleet.until(lambda: re.search(r"^round +1 ", fleet.log("followed"), re.MULTILINE))
    assert answer(metrics, "healthz") == 200
    assert answer(metrics, "readyz") == 503
    assert figure(metrics, "isthmus_serving") == 0
    began = time.monotonic()
    fleet.kill("server")
    fleet.until(lambda: "link and joining at" in fleet.log("standby"))
    assert time.monotonic() - began < 30
    assert re.search(r"takes over from process \d+ on", fleet.log("standby"))
    fleet.until(lambda: answer(metrics, "readyz") == 200)
    assert figure(metrics, "isthmus_serving") == 1
    assert figure(metrics, "isthmus_tenure") == 2
    taken_over = figure(metrics, "isthmus_takeover_timestamp_seconds")
    assert taken_over is not None
    assert abs(time.time() - taken_over) < 60
    fleet.until(lambda: finished(fleet, job))
    rounds, _ = result(fleet, job)
    assert [number for number, _ in rounds] == [1, 2, 3, 4]
    assert rounds[0] == (1, first)
    check_recorded(fleet, job, "was gone", taken_over)
    check_followed(fleet, job)
    assert {finding.damage for finding in recovery.verify(fleet.directory(job))} == {""}


def check_followed(fleet: LoopbackFleet, job: str) -> None:
    """A log that was followed has gone on, with each round once."""
    assert fleet.ended("followed") == 0
    log = fleet.log("followed")
    assert re.findall(r"^round +(\d) ", log, re.MULTILINE) == ["1", "2", "3", "4"]
    assert re.search(
        r"^the server at localhost:\d+ cannot be reached: .*; the log goes on as soon as it, or "
        r"the server that takes over from it, answers$",
        log,
        re.MULTILINE,
    )
    assert log.count("a server answers: the log goes on\n") == 1
    assert log.count(" took over from process ") == 1
    assert log.endswith(f"{job} finished: all rounds are done\n")


@contextlib.contextmanager
def not_writing(fleet: LoopbackFleet, job: str) -> Iterator[None]:
    """A moment in which the server is not within a write that others would have to await."""
    state = fleet.directory(job).parents[1]
    with contextlib.ExitStack() as stack:
        for name in (QUEUE, STANDBY):
            database = sqlite3.connect(state / name, timeout=10, isolation_level=None)
            stack.enter_context(contextlib.closing(database))
            database.execute("BEGIN IMMEDIATE")
        yield


@pytest.mark.parametrize("pair", ["plain"], indirect=True)
def test_a_server_that_was_stopped_commits_nothing_when_it_comes_back(
    pair: Pair, undisturbed: Any
) -> None:
    fleet, address, job, _ = pair
    began = time.monotonic()
    with not_writing(fleet, job):  # nobody could take over
        fleet.send("server", signal.SIGSTOP)
    address.ports.pop()  # where its kernel would take connections that nobody answers
    fleet.until(lambda: "link and joining at" in fleet.log("standby"))
    assert time.monotonic() - began < 30
    fleet.until(lambda: (2, "committed") in fleet.attempts(job))
    before = fleet.log("server")
    fleet.send("server", signal.SIGCONT)
    assert fleet.ended("server") == 75
    said = fleet.log("server").removeprefix(before)
    assert re.search(
        r"^isthmus: process \d+ on \S+ has taken over state: this server has changed nothing there "
        r"since, and ends$",
        said,
        re.MULTILINE,
    )
    assert "Traceback" not in said
    assert said.count("\n") == 1, said
    fleet.until(lambda: finished(fleet, job))
    assert result(fleet, job) == undisturbed
    check_recorded(fleet, job, "had said nothing for 15 s")
