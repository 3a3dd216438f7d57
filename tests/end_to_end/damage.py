"""Seeded damage to files, and what is read from the directories of runs, devices and servers."""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from isthmus.errors import IsthmusError
from isthmus.identity.membership import Membership
from isthmus_clients.device.owner_limits import LimitsGuard, OwnerLimits
from isthmus_clients.training.history_files import begin_history
from isthmus_clients.training.history_log import HistoryLog
from isthmus_datacenter.checkpointing.digests import check_files
from isthmus_server.fleet.authority import CertificateAuthority
from isthmus_server.fleet.registry import Registry
from isthmus_server.fleet.remote_authority import RemoteMembers, check
from isthmus_server.read.report.explain import explain
from isthmus_server.read.report.report import read_report
from isthmus_server.runs.jobs.queue import JobQueue
from isthmus_server.storage import audit
from isthmus_server.storage.run_place import FILE as PLACE
from isthmus_server.storage.run_place import record_place
from isthmus_server.storage.store import Store


def damage(data: bytes, draw: random.Random) -> bytes:
    """The bytes of a file after one accident: flipped bits, a lost block, or a truncation."""
    if not data:
        return b"\0"
    at = draw.randrange(len(data))
    kind = draw.random()
    if kind < 0.5:
        return data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]
    if kind < 0.65:
        return data[:at] + bytes([draw.randrange(256)]) + data[at + 1 :]
    if kind < 0.75:  # a block that was never written
        begin = at - at % 512
        return data[:begin] + bytes(len(data[begin : begin + 512])) + data[begin + 512 :]
    return data[:at]


def sweep(
    original: Path, files: list[Path], read: Callable[[Path], Any], scratch: Path, times: int
) -> dict[str, Counter[str]]:
    """Damage each of the files `times` times; each time, `read` refuses, or reads the same.

    Returns how often each file's damage was refused, and how often it changed nothing.
    """
    expected, outcomes = _read_copy(original, scratch, read, None, b""), {}
    for file in files:
        name, data = str(file.relative_to(original)), file.read_bytes()
        draw, found = random.Random(name), Counter[str]()
        for number in range(times):
            changed = damage(data, draw)
            if changed == data:
                found["same bytes"] += 1
                continue
            try:
                got = _read_copy(original, scratch, read, file, changed)
            except IsthmusError as error:
                sentence = str(error)
                assert sentence, (name, number)
                assert "\n" not in sentence, (name, number, sentence)
                found["refused"] += 1
            else:
                assert got == expected, (name, number)
                found["nothing changed"] += 1
        outcomes[name] = found
    return outcomes


def _read_copy(
    original: Path, scratch: Path, read: Callable[[Path], Any], file: Path | None, changed: bytes
) -> Any:
    copy = scratch / original.name
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(original, copy, symlinks=True)
    if (copy / PLACE).exists():  # or it would be refused as a copy
        record_place(copy)
    if file is not None:
        (copy / file.relative_to(original)).write_bytes(changed)
    return read(copy)


def read_run(directory: Path) -> Any:
    """Everything that a resumed run, its reports and its ranks read from its directory."""
    with contextlib.closing(Store.open(directory, check=True)) as store:
        pages = [read_report(store).to_json(), explain(store, None).to_json()]
    with contextlib.suppress(IsthmusError), contextlib.closing(Store.open(directory)) as store:
        store.ended_since(0, 100)  # `isthmus logs` does not read everything before
    with contextlib.closing(Store.open_to_continue(directory)) as store:
        state = store.run_state()
        for saved in state.files:
            store.checkpoints.check(saved)
        attempts = [attempt.to_json() for attempt in store.logged_attempts()]
        about = (store.run_id, store.base, store.job.model_dump_json(), store.status())
        return json.dumps([pages, attempts], sort_keys=True), about, repr(state)


def read_checkpoint(directory: Path) -> None:
    """What ranks do before they load a checkpoint: its digests are those of the files."""
    check_files(directory)


def read_device(directory: Path) -> Any:
    """What a device reads from its state directory."""
    member = Membership(directory)
    guard = LimitsGuard(OwnerLimits(rounds_per_day=9), directory / "usage.json")
    pair = (member.key.private_numbers().private_value, member.certificate.serial_number)
    about = (member.name, member.kind, member.server, member.enroller, pair)
    history = HistoryLog(begin_history(member)).entries
    guard.check_work(10)
    usage = json.loads((directory / "usage.json").read_bytes())["rounds"]
    identity = member.identity.private_bytes_raw()
    return about, identity, member.authority.serial_number, usage, history


def read_server(directory: Path) -> Any:
    """What a server, or a separate authority, reads from its state directory when it starts."""
    authority = CertificateAuthority(directory)
    with contextlib.closing(Registry(directory)) as registry:
        members = [registry.participants(), registry.revoked_identities()]
    with contextlib.closing(JobQueue(directory)) as queue:
        jobs = queue.entries(100)
    seed = hashlib.sha256(authority._seed).digest()
    serial = authority.certificate.serial_number
    own = seed, serial, authority.serves, authority.server_pair()
    return own, members, jobs, audit.read(directory)


def read_server_of_authority(directory: Path) -> Any:
    """What a server with a separate authority reads from its state directory when it starts."""
    check(directory)
    members = RemoteMembers(directory)
    member, copy = members.membership, members.copy
    about = (member.name, member.kind, member.server, member.enroller)
    pairs = (members.server_pair(), member.identity.private_bytes_raw())
    serial = members.authority_certificate.serial_number
    entries = [(entry, copy.enrolment(entry.name)) for entry in copy.participants()]
    registry = (copy.copied, entries, copy.revoked_identities())
    with contextlib.closing(JobQueue(directory)) as queue:
        jobs = queue.entries(100)
    return about, pairs, serial, registry, jobs, audit.read(directory)


def files_of(directory: Path, *without: str) -> Iterator[Path]:
    """The files below a directory, except those with a name in `without`."""
    for path in sorted(directory.rglob("*")):
        if path.is_file() and not path.is_symlink() and path.name not in without:
            yield path
