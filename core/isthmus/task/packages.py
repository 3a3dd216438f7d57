"""Signed task packages: the files of a task in one archive, with a digest and a signature.

    data = pack(folder, name, author, version)  # bytes of a zip file without compression
    package = read(data)                        # verified; nothing is executed or written
    install(package, tasks, approved)           # unpacked if its author is approved

The digest is that of the manifest, which contains the digests of the files; the author's Ed25519
key signs it. Sizes, names and kinds in a zip file cannot be trusted: everything that is not exactly
in the manifest is refused. An installed folder keeps its package, so that `installed` can verify
the folder and a server can forward the package.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import io
import re
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from isthmus.errors import AdmissionRefused, UserError
from isthmus.names import checked_name
from isthmus.system.private_files import check_private, write_private_file
from isthmus.task.manifest import Manifest, PackedFile

if TYPE_CHECKING:
    from isthmus.job.schema import Job

MAX_BYTES = 64 << 20
"""Largest package."""
MAX_FILES = 1000

_MANIFEST = "manifest.json"
_SIGNATURE = "signature"
_KEPT = ".package"
"""Name of the package in the folder that it was unpacked into."""
_CACHE = "__pycache__"
_MAX_MANIFEST = 1 << 20
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_DATE = (1980, 1, 1, 0, 0, 0)
"""Date of every entry, so that equal files give equal packages."""


@dataclasses.dataclass(frozen=True)
class Package:
    """A verified package: all digests match, and its author signed it."""

    name: str
    version: int
    """Only increases, for each author and name."""
    author: bytes
    """Ed25519 public key, 32 bytes."""
    digest: bytes
    """SHA-256 of the manifest."""
    files: Mapping[str, bytes]
    """Contents by path, with / as the separator."""
    data: bytes
    """The bytes of the package."""

    def check_follows(self, version: int, digest: bytes) -> None:
        """Refuse a package that is older than one of its author and name, or a variant of it.

        Args:
            version: of the other package.
            digest: of the other package.

        Raises:
            AdmissionRefused: with both versions.
        """
        if self.version < version:
            raise AdmissionRefused(
                f"version {self.version} of {self.name!r} is older than version {version}, which "
                "this machine has or had"
            )
        if self.version == version and self.digest != digest:
            raise AdmissionRefused(
                f"version {version} of {self.name!r} has other files than the version {version} "
                "that this machine has or had; its author must increase the version"
            )


def new_author(path: Path) -> bytes:
    """Save a new author's key in a file (PKCS #8 PEM, 0600); returns the public key, 32 bytes.

    Raises:
        UserError: the file exists already, or cannot be written.
    """
    if path.exists():
        raise UserError(f"{path} exists already; nothing was changed")
    key = Ed25519PrivateKey.generate()
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),  # its file's mode protects it
    )
    try:
        write_private_file(path, pem)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None
    return key.public_key().public_bytes_raw()


def read_author(path: Path) -> Ed25519PrivateKey:
    """Read an author's key from its file.

    Raises:
        UserError: it cannot be read, is not such a key, or other users can read it.
    """
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise UserError(
            f"{path} is not an author's signing key; give the file that `isthmus task key` wrote, "
            "not the public key that it printed"
        )
    check_private(path)
    return key


def pack(folder: Path, name: str, author: Ed25519PrivateKey, version: int = 1) -> bytes:
    """Pack the files of a folder, without hidden files and Python's caches.

    `version` has to be above that of every earlier package of this author and name: devices refuse
    a lower one.

    Raises:
        UserError: the folder is empty, too large, or contains something that is not a plain file.
    """
    checked_name(name)
    try:
        files = _files_of(folder)
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read: {error.strerror}") from None
    if not files:
        raise UserError(f"{folder} has no files to pack")
    for path_ in files:
        if not _is_plain(path_):
            raise UserError(f"the file name {path_!r} has characters that not all systems support")
    manifest = Manifest(
        version=version,
        name=name,
        author=author.public_key().public_bytes_raw().hex(),
        files={
            path_: PackedFile(size=len(data), sha256=hashlib.sha256(data).hexdigest())
            for path_, data in files.items()
        },
    ).to_bytes()
    signature = author.sign(_signed_bytes(hashlib.sha256(manifest).digest()))
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for entry, data in {_MANIFEST: manifest, _SIGNATURE: signature, **files}.items():
            archive.writestr(zipfile.ZipInfo(entry, _DATE), data)
    return out.getvalue()


def _files_of(folder: Path) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    size = 0
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if any(part.startswith(".") or part == _CACHE for part in parts):
            continue
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise UserError(f"{path} is not a plain file; remove it from the folder")
        if path.is_dir():
            continue
        size += path.stat().st_size
        if len(files) == MAX_FILES or size > MAX_BYTES // 2:
            raise UserError(f"{folder} has more than {MAX_FILES} files or {MAX_BYTES >> 21} MB")
        files["/".join(parts)] = path.read_bytes()
    return files


def read(data: bytes) -> Package:
    """Verify a package without executing or writing anything.

    Raises:
        AdmissionRefused: it is not a package, was changed, or is not signed by its author.
    """
    if len(data) > MAX_BYTES:
        raise AdmissionRefused(f"a package of {len(data)} bytes is larger than {MAX_BYTES}")
    try:
        _check_directory(data)
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = _plain_entries(archive, len(data))
            manifest = archive.read(entries[_MANIFEST])
            signature = archive.read(entries[_SIGNATURE])
            digest = hashlib.sha256(manifest).digest()
            table = Manifest.parse(manifest)
            author = bytes.fromhex(table.author)
            Ed25519PublicKey.from_public_bytes(author).verify(signature, _signed_bytes(digest))
            if entries.keys() != table.files.keys() | {_MANIFEST, _SIGNATURE}:
                raise ValueError("its files are not those of its manifest")
            files = {path: archive.read(entries[path]) for path in table.files}
            name = checked_name(table.name)
    except InvalidSignature:
        raise AdmissionRefused("the package is not signed by the author it names") from None
    except (
        zipfile.BadZipFile,
        NotImplementedError,  # raised by zipfile for an unknown compression
        RuntimeError,
        EOFError,
        OSError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
    ) as error:
        raise AdmissionRefused(f"this is not a task package: {error}") from None
    for path, blob in files.items():
        about = table.files[path]
        if len(blob) != about.size or hashlib.sha256(blob).hexdigest() != about.sha256:
            raise AdmissionRefused(
                f"the package was changed: {path!r} is not what its author signed"
            )
    return Package(name, table.version, author, digest, files, data)


def install(package: Package, tasks: Path, approved: Collection[bytes]) -> Path:
    """Unpack a package into the folder of its name in a directory of tasks; returns the folder.

    Raises:
        AdmissionRefused: its author is not approved, or it is older than the installed one.
        UserError: the directory cannot be used.
    """
    if package.author not in approved:
        raise AdmissionRefused(
            f"{package.name!r} is by the author {package.author.hex()}, who is not approved here"
        )
    target = tasks / package.name
    earlier = _kept_package(target)
    if earlier is not None and earlier.author == package.author:
        package.check_follows(earlier.version, earlier.digest)
    try:
        tasks.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=tasks, prefix=".new-") as draft:
            whole = Path(draft) / "whole"
            old = Path(draft) / "old"
            for path, blob in package.files.items():
                place = whole / path
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(blob)
            (whole / _KEPT).write_bytes(package.data)
            if target.exists():
                target.rename(old)
            whole.rename(target)
    except OSError as error:
        raise UserError(f"{target} cannot be written: {error.strerror}") from None
    return target


def name_of(job: Job) -> str:
    """Name of the package, and of its folder, from which devices load a job's code."""
    app = job.federated.app
    source = job.task.source if app is None else app
    return source.partition("/")[0]


def installed(tasks: Path, name: str) -> Package | None:
    """The package that a folder was unpacked from; None for a folder without one.

    Raises:
        AdmissionRefused: the folder contains other files than its package.
        UserError: it cannot be read.
    """
    folder = tasks / name
    try:
        package = _kept_package(folder) if _is_plain(name) else None
        if package is None:
            return None
        found = {
            path.relative_to(folder).as_posix()
            for path in folder.rglob("*")
            if (path.is_symlink() or not path.is_dir()) and path.parent.name != _CACHE
        }
        changed = sorted(found - package.files.keys() - {_KEPT})
        for path, blob in package.files.items():
            if not (folder / path).is_file() or (folder / path).read_bytes() != blob:
                changed.append(path)
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error.strerror}") from None
    if changed:
        raise AdmissionRefused(
            f"{folder / changed[0]} is not what the author of {name!r} signed; install it again, "
            f"or remove {folder / _KEPT} to keep the folder as your own task"
        )
    return package


def check_loadable(tasks: Path, name: str) -> Package | None:
    """Check an installed folder before its code is loaded; see `installed`.

    Python's caches are removed: one with the date and size of a signed file would be executed in
    its place.

    Raises:
        AdmissionRefused: the folder contains other files than its package.
        UserError: it cannot be read, or a cache cannot be removed.
    """
    package = installed(tasks, name)
    if package is None:
        return None
    for cache in _caches_of(tasks / name, package):
        try:
            if cache.is_dir() and not cache.is_symlink():
                shutil.rmtree(cache)
            else:
                cache.unlink()
        except FileNotFoundError:
            continue  # there is none, or another process removes it
        except OSError as error:
            raise UserError(f"{cache} cannot be removed: {error.strerror}") from None
    return package


def _caches_of(folder: Path, package: Package) -> list[Path]:
    """Where Python may have a cache of an installed file: folders, links to such, and files."""
    caches = list(folder.rglob(_CACHE))
    if sys.pycache_prefix is not None:
        # Python has the caches of all code in a directory of their own (PYTHONPYCACHEPREFIX).
        caches += [
            Path(importlib.util.cache_from_source(str((folder / path).resolve())))
            for path in package.files
            if path.endswith(".py")
        ]
    return caches


def _kept_package(folder: Path) -> Package | None:
    """The package that a folder keeps.

    Raises:
        AdmissionRefused: it is damaged.
        OSError: it cannot be read.
    """
    kept = folder / _KEPT
    if not kept.is_file() or kept.stat().st_size > MAX_BYTES:
        return None
    return read(kept.read_bytes())


def _check_directory(data: bytes) -> None:
    """Bound the size of the zip directory, which `zipfile` reads at once.

    Its size is in the last 22 bytes of the file, which must declare no comment.
    """
    end = data[-22:]
    is_end_record = end[:4] == b"PK\x05\x06" and end[-2:] == bytes(2)
    if not is_end_record or data[:-22][-20:].startswith(b"PK\x06\x07"):
        raise ValueError("it does not end like a zip file without a comment")
    size = int.from_bytes(end[12:16], "little")
    if size > _MAX_MANIFEST:
        raise ValueError(f"its directory of {size} bytes is too large")


def _plain_entries(archive: zipfile.ZipFile, size: int) -> dict[str, zipfile.ZipInfo]:
    entries: dict[str, zipfile.ZipInfo] = {}
    for entry in archive.infolist():
        if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
            raise ValueError(f"{entry.filename!r} is compressed")
        if entry.file_size > size or entry.flag_bits & 1:
            raise ValueError(f"{entry.filename!r} is incomplete")
        if entry.filename in entries or not _is_plain(entry.filename):
            raise ValueError(f"{entry.filename!r} is not a plain name, or occurs twice")
        entries[entry.filename] = entry
        if len(entries) > MAX_FILES + 2:
            raise ValueError(f"it has more than {MAX_FILES} files")
    if sum(entry.file_size for entry in entries.values()) > size:
        raise ValueError("its files overlap")
    if entries[_MANIFEST].file_size > _MAX_MANIFEST:
        raise ValueError("its manifest is too large")
    return entries


def _is_plain(path: str) -> bool:
    return len(path) <= 400 and all(_PART.fullmatch(part) for part in path.split("/"))


def _signed_bytes(digest: bytes) -> bytes:
    return b"isthmus/task/2" + digest
