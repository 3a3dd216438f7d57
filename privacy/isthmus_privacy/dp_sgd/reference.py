"""One computation that training repeats: it must give the same results as when the run was opened.

What a model computes may depend on its parameters, on an example and on random numbers. For one
example, these parameters and these random numbers it is computed at the start, before training has
seen others, and again later: anything else that has changed the result was kept from other
examples, wherever it is, also in code of C++, in libraries or in files.

The parameters are random numbers, as large as those of the model are at the start, and are made
anew each time. So they take memory only meanwhile, in which there are no gradients yet.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import nn

from isthmus_privacy.dp_sgd.isolation import (
    GeneratorStates,
    Observed,
    check_repeats,
    same_bits,
    summarised,
)
from isthmus_privacy.dp_sgd.kept_state import is_wrapped

_IN_PLACE_OF_ZERO = 0.02
"""Standard deviation where all numbers of a parameter are zeros, which would stop gradients."""

Parameters = Mapping[str, torch.Tensor]
"""By name, the part that this process has of those that are trained."""
Observe = Callable[[GeneratorStates], Observed]
"""Computes the example with the numbers of `Reference.numbers`, from these states of generators."""


class Reference:
    """The results of one example when a run was opened."""

    def __init__(self, model: nn.Module) -> None:
        """`model` is what is trained."""
        self._model = model
        self._spreads: dict[str, tuple[float, float]] = {}
        self._generators: GeneratorStates | None = None
        self._expected: Observed = {}
        self._before: Observed = {}
        """What `_loaded` was then."""
        self._threads = 0

    def check(self, parameters: Parameters, device: torch.device, observe: Observe) -> None:
        """Compute the example, and compare the results with those of the first call.

        Between two calls the platform may load other buffers, and other parameters that are not
        trained. Then later results are compared with the new ones. Whatever else has changed, such
        as what collate() keeps of examples that it has read, must leave the result as it is.

        Args:
            parameters: that are trained.
            device: of the computation.
            observe: called once, on accelerators twice.

        Raises:
            TaskError: the results are others.
        """
        if parameters.keys() != self._spreads.keys():
            self._spreads = {name: _spread(each) for name, each in parameters.items()}
            self._expected = {}
        if self._generators is None:
            self._generators = GeneratorStates(device)
        found = summarised(observe(self._generators))
        repeated = None if device.type == "cpu" else summarised(observe(self._generators))
        loaded = self._loaded(parameters)
        # Other numbers of threads add in another order.
        same_threads = self._threads == torch.get_num_threads()
        if self._expected and same_threads and _is_same(loaded, self._before):
            # `found` comes first, as `repeated` has to be of the same moment as what is expected.
            check_repeats(found, self._expected, repeated)
            return
        self._expected = found
        self._threads = torch.get_num_threads()
        self._before = loaded

    @torch.no_grad()
    def _loaded(self, parameters: Parameters) -> Observed:
        """What the platform loads into the model besides what is trained, in little memory."""
        tensors = dict[str, torch.Tensor](self._model.named_buffers())
        tensors |= dict(self._model.named_parameters())
        others = {name: _own(each) for name, each in tensors.items() if name not in parameters}
        # What a call has left of `torch.func` has no values; it is refused where it was left.
        return summarised({name: each for name, each in others.items() if not is_wrapped(each)})

    def numbers(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """The numbers of a parameter, of the shape and on the device of `like`; always the same."""
        mean, deviation = self._spreads[name]
        generator = torch.Generator(like.device).manual_seed(0)
        return torch.empty_like(like).normal_(mean, deviation, generator=generator)

    @contextlib.contextmanager
    def in_place(self, parameters: Parameters) -> Iterator[None]:
        """Have these numbers in the memory of parameters meanwhile."""
        trained = {name: each.clone() for name, each in parameters.items()}
        try:
            for name, each in parameters.items():
                each.copy_(self.numbers(name, each))
            yield
        finally:
            for name, each in parameters.items():
                each.copy_(trained[name])


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this process has."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def _is_same(one: Observed, other: Observed) -> bool:
    return one.keys() == other.keys() and all(
        each.dtype == other[name].dtype and same_bits(each, other[name])
        for name, each in one.items()
    )


def _spread(values: torch.Tensor) -> tuple[float, float]:
    """Mean and standard deviation of numbers that are about as large."""
    values = values.detach().double()
    mean = float(values.mean())
    deviation = float(values.std(correction=0))
    if not math.isfinite(mean + deviation):  # also of none
        return 0.0, _IN_PLACE_OF_ZERO
    return mean, deviation if mean or deviation else _IN_PLACE_OF_ZERO
