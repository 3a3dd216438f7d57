"""Damaged files are refused with a sentence or change nothing; a rolled back run ends the same.

`make corruption` damages each file 200 times, and prints the outcomes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.end_to_end.damage import (
    files_of,
    read_checkpoint,
    read_device,
    read_run,
    read_server,
    read_server_of_authority,
    sweep,
)

from isthmus.errors import UserError
from isthmus.identity import tls
from isthmus.identity.membership import Membership, prepare
from isthmus_clients.device.owner_limits import LimitsGuard, OwnerLimits
from isthmus_clients.training.history_files import begin_history
from isthmus_clients.training.history_log import HistoryLog
from isthmus_privacy.secagg.history import Begun, Unmasked
from isthmus_server.cli.runs import runs
from isthmus_server.fleet.authority import CertificateAuthority, initialise
from isthmus_server.fleet.authority_service import AuthorityService
from isthmus_server.fleet.registry import Registry
from isthmus_server.fleet.remote_authority import RegistryCopy
from isthmus_server.runs.jobs.queue import JobQueue
from isthmus_server.storage import audit
from isthmus_server.storage.run_place import record_place
from isthmus_server.storage.schema import SCHEMA
from isthmus_server.storage.sealed_database import SealedDatabase
from isthmus_server.storage.store import Store

TIMES = int(os.environ.get("ISTHMUS_TEST_CORRUPTION", "6"))
"""Damages to each file."""


def show(outcomes: dict[str, Counter[str]]) -> None:
    for name, found in outcomes.items():
        print(f"{name:<60}", ", ".join(f"{count} {what}" for what, count in found.items()))


@pytest.fixture
def cut_off(folder: Path, start: Any) -> Path:
    """A run on ranks and devices that was killed in its fourth round, a hybrid one."""
    run = start("job.toml", "--run-dir", "cut-off")
    run.wait_for_line(r"round +3 ")
    run.kill()
    return folder / "cut-off"


@pytest.fixture
def finished(folder: Path, start: Any) -> Path:
    """A run of two secure rounds that has finished."""
    changes = ("strategy.policy=federated", "rounds=2", "datacenter.ranks=0")
    settings = [part for change in changes for part in ("--set", change)]
    run = start("job.toml", "--run-dir", "finished", *settings)
    assert run.finish() == 0, run.output
    return folder / "finished"


def test_a_run_that_was_killed_is_refused_or_unchanged(cut_off: Path, tmp_path: Path) -> None:
    """The write-ahead log has everything; a part of it was once ignored without a word."""
    whole = tmp_path / "whole"
    (checkpoint, *_) = cut_off.glob("datacenter/*/step-*")
    shutil.copytree(checkpoint, whole)
    show(sweep(whole, list(files_of(whole)), read_checkpoint, tmp_path / "damaged", TIMES))

    for name in ("datacenter", "logs"):
        shutil.rmtree(cut_off / name)
    # The kill may have been between a commit and its head; nothing depends on such a commit yet.
    with contextlib.closing(SealedDatabase(cut_off / "run.sqlite", SCHEMA, "read")) as log:
        log.write_head()
    files = list(files_of(cut_off, "lock"))
    names = {path.name for path in files}
    assert {"run.sqlite", "run.sqlite-wal", "run.head", "job.json"} <= names
    outcomes = sweep(cut_off, files, read_run, tmp_path / "damaged", TIMES)
    show(outcomes)
    for name in ("job.json", "run.head", "checkpoints/model-000003.safetensors"):
        assert outcomes[name]["refused"] > 0


def test_a_run_that_has_finished_is_refused_or_unchanged(finished: Path, tmp_path: Path) -> None:
    shutil.rmtree(finished / "logs")
    files = list(files_of(finished, "lock"))
    outcomes = sweep(finished, files, read_run, tmp_path / "damaged", TIMES)
    show(outcomes)
    assert outcomes["model.safetensors"]["refused"] == TIMES
    assert outcomes["run.sqlite"]["nothing changed"] < TIMES


def test_a_device_is_refused_or_unchanged(tmp_path: Path) -> None:
    state, device = tmp_path / "server", tmp_path / "device"
    initialise(state, ["localhost"])
    authority = CertificateAuthority(state)
    key, identity = prepare(device)
    public = identity.public_key().public_bytes_raw()
    certificate, _ = authority.issue(
        tls.signing_request(key), kind="client", name="phone", identity=public
    )
    member = Membership.save(
        device,
        server="localhost:9400",
        authority=authority.certificate,
        enroller=bytes(32),
        key=key,
        certificate=tls.read_certificate(certificate),
    )
    LimitsGuard(OwnerLimits(rounds_per_day=9), device / "usage.json").check_work(10)
    history = HistoryLog(begin_history(member))
    for round_ in range(1, 4):
        history.append(Begun("run", round_, 1, round_, 7))
        history.append(Unmasked("run", round_, bytes([round_] * 32), bytes(range(32))))
    files = list(files_of(device))
    assert {path.name for path in files} == {
        *("authority.pem", "credentials.pem", "identity.key", "member.json", "usage.json"),
        *("history.log", "history.head"),
    }
    outcomes = sweep(device, files, read_device, tmp_path / "damaged", 5 * TIMES)
    show(outcomes)
    for name in ("credentials.pem", "identity.key", "member.json", "usage.json"):
        assert outcomes[name]["refused"] > 3 * TIMES
    for name in ("history.log", "history.head"):  # each byte of them counts
        assert outcomes[name].keys() <= {"refused", "same bytes"}

    # What a crash leaves of the last line is no damage: nothing depends on it yet.
    expected = HistoryLog(member.history).entries
    with member.history.open("ab") as log:
        log.write(b"0123456789abcdef")
    assert HistoryLog(member.history).entries == expected


def test_a_server_is_refused_or_unchanged(tmp_path: Path, make_job: Any) -> None:
    state = tmp_path / "server"
    initialise(state, ["localhost"])
    registry, queue = Registry(state), JobQueue(state)
    for number in range(20):
        name, identity = f"phone-{number}", bytes([number]) * 32
        subject = tls.Subject("client", name, identity, str(number), time.time() + 3600)
        registry.add_token(identity, name=name, kind="client", expires=time.time() + 3600)
        registry.redeem(
            identity, "client", identity, lambda name, subject=subject: (b"pem", subject)
        )
        entry = queue.submit(make_job(), "me", name)
        queue.mark(entry, "finished")
        audit.record(state, "submit", by="me", job=entry.id)
    registry.revoke("phone-3")
    for name in ("copied", "closed"):  # with and without write-ahead logs
        if name == "closed":
            registry.close()
            queue.close()
        shutil.copytree(state, tmp_path / name)
        files = list(files_of(tmp_path / name, "lock"))
        show(sweep(tmp_path / name, files, read_server, tmp_path / "damaged", 2 * TIMES))


def test_a_separate_authority_and_its_server_are_refused_or_unchanged(
    tmp_path: Path, make_job: Any
) -> None:
    state, hub = tmp_path / "authority", tmp_path / "hub"
    initialise(state, ["localhost"], "localhost:9400")
    authority = CertificateAuthority(state)
    key, identity = prepare(hub)
    request = tls.signing_request(key)
    with contextlib.closing(Registry(state)) as registry:
        for number in range(3):
            kind, name = ("client", f"phone-{number}") if number else (tls.SERVER, "hub")
            own = bytes([number]) * 32 if number else identity.public_key().public_bytes_raw()
            registry.add_token(own, name=name, kind=kind, expires=time.time() + 3600)
            _, certificate = registry.redeem(
                own,
                kind,
                own,
                lambda name, kind=kind, own=own: authority.issue(
                    request, kind=kind, name=name, identity=own
                ),
            )
            audit.record(state, "join", by=name, identity=own.hex())
            if kind == tls.SERVER:
                Membership.save(
                    hub,
                    server="localhost:9500",
                    authority=authority.certificate,
                    enroller=tls.enroller_of(authority.certificate),
                    key=key,
                    certificate=tls.read_certificate(certificate),
                )
        registry.revoke("phone-1")
    service = AuthorityService(state)
    (part,) = service.parts("")
    service.members.close()
    RegistryCopy(hub).replace(part)
    with contextlib.closing(JobQueue(hub)) as queue:
        queue.submit(make_job(), "me", "one")
    audit.record(hub, "submit", by="me", job="one")

    trust = sweep(state, list(files_of(state)), read_server, tmp_path / "damaged", TIMES)
    show(trust)
    own_files = list(files_of(hub, "lock"))
    server = sweep(hub, own_files, read_server_of_authority, tmp_path / "damaged", TIMES)
    show(server)
    for outcome in (trust["serves"], server["registry.copy"], server["registry.head"]):
        assert outcome.keys() <= {"refused", "same bytes"}


def test_a_lost_queue_never_gives_a_new_job_the_run_of_an_old_one(
    tmp_path: Path, make_job: Any
) -> None:
    queue = JobQueue(tmp_path)
    entry = queue.submit(make_job(), "me", "one")
    store = Store.create(tmp_path / "runs" / entry.id, entry.job, tmp_path, entry.run_id)
    assert store.run_id == entry.run_id
    store.close()
    queue.close()
    for path in tmp_path.glob("jobs.*"):
        path.unlink()
    with pytest.raises(UserError, match=r"jobs.sqlite is missing, but .*runs has the runs of jobs"):
        JobQueue(tmp_path)


def test_a_run_that_went_back_ends_with_the_same_model(
    cut_off: Path, folder: Path, start: Any, report_of: Any
) -> None:
    shutil.copytree(cut_off, folder / "whole", symlinks=True)
    record_place(folder / "whole")  # or it would be refused as a copy
    whole = start("--resume", "--run-dir", "whole")
    assert whole.finish() == 0, whole.output
    newest = cut_off / "checkpoints" / "model-000003.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1] + b"?")
    refused = start("--resume", "--run-dir", "cut-off")
    assert refused.finish() == 1
    assert "model-000003.safetensors is damaged: its digest differs" in refused.output
    assert "Traceback" not in refused.output
    result = CliRunner().invoke(runs, ["rollback", str(cut_off)], catch_exceptions=False)
    assert "the run continues after round 2" in result.output
    again = start("--resume", "--run-dir", "cut-off")
    assert again.finish() == 0, again.output
    models = [report_of(name)["final"]["model_sha256"] for name in ("whole", "cut-off")]
    assert models[0] == models[1]
