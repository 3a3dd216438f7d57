"""Flower's messages, as Isthmus makes and reads them.

The only module that touches parts of `flwr` that it does not promise to keep:

  * `flwr.supercore.task_identity.TaskIdentity`, one per process, without which no `Message` can be
    made outside Flower's own runtime;
  * `Message(metadata=...)`, the only way to say who a message is from and which one it answers;
  * `flwr.common.constant.ErrorCode`, what went wrong with a message;
  * `flwr.supercore.run.Run`, which a `Grid` has to name;
  * `ClientApp._call`, which only an app of a `client_fn` has;
  * `Array`s of the type `numpy.ndarray` are `.npy` files in memory.

`tests/core/integrations/test_flower.py` tests all of them. Only the modules that run Flower's
strategies and apps import this one, so Flower is needed only if a job uses it.
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
from pathlib import Path

import numpy as np
import torch

from isthmus.errors import JobError, TaskError, UpdateError
from isthmus.task.definition import load_named

# Before flwr is imported: it reports every start and every message to its makers by default.
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["FLWR_DISABLE_UPDATE_CHECK"] = "1"

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of what it is built on, not of ours
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
        from flwr.supercore.run import Run
        from flwr.supercore.task_identity import TaskIdentity
except ModuleNotFoundError as error:
    raise JobError(
        f"this job uses Flower, which is not installed here (no module {error.name!r}); install "
        "Isthmus with its extra `flower`: pip install 'isthmus[flower]'"
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
]

SERVER_NODE = 1
"""The node that Flower takes for the server."""

RUN = 1
"""The run that Flower takes all of a process's messages for; ours is in the request."""

TTL_SECONDS = 43_200.0
"""For how long Flower thinks that a message is good; the job's `[time]` bounds the waits."""

NUMPY = "numpy.ndarray"


def node_of(name: str) -> int:
    """The number that Flower knows a device by."""
    digest = hashlib.sha256(f"isthmus/flower-node/{name}".encode()).digest()
    return 2 + (int.from_bytes(digest[:8], "little") >> 2)


def identify() -> None:
    """Make this process one in which a strategy can make messages."""
    TaskIdentity.run_id = RUN
    TaskIdentity.node_id = SERVER_NODE
    TaskIdentity.task_id = 1


def the_run() -> Run:
    """What a `Grid` says of its run."""
    return Run.create_empty(RUN)


def load_app(source: str, key: str, *, base: Path) -> ClientApp:
    """The ClientApp that a key of the job names.

    Raises:
        TaskError: it cannot be loaded, is no ClientApp, or is one of Flower's older kind.
    """
    app = load_named(source, key, base=base)
    if not isinstance(app, ClientApp):
        kind = type(app).__name__
        raise TaskError(f"{key}={source!r} is of type {kind}, not a flwr.clientapp.ClientApp")
    if app._call is not None:
        raise TaskError(
            f"{key}={source!r} is made of a client_fn (NumPyClient), which knows nothing of the "
            "messages that Flower's strategies send today; give it functions under @app.train() "
            "instead"
        )
    return app


class _WarningCapture(logging.Handler):
    """Takes the place of Flower's handlers for as long as any thread wants it to."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.here = threading.local()
        self.entering = threading.Lock()
        self.users = 0
        self.before: tuple[list[logging.Handler], bool] = ([], False)

    def emit(self, record: logging.LogRecord) -> None:
        heard: list[str] | None = getattr(self.here, "heard", None)
        if heard is not None:
            heard.append(" ".join(record.getMessage().split()))

    def enter(self, log: logging.Logger) -> None:
        with self.entering:
            if self.users == 0:
                self.before = log.handlers, log.propagate
                log.handlers, log.propagate = [self], False
            self.users += 1

    def leave(self, log: logging.Logger) -> None:
        with self.entering:
            self.users -= 1
            if self.users == 0:
                log.handlers, log.propagate = self.before


_CAPTURE = _WarningCapture()


@contextmanager
def captured_warnings() -> Iterator[list[str]]:
    """Keep Flower's log, which narrates every round, from the terminal.

    Gives what it warns of in this thread.
    """
    log = logging.getLogger("flwr")
    outer, heard = getattr(_CAPTURE.here, "heard", None), list[str]()
    _CAPTURE.enter(log)
    _CAPTURE.here.heard = heard
    try:
        yield heard
    finally:
        _CAPTURE.here.heard = outer
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
    """A message with everything that Flower's runtime would have filled in."""
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
    made: Message = Message(metadata=metadata, content=content, error=error)  # type: ignore[call-overload]  # not promised: above
    return made


# -- arrays ----------------------------------------------------------------------------------------


def array_of(tensor: torch.Tensor) -> Array:
    """A contiguous CPU tensor as an `Array`: its bytes are copied once."""
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
        UpdateError: another name, shape or kind of values, or a value that is not finite.
    """
    wanted = dict(parts)
    if record.keys() != wanted.keys():
        wrong = sorted(record.keys() ^ wanted.keys())[0]
        where = "missing from" if wrong in wanted else "unknown, but in"
        raise UpdateError(f"the array {wrong!r} is {where} what came")
    for name, part in wanted.items():
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
