"""A device's store of the files that models start from.

    DIR/files/SHA256      whole files, which were verified, readable by their owner only
    DIR/partial/SHA256    files that are being fetched; a lock says whether a process is at it
    DIR/models/DIGEST     which files a model has, as JSON
    DIR/views/DIGEST-KEY  folders with links to the files, as tasks open them: see `view`

Several devices of one machine may share a store.

>>> import tempfile
>>> WeightStore(Path(tempfile.mkdtemp(), "weights")).models()
[]
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from isthmus.errors import DamagedError, UserError
from isthmus.start.files import CONFIG, INDEX, WEIGHTS, StartFiles
from isthmus.start.manifest import ADAPTER, ListedFile, StartManifest, StartPlace
from isthmus.start.safetensors_file import SafetensorsFile
from isthmus.system.private_files import sync_directory, write_private_file
from isthmus.system.sealed_files import read_sealed_bytes, write_sealed_bytes

DIRECTORY = "weights"
"""Name of a device's own store, in its state directory."""
_MAX_VIEWS = 64
"""Folders in `views`, of which that goes first which was used longest ago."""
PIECE_BYTES = 4 << 20
"""Bytes that are read, hashed or written at a time."""
_MODE = 0o400
"""Permissions of a whole file."""
_DIGEST = re.compile(r"[0-9a-f]{64}")
"""The name of a list or of a file."""
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN)
"""Errors of a process or a machine that lacks something, which say nothing of a file."""


class StoreUnusable(UserError):
    """The store cannot be written to; the sentence names its directory."""

    public = "the store of models cannot be written to; see this device's log"
    """What the server is told instead."""


class DiskFull(StoreUnusable):
    """The disk of the store has no room."""

    public = "the disk of the store of models is full"


class NotReadNow(StoreUnusable):
    """The store cannot be read now, which says nothing of what is in it."""

    public = "the store of models cannot be read now; see this device's log"
    """What the server is told instead."""


@dataclasses.dataclass(frozen=True)
class KeptModel:
    """A model in the store."""

    manifest: StartManifest
    added: bool
    """Whether the owner has added it; else it was fetched for a job."""
    name: str
    """The path that was added, or the job's `model.start`."""
    is_whole: bool
    """Whether all of its files are in the store."""
    damaged: tuple[str, ...] = ()
    """Names of files that are there, and cannot be used: see `WeightStore.damage`."""


class WeightStore:
    """Files by their SHA-256.

    Guarantees:
      * a file is in `files` only if it was whole and verified, and is then never changed. What the
        disk or somebody else has changed of it is found by `damage`, before it is used;
      * what was written before a crash is kept, and nothing that is half written counts;
      * one process at a time fetches a file; the others wait for it.
    """

    def __init__(self, directory: Path) -> None:
        """Name the directory; it is made when something is put into it."""
        directory = directory.absolute()  # a task opens the files from another directory
        self.directory = directory
        self.files = directory / "files"
        self.partial = directory / "partial"
        self._models = directory / "models"
        self._views = directory / "views"
        self._seen: dict[str, tuple[tuple[int, ...], str]] = {}
        """State of files when they were read, and what `damage` has said of them, by SHA-256."""
        self._reading: dict[str, threading.Lock] = collections.defaultdict(threading.Lock)
        """Held while a file is read, so that several jobs do not read it at the same time."""

    # -- files -------------------------------------------------------------------------------------

    def path(self, sha256: str) -> Path:
        """Where a file is, if it is here."""
        return self.files / sha256

    def has(self, file: ListedFile) -> bool:
        """Whether a file is here; what changed in it counts if its size tells, or `damage` did."""
        try:
            found = self.path(file.sha256).lstat()
        except OSError:
            return False
        state, why = self._seen.get(file.sha256, ((), ""))
        if why and state == _state(found):
            return False
        return stat.S_ISREG(found.st_mode) and found.st_size == file.size

    def damage(self, sha256: str) -> str:
        """Why a file that is here cannot be used; empty if it can, and if there is none.

        All of it is read, once for each state of the file. Permissions that a file of this user
        should not have are corrected.

        Raises:
            NotReadNow: the machine has no room for one more open file, or no memory.
        """
        with self._reading[sha256]:
            return self._damage(sha256)

    def _damage(self, sha256: str) -> str:
        path = self.path(sha256)
        try:
            found = path.lstat()
        except OSError:
            return ""
        if not stat.S_ISREG(found.st_mode):
            what = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "no file"
            why = f"it is {what}"
        else:
            if stat.S_IMODE(found.st_mode) != _MODE and found.st_uid == os.getuid():
                with contextlib.suppress(OSError):
                    path.chmod(_MODE)
                    found = path.lstat()
            state, why = self._seen.get(sha256, ((), ""))
            if state == _state(found):
                return why
            try:
                is_same = hash_of(path) == sha256
                why = "" if is_same else "its bytes have changed since they were verified"
            except OSError as error:
                if error.errno in _SHORTAGES:
                    raise NotReadNow(f"{path} cannot be read now: {error.strerror}") from None
                why = f"it cannot be read: {error.strerror or error}"
        self._seen[sha256] = _state(found), why
        return why

    def drop(self, sha256: str) -> None:
        """Delete a file that is damaged; called when the first bytes of its successor are there.

        Raises:
            UserError: it cannot be deleted.
        """
        if self.damage(sha256):
            with _told(self.directory):
                self.path(sha256).unlink(missing_ok=True)

    def begun(self, file: ListedFile) -> int:
        """Bytes that were fetched of a file; all of them if it is here."""
        if self.has(file):
            return file.size
        try:
            return min(file.size, (self.partial / file.sha256).stat().st_size)
        except OSError:
            return 0

    @property
    def used_bytes(self) -> int:
        """Bytes of all files, those included that are being fetched.

        Raises:
            StoreUnusable: it cannot be read.
        """
        total = 0
        for folder in (self.files, self.partial):
            with _told(self.directory), contextlib.suppress(FileNotFoundError):
                for entry in os.scandir(folder):
                    with contextlib.suppress(FileNotFoundError):  # it was finished meanwhile
                        total += entry.stat(follow_symlinks=False).st_size
        return total

    @property
    def noted_bytes(self) -> int:
        """Bytes of the lists of files.

        Raises:
            StoreUnusable: it cannot be read.
        """
        with _told(self.directory), contextlib.suppress(FileNotFoundError):
            return sum(entry.stat().st_size for entry in os.scandir(self._models))
        return 0

    @property
    def free_bytes(self) -> int:
        """Free space of its disk for this user."""
        self._make()
        return shutil.disk_usage(self.directory).free

    @contextlib.contextmanager
    def filling(self, file: ListedFile, *, wait: bool = False) -> Iterator[PartialFile | None]:
        """Fill a file; None while another process is at it, or if it is here.

        Args:
            file: to be filled.
            wait: until no other process is at it.

        Raises:
            DiskFull: there is no room.
            UserError: the store cannot be written to.
        """
        self._make()
        path = self.partial / file.sha256
        with _told(self.directory):
            handle = _opened(path)
        with os.fdopen(handle, "r+b", buffering=0) as opened:
            if self.has(file) or not _locked(opened, wait=wait) or not _is_same(opened, path):
                yield None
                return
            yield PartialFile(self, file, opened)

    # -- models ------------------------------------------------------------------------------------

    def add(self, path: Path, base: Path | None = None) -> KeptModel:
        """Copy the files of a model into the store; those that are here already are not copied.

        Those that are damaged are replaced.

        Args:
            path: a safetensors file, a folder with some, or one with an adapter of PEFT.
            base: of the model under the adapter.

        Raises:
            UserError: they cannot be used, they change meanwhile, or there is no room.
        """
        found = StartFiles.find_all(path, base)
        manifest = StartManifest.of(found)
        folders = [each.path if each.path.is_dir() else each.path.parent for each in found]
        parts = tuple(dict.fromkeys(file.part for file in manifest.files))
        self.keep(manifest, str(path), added=True)  # so that what an interruption leaves has a name
        for file in manifest.files:
            source = folders[parts.index(file.part)] / file.name
            self.damage(file.sha256)
            while not self.has(file):
                with self.filling(file, wait=True) as partial:
                    if partial is None:  # another process has copied it, or has given up
                        continue
                    partial.restart()
                    for piece in _pieces(source):
                        partial.write(piece)
                    if not partial.finish():
                        raise UserError(f"{source} has changed while it was copied; add it again")
        return KeptModel(manifest, True, str(path), True)

    def keep(self, manifest: StartManifest, name: str, *, added: bool = False) -> None:
        """Note which files a model has; those of the owner stay the owner's.

        Raises:
            DiskFull: there is no room.
            UserError: the store cannot be written to.
        """
        self._make()
        known = self._read(self._models / manifest.digest)
        if known is not None and known.is_whole and not added:
            return  # the digest is of no sizes, which a server could have made up
        values = {
            "added": added or (known is not None and known.added),
            "name": name if known is None or added else known.name,
            "files": [dataclasses.asdict(file) for file in manifest.files],
        }
        with _told(self.directory):
            write_sealed_bytes(self._models / manifest.digest, json.dumps(values).encode())

    def model(self, digest: str) -> KeptModel | None:
        """A model that is known here, whether or not it is whole."""
        return self._read(self._models / digest)

    def models(self) -> list[KeptModel]:
        """All models that are known here, by digest.

        Raises:
            StoreUnusable: it cannot be read.
        """
        return [model for model in self._lists().values() if model is not None]

    def unknown(self) -> list[str]:
        """The digests of models whose list of files is damaged, or cannot be read.

        Raises:
            StoreUnusable: it cannot be read.
        """
        return [digest for digest, model in self._lists().items() if model is None]

    def _lists(self) -> dict[str, KeptModel | None]:
        """All models by digest; None for one whose list cannot be read."""
        names: list[str] = []
        with _told(self.directory), contextlib.suppress(FileNotFoundError):
            names = sorted(entry.name for entry in os.scandir(self._models))
        return {name: self._read(self._models / name) for name in names if _DIGEST.fullmatch(name)}

    def remove(self, digest: str) -> int:
        """Forget a model, and delete the files that no other one has; returns the bytes freed.

        Of a model whose list of files is damaged, those are deleted that no list has. A process
        that has the files open keeps them.

        Raises:
            UserError: there is no such model, several begin so, a process fills a file of it, or
                it is not known which files another one has.
        """
        if not digest:  # as of a variable of a shell that is not set; all digests begin so
            raise UserError("name a model by the first digits that `isthmus weights list` prints")
        lists = self._lists()
        found = [each for each in lists if each.startswith(digest)]
        if len(found) != 1:
            number = "no model" if not found else f"{len(found)} models"
            raise UserError(f"{number} in {self.directory} begin with {digest!r}")
        gone = found[0]
        model = lists.pop(gone)
        kept: set[str] = set()
        for other, known in lists.items():
            if known is None:
                raise UserError(
                    f"the list of the files of {other[:16]} in {self.directory} cannot be read, "
                    f"and some may be files of {gone[:16]} too; add that model again, or remove "
                    "it first"
                )
            kept.update(file.sha256 for file in known.manifest.files)
        names = self._all_files() if model is None else {f.sha256 for f in model.manifest.files}
        names -= kept
        freed = 0
        with contextlib.ExitStack() as held:
            for name in names:
                held.enter_context(self._unfilled(name))
            held.enter_context(_told(self.directory))
            for view in self._views.glob(f"{gone}-*"):
                shutil.rmtree(view, ignore_errors=True)
            for name in names:
                for path in (self.files / name, self.partial / name):
                    with contextlib.suppress(FileNotFoundError):
                        freed += path.lstat().st_size
                        path.unlink()
            # Last, so that what an interruption leaves has a name by which it can be removed.
            (self._models / gone).unlink(missing_ok=True)
        return freed

    def _all_files(self) -> set[str]:
        """SHA-256 of all files, those included that are being fetched."""
        found: set[str] = set()
        for folder in (self.files, self.partial):
            with _told(self.directory), contextlib.suppress(FileNotFoundError):
                found.update(entry.name for entry in os.scandir(folder))
        return {name for name in found if _DIGEST.fullmatch(name)}

    @contextlib.contextmanager
    def _unfilled(self, name: str) -> Iterator[None]:
        """Keep others from filling a file, which would finish what is another one by then.

        Raises:
            UserError: one is at it.
        """
        path = self.partial / name
        if not os.path.lexists(path):
            yield
            return
        with _told(self.directory):
            handle = _opened(path)
        with os.fdopen(handle, "r+b", buffering=0) as opened:
            if not _locked(opened):
                raise UserError(
                    f"a process fills a file of this model in {self.directory}; stop that device, "
                    "or wait until it has the model, and remove it then"
                )
            yield

    def view(
        self,
        manifest: StartManifest,
        places: Mapping[str, Path],
        config: Mapping[str, Any] | None,
    ) -> StartPlace:
        """A folder with a model's files under the names that a task expects.

        There is one for each configuration and places, so that no other job, and no device that
        shares the store, changes what a task is about to read.

        Args:
            manifest: the model's files.
            places: where they are, by SHA-256.
            config: of the model, for `config.json`; None for none.

        Raises:
            DiskFull: there is no room.
            UserError: the store cannot be written to, or a file is none of tensors.
        """
        self._make()
        links = {sha256: str(path.resolve()) for sha256, path in places.items()}
        seen = json.dumps([config, links], sort_keys=True).encode()
        top = self._views / f"{manifest.digest}-{hashlib.sha256(seen).hexdigest()[:16]}"
        parts = tuple(dict.fromkeys(file.part for file in manifest.files))
        with _told(self.directory):
            for part in parts:
                _private_folder(top / part)
                files = [file for file in manifest.files if file.part == part]
                names = _names(files)
                for file, name in zip(files, names, strict=True):
                    _link(top / part / name, places[file.sha256])
                if len(files) > 1 and part != ADAPTER:
                    index = {
                        tensor: name
                        for file, name in zip(files, names, strict=True)
                        for tensor in SafetensorsFile.open(places[file.sha256]).tensors
                    }
                    _write(top / part / INDEX, {"weight_map": index})
                if config is not None and part != ADAPTER:
                    _write(top / part / CONFIG, config)
        self._forget_views(top)
        targets = tuple(dict.fromkeys(places[file.sha256].resolve() for file in manifest.files))
        mapped = all(target.parent == self.files.resolve() for target in targets)
        start = top / parts[-1]
        base = top / parts[0] if len(parts) > 1 else None
        return StartPlace(start, base, (top.resolve(), *targets), mapped)

    def _forget_views(self, used: Path) -> None:
        """Delete the views that were used longest ago, if there are too many."""
        with contextlib.suppress(OSError):  # another device has deleted some meanwhile
            os.utime(used)
            views = sorted(self._views.iterdir(), key=lambda view: view.stat().st_mtime_ns)
            for view in views[:-_MAX_VIEWS]:
                shutil.rmtree(view, ignore_errors=True)

    def _make(self) -> None:
        with _told(self.directory):
            for folder in (self.directory, self.files, self.partial, self._models, self._views):
                _private_folder(folder)

    def _read(self, path: Path) -> KeptModel | None:
        try:
            table = json.loads(read_sealed_bytes(path))
            files = tuple(ListedFile(**file) for file in table["files"])
            manifest = StartManifest(files)
            if manifest.digest != path.name:
                return None
            lacking = [file for file in files if not self.has(file)]
            damaged = [file.name for file in lacking if os.path.lexists(self.path(file.sha256))]
            name = str(table["name"])
            return KeptModel(manifest, bool(table["added"]), name, not lacking, tuple(damaged))
        except (OSError, DamagedError, UserError, ValueError, TypeError, KeyError):
            return None  # as if it were not known: nothing but its name is lost


class PartialFile:
    """A file that this process fills from its beginning to its end."""

    def __init__(self, store: WeightStore, file: ListedFile, opened: IO[bytes]) -> None:
        """Read what there is of it already, of which the digest goes on."""
        self._store = store
        self._file = file
        self._opened = opened
        self._hash = hashlib.sha256()
        self.offset = 0
        """Bytes that it has."""
        if os.fstat(opened.fileno()).st_size > file.size:
            self.restart()
        while data := opened.read(PIECE_BYTES):
            self._hash.update(data)
            self.offset += len(data)

    @property
    def missing(self) -> int:
        """Bytes that it lacks."""
        return self._file.size - self.offset

    def restart(self) -> None:
        """Begin again: what it has is of another file."""
        self._opened.truncate(0)
        self._opened.seek(0)
        self._hash = hashlib.sha256()
        self.offset = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Add the next bytes.

        Raises:
            DiskFull: there is no room; what was written before stays.
            UserError: they cannot be written, or are more than the file has.
        """
        if len(data) > self.missing:
            raise UserError(f"more than the {self._file.size} bytes of the file were given")
        view = memoryview(data)
        with _told(self._store.directory):
            while view:
                count = self._opened.write(view)
                self._hash.update(view[:count])
                self.offset += count
                view = view[count:]

    def finish(self) -> bool:
        """Put it into the store if it is whole; False if it is another file, which is dropped.

        Raises:
            DiskFull: there is no room.
            UserError: it cannot be written.
        """
        if self.missing or self._hash.hexdigest() != self._file.sha256:
            self.restart()
            return False
        with _told(self._store.directory):
            os.fchmod(self._opened.fileno(), _MODE)
            os.fsync(self._opened.fileno())
            (self._store.partial / self._file.sha256).replace(self._store.path(self._file.sha256))
            sync_directory(self._store.files)
        return True


def hash_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _state(found: os.stat_result) -> tuple[int, ...]:
    """What changes with the content of a file, or with who may read it."""
    return found.st_ino, found.st_mode, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _names(files: Sequence[ListedFile]) -> Iterable[str]:
    """Names by which `StartFiles.find` finds the files of a part in its folder."""
    if len(files) == 1 and files[0].part != ADAPTER:
        return [WEIGHTS]
    return [file.name for file in files]


def _pieces(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while data := file.read(PIECE_BYTES):
                yield data
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None


def _locked(opened: IO[bytes], *, wait: bool = False) -> bool:
    """Have the lock of an open file; False if another process has it and is not waited for."""
    try:
        fcntl.flock(opened, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _opened(path: Path) -> int:
    """A descriptor of a file that is being fetched, which is made if it is not there.

    A process that was killed within `PartialFile.finish` leaves one that only root could write to.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o600)
    except PermissionError:
        path.chmod(0o600)
        return os.open(path, flags, 0o600)


def _is_same(opened: IO[bytes], path: Path) -> bool:
    """Whether an open file is still the one of this name, and not one that was finished."""
    try:
        return os.path.samestat(os.fstat(opened.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _private_folder(path: Path) -> None:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.stat().st_uid == os.getuid():
        path.chmod(0o700)


def _link(path: Path, target: Path) -> None:
    """A symbolic link, in place of what was there before."""
    wanted = target.resolve()
    with contextlib.suppress(OSError):
        if path.readlink() == wanted:
            return
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    draft.symlink_to(wanted)
    draft.replace(path)


def _write(path: Path, values: Mapping[str, Any]) -> None:
    data = json.dumps(values).encode()
    with contextlib.suppress(OSError):
        if path.read_bytes() == data:
            return
    write_private_file(path, data)


@contextlib.contextmanager
def _told(directory: Path) -> Iterator[None]:
    """Turn errors of the disk into sentences."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(
                f"the disk of {directory} is full; free some space, or remove a model with "
                "`isthmus weights remove`"
            ) from None
        raise StoreUnusable(f"{directory} cannot be used: {error.strerror or error}") from None
