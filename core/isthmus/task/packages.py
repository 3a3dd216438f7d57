"""Tasks that travel: files of one author in one file, with a digest and a signature.

    package = pack(folder, name, author)      # bytes of a zip file; nothing in it is compressed
    found = read(package)                     # checked, and nothing of it executed or written
    install(found, tasks, approved)           # unpacked, if its author is one of the approved

The digest is that of the manifest, which has the digests of the files; the author's Ed25519 key
signs it. A zip file can lie about sizes, names and kinds: what is not plainly in the manifest is
refused. An installed folder keeps its package, so that whether it is still what was signed can be
told (`installed`), and a server can hand it on.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import re
import tempfile
import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from isthmus.errors import AdmissionRefused, UserError
from isthmus.names import checked_name
from isthmus.system.private_files import check_private, write_private_file

if TYPE_CHECKING:
    from isthmus.job.schema import Job

MAX_BYTES = 64 << 20
"""Of a package."""
MAX_FILES = 1000

_MANIFEST, _SIGNATURE = "manifest.json", "signature"
_KEPT = ".package"
"""The package in the folder that it was unpacked into."""
_MAX_MANIFEST = 1 << 20
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_DATE = (1980, 1, 1, 0, 0, 0)
"""Of every entry, so that the same files are the same package."""


@dataclasses.dataclass(frozen=True)
class Package:
    """A package that was read: every digest in it fits, and its author signed it."""

    name: str
    author: bytes
    """Ed25519 public key, 32 bytes."""
    digest: bytes
    """SHA-256 of the manifest."""
    files: Mapping[str, bytes]
    """By path, with / between its parts."""
    data: bytes
    """The package itself."""


def new_author(path: Path) -> bytes:
    """Make an author's key in a new file (PKCS #8 PEM, 0600); returns the public key, 32 bytes.

    Raises:
        UserError: the file is there already, or cannot be written.
    """
    if path.exists():
        raise UserError(f"{path} is there already; nothing was changed")
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
    """An author's key from its file.

    Raises:
        UserError: it cannot be read, holds something else, or others can read it.
    """
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise UserError(
            f"{path} holds no author's signing key: that is the file `isthmus task key` makes, and "
            "what it prints is the public key, which signs nothing"
        )
    check_private(path)
    return key


def pack(folder: Path, name: str, author: Ed25519PrivateKey) -> bytes:
    """A folder's files as a package; what is hidden, and Python's caches, stay out.

    Raises:
        UserError: there is nothing in it, too much, or something that is no plain file.
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
            raise UserError(f"the file name {path_!r} has characters that not all machines take")
    about = {
        path_: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for path_, data in files.items()
    }
    key = author.public_key().public_bytes_raw().hex()
    manifest = json.dumps(
        {"version": 1, "name": name, "author": key, "files": about}, indent=1, sort_keys=True
    ).encode()
    signature = author.sign(_said(hashlib.sha256(manifest).digest()))
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
        if any(part.startswith(".") or part == "__pycache__" for part in parts):
            continue
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise UserError(f"{path} is not a plain file; take it out of the folder")
        if path.is_dir():
            continue
        size += path.stat().st_size
        if len(files) == MAX_FILES or size > MAX_BYTES // 2:
            raise UserError(f"{folder} has more than {MAX_FILES} files or {MAX_BYTES >> 21} MB")
        files["/".join(parts)] = path.read_bytes()
    return files


def read(data: bytes) -> Package:
    """Check a package; nothing in it is executed, and nothing is written.

    Raises:
        AdmissionRefused: it is none, was changed, or is not signed by its author.
    """
    if len(data) > MAX_BYTES:
        raise AdmissionRefused(f"a package of {len(data)} bytes is larger than {MAX_BYTES}")
    try:
        _check_directory(data)
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = _plain_entries(archive, len(data))
            manifest = archive.read(entries[_MANIFEST])
            signature = archive.read(entries[_SIGNATURE])
            table = _table(manifest)
            author, digest = bytes.fromhex(table["author"]), hashlib.sha256(manifest).digest()
            Ed25519PublicKey.from_public_bytes(author).verify(signature, _said(digest))
            about = table["files"]
            if entries.keys() != about.keys() | {_MANIFEST, _SIGNATURE}:
                raise ValueError("its files are not those of its manifest")
            files = {path: archive.read(entries[path]) for path in about}
            name = checked_name(table["name"])
    except InvalidSignature:
        raise AdmissionRefused("the package is not signed by the author it names") from None
    except (
        zipfile.BadZipFile,
        NotImplementedError,  # raised by zipfile for a compression that it does not know
        RuntimeError,
        EOFError,
        OSError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
    ) as error:
        raise AdmissionRefused(f"this is not a package of a task: {error}") from None
    for path, blob in files.items():
        if hashlib.sha256(blob).hexdigest() != about[path]["sha256"]:
            raise AdmissionRefused(
                f"the package was changed: {path!r} is not what its author signed"
            )
    return Package(name, author, digest, files, data)


def install(package: Package, tasks: Path, approved: Collection[bytes]) -> Path:
    """Unpack a package into a directory of tasks, under its name; returns its folder.

    Raises:
        AdmissionRefused: its author is not one of the approved.
        UserError: the directory cannot be used.
    """
    if package.author not in approved:
        raise AdmissionRefused(
            f"{package.name!r} is by the author {package.author.hex()}, who is not approved here"
        )
    target = tasks / package.name
    try:
        tasks.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=tasks, prefix=".new-") as draft:
            whole, old = Path(draft) / "whole", Path(draft) / "old"
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
    """The package that devices load a job's code from: its folder in a directory of tasks."""
    flower = job.federated.flower
    source = job.task.source if flower is None or flower.app is None else flower.app
    return source.partition("/")[0]


def installed(tasks: Path, name: str) -> Package | None:
    """The package that a folder of tasks was unpacked from; None for files put there by hand.

    Raises:
        AdmissionRefused: the folder's files are not those of its package any more.
        UserError: it cannot be read.
    """
    folder = tasks / name
    try:
        kept = folder / _KEPT
        if not _is_plain(name) or not kept.is_file() or kept.stat().st_size > MAX_BYTES:
            return None
        package = read(kept.read_bytes())
        code = {
            path.relative_to(folder).as_posix()
            for path in folder.rglob("*.py")
            if path.is_file() or path.is_symlink()
        }
        changed = sorted(code - package.files.keys())
        for path, blob in package.files.items():
            if not (folder / path).is_file() or (folder / path).read_bytes() != blob:
                changed.append(path)
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error.strerror}") from None
    if changed:
        raise AdmissionRefused(
            f"{folder / changed[0]} is not what the author of {name!r} signed; install it again"
        )
    return package


def _check_directory(data: bytes) -> None:
    """Bound what `zipfile` reads at once, which is all that the end of the file speaks of.

    It looks there first: at the last 22 bytes, which say that no comment follows them.
    """
    end = data[-22:]
    here = end[:4] == b"PK\x05\x06" and end[-2:] == bytes(2)
    if not here or data[:-22][-20:].startswith(b"PK\x06\x07"):
        raise ValueError("it does not end as a zip file of this kind does")
    size = int.from_bytes(end[12:16], "little")
    if size > _MAX_MANIFEST:
        raise ValueError(f"its directory of {size} bytes is too large")


def _plain_entries(archive: zipfile.ZipFile, size: int) -> dict[str, zipfile.ZipInfo]:
    entries: dict[str, zipfile.ZipInfo] = {}
    for entry in archive.infolist():
        if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
            raise ValueError(f"{entry.filename!r} is compressed")
        if entry.file_size > size or entry.flag_bits & 1:
            raise ValueError(f"{entry.filename!r} is not all there")
        if entry.filename in entries or not _is_plain(entry.filename):
            raise ValueError(f"{entry.filename!r} is not a plain name, or there twice")
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


def _table(manifest: bytes) -> dict[str, Any]:
    try:
        table = json.loads(manifest)
    except RecursionError:
        raise ValueError("its manifest is no table") from None
    if not isinstance(table, dict) or not isinstance(table["files"], dict):
        raise ValueError("its manifest is no table")
    if table["version"] != 1:
        raise ValueError(f"it is of version {table['version']}, and 1 is known here")
    return table


def _said(digest: bytes) -> bytes:
    return b"isthmus/task/1" + digest
