"""Fetch task packages from the server, verify them and install them.

A package is fetched only if the owner trusts its author. Nothing of it is written before its
signature, digest and author are verified, and nothing in it is executed before a run uses it.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from isthmus.errors import AdmissionRefused
from isthmus.job import read_job
from isthmus.task import packages
from isthmus.transport.blobs import Buffer
from isthmus.wire import link_pb2
from isthmus_clients.device.owner_limits import LimitsGuard

log = logging.getLogger(__name__)


def should_fetch(work: link_pb2.OpenRun, tasks: Path | None, guard: LimitsGuard | None) -> bool:
    """Whether to fetch the package that a server offers with a run.

    A task that was installed by hand, or is of another author, is never replaced.

    Raises:
        AdmissionRefused: the owner does not allow it and has not installed the task either.
        JobError: the job cannot be read.
    """
    if tasks is None or guard is None:  # the server has started this device itself
        return False
    job = read_job(work.job)
    offer = work.package
    limits = guard.limits
    guard.check_job(job)
    name = packages.name_of(job)
    author = offer.author.hex()
    try:
        installed = packages.installed(tasks, name)
    except AdmissionRefused:  # the owner has changed it
        return False
    if installed is None and (tasks / name).exists():
        return False
    if installed is not None and (
        installed.digest == offer.digest or installed.author != offer.author
    ):
        return False
    if author not in limits.authors:
        if installed is not None:
            return False
        raise AdmissionRefused(
            f"its owner has not installed {name!r}, nor allowed packages of the author {author} "
            "(authors, in policy.toml)"
        )
    _check_digest(offer.digest, guard)
    if offer.blob.size > packages.MAX_BYTES:
        raise AdmissionRefused(
            f"a package of {offer.blob.size} bytes exceeds the limit of {packages.MAX_BYTES}"
        )
    guard.check_fetch(offer.blob.size)
    return True


def admit_job(
    work: link_pb2.OpenRun, data: Buffer | None, tasks: Path | None, guard: LimitsGuard | None
) -> None:
    """Check a job against the owner's limits before loading it; install a fetched package first.

    Raises:
        AdmissionRefused: its owner does not allow the job, or its task, or the received data is not
            a package, not the one that was offered, or older than one that this device has had; or
            the installed folder contains other files than its package.
        UserError: it cannot be installed.
        JobError: the job cannot be read.
    """
    if guard is None:
        return
    job = read_job(work.job)
    guard.check_job(job)
    guard.check_memory(job, work.memory)
    if tasks is None:
        return
    name = packages.name_of(job)
    if data is not None:
        _install(work.package, bytes(data), name, tasks, guard)
    package = packages.check_loadable(tasks, name)
    if package is not None:
        guard.versions.check(package)
    if guard.limits.digests:
        if package is None:
            raise AdmissionRefused(
                f"its owner allows tasks by their digests (digests, in policy.toml), and {name!r} "
                "was not installed from a package"
            )
        _check_digest(package.digest, guard)


def _install(
    offer: link_pb2.Package, data: bytes, name: str, tasks: Path, guard: LimitsGuard
) -> None:
    package = packages.read(data)
    if (package.name, package.digest, package.author) != (name, offer.digest, offer.author):
        raise AdmissionRefused(f"the package received for {name!r} is not the one that was offered")
    guard.versions.check(package)
    packages.install(package, tasks, [bytes.fromhex(key) for key in guard.limits.authors])
    log.info("fetched and installed %s of the author %s", name, package.author.hex())
    folder = (tasks / name).resolve()
    for module, loaded in list(sys.modules.items()):  # of a version that was loaded earlier
        if (path := getattr(loaded, "__file__", None)) and folder in Path(path).parents:
            del sys.modules[module]


def _check_digest(digest: bytes, guard: LimitsGuard) -> None:
    allowed = guard.limits.digests
    if allowed and digest.hex() not in allowed:
        raise AdmissionRefused(f"its owner does not allow the task of digest {digest.hex()}")
