"""Codecs of single updates: how devices encode what they send in rounds without secure sums.

A package provides a codec by an entry point of the group `isthmus.update_codecs`: a name, which
jobs write in `federated.codec`, and a class that is called with the job's `[federated]`. It has to
be installed on the server and on the devices. The class checks `federated.codec_settings`, and
raises `UserError` if they cannot be used.

Secure sums add elements of one ring, which all devices encode alike; `federated.compression` is
for these.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Protocol

import torch
from pydantic import Field

from isthmus.errors import JobError, UpdateError, UserError
from isthmus.job import Job, parse_settings
from isthmus.job.federated import FederatedSection
from isthmus.job.section import Section
from isthmus.provided import make_provided
from isthmus.tensors.exchange_set import TensorLayout
from isthmus_privacy.compression.block_top_k import BLOCK, BlockTopK
from isthmus_privacy.compression.model_change import MAX_BITS, ChangeCodec

CODECS = "isthmus.update_codecs"
"""Entry-point group of codecs."""

SETTINGS = "federated.codec_settings"

_METHODS = ("max_bytes", "encode", "decode")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncodedRound:
    """What both sides know of a round, for codecs that draw elements or a rotation by it."""

    round: int
    """Its number, from 1."""
    seed: int
    """The job's."""
    size: int
    """T: trained elements of an update, which are those that are encoded."""


class SingleUpdateCodec(Protocol):
    """Encodes a vector on a device, and decodes it on the server."""

    def max_bytes(self, size: int) -> int:
        """Most bytes of an encoded vector of `size` elements; a longer message is refused."""
        ...

    def encode(self, values: torch.Tensor, facts: EncodedRound) -> bytes | bytearray:
        """Encode finite values, float32 (T), which it may change."""
        ...

    def decode(self, payload: memoryview, facts: EncodedRound) -> torch.Tensor:
        """The values, float32 (T), of bytes that an unknown device has sent.

        Raises:
            UpdateError: these are not bytes that `encode` returns; one sentence.
        """
        ...


def load_codec(federated: FederatedSection) -> SingleUpdateCodec | None:
    """Construct the codec that a job names, which checks its settings; None without one.

    Raises:
        UserError: it is not installed, its settings cannot be used, or it is no codec.
    """
    if federated.codec is None:
        return None
    shown = f"federated.codec={federated.codec!r}"
    codec = make_provided(CODECS, federated.codec, shown, federated)
    if missing := [each for each in _METHODS if not callable(getattr(codec, each, None))]:
        raise JobError(f"{shown} is not an update codec: it has no {missing[0]}()")
    found: SingleUpdateCodec = codec
    return found


class UpdateMessages:
    """The messages with single updates of a run: its codec's, and what goes with them.

    A message has the header of the exchange set, the running statistics (float32), which are sent
    whole because a rounded variance could become negative, and the codec's bytes.
    """

    def __init__(self, codec: SingleUpdateCodec, job: Job, layout: TensorLayout) -> None:
        """Use a codec for the updates of a job's exchange set."""
        self._codec = codec
        self._seed = job.seed
        self._layout = layout
        self._shown = f"federated.codec={job.federated.codec!r}"

    @classmethod
    def of(cls, job: Job, layout: TensorLayout) -> UpdateMessages | None:
        """Those of a job; None if its updates are sent as they are.

        Raises:
            UserError: its codec cannot be used.
        """
        codec = load_codec(job.federated)
        return None if codec is None else cls(codec, job, layout)

    @property
    def max_bytes(self) -> int:
        """Most bytes of a message.

        Raises:
            UpdateError: the codec failed.
        """
        try:
            return self._begin + int(self._codec.max_bytes(self._layout.trained_size))
        except Exception as error:  # third-party code may raise anything
            raise UpdateError(f"{self._shown} has no largest size: {_said(error)}") from error

    @property
    def _begin(self) -> int:
        """Bytes in front of the codec's."""
        return len(self._layout.header) + 4 * (self._layout.size - self._layout.trained_size)

    def encode(self, update: torch.Tensor, round_: int) -> bytes:
        """The message about an update, float32 (N), which may be changed.

        Raises:
            UpdateError: the codec failed.
        """
        trained = self._layout.trained_size
        statistics = update[trained:].contiguous().numpy().tobytes()
        try:
            encoded = bytes(self._codec.encode(update[:trained], self._facts(round_)))
        except Exception as error:  # third-party code may raise anything
            raise UpdateError(f"{self._shown} cannot encode the update: {_said(error)}") from error
        return bytes(self._layout.header) + statistics + encoded

    def decode(self, message: memoryview, round_: int) -> torch.Tensor:
        """The update that a message is about, float32 (N).

        Raises:
            UpdateError: it is none of this exchange set and codec, or not finite.
        """
        header = len(self._layout.header)
        if len(message) < self._begin or bytes(message[:header]) != self._layout.header:
            raise UpdateError("it is not an encoded update of this exchange set")
        facts = self._facts(round_)
        try:
            values = self._codec.decode(message[self._begin :], facts)
        except Exception as error:  # third-party code may raise anything
            raise UpdateError(f"{self._shown} cannot decode it: {_said(error)}") from error
        is_vector = isinstance(values, torch.Tensor) and values.shape == (facts.size,)
        is_plain = is_vector and values.layout is torch.strided and values.device.type == "cpu"
        if not is_plain or not values.is_floating_point():
            raise UpdateError(
                f"{self._shown} decoded no vector of {facts.size} elements (floating point, on the "
                "CPU)"
            )
        update = torch.empty(self._layout.size)
        update[: facts.size] = values.detach()
        if facts.size < self._layout.size:
            whole = bytearray(message[header : self._begin])
            update[facts.size :] = torch.frombuffer(whole, dtype=torch.float32)
        return update

    def _facts(self, round_: int) -> EncodedRound:
        return EncodedRound(round=round_, seed=self._seed, size=self._layout.trained_size)


def _said(error: Exception) -> str:
    """One line about an exception; of a `UserError` the sentence alone."""
    reason = " ".join(str(error).split())
    return reason if isinstance(error, UserError) else f"{type(error).__name__}: {reason}"


# -- the codecs of Isthmus -------------------------------------------------------------------------


class RoundedSettings(Section):
    """Settings of `rounded`."""

    bits: Annotated[int, Field(ge=2, le=MAX_BITS)] = 8
    """Of each element."""


class RoundedUpdate:
    """Few bits for each element, with a step for each 1024 of them: see `model_change`."""

    def __init__(self, federated: FederatedSection) -> None:
        """Read the settings.

        Raises:
            JobError: they cannot be used.
        """
        self._bits = parse_settings(RoundedSettings, federated.codec_settings, SETTINGS).bits

    def max_bytes(self, size: int) -> int:
        """See `SingleUpdateCodec.max_bytes`."""
        return self._codec(size).nbytes

    def encode(self, values: torch.Tensor, facts: EncodedRound) -> bytearray:
        """See `SingleUpdateCodec.encode`."""
        return self._codec(facts.size).encode(torch.zeros_like(values), values)

    def decode(self, payload: memoryview, facts: EncodedRound) -> torch.Tensor:
        """See `SingleUpdateCodec.decode`."""
        values = torch.zeros(facts.size)
        try:
            taken = self._codec(facts.size).apply(values, payload)
        except ValueError as error:
            raise UpdateError(str(error)) from error
        if taken != len(payload):
            raise UpdateError(f"{len(payload) - taken} bytes follow its {taken} bytes")
        return values

    def _codec(self, size: int) -> ChangeCodec:
        return ChangeCodec(size=size, trained=size, bits=self._bits)


class LargestElementsSettings(Section):
    """Settings of `block-top-k`."""

    keep: Annotated[int, Field(ge=1, le=BLOCK)] = 512
    """Elements of a block of 4096 that are sent."""


class LargestElements:
    """The largest elements of each block, in two bits each: see `block_top_k`."""

    def __init__(self, federated: FederatedSection) -> None:
        """Read the settings.

        Raises:
            JobError: they cannot be used.
        """
        table = federated.codec_settings
        self._keep = parse_settings(LargestElementsSettings, table, SETTINGS).keep

    def max_bytes(self, size: int) -> int:
        """See `SingleUpdateCodec.max_bytes`."""
        return self._codec(size).nbytes

    def encode(self, values: torch.Tensor, facts: EncodedRound) -> bytearray:
        """See `SingleUpdateCodec.encode`."""
        return self._codec(facts.size).encode(values)

    def decode(self, payload: memoryview, facts: EncodedRound) -> torch.Tensor:
        """See `SingleUpdateCodec.decode`."""
        return self._codec(facts.size).decode(payload)

    def _codec(self, size: int) -> BlockTopK:
        return BlockTopK(size=size, trained=size, keep=self._keep)
