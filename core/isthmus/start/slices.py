"""Read parts of the tensors that a model starts from, without reading the others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from isthmus.errors import UserError
from isthmus.start.files import digest_of_all
from isthmus.start.loading import ComparedStart, check_digest, exactly, untied
from isthmus.start.plan import Target
from isthmus.start.safetensors_file import torch_dtype
from isthmus.tensors.fingerprint import same_values


class StartSlices:
    """The values of a model that comes wholly from files, in slices of rows."""

    def __init__(self, path: Path, compared: ComparedStart, sha256: str | None = None) -> None:
        """`compared` are the files at `path` and the model, which fit; `sha256` is their digest.

        Without one, any is right.
        """
        self._path = path
        self._sha256 = sha256
        self._found = compared.files
        self._rows = {name: row for files in self._found for name, row in files.tensors.items()}
        self._targets: Mapping[str, Target] = {
            name: target for target in compared.plan.targets for name in target.names
        }

    @staticmethod
    def are_enough(compared: ComparedStart) -> bool:
        """Whether all of a model's values are values of the files."""
        plan = compared.plan
        return (
            plan.explain() is None
            and compared.converted is None
            and not compared.merged
            and all(target.sources for target in plan.targets)
        )

    def has(self, name: str) -> bool:
        """Whether the files have a tensor of the model."""
        return name in self._targets

    def check(self) -> None:
        """Check that what was read since this was made has the expected digest.

        Raises:
            UserError: it has another one, or the files have changed meanwhile.
        """
        check_digest(self._path, digest_of_all(self._found), self._sha256)
        self.check_unchanged()

    def check_unchanged(self) -> None:
        """Refuse files that have changed since their headers were read.

        Raises:
            UserError: so they have.
        """
        for files in self._found:
            files.check_unchanged()

    def read(self, name: str, start: int = 0, rows: int | None = None) -> torch.Tensor:
        """Rows of a tensor of the model, in its type.

        Args:
            name: in the model.
            start: the first row.
            rows: their number; None for all.

        Raises:
            UserError: the files cannot be read, a value would be rounded, or tied tensors differ.
        """
        target = self._targets[name]
        shape = tuple(target.tensor.shape)
        if rows is not None:
            shape = (rows, *shape[1:])
        first: torch.Tensor | None = None
        for source in target.sources:
            values = self._read_source(source, target, start, shape)
            if first is None:
                first = values
            elif not same_values(first, values):
                raise untied(target)
        assert first is not None
        return first

    def _read_source(
        self, source: str, target: Target, start: int, shape: Sequence[int]
    ) -> torch.Tensor:
        file, stored = self._rows[source]
        row_bytes = math.prod(stored.shape[1:]) * stored.item_bytes
        begin = stored.begin + start * row_bytes
        whole = torch.empty(math.prod(shape), dtype=target.tensor.dtype)
        end = begin + len(whole) * stored.item_bytes
        if not stored.begin <= begin <= end <= stored.end:
            raise UserError(f"{source!r} has no rows from {start} on of the shape {tuple(shape)}")
        at = 0
        for piece in file.read_pieces(begin, end):
            values = torch.frombuffer(piece, dtype=torch_dtype(stored.dtype))
            whole[at : at + len(values)] = exactly(values, stored, target)
            at += len(values)
        return whole.view(tuple(shape))
