"""The codec of a secure sum: what devices agree on, and what it does with an update in a round."""

from __future__ import annotations

import dataclasses
import functools
import json
from importlib.metadata import EntryPoint
from typing import Any

import torch

from isthmus.errors import JobError, UpdateError
from isthmus.job import Job
from isthmus.job.codec_choice import CodecChoice
from isthmus.provided import provided
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.tensors.sending_rates import check_compression
from isthmus_privacy.compression.codecs import (
    CODECS,
    EncodedRound,
    SummableCodec,
    checked_vector,
    load_sum_codec,
    said,
)
from isthmus_privacy.compression.update_codec import MAX_BITS, Levels, UpdateCodec
from isthmus_privacy.crypto.canonical import NUMBER, Message, text

_KEY = "federated.compression.codec"
_SETTINGS_KEY = "federated.compression.settings"
_MAX_SETTINGS = 1 << 16
"""Most bytes of the settings."""
_TOLERANCE = 1e-3
"""Largest relative error of a sum of float32 vectors that is still one of rounding."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProvidedSumCodec(Levels, Message):
    """A codec of a package for a secure sum: all devices of it have the same one.

    Isthmus' own is `UpdateCodec`, in whose place this is in a round configuration.
    """

    TAG = "provided-codec-1"
    FIELDS = {
        "name": text(63),
        "version": text(128),
        "settings": text(_MAX_SETTINGS),
        "length": NUMBER,
        "bits": NUMBER,
        "seed": NUMBER,
    }

    name: str
    """Name of the entry point."""
    version: str
    """Name and version of the package that provides it: two versions may compute different
    things."""
    settings: str = dataclasses.field(repr=False)
    """JSON, with sorted keys."""
    length: int
    """Elements that are sent of an update."""
    bits: int
    """An element has 2**bits - 1 levels, zero in their middle."""
    seed: int
    """The job's."""

    @property
    def more(self) -> str:
        """What a message about it says besides its fields."""
        return f", settings={self.settings}"

    def fits(self, highest: int, size: int) -> bool:
        """Whether its fields are in their ranges, and go with a configuration's fields."""
        in_range = 2 <= self.bits <= MAX_BITS and 1 <= self.length <= size
        return in_range and highest == self.highest

    def kept(self, size: int) -> int:
        """Number of elements that are sent of an update of N = `size`."""
        return self.length

    def in_round(self, round_: int, size: int) -> ProvidedMap:
        """What it does with an update of N = `size` in a round.

        Raises:
            UserError: the codec is not installed here.
        """
        choice = CodecChoice(_KEY, self.name, _SETTINGS_KEY, json.loads(self.settings))
        codec = _codec(self.name, self.settings)
        facts = EncodedRound(round=round_, seed=self.seed, size=size)
        return ProvidedMap(codec, choice, facts, self.length)


class ProvidedMap:
    """A codec of a package in one round, with its results and errors checked."""

    def __init__(
        self, codec: SummableCodec, choice: CodecChoice, facts: EncodedRound, length: int
    ) -> None:
        self._codec = codec
        self._shown = choice.shown
        self._facts = facts
        self._length = length

    def project(self, values: torch.Tensor) -> torch.Tensor:
        """What is sent of an update, float32 (N), before it is rounded: float32 (length).

        Raises:
            UpdateError: the codec failed, or what it returned is not finite.
        """
        if not any(values.stride()):  # zeros that take no memory, of a device without an update
            return torch.zeros(self._length)
        try:
            sent = self._codec.project(values, self._facts)
        except Exception as error:  # third-party code may raise anything
            raise UpdateError(f"{self._shown} cannot encode the update: {said(error)}") from error
        return self._checked(sent, self._length)

    def restore(self, values: torch.Tensor) -> torch.Tensor:
        """The update, float32 (N), that what was sent stands for, float32 (length).

        Raises:
            UpdateError: see `project`.
        """
        try:
            update = self._codec.restore(values, self._facts)
        except Exception as error:  # third-party code may raise anything
            raise UpdateError(f"{self._shown} cannot decode a sum: {said(error)}") from error
        return self._checked(update, self._facts.size)

    def _checked(self, values: object, size: int) -> torch.Tensor:
        vector = checked_vector(values, size, f"{self._shown} returned")
        if not bool(torch.isfinite(vector).all()):
            raise UpdateError(f"{self._shown} returned elements that are not finite")
        return vector


def sum_codec(job: Job, layout: TensorLayout, bits: int) -> UpdateCodec | ProvidedSumCodec:
    """What the devices of a secure sum have to agree on, in a job with `federated.compression`.

    Args:
        job: that names the codec.
        layout: of the update.
        bits: of an element.

    Raises:
        UserError: the codec cannot be used.
    """
    compression = job.federated.compression
    assert compression is not None
    choice = compression.choice
    settings = _canonical(choice)
    codec: Any = _loaded(choice.key, choice.name, choice.settings_key, settings)
    if (own := getattr(codec, "agreed", None)) is not None:
        agreed: UpdateCodec = own(layout, job.seed, bits)
        return agreed
    try:
        length = int(codec.length(layout.size))
    except Exception as error:  # third-party code may raise anything
        raise JobError(f"{choice.shown} has no length: {said(error)}") from error
    if not 1 <= length <= layout.size:
        raise JobError(
            f"{choice.shown} makes {length} elements of an update of {layout.size}; it has to be 1 "
            "to as many"
        )
    if len(settings.encode()) > _MAX_SETTINGS:
        raise JobError(f"{choice.settings_key} has more than {_MAX_SETTINGS} bytes of JSON")
    return ProvidedSumCodec(
        name=choice.name,
        version=_version(choice.name),
        settings=settings,
        length=length,
        bits=bits,
        seed=job.seed,
    )


def check_sums(job: Job, layout: TensorLayout) -> None:
    """Refuse a codec of secure sums that is not what it says, by trying it on random vectors.

    Raises:
        UserError: it cannot be used, or is not linear; or what it takes away would grow.
    """
    compression = job.federated.compression
    if compression is None:
        return
    check_compression(layout, compression.one_in_of, job.exchange.buffers)
    agreed = sum_codec(job, layout, compression.bits)
    if isinstance(agreed, UpdateCodec):
        return
    shown = compression.choice.shown
    codec = agreed.in_round(1, layout.size)
    generator = torch.Generator().manual_seed(job.seed)
    a, b = (torch.randn(layout.size, generator=generator) for _ in range(2))
    unchanged = a.clone()
    projected = codec.project(a)
    if not torch.equal(a, unchanged):
        raise JobError(f"{shown} changes the update in project(), which has to stay as it is")
    if not torch.equal(projected, codec.project(a)):
        raise JobError(
            f"{shown} does not project an update twice in the same way: it may draw by the round "
            "and the seed that it is given, and by nothing else"
        )
    _check_linear(f"{shown}: project()", projected + codec.project(b), codec.project(a + b))
    restored = codec.restore(projected.clone())
    p, q = (torch.randn(len(projected), generator=generator) for _ in range(2))
    sums = codec.restore(p.clone()) + codec.restore(q.clone())
    _check_linear(f"{shown}: restore()", sums, codec.restore(p + q))
    left = float((a - restored).norm() / a.norm())
    if left > 1 + _TOLERANCE:
        raise JobError(
            f"{shown}: what restore(project(update)) lacks of an update is {left:.3g} times as "
            "long as the update, and would grow from round to round as it is sent later; scale "
            "what restore() returns down"
        )


def _check_linear(shown: str, sums: torch.Tensor, of_sum: torch.Tensor) -> None:
    if float((sums - of_sum).norm()) > _TOLERANCE * (float(sums.norm()) + float(of_sum.norm())):
        raise JobError(
            f"{shown} is not linear: of two vectors its results do not add up to that of their "
            "sum, so that the server would decode another update from a sum"
        )


def _canonical(choice: CodecChoice) -> str:
    return json.dumps(dict(choice.settings), sort_keys=True)


def _codec(name: str, settings: str) -> SummableCodec:
    codec: SummableCodec = _loaded(_KEY, name, _SETTINGS_KEY, settings)
    return codec


@functools.lru_cache(maxsize=4)
def _loaded(key: str, name: str, settings_key: str, settings: str) -> Any:
    """One instance serves all runs of a process that name a codec alike."""
    return load_sum_codec(CodecChoice(key, name, settings_key, json.loads(settings)))


def _version(name: str) -> str:
    """The package that provides a codec, and its version."""
    entries: list[EntryPoint] = provided(CODECS).get(name, [])
    package = entries[0].dist if entries else None
    return "unknown" if package is None else f"{package.name} {package.version}"
