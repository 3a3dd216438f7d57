"""`isthmus doctor` for each role: what it finds on a machine, and that it changes nothing."""

import asyncio
import contextlib
import json
import shutil
import socket
import time

import pytest
from click.testing import CliRunner
from tests.server.service.conftest import fleet  # noqa: F401 - a fixture

from isthmus.doctor import checks
from isthmus.doctor.commands import doctor
from isthmus.identity import joining
from isthmus.identity.membership import default_state
from isthmus.system.sealed_files import write_sealed_bytes
from isthmus_datacenter.commands import datacenter
from isthmus_server.fleet.authority import CertificateAuthority, initialise
from isthmus_server.fleet.registry import Registry
from isthmus_server.fleet.snapshot import FleetSnapshot


def examined(*words):
    """The exit code, and what was found by point."""
    result = CliRunner().invoke(doctor, [*map(str, words), "--json"])
    return result.exit_code, {each["what"]: each for each in json.loads(result.output)}


@pytest.fixture
def state(tmp_path):
    initialise(tmp_path / "fleet", ["localhost"])
    Registry(tmp_path / "fleet").close()
    return tmp_path / "fleet"


def test_a_server_in_good_order(state):
    before = {path: path.read_bytes() for path in state.iterdir()}
    code, found = examined("server", state, "--address", "127.0.0.1:29400")
    assert code == 0
    levels = {each["level"] for what, each in found.items() if what not in ("server", "disk")}
    assert levels == {"OK"}
    assert found["server"]["remedy"] == f"isthmus server start {state}"
    assert {path: path.read_bytes() for path in before} == before
    text = CliRunner().invoke(doctor, ["server", str(state)]).output
    assert f"WARN server: it is not running; isthmus server start {state}\n" in text


def test_a_server_with_one_port_needs_no_next_one(state):
    code, found = examined("server", state, "--address", "127.0.0.1:65535", "--one-port")
    assert code == 0
    assert len([what for what in found if "port" in what]) == 1
    code, found = examined("server", state, "--address", "127.0.0.1:65535")
    assert (code, found["ports"]["level"]) == (1, "FAIL")


def two_ports(sockets):
    """Listen at two ports in a row, as a server does; returns the first."""
    while True:
        one = sockets.enter_context(socket.socket())
        other = sockets.enter_context(socket.socket())
        one.bind(("127.0.0.1", 0))
        number = one.getsockname()[1]
        try:
            other.bind(("127.0.0.1", number + 1))
        except OSError:  # the port of another program, which need not listen
            continue
        one.listen()
        other.listen()
        return number


def test_a_server_that_was_killed_is_not_said_to_run(state):
    snapshot = FleetSnapshot(at=time.time(), running=True, participants={}, waiting={})
    write_sealed_bytes(state / "presence", snapshot.to_json())
    with contextlib.ExitStack() as sockets:
        number = two_ports(sockets)
        address = ("--address", f"127.0.0.1:{number}")
        assert examined("server", state, *address)[1]["server"]["level"] == "OK"
    server = examined("server", state, *address)[1]["server"]
    assert server["level"] == "WARN"
    assert server["remedy"].startswith(f"if it was killed, isthmus server start {state}; ")


def test_each_fault_of_a_server_fails_with_what_to_do(state, monkeypatch):
    (state / "enroller.key").chmod(0o644)
    code, found = examined("server", state)
    assert (code, found["file modes"]["level"]) == (1, "FAIL")
    assert found["file modes"]["remedy"] == f"chmod 600 {state / 'enroller.key'}"
    (state / "enroller.key").chmod(0o600)
    with contextlib.closing(Registry(state)) as registry:
        registry._db.execute("DROP TABLE tokens")
    assert examined("server", state)[1]["registry"]["level"] == "FAIL"
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 9, 9))
    assert examined("server", state)[1]["disk"]["level"] == "FAIL"
    code, found = examined("server", state / "nowhere")
    assert (code, found["state"]["level"]) == (1, "FAIL")


def test_a_certificate_that_ends_is_named(state, monkeypatch):
    _, certificate = CertificateAuthority(state).read_server_pair()
    end = certificate.not_valid_after_utc.timestamp()
    for now, level in ((end - 1e6, "OK"), (end - 9, "WARN"), (end + 9, "FAIL")):
        monkeypatch.setattr(checks.time, "time", lambda now=now: now)
        assert checks.certificate("c", certificate, "start it").level == level


async def test_a_device_that_has_joined(fleet, tmp_path):  # noqa: F811
    await fleet.listen()
    token = fleet.token("phone")
    await joining.join(fleet.url, token, tmp_path / "phone", "client")
    code, found = await asyncio.to_thread(examined, "device", tmp_path / "phone")
    assert (code, found["server"]["level"], found["certificate"]["level"]) == (0, "OK", "OK")
    assert found["clock"]["level"] == "OK"
    for ahead, sentence in (
        (90, "it is 90 s behind the server's"),
        (-90, "s ahead of the server's"),
    ):
        later = time.time() + ahead
        fleet.link.enrolments.now = lambda later=later: later
        found = (await asyncio.to_thread(examined, "device", tmp_path / "phone"))[1]
        assert found["clock"]["level"] == "WARN"
        assert sentence in found["clock"]["found"].replace("89 s", "90 s")
    assert not fleet.link.peers  # it has asked the time, and nothing else
    await fleet.close()
    code, found = await asyncio.to_thread(examined, "device", tmp_path / "phone")
    assert (code, found["server"]["level"]) == (1, "FAIL")
    code, found = examined("device", fleet.state)
    assert (code, found["membership"]["level"]) == (1, "FAIL")
    assert "holds no membership" in found["membership"]["found"]


async def test_the_server_s_clock_decides_whether_a_certificate_has_ended(
    fleet,  # noqa: F811
    tmp_path,
    monkeypatch,
):
    await fleet.listen()
    member = await joining.join(fleet.url, fleet.token("phone"), tmp_path / "phone", "client")
    real = time.time
    fleet.link.enrolments.now = real
    monkeypatch.setattr(checks.time, "time", lambda: real() + 10 * 86400)
    code, found = await asyncio.to_thread(examined, "device", tmp_path / "phone")
    assert (code, found["certificate"]["level"]) == (0, "OK")
    assert found["clock"]["found"] == "it is 10 days ahead of the server's"
    fleet.link.enrolments.now = lambda: real() + 10 * 86400
    code, found = await asyncio.to_thread(examined, "device", tmp_path / "phone")
    assert code == 1
    assert "by the server's clock, which is at " in found["certificate"]["found"]
    assert found["certificate"]["remedy"] == "join again with a new token"
    await fleet.close()
    code, found = await asyncio.to_thread(examined, "device", tmp_path / "phone")
    assert "by this machine's clock, which is at " in found["certificate"]["found"]
    sentence = "if that clock is right, join again with a new token"
    assert found["certificate"]["remedy"] == sentence
    monkeypatch.undo()
    end = member.certificate.not_valid_after_utc.timestamp()
    monkeypatch.setattr(checks.time, "time", lambda: end - 3600)
    code, found = await asyncio.to_thread(examined, "device", tmp_path / "phone")
    assert found["certificate"]["remedy"] == "have `isthmus client start` run, which renews it"


async def test_a_device_in_the_default_directory(fleet, tmp_path, monkeypatch):  # noqa: F811
    """The directory is that of `isthmus client join` and `start` without `--state`."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    code, found = examined("device")
    assert (code, found["membership"]["level"]) == (1, "FAIL")
    assert str(tmp_path / "home/isthmus/client") in found["membership"]["found"]
    await fleet.listen()
    await joining.join(fleet.url, fleet.token("phone"), default_state("client"), "client")
    code, found = await asyncio.to_thread(examined, "device")
    assert code == 0
    assert found["membership"]["found"] == f"phone at {fleet.address}"
    await fleet.close()


async def test_other_addresses_of_a_device_are_tried_in_place_of_its_own(fleet, tmp_path):  # noqa: F811
    """One of an aggregator, or of a server that has moved, before `client start --server`."""
    await fleet.listen()
    await joining.join(fleet.url, fleet.token("phone"), tmp_path / "phone", "client")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nowhere = f"127.0.0.1:{closed.getsockname()[1]}"
        moved = f"localhost:{fleet.address.rpartition(':')[2]}"
        words = ["device", str(tmp_path / "phone"), "--server", moved, "--server", nowhere]
        result = await asyncio.to_thread(CliRunner().invoke, doctor, [*words, "--json"])
    found = [each for each in json.loads(result.output) if each["what"] in ("road", "server")]
    assert result.exit_code == 1
    assert [each["level"] for each in found] == ["OK", "OK", "OK", "FAIL"]
    assert found[0]["found"] == f"connections to {moved} go directly"
    assert found[1]["found"] == f"{moved} accepts connections"
    assert nowhere in found[3]["found"]
    result = CliRunner().invoke(doctor, ["device", str(tmp_path / "phone"), "--server", "nowhere"])
    assert result.exit_code == 1
    assert "FAIL road: " in result.output
    await fleet.close()


@pytest.mark.parametrize("folder", [".", "not-there-yet"])
async def test_the_road_is_told_before_a_device_has_joined(fleet, tmp_path, folder):  # noqa: F811
    await fleet.listen()
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nowhere = f"127.0.0.1:{closed.getsockname()[1]}"
        words = ["device", str(tmp_path / folder), "--json"]
        for address in (fleet.url, fleet.address, nowhere):
            words += ["--server", address]
        result = await asyncio.to_thread(CliRunner().invoke, doctor, words)
    found = json.loads(result.output)
    assert [each["level"] for each in found if each["what"] == "server"] == ["OK", "OK", "FAIL"]
    assert f"{nowhere} cannot be reached: Connection refused" in str(found)
    said = [each["found"] for each in found if each["level"] == "FAIL"]
    assert len(said) == len(set(said)) == 2  # that it has no membership, once
    await fleet.close()


async def test_an_aggregator_that_has_joined(fleet, tmp_path):  # noqa: F811
    await fleet.listen()
    keys = tmp_path / "sums"
    await joining.join(fleet.url, fleet.token("localhost", "aggregator"), keys, "aggregator")
    code, found = await asyncio.to_thread(examined, "aggregator", keys)
    assert code == 0
    assert {each["level"] for what, each in found.items() if what != "disk"} == {"OK"}
    assert found["membership"]["found"] == f"localhost at {fleet.address}"
    code, found = await asyncio.to_thread(examined, "device", keys)
    assert (code, found["membership"]["level"]) == (1, "FAIL")
    assert found["membership"]["found"] == f"{keys} is the membership of an aggregator"
    await fleet.close()


async def test_a_datacenter_that_has_joined(fleet, tmp_path, monkeypatch):  # noqa: F811
    """`--state` is the directory of `join` and `launch`, and `join` prints what comes next."""
    await fleet.listen()
    state = tmp_path / "a cluster"
    (tmp_path / "token").write_text(str(fleet.token("cluster", "datacenter")))
    words = ["join", fleet.url, "--token-file", str(tmp_path / "token"), "--state", str(state)]
    joined = await asyncio.to_thread(CliRunner().invoke, datacenter, words, catch_exceptions=False)
    assert joined.output == (
        f"this datacenter is 'cluster' at {fleet.address}; begin, with N ranks on this machine, "
        f"with: isthmus datacenter launch --ranks N --state '{state}'\n"
    )
    code, found = await asyncio.to_thread(examined, "datacenter", "--state", state)
    assert (code, found["membership"]["level"], found["server"]["level"]) == (0, "OK", "OK")
    await fleet.close()


def test_a_datacenter_without_a_gpu():
    code, found = examined("datacenter")
    assert code == 0
    assert "versions" in found
    assert found.get("GPU", found.get("GPU 0"))["level"] in ("OK", "WARN")


def test_a_port_that_another_program_has(state):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        number = other.getsockname()[1]
        assert checks.port("127.0.0.1", number).level == "FAIL"
        other.listen()
        assert checks.port("127.0.0.1", number).found.startswith("something listens")
