"""The codecs of Isthmus, as the entry points of its own metadata name them."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field

from isthmus.errors import UpdateError
from isthmus.job import parse_settings
from isthmus.job.codec_choice import CodecChoice
from isthmus.job.exchange import OneIn, Pattern
from isthmus.job.section import Section
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.tensors.sending_rates import sending_rates
from isthmus_privacy.compression.block_top_k import BLOCK, BlockTopK
from isthmus_privacy.compression.codecs import EncodedRound
from isthmus_privacy.compression.model_change import MAX_BITS, ChangeCodec
from isthmus_privacy.compression.update_codec import UpdateCodec


class RoundedSettings(Section):
    """Settings of `rounded`."""

    bits: Annotated[int, Field(ge=2, le=MAX_BITS)] = 8
    """Bits of each element."""


class RoundedUpdate:
    """Few bits for each element, with a step for each 1024 of them: see `model_change`."""

    is_deterministic = True

    def __init__(self, choice: CodecChoice) -> None:
        """Read the settings.

        Raises:
            JobError: they cannot be used.
        """
        self._bits = parse_settings(RoundedSettings, choice.settings, choice.settings_key).bits

    def max_bytes(self, size: int) -> int:
        """See `Codec.max_bytes`."""
        return self._codec(size).nbytes

    def encode(self, values: torch.Tensor, facts: EncodedRound) -> bytearray:
        """See `Codec.encode`."""
        return self._codec(facts.size).encode(torch.zeros_like(values), values)

    def decode(self, payload: memoryview, facts: EncodedRound) -> torch.Tensor:
        """See `Codec.decode`."""
        values = torch.zeros(facts.size)
        try:
            taken = self._codec(facts.size).apply(values, payload)
        except ValueError as error:
            raise UpdateError(str(error)) from error
        if taken != len(payload):
            raise UpdateError(f"{len(payload) - taken} bytes follow its {taken} bytes")
        return values

    def changes(self, layout: TensorLayout) -> ChangeCodec:
        """See `model_changes.ChangesCodec`: few elements that change share the bits of all."""
        return ChangeCodec(layout.size, layout.trained_size, self._bits)

    def _codec(self, size: int) -> ChangeCodec:
        return ChangeCodec(size=size, trained=size, bits=self._bits)


class LargestElementsSettings(Section):
    """Settings of `block-top-k`."""

    keep: Annotated[int, Field(ge=1, le=BLOCK)] = 512
    """Elements of a block of 4096 that are sent."""


class LargestElements:
    """The largest elements of each block, in two bits each: see `block_top_k`."""

    is_deterministic = True
    leaves_rest = True

    def __init__(self, choice: CodecChoice) -> None:
        """Read the settings.

        Raises:
            JobError: they cannot be used.
        """
        key = choice.settings_key
        self._keep = parse_settings(LargestElementsSettings, choice.settings, key).keep

    def max_bytes(self, size: int) -> int:
        """See `Codec.max_bytes`."""
        return self._codec(size).nbytes

    def encode(self, values: torch.Tensor, facts: EncodedRound) -> bytearray:
        """See `Codec.encode`."""
        return self._codec(facts.size).encode(values)

    def decode(self, payload: memoryview, facts: EncodedRound) -> torch.Tensor:
        """See `Codec.decode`."""
        return self._codec(facts.size).decode(payload)

    def _codec(self, size: int) -> BlockTopK:
        return BlockTopK(size=size, trained=size, keep=self._keep)


class SampledElementsSettings(Section):
    """Settings of `sampled`."""

    one_in: OneIn = 4
    """One of that many neighbouring elements is sent in a round."""
    one_in_of: Annotated[dict[Pattern, OneIn], Field(max_length=64, default_factory=dict)]
    """Patterns of parameters, each with its own `one_in`."""


class SampledElements:
    """One of some neighbouring elements in each round: see `update_codec`.

    Devices agree on it by a message of its own, which has the ranges of the model's tensors.
    """

    is_summable = True

    def __init__(self, choice: CodecChoice) -> None:
        """Read the settings.

        Raises:
            JobError: they cannot be used.
        """
        key = choice.settings_key
        self._settings = parse_settings(SampledElementsSettings, choice.settings, key)

    def agreed(self, layout: TensorLayout, seed: int, bits: int) -> UpdateCodec:
        """What devices agree on.

        Raises:
            JobError: see `sending_rates`.
        """
        rates = sending_rates(layout, self._settings.one_in_of)
        return UpdateCodec(one_in=self._settings.one_in, bits=bits, seed=seed, rates=rates)
