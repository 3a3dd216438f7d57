"""Whether what a model computes for one example depends on the others of its batch.

Others are replaced, in batches of the same size and with the same random numbers, and everything
that is computed for the one has to be the same, bit by bit: the kernels of PyTorch then add the
same numbers in the same order. Only where repeating the very same batch gives other bits, as some
kernels of accelerators do, a difference is allowed, of at most `_ROUNDING`.

Gradients do not tell all: a statistic that is detached changes what others get without a gradient.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from isthmus.errors import TaskError
from isthmus.task.scoring.host_generators import HostGenerators

EXAMPLES = 4
"""Examples of the batches that are compared when a run is opened."""
_EVERY = 64
"""Steps from one comparison in training to the next."""
_ROUNDING = 2.0**-16
"""Largest difference, relative to the largest element, where kernels are not repeatable."""
_SUMMARY = 1 << 12
"""Elements of a tensor that are kept as they are, see `summarised`."""
_OUTLIERS = (-1e3, 1e6)
"""Factors of other examples' values: a share of one part in a thousand million is then seen."""
_WHOLE_OUTLIERS = (-(1 << 10), 1 << 15)
"""What other examples' integers are replaced by: few enough for a table that is as long."""
_NOT_FINITE = (math.nan,)
"""Factors of other examples' values, for what is done with a batch in which a number is missing."""

_SECRET_BYTES = 32
"""Bytes that the numbers of a step follow from, so that nobody can try all possible ones."""
_TWISTER_WORDS = 624
"""Words of 32 bits that are the state of a Mersenne Twister."""
_TWISTER_OFFSET = 24
"""Bytes before them in the state of PyTorch's generator, where each takes 8."""
_TORCH_STATE_BYTES = 5056

Observed = Mapping[str, torch.Tensor]
"""What was computed for one example, by what it is."""


def compares(step: int) -> bool:
    """Whether a step of training, counted from 0, is one of those that are compared."""
    return step % _EVERY == 0


def place_in(step: int, count: int) -> int:
    """The place of the example that is compared in a step, among so many: the last one first.

    An example may depend only on those before it.
    """
    return count - 1 - step // _EVERY % count


def arranged(rows: Sequence[torch.Tensor]) -> Iterator[tuple[Sequence[torch.Tensor], int]]:
    """A few examples with each of them at the end once, and one at the beginning; and its place.

    Where examples before one change what it gets, the last is changed most, as by the capacity of
    an expert; the first is, where examples after it do. A single example is there twice.
    """
    rows = [each[:EXAMPLES] for each in rows]
    if len(rows[0]) == 1:
        rows = [each.repeat_interleave(2, 0) for each in rows]
    count = len(rows[0])
    yield rows, 0
    for shift in range(count):
        yield [each.roll(shift, 0) for each in rows], count - 1


def replaced(
    rows: Sequence[torch.Tensor], place: int, *, made_up: bool
) -> Iterator[list[torch.Tensor]]:
    """The examples, with others in all places but one.

    Args:
        rows: tensors with one row for each example.
        place: of the example that stays.
        made_up: whether also by values that no example has, on which the task's code may fail.
    """
    count = len(rows[0])
    others = torch.tensor([index for index in range(count) if index != place])
    if not len(others):
        return

    def with_others(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        changed = []
        for each, new in zip(rows, values, strict=True):
            changed.append(each.clone())
            changed[-1][others.to(each.device)] = new.to(each.dtype)
        return changed

    yield with_others([each[place] for each in rows])
    if len(others) > 1:  # which leaves their mean as it is
        yield with_others([each[others.roll(1).to(each.device)] for each in rows])
    if made_up:
        for values in _made_up(rows, others):
            yield with_others(values)


def _made_up(
    rows: Sequence[torch.Tensor], others: torch.Tensor
) -> Iterator[Sequence[torch.Tensor]]:
    """Values that no example has, for the examples at the indices `others`."""
    values = [each[others.to(each.device)] for each in rows]
    on_processor = rows[0].device.type == "cpu"
    measured = [_is_measured(each) for each in rows]
    if any(measured):
        # An index that follows from a number that is missing would end a process on an accelerator.
        for factor in _OUTLIERS + (_NOT_FINITE if on_processor else ()):
            factors = [factor if each else 1 for each in measured]
            yield [each * other for each, other in zip(values, factors, strict=True)]
    if not on_processor:
        return
    for index, each in enumerate(values):
        for outlier in _whole_outliers(each):
            # One at a time: with the wrong class of an example its value is not tried.
            changed = list(values)
            changed[index] = torch.full_like(each, outlier)
            yield changed


def _whole_outliers(values: torch.Tensor) -> Iterator[int]:
    """What integers are replaced by, and booleans, such as a mask that no compared example has."""
    if values.dtype == torch.bool:
        yield from (True, False)
    elif _is_whole(values):
        limits = torch.iinfo(values.dtype)
        yield from (min(max(each, limits.min), limits.max) for each in _WHOLE_OUTLIERS)


def _is_whole(values: torch.Tensor) -> bool:
    """Whether it has integers."""
    return not (values.is_floating_point() or values.is_complex() or values.dtype == torch.bool)


def _is_measured(values: torch.Tensor) -> bool:
    """Whether other values can be tried in place of these.

    Whole numbers may be places in a table, and one that is not there would end a process on an
    accelerator; on a processor it is an error, which is passed over.
    """
    if values.is_complex():  # which are no places in a table
        return True
    if not values.is_floating_point():
        return False
    return values.device.type == "cpu" or bool((values != values.round()).any())


def check_same(expected: Observed, found: Observed, repeated: Observed | None = None) -> None:
    """Refuse a model that computed something else for an example among others.

    Args:
        expected: with some other examples.
        found: with others.
        repeated: once more with those of `expected`; None if they had the same bits.

    Raises:
        TaskError: with what differs.
    """
    what = _difference(expected, found, repeated)
    if what is not None:
        raise TaskError(
            f"{what} of an example changes with the other examples of its batch, which "
            "differential privacy of examples does not bound; compute everything from the "
            "example alone, with nn.GroupNorm or nn.LayerNorm in place of statistics over a batch"
        )


def check_repeats(expected: Observed, found: Observed, repeated: Observed | None = None) -> None:
    """Refuse a model that computed something else for an example at another time.

    Args:
        expected: of some examples.
        found: of the same ones with the same parameters and random numbers, and others in between.
        repeated: once more as `expected`; None if it had the same bits.

    Raises:
        TaskError: with what differs.
    """
    what = _difference(expected, found, repeated)
    if what is not None:
        raise TaskError(
            f"{what} of an example changes when it is computed again after others: forward() or "
            "loss() keeps something, perhaps in a library or a file, or uses what collate() or the "
            "dataset keeps, which differential privacy of examples does not bound; keep nothing "
            "between calls"
        )


def _difference(expected: Observed, found: Observed, repeated: Observed | None) -> str | None:
    """What differs; None if nothing does."""
    for what, before in expected.items():
        after = found.get(what)
        if after is not None and after.shape == before.shape:
            if same_bits(before, after):
                continue
            again = None if repeated is None else repeated.get(what)
            if again is not None and not same_bits(before, again) and _is_close(before, after):
                continue
        return what
    return None


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal, any NaN to another."""
    return torch.equal(one, other) or (
        one.is_floating_point() and bool(((one == other) | (one.isnan() & other.isnan())).all())
    )


def _is_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not one.is_floating_point():
        return False
    largest = one.abs().max()
    return bool((one - other).abs().max() <= _ROUNDING * largest)


def summarised(found: Observed) -> Observed:
    """What was computed, in little memory: the gradient of one example is as large as the model.

    Of large tensors a hash of all bits is left, or on an accelerator, whose kernels may not repeat
    these, a sample of the elements with their mean and their root mean square.
    """
    return {what: _summary(each) for what, each in found.items()}


def _summary(values: torch.Tensor) -> torch.Tensor:
    flat = values.detach().reshape(-1)
    if flat.numel() <= _SUMMARY:
        return flat.clone()
    if flat.device.type == "cpu":
        octets: Any = flat.view(torch.uint8).numpy()
        return torch.frombuffer(bytearray(hashlib.blake2b(octets).digest()), dtype=torch.uint8)
    sample = flat[:: flat.numel() // _SUMMARY]
    if not flat.is_floating_point():
        return sample.clone()
    norm = torch.linalg.vector_norm(flat, dtype=torch.float64)
    of_all = [flat.mean(dtype=torch.float64), norm / math.sqrt(flat.numel())]
    return torch.cat([sample.double(), torch.stack(of_all)])


@contextlib.contextmanager
def kept_generators(device: torch.device) -> Iterator[None]:
    """Leave the generators of random numbers as they were, so that training is not changed."""
    states = GeneratorStates(device)
    try:
        yield
    finally:
        states.restore()


def seed_generators(device: torch.device, seed: int) -> None:
    """Seed all generators that code may use without having one of its own; `seed` has 64 bits."""
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)
    HostGenerators.seed(seed)


def seed_secretly(device: torch.device, secret: int) -> None:
    """Seed all generators, as `seed_generators` does, with a secret of 256 bits.

    PyTorch's generator of the processor, and NumPy's, have a seed of 32 bits only, all of which one
    could try. So all of their state follows from the secret.

    Raises:
        TaskError: this version of PyTorch has another state.
    """
    seed_generators(device, secret % 2**64)
    HostGenerators.seed(secret)
    octets = secret.to_bytes(_SECRET_BYTES)
    words = hashlib.shake_256(octets).digest(4 * _TWISTER_WORDS)
    state = torch.get_rng_state()
    if len(state) != _TORCH_STATE_BYTES:
        raise TaskError(
            "differential privacy of examples does not know how this version of PyTorch keeps its "
            "random numbers; use a version that is tested with this one of Isthmus"
        )
    end = _TWISTER_OFFSET + 8 * _TWISTER_WORDS
    kept = state[_TWISTER_OFFSET:end].view(torch.int64)
    kept.copy_(torch.frombuffer(bytearray(words), dtype=torch.int32).long() & 0xFFFFFFFF)
    torch.set_rng_state(state)


@contextlib.contextmanager
def secret_numbers(device: torch.device) -> Iterator[None]:
    """Within it, what code draws is known to nobody, and was never drawn before.

    Which numbers an example gets of a stream depends on how many others draw. That is no more than
    other draws of the same distribution as long as nobody knows them; with a seed that is public,
    as the job's is, one example would change the dropout of all others in a way that can be seen.
    """
    with kept_generators(device):
        seed_secretly(device, secrets.randbits(8 * _SECRET_BYTES))
        yield


class GeneratorStates:
    """The states of all generators that code may use without having one of its own."""

    def __init__(self, device: torch.device) -> None:
        """Note those of the processor and of `device`."""
        self._device = device
        self._torch = torch.get_rng_state()
        self._accelerator: torch.Tensor | None = None
        if device.type == "cuda":
            self._accelerator = torch.cuda.get_rng_state(device)
        elif device.type != "cpu":
            self._accelerator = torch.get_device_module(device).get_rng_state()
        self._host = HostGenerators.now()

    def restore(self) -> None:
        """Set them again."""
        torch.set_rng_state(self._torch)
        if self._accelerator is not None and self._device.type == "cuda":
            torch.cuda.set_rng_state(self._accelerator, self._device)
        elif self._accelerator is not None:
            torch.get_device_module(self._device).set_rng_state(self._accelerator)
        self._host.restore()

    def observed(self) -> Observed:
        """What a pass must leave the same, whatever its examples are: seeds made from data mix."""
        states = {"the state of PyTorch's random numbers after a batch": self._torch}
        if self._accelerator is not None:
            states["the state of the accelerator's random numbers after a batch"] = (
                self._accelerator
            )
        text = repr(self._host).encode()
        states["the state of Python's or NumPy's random numbers after a batch"] = torch.frombuffer(
            bytearray(text), dtype=torch.uint8
        )
        return states


class ComputedBefore:
    """What was computed for one example of a step before the others."""

    def __init__(
        self,
        observe: Callable[[Sequence[torch.Tensor], GeneratorStates | None], Observed],
        rows: Sequence[torch.Tensor],
        place: int,
    ) -> None:
        """Compute it.

        Args:
            observe: computes the example among some, from states of generators or those of now.
            rows: the examples of a pass.
            place: of the one.
        """
        # In memory of their own, as the others will be: kernels may add in another order elsewhere.
        self._rows = [each.clone() for each in rows]
        self._place = place
        self._observe = observe
        device = rows[0].device
        self._generators = GeneratorStates(device)
        self._expected = summarised(observe(self._rows, None))
        self._repeated: Observed | None = None
        if device.type != "cpu":  # where kernels may not repeat their result
            self._repeated = summarised(observe(self._rows, None))

    def compare(self) -> None:
        """Compute it again, among others if there are any.

        Raises:
            TaskError: it is something else.
        """
        others = next(replaced(self._rows, self._place, made_up=False), None)
        found = self._observe(self._rows if others is None else others, self._generators)
        check = check_repeats if others is None else check_same
        check(self._expected, summarised(found), self._repeated)
