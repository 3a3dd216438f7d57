"""Create and read Flower's messages.

This module and `apps`, next to it, are the only ones that use non-public parts of `flwr`:

  * `flwr.supercore.task_identity.TaskIdentity`, one per process, which a `Message` outside of
    Flower's own runtime requires;
  * `Message(metadata=...)`, the only way to set the sender and the answered message;
  * `flwr.common.constant.ErrorCode`, the error codes of messages;
  * `flwr.supercore.run.Run`, which a `Grid` has to return;
  * `ClientApp._call`, which only an app with a `client_fn` has, `ClientApp._registered_funcs`, the
    functions of the others, and `ServerApp._main`;
  * the encoding of `Array`s of the type `numpy.ndarray` as `.npy` files in memory.

`tests/flower/test_messages.py` tests all of them. It is imported only for a job that uses Flower,
so that only such a job needs it.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import threading
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from isthmus.errors import JobError, UpdateError
from isthmus.extras import install_line

# Before flwr is imported: by default it sends telemetry of every start and message.
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["FLWR_DISABLE_UPDATE_CHECK"] = "1"

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Flower's dependencies
        from flwr.app import (
            Array,
            ArrayRecord,
            ConfigRecord,
            Context,
            Error,
            Message,
            Metadata,
            MetricRecord,
            RecordDict,
        )
        from flwr.clientapp import ClientApp
        from flwr.common.constant import ErrorCode
        from flwr.serverapp import ServerApp
        from flwr.supercore.run import Run
        from flwr.supercore.task_identity import TaskIdentity
except ModuleNotFoundError as error:
    raise JobError(
        f"this job uses Flower, which is not installed here (no module {error.name!r}); install "
        f"Isthmus with its extra `flower`: {install_line('flower')}"
    ) from None

__all__ = [
    "Array",
    "ArrayRecord",
    "ClientApp",
    "ConfigRecord",
    "Context",
    "Error",
    "ErrorCode",
    "Message",
    "MetricRecord",
    "RecordDict",
    "Run",
    "ServerApp",
]

SERVER_NODE = 1
"""Flower's node id of the server."""

RUN = 1
"""Flower's run id of all messages; the run id of Isthmus is in the request."""

TTL_SECONDS = 43_200.0
"""Flower's time to live of messages; the job's `[time]` limits the waits."""

NUMPY = "numpy.ndarray"


def node_of(name: str) -> int:
    """Flower's node id of a device."""
    digest = hashlib.sha256(f"isthmus/flower-node/{name}".encode()).digest()
    return 2 + (int.from_bytes(digest[:8], "little") >> 2)


def identify() -> None:
    """Set the process's identity, which strategies need to create messages."""
    TaskIdentity.run_id = RUN
    TaskIdentity.node_id = SERVER_NODE
    TaskIdentity.task_id = 1


def the_run() -> Run:
    """The run of a `Grid`."""
    return Run.create_empty(RUN)


class _WarningCapture(logging.Handler):
    """Replaces the handlers of Flower's log while any thread captures warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.thread = threading.local()
        self.users_lock = threading.Lock()
        self.users = 0
        self.before: tuple[list[logging.Handler], bool] = ([], False)

    def emit(self, record: logging.LogRecord) -> None:
        messages: list[str] | None = getattr(self.thread, "messages", None)
        if messages is not None:
            messages.append(" ".join(record.getMessage().split()))

    def enter(self, log: logging.Logger) -> None:
        with self.users_lock:
            if self.users == 0:
                self.before = log.handlers, log.propagate
                log.handlers = [self]
                log.propagate = False
            self.users += 1

    def leave(self, log: logging.Logger) -> None:
        with self.users_lock:
            self.users -= 1
            if self.users == 0:
                log.handlers, log.propagate = self.before


_CAPTURE = _WarningCapture()


@contextmanager
def captured_warnings() -> Iterator[list[str]]:
    """Suppress Flower's log, which describes every round, and collect its warnings.

    Yields a list to which the warnings logged by this thread are appended.
    """
    log = logging.getLogger("flwr")
    outer = getattr(_CAPTURE.thread, "messages", None)
    messages = list[str]()
    _CAPTURE.enter(log)
    _CAPTURE.thread.messages = messages
    try:
        yield messages
    finally:
        _CAPTURE.thread.messages = outer
        _CAPTURE.leave(log)


def message(
    content: RecordDict | None,
    *,
    kind: str,
    source: int,
    to: int,
    id_: str = "",
    answers: str = "",
    group: str = "",
    error: Error | None = None,
) -> Message:
    """A message with the metadata that Flower's runtime would fill in."""
    metadata = Metadata(
        run_id=RUN,
        message_id=id_,
        src_node_id=source,
        dst_node_id=to,
        reply_to_message_id=answers,
        group_id=group,
        created_at=time.time(),
        ttl=TTL_SECONDS,
        message_type=kind,
    )
    result: Message = Message(metadata=metadata, content=content, error=error)  # type: ignore[call-overload]  # not public, see above
    return result


# -- arrays ----------------------------------------------------------------------------------------


def array_of(tensor: torch.Tensor) -> Array:
    """A contiguous CPU tensor as an `Array`, with one copy of its bytes."""
    values = tensor.detach().numpy()
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, np.lib.format.header_data_from_array_1_0(values))
    data = b"".join((head.getvalue(), values.reshape(-1).view(np.uint8).data))
    return Array(dtype=str(values.dtype), shape=tuple(values.shape), stype=NUMPY, data=data)


def record_of(parts: Iterable[tuple[str, torch.Tensor]]) -> ArrayRecord:
    """Named tensors as an `ArrayRecord`."""
    return ArrayRecord({name: array_of(part) for name, part in parts})


def read_record(record: ArrayRecord, parts: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy a record into float32 tensors of the same names and shapes.

    Raises:
        UpdateError: other names, shapes or types, or a value that is not finite.
    """
    expected = dict(parts)
    if record.keys() != expected.keys():
        wrong = sorted(record.keys() ^ expected.keys())[0]
        where = "missing from" if wrong in expected else "unknown, but in"
        raise UpdateError(f"the array {wrong!r} is {where} the received record")
    for name, part in expected.items():
        try:
            values = record[name].numpy()
        except (TypeError, ValueError, EOFError, SyntaxError) as error:
            raise UpdateError(f"the array {name!r} cannot be read: {error}") from None
        if values.shape != tuple(part.shape) or values.dtype.kind not in "fiu":
            raise UpdateError(
                f"the array {name!r} is {values.dtype} of shape {values.shape}, not float32 of "
                f"shape {tuple(part.shape)}"
            )
        part.copy_(torch.from_numpy(values.astype(np.float32, copy=False)))
        if not bool(torch.isfinite(part).all()):
            raise UpdateError(f"the array {name!r} is not finite")
