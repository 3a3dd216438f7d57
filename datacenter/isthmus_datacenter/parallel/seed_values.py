"""The values that a model has from the seed, in a file that every rank reads its rows from.

They have to be drawn in one order, so one rank builds the whole model, and only while it writes the
file. The file is the encoded model (`isthmus.tensors.exchange_set.TensorLayout.encode`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from isthmus.errors import StorageError
from isthmus.system.private_files import make_state_directory, state_file_opener
from isthmus.tensors.exchange_set import Entry, TensorLayout

_PIECE_ELEMENTS = 1 << 20
"""Elements that are encoded or decoded at once."""


class SeedValues:
    """The values of a model all of whose parameters are exchanged, in slices of rows."""

    def __init__(self, path: Path, layout: TensorLayout, model: nn.Module) -> None:
        """`path` is the file, which need not exist yet; `model` has no memory."""
        self.path = path
        self._layout = layout
        self._entries: Mapping[str, Entry] = {entry.name: entry for entry in layout.entries}
        first: dict[int, str] = {id(each): name for name, each in model.named_parameters()}
        self._tensors = {
            name: (first[id(each)], each.dtype)
            for name, each in model.named_parameters(remove_duplicate=False)
        }
        self._tensors |= {name: (name, each.dtype) for name, each in model.named_buffers()}

    @staticmethod
    def are_enough(layout: TensorLayout, model: nn.Module) -> bool:
        """Whether a file has the values of all parameters of a model, none of them rounded."""
        exact = (torch.float32, torch.bfloat16, torch.float16)
        return all(
            name in layout.names and each.dtype in exact for name, each in model.named_parameters()
        )

    @torch.no_grad()
    def write(self, model: nn.Module) -> None:
        """Write the values of the whole model.

        Raises:
            StorageError: the disk is full or fails.
        """
        tensors = {**dict(model.named_buffers()), **dict(model.named_parameters())}
        piece = torch.empty(_PIECE_ELEMENTS)
        part = self.path.with_name(f".{self.path.name}.part")
        try:
            make_state_directory(self.path.parent)
            with open(part, "wb", opener=state_file_opener) as file:
                file.write(self._layout.header)
                for entry in self._layout.entries:
                    for values in _pieces(tensors[entry.name].detach().reshape(-1)):
                        own = piece[: len(values)]
                        own.copy_(values)
                        file.write(own.numpy().data)
            part.replace(self.path)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise StorageError(
                f"the model's first values cannot be written to {self.path.parent}: "
                f"{error.strerror}"
            ) from None

    def has(self, name: str) -> bool:
        """Whether the file has a tensor."""
        return self._tensors[name][0] in self._entries

    def read(self, name: str, start: int = 0, rows: int | None = None) -> torch.Tensor:
        """Rows of a tensor of the model, in its type; all of them if `rows` is None.

        Raises:
            StorageError: the file cannot be read.
        """
        first, dtype = self._tensors[name]
        entry = self._entries[first]
        row = math.prod(entry.shape[1:])
        shape = entry.shape if rows is None else (rows, *entry.shape[1:])
        whole = torch.empty(shape, dtype=dtype)
        try:
            with self.path.open("rb") as file:
                file.seek(len(self._layout.header) + 4 * (entry.offset + start * row))
                for part in _pieces(whole.view(-1)):
                    values = torch.empty(len(part)) if dtype != torch.float32 else part
                    if file.readinto(values.numpy().data) != 4 * len(part):
                        raise StorageError(f"{self.path} is shorter than the model")
                    if values is not part:
                        part.copy_(values)
        except OSError as error:
            raise StorageError(f"{self.path} cannot be read: {error.strerror}") from None
        return whole

    def check(self) -> None:
        """Nothing to compare: the file is the ranks' own, written for this start."""


def _pieces(flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A vector in parts, as views."""
    return torch.split(flat, _PIECE_ELEMENTS)
