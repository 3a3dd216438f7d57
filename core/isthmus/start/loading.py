"""Fill a model with the tensors of the files that it starts from.

>>> import tempfile
>>> from torch import nn
>>> from isthmus.tensors.exchange_set import TensorLayout
>>> saved = nn.Linear(2, 3)
>>> layout = TensorLayout.of(saved)
>>> wrapped = nn.ModuleDict({"head": nn.Linear(2, 3)})
>>> with tempfile.TemporaryDirectory() as folder:
...     path = Path(folder, "model.safetensors")
...     _ = path.write_bytes(layout.encode(layout.gather(saved)))
...     start = ModelStart(path, StartFiles.find(path).digest())
...     start.fill(wrapped)
>>> wrapped["head"].weight.equal(saved.weight)
True
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import mmap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from isthmus.errors import JobError, UserError
from isthmus.start.adapters import (
    LoraFactors,
    check_beginnings,
    check_scales,
    laid_out,
    read_adapter,
)
from isthmus.start.converted import Converted, convert
from isthmus.start.files import ADAPTER_CONFIG, StartFiles, digest_of, joined
from isthmus.start.plan import (
    Exceptions,
    StartPlan,
    Target,
    check_promise,
    is_of_adapter,
    make_plan,
)
from isthmus.start.safetensors_file import (
    PIECE_BYTES,
    SafetensorsFile,
    StoredTensor,
    stored_dtype,
    torch_dtype,
)
from isthmus.tensors.fingerprint import same_values

_WIDER = {
    "F8_E4M3": (torch.float16, torch.bfloat16, torch.float32, torch.float64),
    "F8_E5M2": (torch.float16, torch.bfloat16, torch.float32, torch.float64),
    "F16": (torch.float32, torch.float64),
    "BF16": (torch.float32, torch.float64),
    "F32": (torch.float64,),
}
"""The types that have every value of a type of the format."""


@dataclasses.dataclass(frozen=True)
class ComparedStart:
    """A model and the files that it starts from, before anything is copied."""

    files: Sequence[StartFiles]
    """See `StartFiles.find_all`."""
    plan: StartPlan
    merged: Sequence[LoraFactors] = ()
    """What an adapter adds to the tensors of a model without one."""
    converted: Converted | None = None
    """What transformers has loaded, where its names are not those of the files."""


@dataclasses.dataclass(frozen=True)
class ModelStart:
    """The files that a model starts from, as the job names them."""

    path: Path
    sha256: str | None = None
    """The expected digest, in hexadecimal; None for any."""
    base: Path | None = None
    """The model under an adapter of PEFT."""
    exceptions: Exceptions = dataclasses.field(default_factory=Exceptions)
    """What may be left out."""

    def compare(
        self,
        model: nn.Module,
        names: Mapping[str, str] | None = None,
        *,
        converts: bool = True,
    ) -> ComparedStart:
        """Compare a model with the files.

        Args:
            model: as the task has built it.
            names: the stored names of the model's tensors; None to match them.
            converts: whether transformers may load the files, if names do not fit.

        Raises:
            UserError: the files cannot be used, a pattern matches nothing, or `names` names what
                does not exist.
        """
        found = StartFiles.find_all(self.path, self.base)
        check_promise(found[0])
        merged: list[LoraFactors] = []
        of_model = list(found)
        if found[-1].is_adapter and not any(
            is_of_adapter(name) for name, _ in model.named_parameters()
        ):
            merged = read_adapter(found[-1], found[0])
            of_model.pop()
        elif found[-1].is_adapter:
            check_scales(model, found[-1])
        groups = [{name: row for name, (_, row) in each.tensors.items()} for each in of_model]
        plan = make_plan(model, groups, self.exceptions, names)
        into = plan.into
        own = {source: [n for each in into[source] for n in each.names] for source in into}
        merged = laid_out(merged, model, own)
        renamed = bool(plan.missing and plan.unexpected)
        of_adapter = found[-1] if len(of_model) > 1 else None
        fresh = [name for each in plan.targets if not each.sources for name in each.names]
        filled = [name for each in plan.targets if each.sources for name in each.names]
        check_beginnings(model, fresh, of_adapter, filled)
        converted = None
        if converts and renamed and names is None and len(found) == 1:
            converted = convert(model, found[0])
        if converted is not None:
            rows = {name: _row(name, each) for name, each in converted.tensors.items()}
            rows |= {name: _row(name, torch.empty(0)) for name in converted.unexpected}
            plan = make_plan(model, [rows], self.exceptions)
        return ComparedStart(found, plan, merged, converted)

    @torch.no_grad()
    def fill(
        self,
        model: nn.Module,
        names: Mapping[str, str] | None = None,
        *,
        mapped: bool = False,
        rounded: Collection[str] = (),
    ) -> None:
        """Copy the tensors of the files into a model. It is not usable after an error.

        Args:
            model: as the task has built it; it is changed.
            names: see `compare`.
            mapped: whether frozen parameters may be mapped from the files instead, which must then
                never become shorter. What is written to them stays in this process.
            rounded: names of parameters whose values are rounded to their type.

        Parameters on the device `meta` get no values.

        Raises:
            JobError: the files cannot be used, do not fit, or do not have the expected digest.
        """
        try:
            compared = self.compare(model, names)
            if reason := compared.plan.explain():
                raise UserError(f"{self.path}: {reason}")
            parameters = {
                name: each for name, each in model.named_parameters() if mapped and not each.is_meta
            }
            check_digest(self.path, self._copy(compared, parameters, rounded), self.sha256)
            # Headers and adapters were read before the digest was computed.
            for files in compared.files:
                files.check_unchanged()
        except UserError as error:
            raise JobError(f"model.start: {error}") from None

    def _copy(
        self,
        compared: ComparedStart,
        mapped: Mapping[str, nn.Parameter],
        rounded: Collection[str],
    ) -> str:
        """Copy all values, or map those that can be; returns the digest of the files."""
        filled = FilledModel(compared.plan, {} if compared.merged else mapped, rounded)
        filled.check_sums(self.path, compared.merged)
        if compared.converted is not None:
            for name, tensor in compared.converted.tensors.items():
                filled.copy(_row(name, tensor), [tensor.reshape(-1)])
            return compared.converted.digest
        digests = [_load(files, filled) for files in compared.files]
        filled.add(compared.merged)
        return joined(digests)


def check_digest(path: Path, found: str, expected: str | None) -> None:
    """Compare the digest of files with that of the job; None for any.

    Raises:
        UserError: they differ.
    """
    if expected is not None and found != expected:
        raise UserError(
            f"{path} has the digest {found} here, and the job is for {expected}; the files have "
            "changed or are others: put those here with which the job was made, or begin a new run"
        )


def _row(name: str, tensor: torch.Tensor) -> StoredTensor:
    """How a file would describe a tensor that is in memory."""
    return StoredTensor(name, stored_dtype(tensor.dtype), tuple(tensor.shape), 0, 0)


def _load(files: StartFiles, filled: FilledModel) -> str:
    """Read files from beginning to end, copy their tensors, and return their digest."""
    digests = {}
    for file in files.files:
        hashed = hashlib.sha256()
        for piece in file.read_pieces(0, file.values):
            hashed.update(piece)
        mapping = file.mapping() if any(map(filled.maps, file.tensors.values())) else None
        for stored in file.tensors.values():
            if mapping is not None and filled.maps(stored):
                filled.map(stored, _hashed_view(mapping, stored, hashed))
            else:
                filled.copy(stored, _hashed_pieces(file, stored, hashed))
        digests[file.path.name] = hashed.hexdigest()
    if files.is_adapter:
        digests[ADAPTER_CONFIG] = files.config_digest()
    return digest_of(digests)


def _hashed_pieces(
    file: SafetensorsFile, stored: StoredTensor, hashed: hashlib._Hash
) -> Iterator[torch.Tensor]:
    """The elements of a tensor in pieces, in the same memory, which are added to a digest."""
    for piece in file.pieces(stored):
        hashed.update(piece)
        yield torch.frombuffer(piece, dtype=torch_dtype(stored.dtype))


def _hashed_view(mapping: mmap.mmap, stored: StoredTensor, hashed: hashlib._Hash) -> torch.Tensor:
    """A tensor in mapped memory, which is added to a digest."""
    with memoryview(mapping) as view:
        for start in range(stored.begin, stored.end, PIECE_BYTES):
            with view[start : min(start + PIECE_BYTES, stored.end)] as piece:
                hashed.update(piece)
    values = torch.frombuffer(
        mapping,
        dtype=torch_dtype(stored.dtype),
        count=math.prod(stored.shape),
        offset=stored.begin,
    )
    return values.view(stored.shape)


class FilledModel:
    """The tensors of a model while they are filled."""

    def __init__(
        self,
        plan: StartPlan,
        mapped: Mapping[str, nn.Parameter],
        rounded: Collection[str] = (),
    ) -> None:
        """`plan` says where stored tensors go; frozen parameters among `mapped` may be mapped.

        Values of those with names in `rounded` are rounded to their type.
        """
        self._rounded = frozenset(rounded)
        self._into = plan.into
        self._mapped = {name: each for name, each in mapped.items() if not each.requires_grad}
        self._filled: set[str] = set()
        """The targets that have their values, by the first of their names."""

    def maps(self, stored: StoredTensor) -> bool:
        """Whether a tensor's bytes in its file are those of one frozen parameter."""
        targets = self._into.get(stored.name, [])
        if len(targets) != 1 or len(targets[0].sources) != 1 or stored.begin == stored.end:
            return False
        parameter = self._mapped.get(targets[0].name)
        return (
            parameter is not None
            and parameter.dtype == torch_dtype(stored.dtype)
            and parameter.is_contiguous()
            and tuple(parameter.shape) == stored.shape
            and stored.begin % stored.item_bytes == 0
        )

    def map(self, stored: StoredTensor, values: torch.Tensor) -> None:
        """Have a parameter use the memory of a mapped file, see `maps`."""
        [target] = self._into[stored.name]
        self._mapped[target.name].data = values
        self._filled.add(target.name)

    def copy(self, stored: StoredTensor, pieces: Iterable[torch.Tensor]) -> None:
        """Copy a tensor to where it goes, or compare it with what was copied there before.

        Args:
            stored: the tensor.
            pieces: its elements; all are consumed.

        Raises:
            UserError: a value would be rounded, is too large for the type that it is rounded to,
                or differs from that of a tied tensor.
        """
        targets = self._into.get(stored.name, [])
        copied = [each for each in targets if each.name not in self._filled]
        # A tensor whose elements are in another order, such as channels_last, is filled at the end.
        flats = {
            each.name: each.tensor.reshape(-1)
            if each not in copied or each.tensor.is_contiguous()
            else torch.empty(each.tensor.numel(), dtype=each.tensor.dtype)
            for each in targets
        }
        at = 0
        for values in pieces:
            end = at + len(values)
            for target in targets:
                part = flats[target.name][at:end]
                if self._rounded.isdisjoint(target.names):
                    converted = exactly(values, stored, target)
                else:
                    converted = rounded(values, stored, target)
                if target in copied:
                    part.copy_(converted)
                elif not same_values(part, converted):
                    raise untied(target)
            at = end
        for target in copied:
            self._filled.add(target.name)
            if not target.tensor.is_contiguous():
                target.tensor.copy_(flats[target.name].view(target.tensor.shape))

    def check_sums(self, path: Path, merged: Sequence[LoraFactors]) -> None:
        """Check that what an adapter adds can be added in float32.

        Raises:
            UserError: a weight is not in the model, in half precision, or of another shape.
        """
        for each in merged:
            for target in self._into.get(each.source, [None]):
                wide = (torch.float32, torch.float64)
                if target is None or target.tensor.dtype not in wide:
                    raise UserError(
                        f"{path} changes {each.source!r}, which the model does not take from the "
                        "files in float32; build the model in float32, with that tensor"
                    )
                if len(target.names) > 1:
                    raise UserError(
                        f"{path} changes {each.source!r}, and {' and '.join(target.names)} are one "
                        "tensor in the model; have model() build the adapters"
                    )
                shape = tuple(target.tensor.shape)
                if each.shape != shape:
                    raise UserError(
                        f"{path} changes {each.source!r} by a matrix of shape {each.shape}, and it "
                        f"is {shape}; the adapter is for another model"
                    )

    def add(self, merged: Sequence[LoraFactors]) -> None:
        """Add what an adapter adds, once to each tensor."""
        for each in merged:
            for target in self._into[each.source]:
                target.tensor.add_(each.change())


def untied(target: Target) -> UserError:
    """The error for tied tensors that have several names in the files, with other values."""
    return UserError(
        f"{' and '.join(map(repr, target.sources))} have other values, and are one tensor in the "
        f"model ({', '.join(target.names)}); untie them there, or list all but one in model.unused"
    )


def exactly(values: torch.Tensor, stored: StoredTensor, target: Target) -> torch.Tensor:
    """Values in the type of a target.

    Raises:
        UserError: one of them would be rounded.
    """
    dtype = target.tensor.dtype
    if values.dtype == dtype:
        return values
    converted = values.to(dtype)
    exact = dtype in _WIDER.get(stored.dtype, ())
    if not exact and not same_values(values, converted.to(values.dtype)):
        raise UserError(
            f"{stored.name!r} is {stored.dtype} and would be rounded to the {dtype} of "
            f"{target.name!r}; build the model in {values.dtype}, or convert the file"
        )
    return converted


def rounded(values: torch.Tensor, stored: StoredTensor, target: Target) -> torch.Tensor:
    """The nearest values in the type of a target.

    Raises:
        UserError: that of a finite one is infinite.
    """
    converted = values.to(target.tensor.dtype)
    # Without memory of the size of the values, as long as all of them are finite.
    are_finite = not len(values) or all(each.isfinite() for each in converted.aminmax())
    if not are_finite and not torch.equal(converted.isfinite(), values.isfinite()):
        raise UserError(
            f"{stored.name!r} has values that are too large for {target.tensor.dtype}; remove "
            "frozen_dtype"
        )
    return converted
