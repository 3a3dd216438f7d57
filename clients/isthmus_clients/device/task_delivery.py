"""Tasks that a server hands on: fetched if the owner trusts their author, checked, then installed.

Nothing of a package is written before its signature, its digest and its author are what the owner
allows, and nothing in it is executed before a run is opened with it.
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
from isthmus_clients.device.owner_limits import Guard

log = logging.getLogger(__name__)


def wanted(work: link_pb2.OpenRun, tasks: Path | None, guard: Guard | None) -> bool:
    """Whether to fetch the package that a server offers with a run.

    What was installed by hand is the owner's and stays; so does what is by another author.

    Raises:
        AdmissionRefused: its owner does not allow it, and has not installed the task either.
        JobError: the job cannot be read.
    """
    if tasks is None or guard is None:  # this server has started this device
        return False
    job, offer, policy = read_job(work.job), work.package, guard.policy
    guard.check_job(job)
    name, author = packages.name_of(job), offer.author.hex()
    try:
        here = packages.installed(tasks, name)
    except AdmissionRefused:  # the owner has changed it, and made it theirs
        return False
    if here is None and (tasks / name).exists():
        return False
    if here is not None and (here.digest == offer.digest or here.author != offer.author):
        return False
    if author not in policy.authors:
        if here is not None:
            return False
        raise AdmissionRefused(
            f"its owner has not installed {name!r}, nor allowed packages of the author {author} "
            "(authors, in policy.toml)"
        )
    _check_digest(offer.digest, guard)
    if offer.blob.size > packages.MAX_BYTES:
        raise AdmissionRefused(f"a package of {offer.blob.size} bytes is larger than any")
    guard.check_fetch(offer.blob.size)
    return True


def admit(
    work: link_pb2.OpenRun, data: Buffer | None, tasks: Path | None, guard: Guard | None
) -> None:
    """Ask the owner's policy before anything of a job is loaded; install first what was fetched.

    Raises:
        AdmissionRefused: its owner does not allow the job, or its task, or what came is no package,
            or not the one that was offered.
        UserError: it cannot be installed.
        JobError: the job cannot be read.
    """
    if guard is None:
        return
    job = read_job(work.job)
    guard.check_job(job)
    if tasks is None:
        return
    name = packages.name_of(job)
    if data is not None:
        _install(work.package, bytes(data), name, tasks, guard)
    if guard.policy.digests:
        package = packages.installed(tasks, name)
        if package is None:
            raise AdmissionRefused(
                f"its owner allows tasks by their digests (digests, in policy.toml), and {name!r} "
                "was not installed from a package"
            )
        _check_digest(package.digest, guard)


def _install(offer: link_pb2.Package, data: bytes, name: str, tasks: Path, guard: Guard) -> None:
    package = packages.read(data)
    if (package.name, package.digest, package.author) != (name, offer.digest, offer.author):
        raise AdmissionRefused(
            f"the package that came for {name!r} is not the one that was offered"
        )
    packages.install(package, tasks, [bytes.fromhex(key) for key in guard.policy.authors])
    log.info("fetched and installed %s of the author %s", name, package.author.hex())
    folder = (tasks / name).resolve()
    for module, loaded in list(sys.modules.items()):  # of a version that was loaded before
        if (path := getattr(loaded, "__file__", None)) and folder in Path(path).parents:
            del sys.modules[module]


def _check_digest(digest: bytes, guard: Guard) -> None:
    allowed = guard.policy.digests
    if allowed and digest.hex() not in allowed:
        raise AdmissionRefused(f"its owner does not allow the task of digest {digest.hex()}")
