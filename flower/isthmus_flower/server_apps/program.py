"""The process of a ServerApp: `python -m isthmus_flower.server_apps.program SOCKET PARENT START`.

Files that the app writes are in its working directory, and what it prints is read by the server.
"""

from __future__ import annotations

import json
import random
import socket
import sys
import threading
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from isthmus.errors import IsthmusError
from isthmus.system.channel import Channel
from isthmus.system.process import die_with_parent


def main() -> None:
    """Run the app to its end, and report how it ended."""
    handle, parent, start = sys.argv[1:]
    die_with_parent(int(parent))
    with socket.socket(fileno=int(handle)) as end:
        connection = Connection(end)
        try:
            run_app(connection, **json.loads(start))
        except IsthmusError as error:
            traceback.print_exception(error.__cause__ or error)  # for the log
            connection.call({"op": "end", "error": str(error)})
        else:
            connection.call({"op": "end", "error": ""})


class Connection:
    """The process's end of the socket: one call at a time, from any thread of the app."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._channel = Channel(end)
        self._lock = threading.Lock()

    def call(self, fields: Any, blobs: Any = ()) -> tuple[dict[str, Any], list[bytes]]:
        """Send a request and return the server's answer: its fields and encoded records."""
        from isthmus_flower.server_apps.frames import packed

        with self._lock:
            try:
                self._socket.sendall(packed(fields, blobs))
                answer = json.loads(self._channel.receive())
                return answer, [self._read(size) for size in answer["sizes"]]
            except (EOFError, ConnectionError):
                raise SystemExit("the server has closed the connection") from None

    def _read(self, size: int) -> bytes:
        data = bytearray(size)
        self._channel.receive_into(data)
        return bytes(data)


def run_app(
    connection: Connection,
    *,
    source: str,
    base: str,
    installed: bool,
    config: dict[str, Any],
    seed: int,
) -> None:
    """Load a ServerApp and call its `main`.

    Args:
        connection: to the server.
        source: the app as the job names it.
        base: directory of the job's relative paths.
        installed: see `isthmus_flower.apps.project_root`.
        config: the app's run config.
        seed: for the generators of Python, NumPy and PyTorch, before the app is loaded.

    Raises:
        TaskError: the app cannot be loaded, or its code raised an exception.
        JobError: Flower is not installed.
    """
    # First: it disables the telemetry of Flower before that is imported.
    from isthmus_flower import messages

    import numpy as np  # isort: skip
    import torch  # isort: skip
    from flwr.app import Message  # isort: skip

    from isthmus.task import user_code
    from isthmus_flower.apps import load_server_app
    from isthmus_flower.server.run_scoped_grid import RunScopedGrid
    from isthmus_flower.server_apps.frames import describe_messages, read_messages

    class ForwardingGrid(RunScopedGrid):
        """The server's `LinkGrid`, called from this process."""

        def get_node_ids(self) -> Iterable[int]:
            nodes: list[int] = connection.call({"op": "nodes"})[0]["nodes"]
            return nodes

        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            fields, blobs = describe_messages(list(messages))
            ids: list[str] = connection.call({"op": "push", "messages": fields}, blobs)[0]["ids"]
            return ids

        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            answer, blobs = connection.call({"op": "pull", "ids": list(message_ids)})
            return read_messages(answer["messages"], blobs)

        def send_and_receive(
            self, messages: Iterable[Message], *, timeout: float | None = None
        ) -> Iterable[Message]:
            fields, blobs = describe_messages(list(messages))
            request = {"op": "exchange", "messages": fields, "seconds": timeout}
            answer, blobs = connection.call(request, blobs)
            return read_messages(answer["messages"], blobs)

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    messages.identify()
    app = load_server_app(source, base=Path(base), installed=installed)
    context = messages.Context(
        run_id=messages.RUN,
        node_id=messages.SERVER_NODE,
        node_config={},
        state=messages.RecordDict(),
        run_config=config,
    )
    with user_code("the ServerApp"):
        app(ForwardingGrid(), context)


if __name__ == "__main__":
    main()
