"""What tasks that are made of another library's objects have in common."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from isthmus.errors import TaskError
from isthmus.task.definition import Parameters, Task

if TYPE_CHECKING:
    from pathlib import Path


class CarriedTask(Task):
    """Remembers its last model, whose parameters another library's code takes from the model."""

    def __init__(self, settings: Mapping[str, Any], data: Path | None = None) -> None:
        """See `Task`."""
        super().__init__(settings, data)
        # Weak: the model is its participant's, and a task lives as long as the process.
        self._last_model: weakref.ref[nn.Module] | None = None

    def _remember(self, model: nn.Module) -> nn.Module:
        self._last_model = weakref.ref(model)
        return model

    def _known_model(self) -> nn.Module:
        """The last model, or a new one that is no participant's."""
        model = None if self._last_model is None else self._last_model()
        if model is None:
            with torch.random.fork_rng(devices=[]):
                model = self.model()
        return model

    @contextlib.contextmanager
    def _model_of(self, parameters: Parameters) -> Iterator[nn.Module]:
        """The model, within it with the given parameters in the places of its own.

        They may be shards, or others of the same names, and no copy of them is made.

        Raises:
            TaskError: the model has no parameters of these names.
        """
        model = self._known_model()
        with contextlib.ExitStack() as stack:
            for name, parameter in parameters.named.items():
                owner, _, own = name.rpartition(".")
                try:
                    places = model.get_submodule(owner)._parameters
                except AttributeError:
                    places = {}
                if places.get(own) is None:
                    raise TaskError(
                        f"the optimizer is made for the model's own parameters, and {name!r} is "
                        "none of them; override optimizer(), or remove exchange.low_rank"
                    )
                stack.callback(places.__setitem__, own, places[own])
                places[own] = parameter
            yield model


def keep_only(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """Leave out of an optimizer what is not trained: it was given all parameters of a model."""
    given = {id(each) for each in parameters}
    for group in optimizer.param_groups:
        group["params"] = [each for each in group["params"] if id(each) in given]


def epoch_order(
    count: int, batch_size: int, generator: torch.Generator, *, shuffled: bool, whole: bool
) -> Sequence[int] | None:
    """The indices of an epoch, as a loader of PyTorch orders them.

    Args:
        count: of the examples.
        batch_size: of the job.
        generator: for a random order.
        shuffled: whether it is random.
        whole: whether an incomplete last batch is left out.

    Returns:
        None for all examples in a random order.
    """
    if shuffled and not whole:
        return None
    used = count - count % batch_size if whole else count
    if not shuffled:
        return range(used)
    drawn: list[int] = torch.randperm(count, generator=generator)[:used].tolist()
    return drawn


def refuse(owner: str, found: Mapping[str, str], ignore: Collection[str]) -> None:
    """Refuse what may change what is trained.

    Args:
        owner: what has it, such as the name of a class.
        found: what was found by name, each with what to do instead.
        ignore: names that the user says do not matter.

    Raises:
        TaskError: there is something.
    """
    refused = {name: remedy for name, remedy in found.items() if name not in ignore}
    if refused:
        named = ", ".join(f"{name} ({remedy})" for name, remedy in refused.items())
        listed = ", ".join(map(repr, refused))
        raise TaskError(
            f"{owner} cannot be carried over as it is, because this may change what is trained: "
            f"{named}; change it, or say ignore=[{listed}] if nothing of the result depends on it "
            "or the job has the same"
        )


def overridden(cls: type, base: type, names: Collection[str]) -> list[str]:
    """Names of the methods that a class defines in place of its library's base class."""
    return [
        name
        for name in names
        if hasattr(base, name) and getattr(cls, name) is not getattr(base, name)
    ]


def replaced(cls: type, base: type, packages: Collection[str]) -> list[str]:
    """Names that a class defines and its library's base class defines too, sorted.

    What the library takes over from elsewhere, such as `torch.nn.Module`, is left out.
    """
    derived = cls.__mro__[: cls.__mro__.index(base)]
    own = {name for each in derived for name in vars(each) if not name.startswith("_")}
    libraries = [each for each in base.__mro__ if each.__module__.partition(".")[0] in packages]
    return sorted(own & {name for each in libraries for name in vars(each)})


def library_class(cls: type, name: str, packages: Collection[str]) -> type | None:
    """The class of a library that another one is derived from, without importing the library."""
    for each in cls.__mro__:
        if each.__name__ == name and each.__module__.partition(".")[0] in packages:
            return each
    return None


Made = Callable[..., Any]
"""A class, which is called without arguments, or a function of the task."""


def made(source: Made, *arguments: Any) -> Any:
    """An object of a class, or what a function of the arguments returns."""
    return source() if isinstance(source, type) else source(*arguments)
