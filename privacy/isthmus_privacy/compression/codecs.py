"""Codecs: how updates, and changes of the model, are encoded on their way.

A package provides a codec by an entry point of the group `isthmus.update_codecs`: a name, which
jobs write, and a class that is called with the job's `CodecChoice`. It checks the settings in it,
and raises `UserError` if they cannot be used. The package has to be installed where the codec runs.
Those of Isthmus are registered in the same way. What a codec has to be able to do depends on what
it is for:

    federated.codec                a `Codec`: single updates in rounds without secure sums
    datacenter.compression.codec   a `Codec`; what it takes away is kept and sent later
    federated.download_codec       a `Codec` that is deterministic: devices and server compute the
                                   same model with it, whose SHA-256 is checked
    federated.compression.codec    a `SummableCodec`: a linear map, so that Isthmus can round its
                                   results to whole numbers, have these summed securely, and map
                                   the sum back; what is taken away is kept and sent later

A class may be both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from isthmus.errors import JobError, UpdateError, UserError
from isthmus.job import Job
from isthmus.job.codec_choice import CodecChoice
from isthmus.provided import make_provided

CODECS = "isthmus.update_codecs"
"""Entry-point group of codecs."""

_METHODS = ("max_bytes", "encode", "decode")
_OF_SUMS = ("length", "project", "restore")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncodedRound:
    """What both sides know of a round, for codecs that draw elements or a rotation by it."""

    round: int
    """Number of the round, from 1; 0 for changes of the model, which are those of several
    rounds."""
    seed: int
    """The job's."""
    size: int
    """T: elements that are encoded, the trained ones of an update or, in a secure sum, all."""


class Codec(Protocol):
    """Encodes a vector where it was computed, and decodes it where it is used.

    Attributes that a class may have besides:
        is_deterministic: True if `decode` gives the same bits on every processor, so that it can
            be used for downloads; False without the attribute.
        leaves_rest: True if `encode` replaces the values by what the message lacks of them; without
            the attribute Isthmus decodes the message to find out, which takes memory for a vector.
    """

    def max_bytes(self, size: int) -> int:
        """Most bytes of an encoded vector of `size` elements; a longer message is refused."""
        ...

    def encode(self, values: torch.Tensor, facts: EncodedRound) -> bytes | bytearray:
        """Encode finite values, float32 (T), which it may change."""
        ...

    def decode(self, payload: memoryview, facts: EncodedRound) -> torch.Tensor:
        """The values, a new float32 (T), of bytes that an unknown participant has sent.

        Raises:
            UpdateError: these are not bytes that `encode` returns; one sentence.
        """
        ...


class SummableCodec(Protocol):
    """A linear map from updates to shorter vectors, and one back, for secure sums.

    Isthmus rounds the elements of a shorter vector to whole numbers of 0 to 2**bits - 2, in a range
    that it finds for all devices of a sum, and the server learns the sum of these numbers. So the
    codec gets what has to be linear, and no element can wrap: `project(a) + project(b)` is
    `project(a + b)`, and the same for `restore`. What `restore(project(update))` lacks of an update
    is sent later, so that it must not be longer than the update. `check_sums` tries all of this.
    """

    is_summable: bool
    """True."""

    def length(self, size: int) -> int:
        """Elements of the shorter vector for updates of `size` elements, in every round."""
        ...

    def project(self, values: torch.Tensor, facts: EncodedRound) -> torch.Tensor:
        """The shorter vector, a new float32 (length), of values, float32 (T), which stay."""
        ...

    def restore(self, values: torch.Tensor, facts: EncodedRound) -> torch.Tensor:
        """The update, a new float32 (T), that a shorter vector, float32 (length), stands for."""
        ...


def load_codec(choice: CodecChoice | None) -> Codec | None:
    """Construct the codec that a job names for single vectors; None without one.

    Raises:
        UserError: it is not installed, its settings cannot be used, or it is no such codec.
    """
    if choice is None:
        return None
    found: Codec = _made(choice, _METHODS, "single updates")
    return found


def load_change_codec(choice: CodecChoice | None) -> Codec | None:
    """Construct the codec that a job names for changes of the model; None without one.

    Raises:
        UserError: see `load_codec`; or every participant may compute another model with it.
    """
    codec = load_codec(choice)
    if choice is not None and not getattr(codec, "is_deterministic", False):
        raise JobError(
            f"{choice.shown} does not say that it decodes to the same bits on every processor "
            "(is_deterministic = True), and devices have to compute the committed model; name "
            "another codec"
        )
    return codec


def load_sum_codec(choice: CodecChoice) -> Any:
    """Construct the codec that a job names for secure sums: a `SummableCodec`, or Isthmus' own.

    Raises:
        UserError: see `load_codec`; or sums cannot be computed with it.
    """
    codec = _made(choice, (), "secure sums")
    if not getattr(codec, "is_summable", False):
        raise JobError(
            f"{choice.shown} does not say that its numbers can be summed (is_summable = True), and "
            "with secure aggregation the server learns only sums; name another codec, or set "
            "secure_aggregation = false and federated.codec"
        )
    if not hasattr(codec, "agreed"):  # see `SampledElements`
        _check_methods(codec, choice, _OF_SUMS, "secure sums")
    return codec


def check_codecs(job: Job) -> None:
    """Construct all codecs that a job names.

    Raises:
        UserError: see `load_codec`, `load_change_codec` and `load_sum_codec`.
    """
    load_codec(job.federated.update_codec)
    load_change_codec(job.federated.change_codec)
    if job.federated.compression is not None:
        load_sum_codec(job.federated.compression.choice)
    if job.datacenter.compression is not None:
        load_codec(job.datacenter.compression.choice)


def _made(choice: CodecChoice, methods: Sequence[str], use: str) -> Any:
    codec = make_provided(CODECS, choice.name, choice.shown, choice)
    _check_methods(codec, choice, methods, use)
    return codec


def _check_methods(codec: object, choice: CodecChoice, methods: Sequence[str], use: str) -> None:
    if missing := [each for each in methods if not callable(getattr(codec, each, None))]:
        raise JobError(f"{choice.shown} is not a codec for {use}: it has no {missing[0]}()")


class CodecCalls:
    """A codec of any package, whose results and errors are checked.

    Guarantees:
      * what a codec raises becomes an `UpdateError` that names it;
      * its vectors have the right length, are on the CPU and are float32.
    """

    def __init__(self, codec: Codec, choice: CodecChoice, *, seed: int, size: int) -> None:
        """`size` is T, elements that are encoded; `seed` the job's."""
        self._codec = codec
        self._seed = seed
        self._size = size
        self.shown = choice.shown
        """How messages name it."""

    @property
    def max_bytes(self) -> int:
        """Most bytes of an encoded vector.

        Raises:
            UpdateError: the codec failed.
        """
        try:
            return int(self._codec.max_bytes(self._size))
        except Exception as error:  # third-party code may raise anything
            raise UpdateError(f"{self.shown} has no largest size: {said(error)}") from error

    def encode(self, values: torch.Tensor, round_: int) -> bytes:
        """The codec's bytes of values, float32 (T), which may be changed.

        Raises:
            UpdateError: the codec failed.
        """
        try:
            return bytes(self._codec.encode(values, self._facts(round_)))
        except Exception as error:  # third-party code may raise anything
            raise UpdateError(f"{self.shown} cannot encode the update: {said(error)}") from error

    def encode_and_leave(self, values: torch.Tensor, round_: int) -> bytes:
        """The codec's bytes of values, float32 (T); what the bytes lack of them is left there.

        Raises:
            UpdateError: the codec failed, or decoded something that is not finite.
        """
        if getattr(self._codec, "leaves_rest", False):
            return self.encode(values, round_)
        payload = self.encode(values.clone(), round_)
        sent = self.decode(memoryview(payload), round_)
        if not bool(torch.isfinite(sent).all()):
            raise UpdateError(f"{self.shown} decoded values that are not finite")
        values.sub_(sent)
        return payload

    def decode(self, payload: memoryview, round_: int) -> torch.Tensor:
        """The values, float32 (T), of bytes that may be those of the codec.

        Raises:
            UpdateError: they are not, or the codec failed.
        """
        try:
            values = self._codec.decode(payload, self._facts(round_))
        except Exception as error:  # third-party code may raise anything
            raise UpdateError(f"{self.shown} cannot decode it: {said(error)}") from error
        return checked_vector(values, self._size, f"{self.shown} decoded")

    def _facts(self, round_: int) -> EncodedRound:
        return EncodedRound(round=round_, seed=self._seed, size=self._size)


def checked_vector(values: object, size: int, did: str) -> torch.Tensor:
    """A vector that a codec returned, as float32 (`size`).

    Raises:
        UpdateError: it is none, with what the codec `did`.
    """
    if (
        not isinstance(values, torch.Tensor)
        or values.shape != (size,)
        or values.layout is not torch.strided
        or values.device.type != "cpu"
        or not values.is_floating_point()
    ):
        raise UpdateError(f"{did} no vector of {size} elements (floating point, on the CPU)")
    return values.detach().float()


def said(error: Exception) -> str:
    """One line about an exception; of a `UserError` the sentence alone."""
    reason = " ".join(str(error).split())
    return reason if isinstance(error, UserError) else f"{type(error).__name__}: {reason}"
