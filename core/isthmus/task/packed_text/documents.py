r"""The documents of a file, one after the other: parquet, Arrow, JSON lines, or plain text.

>>> import tempfile
>>> path = Path(tempfile.mkdtemp()) / "two.jsonl"
>>> _ = path.write_text('{"text": "one"}\n{"text": "two"}\n')
>>> list(FileSource(path, "text", None).documents())
['one', 'two']
"""

from __future__ import annotations

import codecs
import contextlib
import gzip
import hashlib
import importlib
import io
import json
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from isthmus.errors import StorageError, TaskError
from isthmus.extras import install_line

MAX_DOCUMENT = 64 << 20
"""Bytes, or characters, of one document: it is tokenised as a whole, in memory."""
_CHUNK = 1 << 20
_ROWS = 256
"""Rows of a table that are in memory at once."""


class Source(Protocol):
    """Where documents come from."""

    name: str
    """For messages."""

    def state(self) -> dict[str, Any]:
        """What is compared first to find out whether it has changed; quick."""
        ...

    def digest(self) -> str:
        """A digest of all that it has; may take a while."""
        ...

    def owner_and_readers(self) -> tuple[int, int, int]:
        """User and group that it belongs to, and the permissions of its readers, as of a file."""
        ...

    def documents(self) -> Iterator[str]:
        """All of them in order, each read when it is asked for."""
        ...


class FileSource:
    """A file, of the kind that its name ends with."""

    def __init__(self, path: Path, column: str, separator: str | None) -> None:
        """Describe a file.

        Args:
            path: the file.
            column: of a table, or key of JSON lines, that has the text.
            separator: what is between the documents of plain text; None if a file is one.

        Raises:
            TaskError: its kind is unknown, or its name has none and it does not exist.
        """
        self.path = path
        self.name = str(path)
        self._column = column
        self._separator = separator
        kind = kind_of(path)
        if kind is None and not path.exists():
            # A folder that is not there has no kind either.
            raise TaskError(f"there is no file or folder of text {path}")
        if kind is None:
            raise TaskError(f"{path} is none of the files that text is read from: {KINDS}")
        self._read = _READERS[kind]

    def state(self) -> dict[str, Any]:
        """See `Source.state`.

        Raises:
            StorageError: it cannot be read.
            TaskError: there is no such file.
        """
        with _readable(self.path):
            status = self.path.stat()
        return {"bytes": status.st_size, "modified": status.st_mtime_ns}

    def digest(self) -> str:
        """See `Source.digest`.

        Raises:
            StorageError: it cannot be read.
            TaskError: there is no such file.
        """
        with _readable(self.path), self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def owner_and_readers(self) -> tuple[int, int, int]:
        """See `Source.owner_and_readers`.

        Raises:
            StorageError: there is no such file, or it cannot be read.
        """
        with _readable(self.path):
            status = self.path.stat()
        return status.st_uid, status.st_gid, status.st_mode & 0o444

    def documents(self) -> Iterator[str]:
        """See `Source.documents`.

        Raises:
            StorageError: it cannot be read.
            TaskError: it is not what its name says, has no such column, or something else there
                than text.
        """
        with _readable(self.path):
            yield from self._read(self)

    # -- kinds ----------------------------------------------------------------------------------

    def _open(self) -> io.BufferedIOBase:
        if self.path.suffix == _COMPRESSED:
            return gzip.open(self.path, "rb")
        return self.path.open("rb")

    def _lines(self) -> Iterator[str]:
        """The documents of JSON lines."""
        with self._open() as file:
            number = 0
            while line := file.readline(MAX_DOCUMENT + 1):
                number += 1
                where = f"{self.path}, line {number}"
                if len(line) > MAX_DOCUMENT:
                    raise TaskError(f"{where} has more than {MAX_DOCUMENT >> 20} MiB; divide it")
                if line.isspace():
                    continue
                try:
                    row = json.loads(line.decode())
                except UnicodeDecodeError as error:
                    raise TaskError(f"{where} is not UTF-8: {error.reason}; convert it") from None
                except (ValueError, RecursionError) as error:
                    raise TaskError(f"{where} is not JSON: {error}") from None
                if not isinstance(row, dict):
                    raise TaskError(f"{where} is not a JSON object with a key {self._column!r}")
                if self._column not in row:
                    raise self._no_column(where, row)
                yield self._text(row[self._column], where)

    def _plain(self) -> Iterator[str]:
        """The documents of plain text."""
        decoder = codecs.getincrementaldecoder("utf-8-sig")()
        pending = ""
        with self._open() as file:
            while True:
                before = file.tell()
                chunk = file.read(_CHUNK)
                try:
                    pending += decoder.decode(chunk, final=not chunk)
                except UnicodeDecodeError as error:
                    raise TaskError(
                        f"{self.path} is not UTF-8 near byte {before}: {error.reason}; convert it"
                    ) from None
                if self._separator is not None:
                    *whole, pending = pending.split(self._separator)
                    yield from whole
                if len(pending) > MAX_DOCUMENT:
                    remedy = "give PackedText a separator that the text has between documents"
                    raise TaskError(
                        f"{self.path} has a document of more than {MAX_DOCUMENT >> 20} MiB; "
                        f"{remedy}, or divide it"
                    )
                if not chunk:
                    yield pending
                    return

    def _parquet(self) -> Iterator[str]:
        """The documents of a parquet file."""
        pyarrow = _pyarrow(self.path)
        module = importlib.import_module("pyarrow.parquet")
        try:
            # Not read ahead: a group of rows may have gigabytes.
            with module.ParquetFile(self.path, pre_buffer=False) as file:
                self._check_column(file.schema_arrow, pyarrow)
                batches = file.iter_batches(batch_size=_ROWS, columns=[self._column])
                yield from self._rows(batches)
        except pyarrow.ArrowException as error:
            raise TaskError(f"{self.path} cannot be read as parquet: {_line(error)}") from None

    def _arrow(self) -> Iterator[str]:
        """The documents of an Arrow file, as Hugging Face's `save_to_disk` writes them."""
        pyarrow = _pyarrow(self.path)
        try:
            with pyarrow.memory_map(str(self.path)) as mapped:
                if mapped.read(len(_ARROW_FILE)) == _ARROW_FILE:
                    file = pyarrow.ipc.open_file(mapped)
                    batches = (file.get_batch(index) for index in range(file.num_record_batches))
                    schema = file.schema
                else:
                    mapped.seek(0)
                    batches = pyarrow.ipc.open_stream(mapped)
                    schema = batches.schema
                self._check_column(schema, pyarrow)
                for batch in batches:
                    own = batch.select([self._column])
                    yield from self._rows(
                        own.slice(first, _ROWS) for first in range(0, own.num_rows, _ROWS)
                    )
        except pyarrow.ArrowException as error:
            raise TaskError(f"{self.path} cannot be read as Arrow: {_line(error)}") from None

    def _check_column(self, schema: Any, pyarrow: Any) -> None:
        if self._column not in schema.names:
            raise self._no_column(str(self.path), schema.names)
        kind = schema.field(self._column).type
        if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
            raise TaskError(f"{self.path}: column {self._column!r} has {kind}, and no text")

    def _rows(self, batches: Iterator[Any]) -> Iterator[str]:
        for batch in batches:
            try:
                texts = batch.column(0).to_pylist()
            except UnicodeDecodeError as error:
                raise TaskError(
                    f"{self.path} has text that is not UTF-8: {error.reason}; convert it"
                ) from None
            for text in texts:
                yield self._text("" if text is None else text, str(self.path))

    def _no_column(self, where: str, names: Any) -> TaskError:
        known = ", ".join(sorted(map(repr, names))[:10]) or "nothing"
        return TaskError(f"{where} has no {self._column!r}, but {known}; name the column")

    def _text(self, value: Any, where: str) -> str:
        if not isinstance(value, str):
            raise TaskError(f"{where}: {self._column!r} is {type(value).__name__}, and no text")
        if len(value) > MAX_DOCUMENT:
            raise TaskError(
                f"{where}: a document has more than {MAX_DOCUMENT >> 20} MiB; divide it"
            )
        return value


class DatasetSource:
    """A `datasets.Dataset` of Hugging Face, whose rows have indices."""

    def __init__(self, dataset: Any, column: str) -> None:
        """Describe it.

        Raises:
            TaskError: it has no length, or no such column.
        """
        if not hasattr(dataset, "__len__"):
            raise TaskError(
                "PackedText got a data set of the type "
                f"{type(dataset).__name__}, which has no indices; give it files, or load the data "
                "without streaming=True"
            )
        if column not in dataset.column_names:
            known = ", ".join(map(repr, dataset.column_names))
            raise TaskError(f"the dataset has no column {column!r}, but {known}")
        self.name = f"the dataset {dataset._fingerprint}"
        self._dataset = dataset.with_format(None)
        self._fingerprint = str(dataset._fingerprint)
        self._column = column

    def state(self) -> dict[str, Any]:
        """See `Source.state`."""
        return {"rows": len(self._dataset), "fingerprint": self._fingerprint}

    def digest(self) -> str:
        """See `Source.digest`."""
        return hashlib.sha256(self._fingerprint.encode()).hexdigest()

    def owner_and_readers(self) -> tuple[int, int, int]:
        """See `Source.owner_and_readers`; it may have been made in memory, from anything."""
        return os.geteuid(), os.getegid(), 0o400

    def documents(self) -> Iterator[str]:
        """See `Source.documents`.

        Raises:
            TaskError: the column has something else than text.
        """
        for first in range(0, len(self._dataset), _ROWS):
            try:
                texts = self._dataset[first : first + _ROWS][self._column]
            except UnicodeDecodeError as error:
                raise TaskError(
                    f"{self.name} has text that is not UTF-8: {error.reason}; convert it"
                ) from None
            for text in texts:
                if not isinstance(text, str | None):
                    raise TaskError(f"{self.name}: column {self._column!r} has no text")
                yield text or ""


KINDS = ".parquet, .arrow, .jsonl and .txt, the last two also with .gz"
_COMPRESSED = ".gz"
_ARROW_FILE = b"ARROW1"
_READERS: dict[str, Callable[[FileSource], Iterator[str]]] = {
    ".jsonl": FileSource._lines,
    ".txt": FileSource._plain,
    ".parquet": FileSource._parquet,
    ".arrow": FileSource._arrow,
}


def kind_of(path: Path) -> str | None:
    """The ending of a file's name, as in `KINDS`, without `.gz`; None if it is another.

    >>> kind_of(Path("a.jsonl.gz")), kind_of(Path("a.parquet.gz")), kind_of(Path("README.md"))
    ('.jsonl', None, None)
    """
    suffixes = path.suffixes
    if suffixes[-1:] == [_COMPRESSED]:
        kind = suffixes[-2] if len(suffixes) > 1 else ""
        return kind if kind in (".jsonl", ".txt") else None
    return path.suffix if path.suffix in _READERS else None


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Within it a file that cannot be read is one sentence."""
    try:
        yield
    except FileNotFoundError:
        raise TaskError(f"there is no file {path}") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TaskError(f"{path} is no whole gzip file: {error}") from None
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}") from None


def _pyarrow(path: Path) -> Any:
    try:
        return importlib.import_module("pyarrow")
    except ModuleNotFoundError:
        raise TaskError(
            f"{path} needs the package pyarrow, which is not installed; {install_line('text')}"
        ) from None


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
