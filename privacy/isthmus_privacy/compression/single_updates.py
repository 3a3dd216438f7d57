"""Messages with one participant's update, encoded by the codec that the job names."""

from __future__ import annotations

import torch

from isthmus.errors import UpdateError
from isthmus.job import Job
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.tensors.finite import is_finite
from isthmus_privacy.compression.codecs import CodecCalls, load_codec


class UpdateMessages:
    """The messages with single updates of a run: its codec's, and what goes with them.

    A message has the header of the exchange set, the running statistics (float32), which are sent
    whole because a rounded variance could become negative, and the codec's bytes.
    """

    def __init__(self, codec: CodecCalls, layout: TensorLayout) -> None:
        """Use a codec for the updates of an exchange set."""
        self._codec = codec
        self._layout = layout

    @classmethod
    def of(cls, job: Job, layout: TensorLayout) -> UpdateMessages | None:
        """The messages of a job; None if its updates are sent as they are.

        Raises:
            UserError: its codec cannot be used.
        """
        choice = job.federated.update_codec
        codec = load_codec(choice)
        if codec is None or choice is None:
            return None
        return cls(CodecCalls(codec, choice, seed=job.seed, size=layout.trained_size), layout)

    @property
    def max_bytes(self) -> int:
        """Most bytes of a message.

        Raises:
            UpdateError: the codec failed.
        """
        return self._begin + self._codec.max_bytes

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
        encoded = self._codec.encode(update[:trained], round_)
        return bytes(self._layout.header) + statistics + encoded

    def decode(self, message: memoryview, round_: int) -> torch.Tensor:
        """The update that a message is about, float32 (N).

        Raises:
            UpdateError: it is none of this exchange set and codec, or not finite.
        """
        header = len(self._layout.header)
        if len(message) < self._begin or bytes(message[:header]) != self._layout.header:
            raise UpdateError("it is not an encoded update of this exchange set")
        trained = self._layout.trained_size
        values = self._codec.decode(message[self._begin :], round_)
        update = torch.empty(self._layout.size)
        update[:trained] = values
        if trained < self._layout.size:
            whole = bytearray(message[header : self._begin])
            update[trained:] = torch.frombuffer(whole, dtype=torch.float32)
        return update


class DatacenterMessages:
    """The messages with updates of datacenters, which keep what these lack.

    A message has the codec's bytes and the running statistics (float32), which are sent whole.
    """

    def __init__(self, codec: CodecCalls, layout: TensorLayout) -> None:
        """Use a codec for the updates of an exchange set."""
        self._codec = codec
        self._trained = layout.trained_size
        self._size = layout.size

    @classmethod
    def of(cls, job: Job, layout: TensorLayout) -> DatacenterMessages | None:
        """The messages of a job; None if its datacenters send their models.

        Raises:
            UserError: its codec cannot be used.
        """
        if job.datacenter.compression is None:
            return None
        choice = job.datacenter.compression.choice
        codec = load_codec(choice)
        assert codec is not None
        return cls(CodecCalls(codec, choice, seed=job.seed, size=layout.trained_size), layout)

    def encode(self, update: torch.Tensor, round_: int) -> bytearray:
        """A message about an update, float32 (N), which is replaced by what the message lacks.

        Raises:
            UpdateError: it is not finite, or the codec failed.
        """
        values = update[: self._trained]
        if not is_finite(values):
            raise UpdateError("the update is not finite, so that it cannot be compressed")
        payload = bytearray(self._codec.encode_and_leave(values, round_))
        statistics = update[self._trained :]
        payload += statistics.contiguous().numpy().tobytes()
        statistics.zero_()
        return payload

    def decode(self, payload: bytes | bytearray | memoryview, round_: int) -> torch.Tensor:
        """The update that a message is about, float32 (N).

        Raises:
            UpdateError: the message is none of this codec and exchange set, or not finite.
        """
        self.check_size(len(payload))
        view = memoryview(payload)
        rest = 4 * (self._size - self._trained)
        if len(view) < rest:
            raise UpdateError(
                f"its compressed update has {len(view)} bytes, too few for this model"
            )
        end = len(view) - rest
        update = self._codec.decode(view[:end], round_)
        if rest:
            statistics = torch.frombuffer(bytearray(view[end:]), dtype=torch.float32)
            update = torch.cat([update, statistics])
        if not is_finite(update):
            raise UpdateError("its compressed update is not finite")
        return update

    def check_size(self, nbytes: int) -> None:
        """Refuse a message of too many bytes, before there is memory for it.

        Raises:
            UpdateError: with both numbers.
        """
        most = self._codec.max_bytes + 4 * (self._size - self._trained)
        if nbytes > most:
            raise UpdateError(
                f"its compressed update has {nbytes} bytes where this exchange set takes at most "
                f"{most}"
            )
