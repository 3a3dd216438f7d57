"""Which tensor of the files goes into which tensor of a model, and what does not fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from isthmus.errors import UserError
from isthmus.start.files import StartFiles
from isthmus.start.names import match
from isthmus.start.safetensors_file import StoredTensor, torch_dtype
from isthmus.tensors.exchange_set import about_brackets, matches

_SHOWN = 3
"""Names in a sentence; a model has thousands."""
_HALF = ("F16", "BF16", "F8_E4M3", "F8_E5M2")


@dataclasses.dataclass(frozen=True, eq=False)
class Target:
    """A tensor of a model's state, and where its values are."""

    names: tuple[str, ...]
    """Names of the tensor in the model: tied ones are several."""
    tensor: torch.Tensor
    sources: tuple[str, ...] = ()
    """Names of the tensor in the files: none if it keeps the values of the seed."""

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

    @property
    def into(self) -> dict[str, list[Target]]:
        """Where each tensor of the files goes, by its name there."""
        found: dict[str, list[Target]] = {}
        for target in self.targets:
            for source in target.sources:
                found.setdefault(source, []).append(target)
        return found

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
class Exceptions:
    """What may be left out, as patterns of names."""

    fresh: Sequence[str] = ()
    """Patterns of the model's tensors that keep the values of the seed."""
    unused: Sequence[str] = ()
    """Patterns of the files' tensors that are not loaded."""


def make_plan(
    model: nn.Module,
    groups: Sequence[Mapping[str, StoredTensor]],
    exceptions: Exceptions,
    names: Mapping[str, str] | None = None,
) -> StartPlan:
    """Compare a model with stored tensors.

    Args:
        model: as the task has built it.
        groups: the stored tensors: of a model, and after it those of an adapter.
        exceptions: what may be left out.
        names: the stored names of the model's tensors; None to match them.

    Raises:
        UserError: a pattern matches nothing, or `names` names what does not exist.
    """
    tensors = {name: each for group in groups for name, each in group.items()}
    if sum(map(len, groups)) != len(tensors):
        raise UserError("the adapter and the model under it have tensors of the same name")
    targets = state_of(model)
    own = [name for target in targets for name in target.names]
    _check_patterns("fresh", exceptions.fresh, own)
    _check_patterns("unused", exceptions.unused, list(tensors))
    wanted = [name for name in tensors if not matches(name, exceptions.unused)]
    are_matched = names is None
    if names is None:
        names = _matched(groups, own, wanted)
    else:
        _check_names(names, own, tensors)
    planned: list[Target] = []
    missing: list[str] = []
    used: set[str] = set()
    misfits: list[str] = []
    for target in targets:
        if any(matches(name, exceptions.fresh) for name in target.names):
            planned.append(target)
            continue
        sources = tuple(dict.fromkeys(names[name] for name in target.names if name in names))
        used.update(sources)
        planned.append(dataclasses.replace(target, sources=sources))
        if not sources:
            missing.append(target.name)
        for source in sources:
            misfits += _misfit(target, tensors[source])
    if are_matched:
        misfits += _in_two_places(planned)
    unexpected = tuple(name for name in wanted if name not in used)
    return StartPlan(tuple(planned), tuple(missing), unexpected, tuple(misfits))


def _in_two_places(targets: Sequence[Target]) -> Iterator[str]:
    """Sentences about stored tensors that fit several of a model: files name no adapter.

    A layer and PEFT's copy of it begin with the same values.
    """
    places: dict[str, Target] = {}
    for target in targets:
        for source in target.sources:
            first = places.setdefault(source, target)
            is_copy = ".original_module." in first.name and is_saved(target.name)
            if first is not target and not is_copy:
                yield (
                    f"{source!r} in it fits {first.name!r} and {target.name!r}, which are of two "
                    "adapters; list those of one adapter in model.fresh, or have the task say by "
                    "start_names() which it is of"
                )


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
    groups: Sequence[Mapping[str, StoredTensor]], own: Sequence[str], wanted: Sequence[str]
) -> dict[str, str]:
    """The stored names of the model's tensors; those of an adapter may have another prefix."""
    if len(groups) == 1:
        return match(own, wanted)
    names: dict[str, str] = {}
    for group, of_adapter in zip(groups, (False, True), strict=True):
        names |= match(
            [name for name in own if (is_of_adapter(name) or is_saved(name)) == of_adapter],
            [name for name in wanted if name in group],
        )
    return names


def is_of_adapter(name: str) -> bool:
    """Whether a tensor of a model is a part of an adapter of PEFT, by its name."""
    return ".lora_" in name


def is_saved(name: str) -> bool:
    """Whether a tensor of a model is in PEFT's copy of a layer, `modules_to_save`, by its name."""
    return ".modules_to_save." in name


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


def check_promise(files: StartFiles) -> None:
    """Refuse weights in half precision which their configuration says are float32.

    Raises:
        UserError: so they are.
    """
    config = files.config()
    if config is None or (config.get("dtype") or config.get("torch_dtype")) != "float32":
        return
    for name, (_, stored) in files.tensors.items():
        if stored.dtype in _HALF:
            raise UserError(
                f"{files.path} has {name!r} in half precision ({stored.dtype}), and its "
                "config.json promises float32; get the weights in float32, or correct config.json"
            )


def _some(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
