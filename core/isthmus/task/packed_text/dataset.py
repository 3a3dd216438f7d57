"""Sequences of equal length from text, as a data set with a length and indices."""

from __future__ import annotations

import bisect
import copy
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from isthmus.errors import TaskError
from isthmus.task.packed_text.documents import KINDS, DatasetSource, FileSource, Source, kind_of
from isthmus.task.packed_text.token_files import TokenFile
from isthmus.task.packed_text.tokenizing import Tokenizer

_COMPARED = 8
"""Files of which one document is tokenised again, with a function that may have changed."""
IGNORED = -100
"""A target that is not scored, as PyTorch's `cross_entropy` has it."""
_FOLDER = ".tokens"
"""For the files with tokens, in the folder of the text."""


class PackedText(Dataset[Any]):
    """Text on disk, packed into sequences.

    All documents, each with a token after its end, follow one another in the order of the files.
    This row of tokens is cut into sequences of equal length; what is left at its end, less than a
    sequence, is not used. Row i is a pair of int64 (length): the tokens of sequence i, and of each
    the one that follows.

    Each file is tokenised once, when the object is made, into a file of a folder. Afterwards any
    sequence is read directly, by any number of processes. It has a length and indices, so that the
    order of an epoch, the share of each rank and where a run continues are those of every other
    data set. A slice is a data set too: ``text[:64]`` to evaluate, ``text[64:]`` to train.

    Guarantees:
      * memory for a few documents, and for a checksum of each 64 KiB of tokens;
      * the same sequences from the same files, whatever process tokenises them;
      * a file, a tokenizer or a length that has changed since a datacenter began to train on them
        is an error (`digest`).
    """

    def __init__(
        self,
        files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] | Any,
        *,
        tokenizer: str | Path | Callable[[str], Any],
        end: str | int,
        length: int,
        column: str = "text",
        separator: str | None = None,
        boundaries: bool = False,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        """Tokenise what was not tokenised before.

        Args:
            files: a file, a folder of files in the order of their names, files in this order, or a
                `datasets.Dataset`.
            tokenizer: a file `tokenizer.json`, or a function of a text that returns the numbers of
                its tokens, such as a tokenizer of `transformers`.
            end: the token after each document, as text or number.
            length: tokens of a sequence.
            column: of a table, or key of JSON lines, that has the text.
            separator: what is between the documents of plain text; by default, a file is one.
            boundaries: whether a sequence says where documents begin. Its row is then a pair of
                ``{"input_ids", "position_ids"}``, whose positions begin anew with each document,
                and targets that are -100 after its last token.
            folder: for the files with tokens; by default `.tokens` where the text is.

        Raises:
            DamagedError: a file with tokens is not what was written.
            StorageError: a file cannot be read or written.
            TaskError: files, column or tokenizer cannot be used, there is less than one sequence,
                or a file has changed since it was tokenised.
        """
        if length < 1:
            raise TaskError(f"PackedText: length={length} must be at least 1")
        if separator == "":
            raise TaskError("PackedText: separator is empty; leave it out if each file is one")
        self.length = length
        self._boundaries = boundaries
        numbers = Tokenizer(tokenizer, end)
        self._end = numbers.end
        settings = [numbers.identity, numbers.end, numbers.code, column, separator]
        sources = list(_sources(files, column, separator))
        paths = [_token_path(source, settings, folder) for source in sources]
        made: list[TokenFile | None] = [None] * len(sources)
        # Ranks that begin together each take other files, and then wait for the rest.
        for waits in (False, True):
            for at, source in enumerate(sources):
                made[at] = made[at] or TokenFile.of(source, numbers, paths[at], waits=waits)
        self._files = [each for each in made if each is not None]
        if numbers.is_function:
            for at in range(0, len(sources), -(-len(sources) // _COMPARED)):
                self._files[at].check_tokenizer(sources[at], numbers)
        self._starts = [0, *itertools.accumulate(each.tokens for each in self._files)]
        self.tokens = self._starts[-1]
        """All tokens, with those that end documents."""
        self._rows = range((self.tokens - 1) // length)
        """The sequences that are rows."""
        if not self._rows:
            raise TaskError(
                f"the text has {self.tokens} tokens, and a sequence of length={length} needs "
                f"{length + 1}"
            )
        contents = [[each.source_digest, each.tokens] for each in self._files]
        text = json.dumps([settings, length, boundaries, contents])
        self._content = hashlib.sha256(text.encode()).hexdigest()

    @property
    def digest(self) -> str:
        """Changes with all that decides about the rows."""
        return f"{self._content}-{self._rows.start}-{self._rows.stop}"

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return self._part(index)
        if not 0 <= index < len(self):
            raise IndexError(index)
        tokens = self._read(self._rows[index] * self.length, self.length + 1)
        inputs = tokens[:-1]
        targets = tokens[1:]
        if not self._boundaries:
            return inputs, targets
        ends = inputs == self._end
        # The position of a token is its distance from the first one of its document here.
        numbers = torch.arange(self.length)
        begins = torch.zeros_like(numbers)
        begins[1:] = torch.where(ends[:-1], numbers[1:], 0)
        positions = numbers - begins.cummax(0).values
        return {"input_ids": inputs, "position_ids": positions}, targets.where(~ends, IGNORED)

    def _part(self, rows: slice) -> PackedText:
        """Neighbouring rows, such as those that are held out."""
        if rows.step not in (None, 1):
            raise TaskError("PackedText: a part of it has neighbouring rows, so without a step")
        part = copy.copy(self)
        part._rows = self._rows[rows]
        return part

    def _read(self, first: int, count: int) -> torch.Tensor:
        """Tokens of the whole text, int64 (count), which may be in several files."""
        parts = []
        at = bisect.bisect_right(self._starts, first) - 1
        while count:
            file = self._files[at]
            begin = first - self._starts[at]
            taken = min(count, file.tokens - begin)
            parts.append(file.read(begin, taken))
            first += taken
            count -= taken
            at += 1
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _sources(files: Any, column: str, separator: str | None) -> Iterator[Source]:
    """Where the documents are, in order."""
    if hasattr(files, "column_names"):
        yield DatasetSource(files, column)
        return
    if isinstance(files, str | os.PathLike):
        paths = [Path(files)]
        if paths[0].is_dir():
            listed = paths[0].iterdir()
            paths = sorted(each for each in listed if kind_of(each) and each.name[0] != ".")
            if not paths:
                raise TaskError(f"the folder {files} has no file with text: {KINDS}")
    else:
        paths = [Path(each) for each in files]
        if not paths:
            raise TaskError("PackedText got an empty list of files")
    for path in paths:
        yield FileSource(path, column, separator)


def _token_path(source: Source, settings: Sequence[Any], folder: Any) -> Path:
    """The file with the tokens of a source; its name tells it from those of other settings."""
    about: list[Any] = [*settings]
    if isinstance(source, FileSource):
        name = source.path.name
        if folder is None:
            folder = source.path.parent / _FOLDER
        else:  # which may have files of the same name from several places
            about.append(str(source.path.parent.resolve()))
    else:
        name = "dataset"
        about.append(source.state())
        if folder is None:
            raise TaskError(
                "PackedText needs a folder for the tokens of a Dataset; give it folder=..."
            )
    key = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]
    return Path(folder) / f"{name}.{key}"
