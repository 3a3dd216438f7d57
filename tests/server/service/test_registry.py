import contextlib
import errno
import random
import shutil
import sqlite3
import subprocess
import sys
import threading
import time

import pytest

from isthmus.errors import AdmissionRefused, DamagedError, UserError
from isthmus.identity import tls
from isthmus_server.fleet import registry as module
from isthmus_server.fleet import registry_file
from isthmus_server.fleet.authority import initialise
from isthmus_server.fleet.registry import Registry
from isthmus_server.service.server import ControlPlaneServer
from isthmus_server.storage import audit

SOON = 3600.0


@pytest.fixture
def registry(tmp_path):
    registry = Registry(tmp_path)
    yield registry
    registry.close()


def subject(name, serial="1", kind="client", identity=b"i" * 32, seconds=SOON):
    return tls.Subject(kind, name, identity, serial, time.time() + seconds)


def issuing(kind="client", identity=b"i" * 32, serial="1"):
    return lambda name: (b"certificate", subject(name, serial, kind, identity))


def allow(registry, name, digest=b"t", kind="client", seconds=SOON):
    registry.add_token(digest, name=name, kind=kind, expires=time.time() + seconds)


def redeem(registry, digest=b"t", kind="client", identity=b"i" * 32, serial="1"):
    return registry.redeem(digest, kind, identity, issuing(kind, identity, serial))


def test_a_token_makes_a_participant(registry):
    allow(registry, "a")
    assert redeem(registry) == ("a", b"certificate")
    registry.check(subject("a"))
    (entry,) = registry.participants()
    assert (entry.name, entry.kind, entry.revoked) == ("a", "client", None)


@pytest.mark.parametrize("together", [8])
def test_only_one_of_many_concurrent_joins_with_a_token_succeeds(tmp_path, registry, together):
    allow(registry, "a")
    ready, got = threading.Barrier(together), []

    def use(number):
        mine = Registry(tmp_path)
        ready.wait()
        try:
            got.append(redeem(mine, identity=bytes([number]) * 32, serial=str(number))[0])
        except AdmissionRefused as error:
            got.append(str(error))
        mine.close()

    threads = [threading.Thread(target=use, args=(number,)) for number in range(together)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    used = "this token has been used; ask the operator for another"
    assert sorted(got) == ["a", *[used] * (together - 1)]
    assert len(registry.participants()) == 1


def test_a_join_can_be_repeated_for_a_while(registry, monkeypatch):
    allow(registry, "a")
    redeem(registry)
    assert redeem(registry, serial="2") == ("a", b"certificate")
    with pytest.raises(AdmissionRefused, match="this token has been used"):
        redeem(registry, identity=b"j" * 32)
    monkeypatch.setattr(module, "REPEAT_SECONDS", 0.0)
    with pytest.raises(AdmissionRefused, match="this token has been used"):
        redeem(registry)


def test_a_join_that_was_revoked_meanwhile_is_not_repeated(registry):
    allow(registry, "a")
    redeem(registry)
    registry.revoke("a")
    with pytest.raises(AdmissionRefused, match="this token has been used"):
        redeem(registry)


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ({"digest": b"other"}, "this server does not know this token, or it was used long ago"),
        (
            {"kind": "datacenter"},
            "this token is for a participant of kind 'client', not 'datacenter'",
        ),
    ],
)
def test_a_mismatched_token_is_refused_and_kept(registry, how, sentence):
    allow(registry, "a")
    with pytest.raises(AdmissionRefused, match=f"^{sentence}$"):
        redeem(registry, **how)
    assert redeem(registry)[0] == "a"


def test_an_expired_token_is_refused(registry):
    allow(registry, "a", seconds=-1)
    with pytest.raises(AdmissionRefused, match=r"this token ended at .* by the server's clock"):
        redeem(registry)


def test_a_join_that_fails_does_not_use_up_the_token(registry):
    allow(registry, "a")

    def fail(name):
        raise AdmissionRefused("no certificate for you")

    with pytest.raises(AdmissionRefused, match="no certificate for you"):
        registry.redeem(b"t", "client", b"i" * 32, fail)
    assert registry.participants() == []
    assert redeem(registry)[0] == "a"


def test_a_name_belongs_to_one_participant_until_it_is_revoked(registry):
    allow(registry, "a")
    allow(registry, "a", digest=b"second")  # nobody has joined yet
    redeem(registry)
    with pytest.raises(UserError, match="'a' is a participant already; revoke it first"):
        allow(registry, "a", digest=b"third")
    with pytest.raises(AdmissionRefused, match="'a' is a participant already"):
        redeem(registry, digest=b"second", identity=b"j" * 32, serial="2")
    registry.revoke("a")  # the second token is worthless with it
    allow(registry, "a", digest=b"fourth")
    assert redeem(registry, digest=b"fourth", identity=b"j" * 32, serial="4")[0] == "a"
    registry.check(subject("a", serial="4", identity=b"j" * 32))
    with pytest.raises(AdmissionRefused, match="not valid any more"):
        registry.check(subject("a"))


def test_devices_and_revoked_names_are_those_of_now(registry, monkeypatch):
    monkeypatch.setattr(module, "_PART", 2)  # several parts
    kinds = {"e": "client", "d": "datacenter", "c": "client", "b": "client", "a": "client"}
    for name, kind in kinds.items():
        allow(registry, name, name.encode(), kind)
        redeem(registry, name.encode(), kind, name.encode() * 32, name)
    registry.revoke("c")
    registry.revoke("d")
    assert list(registry.clients()) == ["a", "b", "e"]
    assert registry.revoked_names() == {"c", "d"}
    allow(registry, "c", b"again")
    redeem(registry, b"again", "client", b"n" * 32, "again")
    assert list(registry.clients()) == ["a", "b", "c", "e"]
    assert registry.revoked_names() == {"d"}


def test_a_revoked_identity_is_never_accepted_again(registry):
    allow(registry, "a")
    redeem(registry)
    registry.revoke("a")
    assert registry.revoked_identities() == {b"i" * 32}
    for name in ("a", "b"):
        allow(registry, name, digest=name.encode())
        with pytest.raises(
            AdmissionRefused, match="this identity belongs to a participant already, or was"
        ):
            redeem(registry, digest=name.encode(), serial="9")


def test_one_identity_cannot_have_two_names(registry):
    allow(registry, "a")
    allow(registry, "b", digest=b"b")
    redeem(registry)
    with pytest.raises(AdmissionRefused, match="this identity belongs to a participant already"):
        redeem(registry, digest=b"b", serial="2")


@pytest.mark.parametrize(
    ("shown", "sentence"),
    [
        ({"name": "z"}, "'z' is not a participant of this server"),
        ({"serial": "2"}, "this certificate of 'a' is not valid any more"),
        ({"kind": "datacenter"}, "this certificate of 'a' is not valid any more"),
        ({"identity": b"j" * 32}, "this certificate of 'a' is not valid any more"),
    ],
)
def test_a_certificate_that_is_not_in_the_registry_is_not_valid(registry, shown, sentence):
    allow(registry, "a")
    redeem(registry)
    with pytest.raises(AdmissionRefused, match=f"^{sentence}$"):
        registry.check(subject(**{"name": "a", **shown}))


def test_renewal_keeps_the_old_certificate_until_its_end(registry):
    allow(registry, "a")
    redeem(registry)
    registry.renew(subject("a"), issuing(serial="2"))
    registry.check(subject("a"))
    registry.check(subject("a", serial="2"))
    registry.revoke("a")
    for serial in ("1", "2"):
        with pytest.raises(AdmissionRefused, match="'a' has been revoked"):
            registry.check(subject("a", serial=serial))
        with pytest.raises(AdmissionRefused, match="'a' has been revoked"):
            registry.renew(subject("a", serial=serial), issuing(serial="3"))


def test_revoking_an_unused_token_makes_it_invalid(registry):
    allow(registry, "a")
    registry.revoke("a")
    with pytest.raises(AdmissionRefused, match="this server does not know this token"):
        redeem(registry)


def test_revoking_an_unknown_name_is_an_error(registry):
    with pytest.raises(UserError, match="there is no participant or token named 'a'"):
        registry.revoke("a")
    allow(registry, "a")
    redeem(registry)
    registry.revoke("a")
    with pytest.raises(UserError, match="'a' is revoked already"):
        registry.revoke("a")


@pytest.mark.parametrize("name", ["", "a b", "a/b", "-a", "x" * 64, "é", "a:b"])
def test_a_name_that_would_not_fit_into_a_certificate_is_refused(registry, name):
    with pytest.raises(UserError, match="is not 1 to 63 letters"):
        allow(registry, name)


def elsewhere(folder, line):
    """Execute one registry operation in another process; returns its output."""
    code = f"""
from pathlib import Path
from isthmus_server.fleet.authority import initialise
from isthmus_server.fleet.registry import Registry
from isthmus_server.service.server import ControlPlaneServer
from isthmus_server.storage import audit
registry = Registry(Path({str(folder)!r}))
{line}
registry.close()
"""
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout


def test_processes_see_each_other_s_changes_and_lose_none(tmp_path, registry):
    """If SQLite's locks on the file were lost, each process would have its own log."""
    second = Registry(tmp_path)  # as the server has two, one of them for writing
    for name in ("a", "b"):
        registry.revoked_identities()
        before = registry.version
        allowed = f"name={name!r}, kind='client', expires={time.time() + SOON}"
        elsewhere(tmp_path, f"registry.add_token({name.encode()!r}, {allowed})")
        assert registry.version != before
    assert redeem(registry, digest=b"a")[0] == "a"
    assert redeem(second, digest=b"b", identity=b"j" * 32, serial="2")[0] == "b"
    assert {entry.name for entry in registry.participants()} == {"a", "b"}
    seen = elsewhere(tmp_path, "print(*(entry.name for entry in registry.participants()))")
    assert seen.split() == [b"a", b"b"]
    second.close()


KILLED = """
import os, signal
record = audit.record
def record_and_die(*args, **details):
    record(*args, **details)
    os.kill(os.getpid(), signal.SIGKILL)
audit.record = record_and_die
registry.revoke("a")
"""


def test_what_a_killed_command_has_written_into_the_audit_log_is_not_written_again(
    tmp_path, registry
):
    """Nor by a server that runs, and does not open the registry again."""
    allow(registry, "a")
    with pytest.raises(subprocess.CalledProcessError):
        elsewhere(tmp_path, KILLED)
    allow(registry, "b", digest=b"u")
    written = [(entry.action, entry.details["name"]) for entry in audit.read(tmp_path)]
    assert written == [("token", "a"), ("revoke", "a"), ("token", "b")]


def test_what_a_full_disk_has_kept_from_the_audit_log_is_written_later_once(
    tmp_path, registry, monkeypatch
):
    """The entry was written, and the head of the log was not."""
    with monkeypatch.context() as full:

        def no_space(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        full.setattr(audit, "write_sealed", no_space)
        with pytest.raises(UserError, match="No space left on device"):
            allow(registry, "a")
    allow(registry, "b", digest=b"u")
    assert [entry.details["name"] for entry in audit.read(tmp_path)] == ["a", "b"]


def test_a_participant_does_not_fill_the_registry_with_certificates(registry, monkeypatch):
    monkeypatch.setattr(module, "MAX_CERTIFICATES", 3)
    allow(registry, "a")
    redeem(registry)
    for serial in ("2", "3"):
        registry.renew(subject("a"), issuing(serial=serial))
    with pytest.raises(AdmissionRefused, match=r"^'a' has 3 valid certificates; use one of them$"):
        registry.renew(subject("a"), issuing(serial="4"))


def test_a_full_disk_is_reported_and_changes_nothing(registry):
    (pages,) = registry._db.execute("PRAGMA page_count").fetchone()
    registry._db.execute(f"PRAGMA max_page_count={pages}")
    with pytest.raises(sqlite3.OperationalError, match="database or disk is full"):
        allow(registry, "a", digest=b"t" * 10_000)
    registry._db.execute(f"PRAGMA max_page_count={pages + 9}")
    allow(registry, "a")
    assert redeem(registry) == ("a", b"certificate")


@pytest.mark.parametrize("since", ["joined", "invited", "never joined"])
def test_an_older_copy_does_not_bring_a_revoked_identity_back(tmp_path, since):
    """A copy of database and head from before the revocation is intact in itself."""
    state, copy = tmp_path / "server", tmp_path / "copy"
    initialise(state, ["localhost"])

    def make_copy():
        with contextlib.closing(sqlite3.connect(state / "fleet.sqlite")) as now:
            now.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        for name in ("fleet.sqlite", "fleet.head"):
            copy.mkdir(exist_ok=True)
            shutil.copy(state / name, copy / name)

    with contextlib.closing(Registry(state)) as registry:
        allow(registry, "phone")
        audit.record(state, "token", by="user me", name="phone", token=b"t".hex())
        if since != "joined":
            make_copy()
        if since != "never joined":
            redeem(registry)
            audit.record(state, "join", by="phone", identity=(b"i" * 32).hex())
        if since == "joined":
            make_copy()
        registry.revoke("phone")
        audit.record(state, "revoke", by="user me", name="phone")
    registry_file.check(state)
    for path in state.glob("fleet.*"):
        path.unlink()
    shutil.copytree(copy, state, dirs_exist_ok=True)
    for use in (registry_file.check, ControlPlaneServer):
        with pytest.raises(DamagedError, match=r"fleet\.sqlite accepts 'phone', whose revocation "):
            use(state)
    with contextlib.closing(Registry(state)) as registry:
        registry.revoke("phone")
        audit.record(state, "revoke", by="user me", name="phone")
        allow(registry, "phone", b"u")  # for another device; it is not recorded before a crash
    registry_file.check(state)
    ControlPlaneServer(state).members.close()


@pytest.mark.parametrize("lost", ["fleet.*", "audit.*"])
def test_a_registry_or_an_audit_log_that_is_lost_with_its_head_is_missed(tmp_path, lost):
    state = tmp_path / "state"
    initialise(state, ["localhost"])
    with contextlib.closing(Registry(state)) as registry:
        allow(registry, "phone")
        audit.record(state, "token", by="user me", name="phone", token=b"t".hex())
        redeem(registry)
    registry_file.check(state)
    for path in state.glob(lost):
        path.unlink()
    with pytest.raises(DamagedError, match="is missing"):
        registry_file.check(state)
    if lost == "fleet.*":
        with pytest.raises(DamagedError, match=r"fleet\.sqlite is missing, and .* there was one"):
            ControlPlaneServer(state)
        assert not (state / "fleet.sqlite").exists()
    else:
        ControlPlaneServer(state).members.close()  # it can go on, with a new log


def actions(folder):
    return [(entry.action, entry.by) for entry in audit.read(folder)]


def test_every_change_of_two_writers_is_in_the_audit_log_once(tmp_path, registry):
    """They write the head file next to the registry at the same time: that is no failure."""
    others = "abcdefgh"
    for name in others:
        allow(registry, name, digest=name.encode())

    def join(names):
        mine = Registry(tmp_path)
        for name in names:
            redeem(mine, name.encode(), identity=name.encode() * 32, serial=name)
        mine.close()

    threads = [threading.Thread(target=join, args=(names,)) for names in (others[:4], others[4:])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    joins = [by for action, by in actions(tmp_path) if action == "join"]
    assert sorted(joins) == list(others)


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("later", [-7200.0, 7200.0])
def test_an_entry_of_the_audit_log_is_known_by_its_mark_where_the_clock_was_set(
    tmp_path, registry, monkeypatch, written, later
):
    """The same action was recorded before, at a time that is now to come, or long past."""
    allow(registry, "a")
    registry.revoke("a")
    allow(registry, "a", digest=b"u")
    before = audit.record
    now = time.time

    class Ended(BaseException):
        pass

    def end(*arguments, **details):
        with monkeypatch.context() as clock:  # it is set between both writes, too
            clock.setattr(time, "time", lambda: now() + 2 * later)
            if written:
                before(*arguments, **details)
        raise Ended

    with monkeypatch.context() as killed:
        killed.setattr(time, "time", lambda: now() + later)
        killed.setattr(audit, "record", end)
        with pytest.raises(Ended):
            registry.revoke("a")
    registry.close()
    with contextlib.closing(Registry(tmp_path)):
        found = [action for action, _ in actions(tmp_path)]
    assert found == ["token", "revoke", "token", "revoke"]
    entries = audit.read(tmp_path)
    assert entries[1].details == entries[3].details
    assert len({entry.mark for entry in entries}) == len(entries)


@pytest.mark.parametrize("written", [False, True])
def test_a_change_whose_process_ended_before_the_audit_log_is_recorded_later(
    tmp_path, registry, monkeypatch, written
):
    allow(registry, "a")
    before = audit.record

    class Ended(BaseException):
        pass

    def end(*arguments, **details):
        if written:
            before(*arguments, **details)
        raise Ended

    monkeypatch.setattr(audit, "record", end)
    with pytest.raises(Ended):
        redeem(registry)
    registry.close()
    monkeypatch.undo()
    with contextlib.closing(Registry(tmp_path)) as again:
        assert again.participants()[0].name == "a"
        assert [action for action, _ in actions(tmp_path)] == ["token", "join"]
        again.revoke("a")
    with contextlib.closing(Registry(tmp_path)):
        assert [action for action, _ in actions(tmp_path)] == ["token", "join", "revoke"]


def test_a_full_disk_under_the_audit_log_loses_no_join(tmp_path, registry, monkeypatch):
    """The join is committed and refused; the repeated one gets its certificate, and is recorded."""
    allow(registry, "a")

    def full(*_, **__):
        raise UserError("audit.log cannot be written (No space left on device)")

    monkeypatch.setattr(audit, "record", full)
    with pytest.raises(UserError, match="No space"):
        redeem(registry)
    monkeypatch.undo()
    assert redeem(registry) == ("a", b"certificate")
    assert [action for action, _ in actions(tmp_path)] == ["token", "join"]


class Ended(BaseException):
    """A process is killed here."""


def end_after(writing, monkeypatch):
    """Have the next entry of the audit log be the last that this process writes."""
    before = audit.record

    def end(*arguments, **details):
        if writing:
            before(*arguments, **details)
        raise Ended

    monkeypatch.setattr(audit, "record", end)


def test_equal_changes_in_one_second_are_each_recorded(tmp_path, registry, monkeypatch):
    """The entry of the first one was taken for that of the second."""
    for digest, identity in ((b"t", b"i" * 32), (b"u", b"j" * 32)):
        allow(registry, "a", digest=digest)
        redeem(registry, digest, identity=identity, serial=digest.hex())
        if digest == b"t":
            registry.revoke("a")
    end_after(False, monkeypatch)
    with pytest.raises(Ended):
        registry.revoke("a")
    registry.close()
    monkeypatch.undo()
    with contextlib.closing(Registry(tmp_path)):
        assert [action for action, _ in actions(tmp_path)] == ["token", "join", "revoke"] * 2


def test_an_entry_that_another_process_wrote_before_it_ended_is_not_written_again(
    tmp_path, registry, monkeypatch
):
    """That one found the change committed, and ended before it could say that it is recorded."""
    commits = registry._log.write_head

    def others_turn():
        commits()
        with monkeypatch.context() as patch:
            end_after(True, patch)
            with pytest.raises(Ended):
                Registry(tmp_path)

    monkeypatch.setattr(registry._log, "write_head", others_turn)
    allow(registry, "a")
    monkeypatch.undo()
    assert [action for action, _ in actions(tmp_path)] == ["token"]


CHANGING = """
import os, random, sys, time
from pathlib import Path
from isthmus.errors import AdmissionRefused, UserError
from isthmus.identity import tls
from isthmus_server.fleet.registry import Registry

registry = Registry(Path(sys.argv[1]))
print("begun", flush=True)
soon = time.time() + 600
while True:
    name = random.choice("ab")
    token, identity = os.urandom(32), os.urandom(32)

    def issue(name):
        return b"c", tls.Subject("client", name, identity, identity.hex(), soon)

    for change in (
        lambda: registry.add_token(token, name=name, kind="client", expires=soon),
        lambda: registry.redeem(token, "client", identity, issue),
        lambda: registry.revoke(name),
    ):
        try:
            change()
        except (AdmissionRefused, UserError):
            pass  # another process was first
"""


def test_what_killed_processes_have_committed_is_in_the_audit_log_once(tmp_path):
    """Three join and revoke under the same names, and one after the other is killed."""
    Registry(tmp_path).close()
    running = []
    for turn in range(12):
        if len(running) == 3:
            time.sleep(random.uniform(0.0, 0.1))  # at any instant of its work
            running[0].kill()
            running.pop(0).communicate()
        command = [sys.executable, "-c", CHANGING, str(tmp_path)]
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        if turn >= 2:
            assert running[-1].stdout.readline() == "begun\n"
    for process in running:
        process.kill()
        process.communicate()
    with contextlib.closing(Registry(tmp_path)) as registry:
        found = {
            what: {row[0].hex() for row in registry._db.execute(query)}
            for what, query in {
                "identity": "SELECT identity FROM participants UNION "
                "SELECT identity FROM revoked_identities",
                "token": "SELECT digest FROM tokens",
            }.items()
        }
        assert registry._db.execute("SELECT count(*) FROM unrecorded").fetchone() == (0,)
        gone = len(registry.revoked_identities())
    entries = audit.read(tmp_path)
    joins = [entry.details["identity"] for entry in entries if entry.action == "join"]
    tokens = [entry.details["token"] for entry in entries if entry.action == "token"]
    assert len(joins) > 5
    assert sorted(joins) == sorted(found["identity"])
    assert len(tokens) == len(set(tokens))
    assert set(tokens) >= found["token"]
    assert sum(entry.action == "revoke" for entry in entries) >= gone
