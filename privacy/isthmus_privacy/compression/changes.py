"""Changes of the model in the encoding that the job names.

Device and server compute the same model from a change: the server rounds a change before it commits
the model, see `model_change`.
"""

from __future__ import annotations

from typing import Protocol

import torch

from isthmus.errors import UpdateError
from isthmus.job import Job
from isthmus.tensors.exchange_set import TensorLayout
from isthmus_privacy.compression.codecs import CodecCalls, load_change_codec

_LENGTH_BYTES = 8


class ChangesCodec(Protocol):
    """Encodes the changes of one layout of models, N elements of which T are trained."""

    @property
    def trained(self) -> int:
        """T."""
        ...

    @property
    def nbytes(self) -> int:
        """Most bytes of an encoded change."""
        ...

    def encode(
        self, before: torch.Tensor, after: torch.Tensor, changing: torch.Tensor | None = None
    ) -> bytearray:
        """The change from one model to another, finite float32 (N) both; see `ChangeCodec`."""
        ...

    def apply(self, vector: torch.Tensor, payload: bytes | bytearray | memoryview) -> int:
        """Replace a model by the one after a change; returns the bytes of the change.

        Raises:
            ValueError: the payload does not begin with a change.
        """
        ...


class ProvidedChanges:
    """Changes of which the trained part is encoded by a codec for single vectors.

    A change has the number of the codec's bytes, 8 bytes; these; and the running statistics of the
    later model, float32.
    """

    def __init__(self, codec: CodecCalls, layout: TensorLayout) -> None:
        """Use a codec for one layout of models."""
        self._codec = codec
        self._statistics = 4 * (layout.size - layout.trained_size)
        self.trained = layout.trained_size
        """T."""

    @property
    def nbytes(self) -> int:
        """Most bytes of an encoded change.

        Raises:
            UpdateError: the codec failed.
        """
        return _LENGTH_BYTES + self._codec.max_bytes + self._statistics

    def encode(
        self, before: torch.Tensor, after: torch.Tensor, changing: torch.Tensor | None = None
    ) -> bytearray:
        """See `ChangesCodec.encode`; all trained elements may change.

        Raises:
            UpdateError: the codec failed.
        """
        encoded = self._codec.encode(after[: self.trained] - before[: self.trained], 0)
        if len(encoded) > self._codec.max_bytes:
            raise UpdateError(
                f"{self._codec.shown} encoded {len(encoded)} bytes where it says "
                f"{self._codec.max_bytes} at most"
            )
        statistics = after[self.trained :].contiguous().numpy().tobytes()
        return bytearray(len(encoded).to_bytes(_LENGTH_BYTES, "little") + encoded + statistics)

    def apply(self, vector: torch.Tensor, payload: bytes | bytearray | memoryview) -> int:
        """See `ChangesCodec.apply`.

        Raises:
            ValueError: the payload does not begin with a change; an `UpdateError` if the codec
                says so, or would make a model that is not finite.
        """
        view = memoryview(payload)
        length = int.from_bytes(view[:_LENGTH_BYTES], "little")
        end = _LENGTH_BYTES + length + self._statistics
        if len(view) < _LENGTH_BYTES or len(view) < end or length > self._codec.max_bytes:
            raise ValueError(f"a change of {len(view)} bytes came; it has {self.nbytes} or fewer")
        last = _LENGTH_BYTES + length
        model = vector[: self.trained] + self._codec.decode(view[_LENGTH_BYTES:last], 0)
        if not bool(torch.isfinite(model).all()):
            raise UpdateError(f"{self._codec.shown} decoded a change to a model that is not finite")
        vector[: self.trained] = model
        if self._statistics:
            statistics = bytearray(view[last:end])
            vector[self.trained :] = torch.frombuffer(statistics, dtype=torch.float32)
        return end


def changes_codec(job: Job, layout: TensorLayout) -> ChangesCodec | None:
    """The codec of the changes of a job's model; None if whole models are sent.

    Raises:
        UserError: it cannot be used.
    """
    choice = job.federated.change_codec
    codec = load_change_codec(choice)
    if codec is None or choice is None:
        return None
    if (own := getattr(codec, "changes", None)) is not None:
        found: ChangesCodec = own(layout)
        return found
    calls = CodecCalls(codec, choice, seed=job.seed, size=layout.trained_size)
    return ProvidedChanges(calls, layout)
