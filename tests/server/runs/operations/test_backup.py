"""Backups of a running server, and what a restored one refuses because it may have forgotten it."""

import asyncio
import contextlib
import shutil
import sqlite3
import stat

import pytest
from click.testing import CliRunner
from tests.server.service.conftest import fleet, operated  # noqa: F401 - fixtures
from tests.server.storage.conftest import new_run  # noqa: F401 - a fixture
from tests.server.storage.rounds import commit_round
from tests.server.waiting import wait_until

from isthmus.errors import DamagedError, TakenOver, UserError
from isthmus.identity import tls
from isthmus.system.sealed_files import read_sealed
from isthmus_privacy.dp.accounting import ZeroConcentrated
from isthmus_privacy.dp.ledger import Charge, Ledger, LedgerDamaged
from isthmus_server.budgets.populations import Populations, check_populations, of_server
from isthmus_server.cli.server import server
from isthmus_server.fleet import registry_file
from isthmus_server.fleet.authority import initialise
from isthmus_server.fleet.registry import Registry
from isthmus_server.runs.jobs.queue import JobQueue
from isthmus_server.runs.operations.backup import back_up
from isthmus_server.runs.operations.manifest import FILE
from isthmus_server.runs.operations.restore import restore
from isthmus_server.service.tenure import begin
from isthmus_server.storage import audit
from isthmus_server.storage.recovery import verify
from isthmus_server.storage.run_place import FILE as PLACE
from isthmus_server.storage.store import Store


def command(*words):
    result = CliRunner().invoke(server, [str(word) for word in words])
    if result.exception is not None:
        raise result.exception
    return result.output


async def test_a_backup_of_a_running_server_is_restored(operated, tmp_path):  # noqa: F811
    operated.gate.set()
    await operated.devices()
    first = await operated.submit(operated.job(), "one")
    assert await operated.ended(first) == "finished"
    operated.gate.clear()
    second = await operated.submit(operated.job("name=other"), "two")
    await wait_until(lambda: operated.runner.queue.get(second).state == "running")
    await wait_until(lambda: any(peer.pending for peer in operated.link.peers.values()))
    operated.token("later")
    backup, again = tmp_path / "backup", tmp_path / "again"
    said = await asyncio.to_thread(command, "backup", operated.state, backup)
    assert said.endswith(f"are backed up in {backup}\n")
    operated.gate.set()
    assert await operated.ended(second) == "finished"  # the backup has not disturbed it
    said = await asyncio.to_thread(command, "restore", backup, again)
    assert f"cancelled: {second}; submit it again\n" in said
    assert "revoke again whom you have revoked since then" in said
    assert "damaged" not in command("verify", again)
    for run in (first, second):
        assert [finding.damage for finding in verify(again / "runs" / run) if finding.damage] == []
    with contextlib.closing(JobQueue(again)) as queue:
        assert {each.id: each.state for each in queue.entries(9)} == {
            first: "finished",
            second: "cancelled",
        }
    with contextlib.closing(Registry(again)) as registry:
        assert {entry.name for entry in registry.participants()} == {"me", *"abc"}
        tokens = registry._db.execute("SELECT count(*) FROM tokens WHERE used IS NULL")
        assert tokens.fetchone() == (0,)
    for path in (backup, *backup.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert audit.read(again)[-1].action == "restore"


@pytest.fixture
def state(tmp_path):
    """A server that has charged a population once."""
    state = tmp_path / "state"
    initialise(state, ["localhost"])
    with contextlib.closing(Registry(state)) as registry:
        for name in ("phone", "tablet"):
            registry.add_token(name.encode(), name=name, kind="client", expires=2e10)
            join(registry, name)
    charge(state)
    return state


def identity(name):
    return name.encode().ljust(32)


def join(registry, name):
    subject = tls.Subject("client", name, identity(name), name, 2e10)
    registry.redeem(name.encode(), "client", identity(name), lambda _: (b"certificate", subject))


def charge(state, population="fleet"):
    with Populations(state / "privacy").ledger(population) as ledger:
        event = ZeroConcentrated(rho=0.5)
        asked = {"run": "r", "round": 1, "attempt": 1, "what": "round", "devices": ("a",)}
        ledger.reserve(
            Charge(
                population=population,
                unit="device",
                adjacency="zero-out",
                mechanism="distributed",
                event=event,
                **asked,
            )
        )
        return ledger.head.number


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda folder: (folder / "server.pem").write_bytes(b"x"), "server.pem was changed"),
        (lambda folder: (folder / "fleet.head").unlink(), "fleet.head is missing"),
        (lambda folder: (folder / "more").write_bytes(b""), "more was added"),
        (lambda folder: (folder / "more").symlink_to("/etc"), "is not a plain file"),
        (lambda folder: (folder / FILE).write_bytes(b"x" * 99), "is damaged"),
        (lambda folder: (folder / FILE).unlink(), "is not a backup of a server"),
    ],
)
def test_a_damaged_backup_is_refused(state, tmp_path, damage, sentence):
    back_up(state, tmp_path / "backup")
    damage(tmp_path / "backup")
    with pytest.raises(UserError, match=sentence):
        restore(tmp_path / "backup", tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_neither_command_writes_where_something_is(state, tmp_path):
    back_up(state, tmp_path / "backup")
    for words in (("backup", state, tmp_path / "backup"), ("restore", tmp_path / "backup", state)):
        with pytest.raises(UserError, match="is not empty; nothing was changed"):
            command(*words)
    with pytest.raises(UserError, match="of no server and no authority"):
        command("backup", tmp_path, tmp_path / "other")
    with pytest.raises(UserError, match=r"is inside .*: later backups would contain it"):
        command("backup", state, state / "copy")
    with pytest.raises(UserError, match="has no audit log and no privacy ledgers"):
        command("restore", tmp_path / "backup", tmp_path / "other", "--lost", tmp_path / "nowhere")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["backup", "state"]


def test_a_server_with_damage_is_not_backed_up(state, tmp_path):
    with contextlib.closing(Registry(state)) as registry:
        registry._db.execute("DROP TABLE tokens")
    with pytest.raises(DamagedError):
        back_up(state, tmp_path / "backup")
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_an_older_ledger_is_not_used_as_if_nothing_had_been_charged_since(state, tmp_path):
    back_up(state, tmp_path / "backup")
    assert charge(state) == 2
    again = tmp_path / "again"
    said = command("restore", tmp_path / "backup", again)
    assert "not asked any more: the population fleet\n" in said
    for population in ("fleet", "new"):  # one that the backup does not know may be as old
        with pytest.raises(LedgerDamaged, match=f"population '{population}' was asked between"):
            charge(again, population)
    assert "the population new may be asked again" in command("population", again, "new")
    assert charge(again, "new") == 1
    with pytest.raises(LedgerDamaged):
        charge(again)
    assert audit.read(again)[-1].details == {"name": "new"}
    with pytest.raises(UserError, match="is not refused"):
        command("population", again, "new")
    back_up(again, tmp_path / "second")  # a backup of it refuses the same
    restore(tmp_path / "second", tmp_path / "third", nothing_ran_since=True)
    with pytest.raises(LedgerDamaged):
        charge(tmp_path / "third")


def test_what_is_left_of_the_lost_directory_is_used(state, tmp_path):
    back_up(state, tmp_path / "backup")
    charge(state)
    with contextlib.closing(Registry(state)) as registry:
        registry.revoke("phone")
    with pytest.raises(UserError, match="is newer than the backup: the audit log had 1 more"):
        restore(tmp_path / "backup", tmp_path / "no", lost=state, nothing_ran_since=True)
    (state / "fleet.sqlite").write_bytes(b"lost")
    said = command("restore", tmp_path / "backup", tmp_path / "again", "--lost", state)
    assert "newer than the backup: the ledger of 'fleet' had 1 more lines\n" in said
    assert charge(tmp_path / "again") == 3
    with contextlib.closing(Registry(tmp_path / "again")) as registry:
        revoked = {entry.name: entry.revoked is not None for entry in registry.participants()}
    assert revoked == {"phone": True, "tablet": False}


def test_a_ledger_of_the_lost_directory_that_was_cut_is_not_used(state, tmp_path):
    charge(state)
    back_up(state, tmp_path / "backup")
    ledger = state / "privacy/fleet.ledger"
    ledger.write_bytes(ledger.read_bytes().partition(b"\n")[0] + b"\n")
    done = restore(tmp_path / "backup", tmp_path / "again", lost=state)
    assert done.populations == ["fleet"]
    with pytest.raises(LedgerDamaged):
        charge(tmp_path / "again")


def test_a_ledger_of_the_lost_directory_that_is_older_than_its_pruned_runs_is_not_used(
    state, tmp_path
):
    """A backup has the ledgers of pruned runs, too."""
    kept = state / "pruned/run-1"
    kept.mkdir(parents=True)

    def keep():
        for name in ("ledger", "head"):
            shutil.copy(state / f"privacy/fleet.{name}", kept / f"privacy.{name}")

    keep()
    back_up(state, tmp_path / "backup")
    older = shutil.copytree(state / "privacy", tmp_path / "older")
    charge(state)
    with Ledger.open(state / "privacy/fleet.ledger") as ledger:
        ledger.keep_head_in(state / "privacy/fleet.head")
        ledger.settle(ledger.head.number, "committed")
    keep()
    shutil.copytree(older, state / "privacy", dirs_exist_ok=True)
    done = restore(tmp_path / "backup", tmp_path / "again", lost=state)
    assert done.populations == ["fleet"]
    with pytest.raises(LedgerDamaged, match="was asked between"):
        charge(tmp_path / "again")
    command("population", tmp_path / "again", "fleet")
    with of_server(tmp_path / "again").ledger("fleet") as ledger:
        assert ledger.head.number == 1
    (tmp_path / "again/privacy/fleet.ledger").unlink()
    (tmp_path / "again/privacy/fleet.head").unlink()
    assert "again/pruned/run-1" in str(verify_populations(tmp_path / "again"))


def verify_populations(state):
    """Why `isthmus server verify` refuses the ledgers of a state directory."""
    with pytest.raises(LedgerDamaged) as refused:
        check_populations(state)
    return refused.value


def test_an_audit_log_without_its_head_is_not_taken_over(state, tmp_path):
    back_up(state, tmp_path / "backup")
    (state / "audit.head").unlink()
    restore(tmp_path / "backup", tmp_path / "again", lost=state)
    actions = [entry.action for entry in audit.read(tmp_path / "again")]
    assert actions == ["token", "join", "token", "join", "restore"]


def test_a_standby_whose_registry_has_other_tables_is_refused_when_it_starts(state):
    with begin(state, standby=True, tell=print):
        with contextlib.closing(sqlite3.connect(state / "fleet.sqlite")) as registry:
            registry.execute("CREATE TABLE of_another_version (number INTEGER)")
        with pytest.raises(DamagedError, match=r"fleet.sqlite was written by another version"):
            command("start", state, "--address", "127.0.0.1:0", "--standby")


def test_a_standby_starts_while_the_first_token_makes_the_registry(tmp_path, monkeypatch):
    """The file is there, and has no tables yet."""

    def begun(*_, **__):
        raise UserError("it serves or waits")

    monkeypatch.setattr("isthmus_server.service.tenure.begin", begun)
    state = tmp_path / "new"
    initialise(state, ["localhost"])
    with contextlib.closing(sqlite3.connect(state / "fleet.sqlite")) as registry:
        registry.execute("PRAGMA journal_mode=WAL")
        with pytest.raises(UserError, match="it serves or waits"):
            command("start", state, "--address", "127.0.0.1:0", "--standby")
    with pytest.raises(DamagedError, match=r"fleet.sqlite was written by another version"):
        registry_file.check(state)


@pytest.mark.parametrize("nothing_ran_since", [False, True])
def test_a_server_that_still_runs_from_the_lost_directory_is_fenced_off(
    state, tmp_path, nothing_ran_since
):
    """It was started once after the backup, is stopped, and finds the copy at its place."""
    with begin(state, standby=False, tell=print):
        back_up(state, tmp_path / "backup")
    with begin(state, standby=False, tell=print) as stopped:
        state.rename(tmp_path / "away")
        restore(tmp_path / "backup", state, nothing_ran_since=nothing_ran_since)
        with begin(state, standby=False, tell=print) as mine:
            mine.fence.check()
            with pytest.raises(TakenOver):
                stopped.fence.check()


def test_a_server_that_moves_to_another_machine_goes_on(state, new_run, tmp_path):  # noqa: F811
    store = new_run("state/runs/one")
    commit_round(store, 1)
    store.close()
    back_up(state, tmp_path / "backup")
    shutil.rmtree(state)
    restore(tmp_path / "backup", tmp_path / "again", nothing_ran_since=True)
    assert charge(tmp_path / "again") == 2
    assert audit.read(tmp_path / "again")[-1].details["stated"] == "nothing ran since"
    run = tmp_path / "again/runs/one"
    assert read_sealed(run / PLACE)["path"] == str(run)  # not the draft's
    Store.open_to_continue(run).close()
