"""Gets the files that a job's model starts from, before its run is opened, and keeps them.

They are named by the job's digest. In this order a device takes them from its store, where its
owner keeps models, and from sources (`isthmus_clients.device.weights.sources`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

from isthmus.errors import AdmissionRefused, IsthmusError, JobError, TaskError, UserError
from isthmus.job import Job, read_job
from isthmus.printable import counted, in_a_line
from isthmus.start.files import ADAPTER_CONFIG
from isthmus.start.manifest import ListedFile, StartManifest, StartPlace
from isthmus.start.safetensors_file import SafetensorsFile
from isthmus.transport.blob_sources import SILENT_SECONDS, NamedSource
from isthmus.transport.requests import manifest_of
from isthmus.transport.worker import ReportProgress
from isthmus.wire import link_pb2
from isthmus_clients.device.owner_limits import LimitsGuard
from isthmus_clients.device.weights.sources import (
    LinkSource,
    Pull,
    WeightSource,
    check_sources,
    sources_of,
)
from isthmus_clients.device.weights.store import (
    PartialFile,
    StoreUnusable,
    WeightStore,
    hash_of,
)

log = logging.getLogger(__name__)

_GRANTED_BYTES = 4 << 20
"""Bytes between two looks at the owner's hours and limits."""
_READ_BYTES = 256 << 10
_LEAST_BYTES = 64 << 10
"""A source that gives less in `SILENT_SECONDS` is left."""
_PAUSES = (0.0, 1.0, 4.0)
"""Seconds before the sources are asked, each time."""
_TRIES = 3
"""Times that a source is opened without giving anything in between."""
_MAX_FOUND = 20_000
"""Files in the owner's folders that are looked at."""
_MAX_DEPTH = 6
_MAX_LISTS = 64
"""Lists of files in memory, of which the one that was asked for longest ago goes first."""
_LISTED_BYTES = 200
"""Bytes of a file in a list on disk, without its name."""


class _Stopped(IsthmusError):
    """Nobody waits for the files any more."""


class _TooSlow(OSError):
    """A source gave too little, and is left."""


class _Flow:
    """How much a source has given since it gave as much as it must."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begin again, after a pause that is not the source's."""
        self._moved_at = time.monotonic()
        self._moved = 0

    def add(self, count: int) -> None:
        """Note bytes that were received.

        Raises:
            _TooSlow: they are too few for the time.
        """
        self._moved += count
        if self._moved >= _LEAST_BYTES:
            self.restart()
        elif time.monotonic() - self._moved_at > SILENT_SECONDS:
            raise _TooSlow(f"it gave too little for {SILENT_SECONDS:g} s")


class WeightKeeper:
    """The models of a device.

    Guarantees:
      * nothing is fetched beyond the owner's limits, outside of the owner's hours, or from where
        the owner does not allow;
      * what was fetched before the process ended is not fetched again;
      * a file counts only with the SHA-256 that the job's digest implies, from wherever it came.
    """

    def __init__(
        self,
        store: WeightStore,
        guard: LimitsGuard,
        tasks: Path,
        *,
        hours: Sequence[str] = (),
        blobs: Sequence[NamedSource] = (),
        look_seconds: float = 30.0,
    ) -> None:
        """Prepare.

        Args:
            store: of this device, perhaps shared with others of this machine.
            guard: the owner's limits.
            tasks: the directory of tasks, where a start may be, too.
            hours: in which it fetches; empty for the owner's.
            blobs: sources that the owner has named for this process.
            look_seconds: between two looks at what it waits for.

        Raises:
            UserError: the owner's sources cannot be used.
        """
        check_sources(guard.limits.weights)
        self.store = store
        self._guard = guard
        self._tasks = tasks
        self._hours = hours
        self._blobs = blobs
        self._look_seconds = look_seconds
        self._link: LinkSource | None = None
        self.paid_until = 0.0
        """When, by the owner's rate, all that was received may be here (monotonic); for what holds
        `one`. A request that is cancelled and comes again gets no new allowance."""
        self._stops: dict[str, threading.Event] = {}
        """Events that stop the requests that are being worked on, by the id of the request."""
        self._one = threading.Lock()
        """Held while something is fetched: one file at a time, within one limit on the rate."""
        self._manifests: dict[str, StartManifest] = {}
        self._hashes: dict[tuple[object, ...], str] = {}
        """SHA-256 of the owner's files, by path and state."""

    def connect(self, pull: Pull) -> None:
        """Use the link; called on its loop."""
        self._link = LinkSource(pull, asyncio.get_running_loop())

    async def prepare(
        self, request_id: str, work: link_pb2.Prepare, progress: ReportProgress
    ) -> None:
        """Have the files of a job's model here; returns when they are.

        Raises:
            AdmissionRefused: the owner does not allow it.
            UserError: the list is not of the job's model, no source has a file, or there is no
                room.
        """
        job = read_job(work.job)
        self._guard.check_job(job)
        self._guard.check_memory(job, work.memory)
        manifest = checked_list(work, job)
        stop = threading.Event()
        self._stops[request_id] = stop
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        fetching = _Fetching(self, job, manifest, stop, progress)

        def end(error: Exception | None) -> None:
            if done.done():
                return
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

        def run() -> None:
            error: Exception | None = None
            try:
                fetching.run()
            except StoreUnusable as raised:
                log.warning("%s", raised)
                error = UserError(raised.public)
            except Exception as raised:  # noqa: BLE001 - it is raised where it is awaited
                error = raised
            if not loop.is_closed():
                loop.call_soon_threadsafe(end, error)

        # A thread of its own, which a source that hangs cannot keep the process from ending with.
        threading.Thread(target=run, name=f"weights of {job.name}", daemon=True).start()
        try:
            await done
        finally:
            stop.set()
            self._stops.pop(request_id, None)

    def cancel(self, request_id: str) -> None:
        """Stop what is fetched for a request; what is here of it stays."""
        if (stop := self._stops.get(request_id)) is not None:
            stop.set()

    def place(self, job: Job) -> StartPlace | None:
        """Where a task finds the files of a job's model; None if they are only in its directory.

        Raises:
            TaskError: they are not here, or not any more.
        """
        digest = job.model.sha256
        if job.model.start is None or digest is None:
            return None
        manifest = self._manifests.get(digest)
        if manifest is None:
            known = self.store.model(digest)
            if known is None:
                return None
            manifest = known.manifest
        try:
            places, missing = self.found(manifest, job)
        except StoreUnusable as error:
            log.warning("%s", error)
            raise TaskError(error.public) from None
        if missing:
            raise TaskError(
                f"{missing[0].name} of the model that {job.name!r} starts from is not here; start "
                "this device again, so that it gets it, or add it with `isthmus weights add`"
            )
        try:
            return self.store.view(manifest, places, job.task.settings.get("start_config"))
        except UserError as error:  # with a path of this device, which the server is not told
            log.warning("the model that %s starts from: %s", job.name, error)
            raise TaskError(
                f"the files of the model that {job.name!r} starts from cannot be used on this "
                "device; see its log"
            ) from None

    def found(self, manifest: StartManifest, job: Job) -> tuple[dict[str, Path], list[ListedFile]]:
        """Where files of a model are on this device by SHA-256, and those that are not."""
        places = {
            file.sha256: self.store.path(file.sha256)
            for file in manifest.files
            if self.store.has(file) and not self.store.damage(file.sha256)
        }
        wanted = {file.sha256: file.size for file in manifest.files if file.sha256 not in places}
        if wanted:
            for path in self._owners_files(job, set(wanted.values())):
                if (sha256 := self._hash(path)) in wanted:
                    places.setdefault(sha256, path)
                    if wanted.keys() <= places.keys():
                        break
        return places, [file for file in manifest.files if file.sha256 not in places]

    def note(self, manifest: StartManifest, job: Job) -> None:
        """Remember which files the model of a job has."""
        self._manifests.pop(manifest.digest, None)
        self._manifests[manifest.digest] = manifest
        if len(self._manifests) > _MAX_LISTS:
            del self._manifests[next(iter(self._manifests))]
        assert job.model.start is not None
        if self.has_room(manifest):
            self.store.keep(manifest, job.model.start)

    def has_room(self, manifest: StartManifest, more: int = 0) -> bool:
        """Whether the owner's limit has room for a list, and for more bytes of files."""
        listed = _LISTED_BYTES * len(manifest.files)
        listed += sum(len(file.name.encode()) for file in manifest.files)
        used = self.store.used_bytes + self.store.noted_bytes
        return used + listed + more <= self._guard.limits.weights_mb * 1_000_000

    def _owners_files(self, job: Job, sizes: set[int]) -> Iterator[Path]:
        """Files of certain sizes where the owner keeps models: the content decides, no name."""
        places = [path.expanduser() for path in self._guard.limits.weights.folders]
        if job.model.start is not None:
            try:
                job.model.check_inside()
            except JobError:
                pass
            else:
                places += [self._tasks / each for each in (job.model.start, job.model.base) if each]
        looked = 0
        for place in places:
            for path in _files_below(place):
                looked += 1
                if looked > _MAX_FOUND:
                    log.warning(
                        "%s has too many files; name the folder of the model in [weights] folders",
                        place,
                    )
                    return
                if _is_of_a_model(path, sizes):
                    yield path

    def _hash(self, path: Path) -> str:
        """The SHA-256 of a file; empty if it cannot be read."""
        try:
            found = path.stat()
            key = (path, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
            if key not in self._hashes:
                self._hashes[key] = hash_of(path)
            return self._hashes[key]
        except OSError as error:
            log.warning("%s cannot be read: %s", path, error.strerror)
            return ""

    # What a fetching needs.

    @property
    def guard(self) -> LimitsGuard:
        """The owner's limits."""
        return self._guard

    @property
    def one(self) -> threading.Lock:
        """Held while something is fetched."""
        return self._one

    @property
    def look_seconds(self) -> float:
        """Seconds between two looks at what it waits for."""
        return self._look_seconds

    def check_now(self, size: int) -> None:
        """Refuse to receive bytes now, or count them.

        Raises:
            AdmissionRefused: the owner does not allow it at this time.
        """
        self._guard.check_weights(size, self._hours)

    def sources(
        self, job: Job, manifest: StartManifest, skipped: Callable[[int], None]
    ) -> list[WeightSource]:
        """Where to ask, in this order."""
        limits = self._guard.limits.weights
        return list(sources_of(limits, job, manifest, self._blobs, self._link, skipped))


def checked_list(work: link_pb2.Prepare, job: Job) -> StartManifest:
    """The list of a request, which has the digest that the job names.

    Raises:
        UserError: it is of another model.
    """
    manifest = manifest_of(work.files)
    if job.model.start is None or manifest.digest != job.model.sha256:
        raise UserError(
            f"the server offers files with the digest {manifest.digest}, and {job.name!r} starts "
            f"from {job.model.start or 'no files'} with the digest {job.model.sha256}"
        )
    return manifest


class _Fetching:
    """One request, on a thread of its own."""

    def __init__(
        self,
        keeper: WeightKeeper,
        job: Job,
        manifest: StartManifest,
        stop: threading.Event,
        progress: ReportProgress,
    ) -> None:
        self._keeper = keeper
        self._store = keeper.store
        self._job = job
        self._manifest = manifest
        self._stop = stop
        self._progress = progress
        self._here = 0
        """Bytes of the files that are whole."""
        self._pause = ""
        self._granted = 0
        """Bytes that may still be received before the owner's limits are asked."""
        self._is_counted = False
        """Whether these bytes are of the network, and were counted."""
        self._asked_at = 0.0
        """When the owner's limits were asked (monotonic)."""
        self._reading: tuple[WeightSource, ListedFile, PartialFile] | None = None
        self._flow = _Flow()
        self._logged = -1
        self._whys: dict[str, str] = {}
        """Why a source did not give a file, by its name for the server."""
        self._damaged = ""
        """Which of the store's files are damaged and have to come again."""
        self._freed = 0
        """Bytes of the damaged files, which are deleted before others come in their place."""

    def run(self) -> None:
        """Have all files here."""
        try:
            self._run()
        except (AdmissionRefused, UserError) as error:
            if self._damaged and not isinstance(error, StoreUnusable):
                error.args = (f"{self._damaged}; {error}",)
            raise

    def _run(self) -> None:
        _, missing = self._keeper.found(self._manifest, self._job)
        if not missing:
            self._keeper.note(self._manifest, self._job)
            return
        missing = list({file.sha256: file for file in missing}.values())
        self._here = self._manifest.size - sum(file.size for file in missing)
        self._note_damage(missing)
        self._check_room(missing)
        self._keeper.note(self._manifest, self._job)
        for file in missing:
            self._fetch(file)
            self._here += file.size
        self._keeper.note(self._manifest, self._job)  # it may have been removed meanwhile
        log.info("the model that %s starts from is here", self._job.name)

    def _note_damage(self, missing: Sequence[ListedFile]) -> None:
        """Say which of the missing files are damaged; the server is told their names alone."""
        names = []
        for file in missing:
            if why := self._store.damage(file.sha256):
                names.append(file.name)
                place = self._store.path(file.sha256)
                log.warning("%s in the store, %s, is damaged: %s", file.name, place, why)
                with contextlib.suppress(FileNotFoundError):  # another device has replaced it
                    self._freed += place.lstat().st_size
        if names:
            others = len(names) - 1
            which = f" and {counted(others, 'more file')} were" if others else " was"
            self._damaged = f"{names[0]}{which} damaged in its store"

    def _check_room(self, missing: Sequence[ListedFile]) -> None:
        """Refuse what the owner's limit or the disk has no room for, before anything is fetched."""
        needed = sum(file.size - self._store.begun(file) for file in missing) - self._freed
        limit = self._keeper.guard.limits.weights_mb * 1_000_000
        model = f"the model that {self._job.name!r} starts from"
        if not limit:
            raise AdmissionRefused(
                f"its owner lets it fetch no models (weights_mb in policy.toml), and {model}, of "
                f"{_mb(self._manifest.size)}, is not here; its owner can add it with `isthmus "
                "weights add`"
            )
        used = self._store.used_bytes + self._store.noted_bytes
        if not self._keeper.has_room(self._manifest, needed):
            raise AdmissionRefused(
                f"{model} lacks {_mb(needed)} here, and of the {_mb(limit)} that its owner gives "
                f"to models (weights_mb in policy.toml) {_mb(used)} are used"
            )
        if (free := self._store.free_bytes) < needed:
            raise UserError(
                f"{model} lacks {_mb(needed)} here, and its disk has {_mb(free)} left for it"
            )

    def _fetch(self, file: ListedFile) -> None:
        while not self._store.has(file):
            with self._store.filling(file) as partial:
                if partial is not None:
                    with self._turn(file):
                        self._fill(file, partial)
                    return
            self._wait(min(1.0, self._keeper.look_seconds), file)  # another process fetches it

    @contextlib.contextmanager
    def _turn(self, file: ListedFile) -> Iterator[None]:
        """Wait until nothing else is fetched by this process."""
        while not self._keeper.one.acquire(blocking=False):
            self._wait(min(1.0, self._keeper.look_seconds), file, "another model is fetched first")
        try:
            yield
        finally:
            self._keeper.one.release()

    def _fill(self, file: ListedFile, partial: PartialFile) -> None:
        """Fill a file from the sources: go on where it is, and begin again if that was wrong."""
        liars: set[str] = set()
        if not partial.missing and partial.finish():  # it ended just before that
            return
        alone = False
        """Whether a source has to give all of it."""
        for pause in _PAUSES:
            if pause:
                self._wait(min(pause, self._keeper.look_seconds), file, self._reasons())
            for source in self._keeper.sources(self._job, self._manifest, self._skipped):
                if source.named in liars:
                    continue
                if alone:
                    partial.restart()
                of_others = partial.offset > 0
                why = self._read(source, file, partial)
                if not partial.missing:
                    if partial.finish():
                        log.info("%s: %s, %d bytes", source.named, file.name, file.size)
                        return
                    why = "its bytes are others than the model's"
                    if of_others:  # of what several have given, nobody knows who was wrong
                        alone = True
                    else:
                        liars.add(source.named)
                log.warning("%s: %s: %s", source.named, file.name, why)
                self._whys[source.public] = source.told(why)
        raise UserError(
            f"{file.name} of the model that {self._job.name!r} starts from has no source: "
            f"{self._reasons() or 'its owner allows none'}"
        )

    def _reasons(self) -> str:
        return "; ".join(f"{source}: {why}" for source, why in self._whys.items())

    def _read(self, source: WeightSource, file: ListedFile, partial: PartialFile) -> str:
        """Read from a source as long as it gives something; returns why there is no more."""
        tries = _TRIES
        why = ""
        while tries:
            start = partial.offset
            self._reading = source, file, partial
            try:
                self._await_permission(source, file, partial)
                self._flow.restart()
                stream = source.source.open(file.sha256, file.size, start)
                if stream is None:
                    return "it does not have the file"
                with stream:
                    self._copy(source, file, partial, stream)
                if not partial.missing:
                    return ""
                why = f"it ends at {partial.offset} of {file.size} bytes"
            except (_Stopped, UserError):
                raise
            except _TooSlow as error:
                return str(error)
            except ConnectionError as error:
                why = in_a_line(str(error))
                if source.is_link:  # the server asks again, or has this request cancelled
                    self._wait(min(1.0, self._keeper.look_seconds), file, why)
                    continue
            except Exception as error:  # noqa: BLE001 - a package may raise anything
                why = in_a_line(str(error) or type(error).__name__)
            # One that gives a byte for each connection is left, too.
            tries = _TRIES if partial.offset - start >= _LEAST_BYTES else tries - 1
            if tries:
                self._wait(min(0.5, self._keeper.look_seconds), file)
        return why

    def _copy(
        self, source: WeightSource, file: ListedFile, partial: PartialFile, stream: IO[bytes]
    ) -> None:
        read: Callable[[int], bytes] = getattr(stream, "read1", stream.read)
        self._flow.restart()
        while partial.missing:
            if self._await_permission(source, file, partial):
                self._flow.restart()
            wanted = min(_READ_BYTES, partial.missing, self._granted)
            data = read(wanted)
            if not data:
                return
            if len(data) > wanted:
                raise OSError(f"it gave {len(data)} bytes where {wanted} were wanted")
            # Not before: what no source has stays in the store, and is named there as damaged.
            self._store.drop(file.sha256)
            partial.write(data)
            self._report(file, partial.offset)
            self._received(source, len(data))

    def _received(self, source: WeightSource, count: int) -> None:
        self._granted -= count
        self._flow.add(count)
        if source.is_network and self._pace(count):
            self._flow.restart()

    def _skipped(self, count: int) -> None:
        """Count what a source gives before the byte that is wanted, as it does with the rest."""
        assert self._reading is not None
        self._received(self._reading[0], count)
        if self._await_permission(*self._reading):
            self._flow.restart()

    def _await_permission(
        self, source: WeightSource, file: ListedFile, partial: PartialFile
    ) -> bool:
        """Wait for the owner's hours and limits; whether it had to."""
        if self._stop.is_set():
            raise _Stopped("nobody waits for the files any more")
        # What an earlier request has received is paid before anything more is.
        waited = source.is_network and self._pace(0)
        if source.is_network and not self._is_counted:
            self._granted = 0
        while (
            self._granted <= 0
            # At a low rate, what is granted may last longer than the owner's hours.
            or time.monotonic() - self._asked_at > self._keeper.look_seconds
        ):
            size = 0 if self._granted > 0 else min(_GRANTED_BYTES, partial.missing)
            try:
                self._keeper.check_now(size if source.is_network else 0)
                self._granted += size
                self._is_counted = source.is_network
                self._asked_at = time.monotonic()
            except AdmissionRefused as refused:
                waited = True
                self._wait(self._keeper.look_seconds, file, str(refused), partial.offset)
        return waited

    def _pace(self, count: int) -> bool:
        """Wait as the owner's limit on the rate says; whether it had to for long."""
        rate = self._keeper.guard.limits.weights.kb_per_second
        if rate is None:
            return False
        now = time.monotonic()
        self._keeper.paid_until = max(self._keeper.paid_until, now) + count / (1000 * rate)
        ahead = self._keeper.paid_until - now
        if ahead > 0.05 and self._stop.wait(ahead):
            raise _Stopped("nobody waits for the files any more")
        return ahead > 1

    def _wait(
        self, seconds: float, file: ListedFile, why: str = "", offset: int | None = None
    ) -> None:
        self._report(file, self._store.begun(file) if offset is None else offset, why)
        if self._stop.wait(seconds):
            raise _Stopped("nobody waits for the files any more")

    def _report(self, file: ListedFile, offset: int, why: str = "") -> None:
        """Tell the server how far it is, and the owner at each tenth."""
        size = self._manifest.size
        done = self._here + offset
        said = why or (self._damaged and f"{self._damaged}, fetched anew")
        self._progress(link_pb2.Progress(fetched=link_pb2.Fetched(bytes=done, of=size, pause=said)))
        if why and why != self._pause:
            log.info("downloading the model of %s waits: %s", self._job.name, why)
        self._pause = why
        if (tenth := 10 * done // size) != self._logged:
            self._logged = tenth
            log.info("downloading the model of %s, %d %%", self._job.name, 100 * done // size)


def _is_of_a_model(path: Path, sizes: set[int]) -> bool:
    """Whether a file has one of some sizes and can be of a model.

    A server learns whether a file of its SHA-256 is here, so that it is not to ask about others:
    from the digest of a password one can find the password.
    """
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode) or found.st_size not in sizes:
            return False
        if path.name == ADAPTER_CONFIG:
            return True
        SafetensorsFile.open(path)
    except (OSError, UserError):
        return False
    return True


def _files_below(place: Path) -> Iterator[Path]:
    """The files of a folder, not deeper than a cache of models is; or one file."""
    if place.is_file():
        yield place
        return
    depth = len(place.parts)
    # Links are followed, as in such caches, to files and not to folders.
    for folder, folders, files in os.walk(place):
        folders.sort()
        if len(Path(folder).parts) - depth >= _MAX_DEPTH:
            folders.clear()
        for name in sorted(files):
            yield Path(folder, name)


def _mb(count: int) -> str:
    return f"{count / 1e6:.3g} MB" if count < 1e9 else f"{count / 1e6:.0f} MB"
