"""The process of a ServerApp, seen from the server: started, answered and ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from isthmus.errors import CannotContinue, TaskError
from isthmus.printable import in_a_line
from isthmus.system.channel import TooLarge, read_message
from isthmus.system.forked_process import described
from isthmus_flower.server.grid import LinkGrid
from isthmus_flower.server_apps.frames import describe_messages, packed, read_messages

PROGRAM = ("-m", "isthmus_flower.server_apps.program")

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_MAX_LINE = 1 << 16


class ServerAppProcess:
    """One run of a ServerApp's `main` in a process of its own."""

    def __init__(self, grid: LinkGrid, log: Path, show: Callable[[str], None]) -> None:
        """Set up; `run` starts the process.

        Args:
            grid: the devices that the app reaches.
            log: file that the app's output is appended to.
            show: called with each line of that output, without colours.
        """
        self._grid = grid
        self._log = log
        self._show = show

    async def run(self, directory: Path, start: dict[str, Any]) -> None:
        """Run the app until its `main` returns; when this is cancelled, the process is killed.

        Args:
            directory: the process's working directory.
            start: see `isthmus_flower.server_apps.program.run_app`.

        Raises:
            TaskError: the app cannot be loaded, or its code raised an exception.
            CannotContinue: the process ended by itself, for example because memory is short.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                *PROGRAM,
                str(theirs.fileno()),
                str(os.getpid()),
                json.dumps(start),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                limit=_MAX_LINE,
                cwd=directory,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
        reader, writer = await asyncio.open_connection(sock=ours)
        assert process.stdout is not None
        output = asyncio.create_task(self._read_output(process.stdout))
        try:
            failure = await self._serve(reader, writer)
            code = await process.wait()
        finally:
            writer.close()
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGKILL)
                await process.wait()
            await output
        if failure is None:
            raise CannotContinue(
                f"the process of the ServerApp ended: {described(code)}; see {self._log}"
            )
        if failure:
            raise TaskError(failure)

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> str | None:
        """Answer the app's requests; returns why it failed, "", or None if it just ended."""
        try:
            while True:
                request = json.loads(await read_message(reader))
                blobs = [await reader.readexactly(size) for size in request["sizes"]]
                writer.write(await self._answer(request, blobs))
                await writer.drain()
                if request["op"] == "end":
                    return str(request["error"])
        except TooLarge as error:
            return f"the process of the ServerApp must not say so much at once: {error}"
        except (EOFError, ConnectionError):
            return None

    async def _answer(self, request: dict[str, Any], blobs: list[bytes]) -> bytes:
        grid = self._grid
        if request["op"] == "nodes":
            return packed({"nodes": list(grid.get_node_ids())})
        if request["op"] == "end":
            return packed({})
        if request["op"] == "pull":
            replies = await grid.pull(request["ids"])
        else:
            messages = await asyncio.to_thread(read_messages, request["messages"], blobs)
            if request["op"] == "push":
                return packed({"ids": await grid.push(messages)})
            seconds = request["seconds"]
            answers = await grid.exchange(messages, grid.seconds if seconds is None else seconds)
            replies = [answer.reply for answer in answers]
        return await asyncio.to_thread(_described, replies)

    async def _read_output(self, stream: asyncio.StreamReader) -> None:
        with self._log.open("a", encoding="utf-8") as file:
            while True:
                try:
                    line = await stream.readline()
                except ValueError:  # longer than the limit: what was read is dropped
                    continue
                if not line:
                    return
                text = _COLOURS.sub("", line.decode(errors="replace")).rstrip()
                file.write(f"{text}\n")
                file.flush()
                if text:
                    self._show(in_a_line(text.replace("\t", "    ")))


def _described(replies: list[Any]) -> bytes:
    fields, blobs = describe_messages(replies)
    return packed({"messages": fields}, blobs)
