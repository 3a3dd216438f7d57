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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from isthmus.errors import JobError, UserError
from isthmus.start.adapters import LoraFactors, read_adapter
from isthmus.start.files import ADAPTER_CONFIG, StartFiles, digest_of, joined
from isthmus.start.names import match
from isthmus.start.safetensors_file import SafetensorsFile, StoredTensor, torch_dtype
from isthmus.tensors.exchange_set import about_brackets, matches
from isthmus.tensors.fingerprint import same_values

_SHOWN = 3
"""Names in a sentence; a model has thousands."""

_HALF = ("F16", "BF16", "F8_E4M3", "F8_E5M2")
_WIDER = {
    "F8_E4M3": (torch.float16, torch.bfloat16, torch.float32, torch.float64),
    "F8_E5M2": (torch.float16, torch.bfloat16, torch.float32, torch.float64),
    "F16": (torch.float32, torch.float64),
    "BF16": (torch.float32, torch.float64),
    "F32": (torch.float64,),
}
"""The types that have every value of a type of the format."""


@dataclasses.dataclass(frozen=True)
class Target:
    """A tensor of a model's state, and where its values are."""

    names: tuple[str, ...]
    """Its names in the model: tied ones are several."""
    tensor: torch.Tensor
    sources: tuple[str, ...] = ()
    """Its names in the files: none if it keeps the values of the seed."""

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]


@dataclasses.dataclass(frozen=True)
class StartPlan:
    """What would be loaded, and what does not fit."""

    targets: tuple[Target, ...]
    missing: tuple[str, ...] = ()
    """Tensors of the model that the files do not have."""
    unexpected: tuple[str, ...] = ()
    """Tensors of the files that the model does not have."""
    misfits: tuple[str, ...] = ()
    """Sentences about tensors that have another shape or type."""

    def explain(self) -> str | None:
        """What does not fit, or None."""
        parts = list(self.misfits[:1])
        if self.missing:
            parts.append(
                f"{len(self.missing)} tensors of the model are not in it ({_some(self.missing)}); "
                "correct the model, list in model.fresh those that begin with the values of the "
                "seed, or give their names there by start_names() of the task"
            )
        if self.unexpected:
            parts.append(
                f"{len(self.unexpected)} tensors in it are not in the model "
                f"({_some(self.unexpected)}); correct the model, or list them in model.unused"
            )
        return ". Also, ".join(parts) or None


@dataclasses.dataclass(frozen=True)
class ModelStart:
    """The files that a model starts from, as the job names them."""

    path: Path
    sha256: str | None = None
    """The expected digest, in hexadecimal; None for any."""
    base: Path | None = None
    """The model under an adapter of PEFT."""
    fresh: Sequence[str] = ()
    """Patterns of the model's tensors that keep the values of the seed."""
    unused: Sequence[str] = ()
    """Patterns of the files' tensors that are not loaded."""

    def find(self) -> list[StartFiles]:
        """See `StartFiles.find_all`."""
        return StartFiles.find_all(self.path, self.base)

    def plan(self, model: nn.Module, names: Mapping[str, str] | None = None) -> StartPlan:
        """Compare a model with the headers of the files.

        Args:
            model: as the task has built it.
            names: the stored names of the model's tensors; None to match them.

        Raises:
            UserError: the files cannot be used, a pattern matches nothing, or `names` names what
                does not exist.
        """
        return self._plan(self.find(), model, names)[0]

    @torch.no_grad()
    def fill(self, model: nn.Module, names: Mapping[str, str] | None = None) -> None:
        """Copy the tensors of the files into a model. It is not usable after an error.

        Args:
            model: as the task has built it; it is changed.
            names: see `plan`.

        Raises:
            JobError: the files cannot be used, do not fit, or do not have the expected digest.
        """
        try:
            found = self.find()
            plan, factors = self._plan(found, model, names)
            if reason := plan.explain():
                raise UserError(f"{self.path}: {reason}")
            into = {source: target for target in plan.targets for source in target.sources}
            if factors:
                _check_exact_sum(self.path, factors, into)
            digests = []
            for files in found:
                adapter = files.is_adapter and bool(factors)
                digests.append(_load(files, {} if adapter else into))
            self._check_digest(joined(digests))
            for each in factors:
                into[each.source].tensor.add_(each.change())
        except UserError as error:
            raise JobError(f"model.start: {error}") from None

    def _check_digest(self, found: str) -> None:
        if self.sha256 is not None and found != self.sha256:
            raise UserError(
                f"{self.path} has the digest {found} here, and the job is for {self.sha256}; the "
                "files have changed or are others: put those here with which the job was made, or "
                "begin a new run"
            )

    def _plan(
        self, found: Sequence[StartFiles], model: nn.Module, names: Mapping[str, str] | None
    ) -> tuple[StartPlan, list[LoraFactors]]:
        """The plan, and what an adapter adds to the tensors of a model without one."""
        tensors = {name: each for files in found for name, each in files.tensors.items()}
        if sum(len(files.tensors) for files in found) != len(tensors):
            raise UserError(f"{self.path} and {self.base} have tensors of the same name")
        targets = state_of(model)
        factors: list[LoraFactors] = []
        own = [name for target in targets for name in target.names]
        if found[-1].is_adapter and not any(".lora_" in name for name in own):
            factors = read_adapter(found[-1], found[0])
            for name in found[-1].tensors:
                del tensors[name]
        _check_patterns("fresh", self.fresh, own)
        _check_patterns("unused", self.unused, list(tensors))
        wanted = [name for name in tensors if not matches(name, self.unused)]
        if names is None:
            names = _matched(found, own, wanted)
        else:
            _check_names(names, own, tensors)
        planned: list[Target] = []
        missing: list[str] = []
        used: set[str] = set()
        misfits: list[str] = []
        for target in targets:
            if any(matches(name, self.fresh) for name in target.names):
                planned.append(target)
                continue
            sources = tuple(dict.fromkeys(names[name] for name in target.names if name in names))
            used.update(sources)
            planned.append(dataclasses.replace(target, sources=sources))
            if not sources:
                missing.append(target.name)
            for source in sources:
                misfits += _misfit(target, tensors[source][1])
        for files in found:
            misfits += _broken_promise(files, used)
        unexpected = tuple(name for name in wanted if name not in used)
        plan = StartPlan(tuple(planned), tuple(missing), unexpected, tuple(misfits))
        return plan, factors


def state_of(model: nn.Module) -> list[Target]:
    """The parameters and persistent buffers of a model, tied ones once, in its order."""
    temporary = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        for name in getattr(module, "_non_persistent_buffers_set", ())
    }
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for name, tensor in [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]:
        if name not in temporary:
            names.setdefault(id(tensor), []).append(name)
            tensors[id(tensor)] = tensor.detach()
    return [Target(tuple(found), tensors[key]) for key, found in names.items()]


def _matched(
    found: Sequence[StartFiles], own: Sequence[str], wanted: Sequence[str]
) -> dict[str, str]:
    """The stored names of the model's tensors; those of an adapter may have another prefix."""
    names: dict[str, str] = {}
    for files in found:
        known = files.tensors
        names |= match(
            [name for name in own if (".lora_" in name) == files.is_adapter],
            [name for name in wanted if name in known],
        )
    return names


def _check_patterns(key: str, patterns: Sequence[str], names: Sequence[str]) -> None:
    for pattern in patterns:
        if not any(matches(name, [pattern]) for name in names):
            where = "the model" if key == "fresh" else "the files"
            raise UserError(
                f"model.{key}: {pattern!r} matches no tensor of {where}{about_brackets(pattern)}; "
                f"there are {_some(names)}"
            )


def _check_names(
    names: Mapping[str, str], own: Sequence[str], stored: Mapping[str, object]
) -> None:
    for name, source in names.items():
        if name not in own:
            raise UserError(f"start_names() names {name!r}, which the model does not have")
        if source not in stored:
            raise UserError(
                f"start_names() says that {name!r} is {source!r} there, and no file has it; they "
                f"have {_some(list(stored))}"
            )


def _misfit(target: Target, stored: StoredTensor) -> Iterator[str]:
    """Why a stored tensor cannot be loaded into a model's tensor; nothing if it can."""
    shape = tuple(target.tensor.shape)
    if stored.shape != shape:
        yield (
            f"{stored.name!r} has the shape {stored.shape}, and {target.name!r} of the model has "
            f"{shape}; build the model with the sizes of the file, or list the one in model.unused "
            "and the other in model.fresh"
        )
    dtype = torch_dtype(stored.dtype)
    both_float = dtype.is_floating_point and target.tensor.dtype.is_floating_point
    if dtype != target.tensor.dtype and not both_float:
        yield (
            f"{stored.name!r} is of type {stored.dtype}, and {target.name!r} of the model is "
            f"{target.tensor.dtype}; build the model with the type of the file"
        )


def _broken_promise(files: StartFiles, used: set[str]) -> Iterator[str]:
    """Say that weights are in half precision which their configuration says are float32."""
    config = files.config()
    if config is None or (config.get("dtype") or config.get("torch_dtype")) != "float32":
        return
    for name, (_, stored) in files.tensors.items():
        if name in used and stored.dtype in _HALF:
            yield (
                f"{name!r} is in half precision ({stored.dtype}), and the folder's config.json "
                "promises float32; get the weights in float32, or correct config.json"
            )


def _load(files: StartFiles, into: Mapping[str, Target]) -> str:
    """Read files from beginning to end, copy their tensors, and return their digest."""
    digests = {}
    for file in files.files:
        hashed = hashlib.sha256()
        for piece in file.read_pieces(0, file.values):
            hashed.update(piece)
        for stored in file.tensors.values():
            _load_tensor(file, stored, into.get(stored.name), hashed)
        digests[file.path.name] = hashed.hexdigest()
    if files.is_adapter:
        digests[ADAPTER_CONFIG] = files.config_digest()
    return digest_of(digests)


def _load_tensor(
    file: SafetensorsFile, stored: StoredTensor, target: Target | None, hashed: hashlib._Hash
) -> None:
    """Copy one tensor, or compare it, if it is another name of one that was copied before."""
    if target is None:
        for piece in file.pieces(stored):
            hashed.update(piece)
        return
    tensor = target.tensor
    # A tensor whose elements are in another order, such as channels_last, is filled at the end.
    flat = (tensor if tensor.is_contiguous() else torch.empty_like(tensor).contiguous()).view(-1)
    before = tensor.reshape(-1) if target.sources[0] != stored.name else None
    at = 0
    for piece in file.pieces(stored):
        hashed.update(piece)
        values = torch.frombuffer(piece, dtype=torch_dtype(stored.dtype))
        end = at + len(values)
        converted = _exactly(values, stored, target)
        if before is None:
            flat[at:end] = converted
        elif not same_values(before[at:end], converted):
            raise UserError(
                f"{target.sources[0]!r} and {stored.name!r} have other values in {file.path}, and "
                f"are one tensor in the model ({', '.join(target.names)}); untie them there, or "
                "list one in model.unused"
            )
        at = end
    if before is None and not tensor.is_contiguous():
        tensor.copy_(flat.view(tensor.shape))


def _exactly(values: torch.Tensor, stored: StoredTensor, target: Target) -> torch.Tensor:
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


def _check_exact_sum(
    path: Path, factors: Sequence[LoraFactors], into: Mapping[str, Target]
) -> None:
    for each in factors:
        target = into.get(each.source)
        if target is None or target.tensor.dtype not in (torch.float32, torch.float64):
            raise UserError(
                f"{path} changes {each.source!r}, which the model does not take from the files in "
                "float32; build the model in float32, with that tensor"
            )
        if each.shape != tuple(target.tensor.shape):
            raise UserError(
                f"{path} changes {each.source!r} by a matrix of shape {each.shape}, and it is "
                f"{tuple(target.tensor.shape)}; the adapter is for another model"
            )


def _some(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
