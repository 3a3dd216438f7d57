"""The tokens of one source in a file: written once, found again, and checked where it is read.

The file has the tokens as numbers of two or four bytes, in the machine's order of bytes, and at its
end what they were made of, with a checksum of each block. It gets its name when it is complete: a
process that finds it can use it. Only those can read it who can read the text, and it is used only
if it belongs to this user, to root, or to the owner of the text: others may not choose what is
trained on.
"""

from __future__ import annotations

import array
import fcntl
import os
import struct
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import torch

from isthmus.errors import DamagedError, StorageError, TaskError
from isthmus.system.private_files import sync_directory
from isthmus.system.sealed_files import sealed_json, unsealed_json
from isthmus.task.packed_text.documents import Source
from isthmus.task.packed_text.tokenizing import Tokenizer

BLOCK = 1 << 16
"""Bytes that share a checksum: reading fewer from a disk takes as long."""
_MAGIC = b"ISTHTOK1"
_TAIL = struct.Struct("<Q8s")
"""Bytes of the description before it, and what tells the file from others."""
_MAX_DESCRIPTION = 1 << 28
_BATCH_CHARACTERS = 1 << 18
"""Characters of the documents that are tokenised together."""
_REPORT_SECONDS = 30.0
_DRAFT = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_DTYPES = {"H": torch.uint16, "I": torch.uint32}


class TokenFile:
    """The tokens of one source, in any order of reading."""

    def __init__(self, path: Path, owners: frozenset[int], description: dict[str, Any]) -> None:
        self.path = path
        self._owners = owners
        self.tokens: int = description["tokens"]
        """Number of tokens."""
        self.source_digest: str = description["source_digest"]
        self._state: dict[str, Any] = description["source"]
        self._code: str = description["code"]
        self._width = array.array(self._code).itemsize
        self._checksums: Sequence[int] = description["checksums"]
        self._checked = bytearray(len(self._checksums))
        """Whether a block was found whole, in this process."""

    @classmethod
    def of(cls, source: Source, tokenizer: Tokenizer, path: Path, *, waits: bool) -> Self | None:
        """The file of a source, which is written first if there is none.

        Args:
            source: the text.
            tokenizer: makes the tokens.
            path: the file.
            waits: whether to wait for another process that is writing it; None is returned if not.

        Raises:
            DamagedError: the file that is there is not what was written.
            StorageError: it cannot be written or read.
            TaskError: the source has changed since, or it cannot be read.
        """
        owners = frozenset((0, os.geteuid(), source.owner_and_readers()[0]))
        found = cls._find(path, owners) or cls._make(source, tokenizer, path, owners, waits)
        if found is not None:
            found._check_source(source)
        return found

    def read(self, first: int, count: int) -> torch.Tensor:
        """`count` tokens from `first` on, int64 (count).

        Raises:
            DamagedError: they are not those that were written.
            StorageError: they cannot be read.
        """
        begin = first * self._width
        end = begin + count * self._width
        blocks = range(begin // BLOCK, -(-end // BLOCK))
        # All bytes of a block the first time, to check it; afterwards only those that are wanted.
        whole = not all(self._checked[block] for block in blocks)
        lowest = blocks.start * BLOCK if whole else begin
        highest = min(blocks.stop * BLOCK, self.tokens * self._width) if whole else end
        try:
            with self.path.open("rb", buffering=0) as file:
                _check_owner(file.fileno(), self.path, self._owners)
                data = os.pread(file.fileno(), highest - lowest, lowest)
        except OSError as error:
            raise StorageError(f"{self.path} cannot be read: {error.strerror}") from None
        if len(data) != highest - lowest:
            raise _damaged(self.path)
        if whole:
            for block in blocks:
                part = data[(block - blocks.start) * BLOCK :][:BLOCK]
                if zlib.crc32(part) != self._checksums[block]:
                    raise _damaged(self.path)
                self._checked[block] = True
        wanted = bytearray(data[begin - lowest : end - lowest])
        return torch.frombuffer(wanted, dtype=_DTYPES[self._code]).long()

    def _check_source(self, source: Source) -> None:
        """Refuse a source that has changed; one that was only copied has not."""
        if source.state() == self._state or source.digest() == self.source_digest:
            return
        raise TaskError(
            f"{source.name} has changed since it was tokenised; restore it, or delete {self.path} "
            "to use it as it is now"
        )

    def check_tokenizer(self, source: Source, tokenizer: Tokenizer) -> None:
        """Refuse a tokenizer that makes other tokens of the first document.

        Raises:
            TaskError: it does.
        """
        text = next(filter(None, source.documents()), "")
        [row] = tokenizer.encode([text])
        if not row:
            return
        if len(row) > self.tokens or self.read(0, len(row)).tolist() != list(row):
            raise TaskError(
                f"the tokenizer has changed since {source.name} was tokenised; delete {self.path} "
                "to use it as it is now"
            )

    # -- file -----------------------------------------------------------------------------------

    @classmethod
    def _find(cls, path: Path, owners: frozenset[int]) -> Self | None:
        try:
            with path.open("rb") as file:
                _check_owner(file.fileno(), path, owners)
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - _TAIL.size))
                tail = file.read(_TAIL.size)
                if len(tail) < _TAIL.size:
                    raise _damaged(path)
                length, magic = _TAIL.unpack(tail)
                at = size - _TAIL.size - length
                if magic != _MAGIC or length > _MAX_DESCRIPTION or at < 0:
                    raise _damaged(path)
                file.seek(at)
                description = unsealed_json(file.read(length))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise StorageError(f"{path} cannot be read: {error.strerror}") from None
        if description is None:
            raise _damaged(path)
        found = cls(path, owners, description)
        if at != found.tokens * found._width:
            raise _damaged(path)
        return found

    @classmethod
    def _make(
        cls,
        source: Source,
        tokenizer: Tokenizer,
        path: Path,
        owners: frozenset[int],
        waits: bool,
    ) -> Self | None:
        """Write the file, unless another process does or has done so."""
        draft = path.with_name(f"{path.name}.draft")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            while True:
                with os.fdopen(os.open(draft, _DRAFT, 0o600), "ab") as file:
                    # A link, or a file that another user keeps open, is not to be written.
                    _check_owner(file.fileno(), draft, frozenset((os.geteuid(),)))
                    try:  # the kernel releases the lock if this process is killed
                        fcntl.flock(file, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
                    except BlockingIOError:
                        return None
                    if not _is_at(file.fileno(), draft):
                        continue  # it was another's draft, who has ended
                    try:
                        # The other may have succeeded before this opened it.
                        made = cls._find(path, owners)
                        if made is not None:
                            draft.unlink()
                            return made
                        _write(source, tokenizer, file)
                        _share(source, file.fileno())
                    except BaseException:
                        draft.unlink(missing_ok=True)
                        raise
                    draft.replace(path)
                    sync_directory(path.parent)
                    return cls._find(path, owners)
        except OSError as error:
            raise StorageError(
                f"the tokens of {source.name} cannot be written to {path.parent}: "
                f"{error.strerror}; give PackedText another folder"
            ) from None


def _check_owner(handle: int, path: Path, owners: frozenset[int]) -> None:
    """Refuse an open file of another user.

    Raises:
        StorageError: it is one.
    """
    owner = os.fstat(handle).st_uid
    if owner not in owners:
        raise StorageError(
            f"{path} belongs to user {owner}, who is neither the owner of the text nor this user; "
            "give PackedText another folder, which other users cannot write"
        )


def _share(source: Source, handle: int) -> None:
    """Let those read a file of this user who can read the source."""
    _, group, readers = source.owner_and_readers()
    if os.fstat(handle).st_gid != group and not readers & 0o004:
        readers &= 0o400
    os.fchmod(handle, 0o600 | readers)


def _is_at(handle: int, path: Path) -> bool:
    """Whether a path still is that of an open file, which another process may have renamed."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _write(source: Source, tokenizer: Tokenizer, file: Any) -> None:
    """Write the tokens of a source, and their description after them."""
    file.truncate(0)
    before = source.state()
    digest = source.digest()
    tokens = 0
    checksums: list[int] = []
    pending = bytearray()
    for part in _tokens(source, tokenizer):
        tokens += len(part)
        pending += part.tobytes()
        whole = len(pending) // BLOCK * BLOCK
        checksums += [zlib.crc32(pending[at : at + BLOCK]) for at in range(0, whole, BLOCK)]
        file.write(pending[:whole])
        del pending[:whole]
    if not tokens:
        raise TaskError(f"{source.name} has no text")
    if pending:
        checksums.append(zlib.crc32(pending))
        file.write(pending)
    if source.state() != before:
        raise TaskError(f"{source.name} has changed while it was tokenised; begin again")
    description = sealed_json(
        {
            "tokens": tokens,
            "code": tokenizer.code,
            "source": before,
            "source_digest": digest,
            "checksums": checksums,
        }
    )
    file.write(description + _TAIL.pack(len(description), _MAGIC))
    file.flush()
    os.fsync(file.fileno())


def _tokens(source: Source, tokenizer: Tokenizer) -> Iterator[array.array[int]]:
    """The tokens of some documents at a time, with `end` after each that has any."""
    reported = time.monotonic()
    total = 0
    for texts in _batches(source.documents()):
        part = array.array(tokenizer.code)
        try:
            rows = tokenizer.encode(texts)
        except TaskError as error:
            raise TaskError(f"{source.name}: {error}") from error
        for row in rows:
            if len(row):
                part.extend(row)
                part.append(tokenizer.end)
        total += len(part)
        yield part
        if time.monotonic() - reported > _REPORT_SECONDS:
            reported = time.monotonic()
            print(f"{source.name}: {total:,} tokens so far", file=sys.stderr, flush=True)


def _batches(documents: Iterator[str]) -> Iterator[list[str]]:
    """Documents with together about so many characters as are tokenised at once."""
    texts: list[str] = []
    characters = 0
    for text in documents:
        texts.append(text)
        characters += len(text)
        if characters >= _BATCH_CHARACTERS:
            yield texts
            texts = []
            characters = 0
    if texts:
        yield texts


def _damaged(path: Path) -> DamagedError:
    return DamagedError(f"{path} is damaged; delete it, and the text is tokenised again")
