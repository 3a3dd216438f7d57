"""How a rank and the coordinator of a simulation know each other before one trusts the other.

Both directions count: the coordinator's model is trained from what ranks send, and a rank runs the
task with the settings that the coordinator sends. Where they meet, anyone can read and write.

On one machine they meet at a Unix socket, and the kernel tells both the user of the other process,
who has to be their own. On several, both have a key from the environment, and prove it to each
other for numbers that are drawn anew (HMAC-SHA-256). What follows is neither signed nor encrypted.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import socket
import struct
from collections.abc import Mapping
from typing import Any

from isthmus.errors import UserError
from isthmus.system.channel import Channel
from isthmus_simulation.rank_place import START_SECONDS

_HELLO_BYTES = 1 << 16
_HELLO_SECONDS = 10.0
"""For the rest of a message whose first bytes have arrived."""
_CREDENTIALS = struct.Struct("3i")
"""Process, user and group."""


def introduce(
    connected: socket.socket, key: bytes | None, rank: int, about: Mapping[str, object]
) -> None:
    """Introduce a rank to the coordinator, and have that prove who it is.

    Args:
        connected: to what may be the coordinator.
        key: that of the ranks; None on one machine.
        rank: its number.
        about: describes it.

    Raises:
        UserError: it is not the coordinator.
        EOFError, OSError: the connection has ended.
    """
    connected.settimeout(START_SECONDS)  # others may be greeted first
    channel = Channel(connected)
    hello: dict[str, object] = {"rank": rank, "about": dict(about)}
    if key is None:
        if not _is_own_user(connected):
            raise _another_program(rank)
    else:
        own = secrets.token_hex(32)
        channel.send(json.dumps({"number": own}).encode())
        answer = _received(channel)
        other = str(answer.get("number"))
        if not _proves(answer.get("proof"), key, "coordinator", own, other):
            raise _another_program(rank)
        hello["proof"] = _proof(key, "rank", own, other, hello)
    channel.send(json.dumps(hello).encode())


def greeted(connected: socket.socket, key: bytes | None) -> tuple[int, dict[str, object]] | None:
    """The number and the description of a rank that has connected; None if it is something else.

    Args:
        connected: to what may be a rank.
        key: that of the ranks; None on one machine.
    """
    connected.settimeout(_HELLO_SECONDS)
    channel = Channel(connected)
    with contextlib.suppress(EOFError, OSError, ValueError, KeyError, TypeError):
        if key is None:
            if not _is_own_user(connected):
                return None
            hello = _received(channel)
        else:
            other = str(_received(channel)["number"])
            own = secrets.token_hex(32)
            proof = _proof(key, "coordinator", other, own)
            channel.send(json.dumps({"number": own, "proof": proof}).encode())
            hello = _received(channel)
            if not _proves(hello.pop("proof"), key, "rank", other, own, hello):
                return None
        return int(hello["rank"]), dict(hello["about"])
    return None


def _received(channel: Channel) -> dict[str, Any]:
    try:
        message = json.loads(channel.receive(_HELLO_BYTES))
    except (ValueError, RecursionError):
        raise OSError("a greeting is no JSON") from None
    if not isinstance(message, dict):
        raise OSError("a greeting has another form")
    return message


def _is_own_user(connected: socket.socket) -> bool:
    """Whether the process at the other end of a Unix socket is of this user."""
    if connected.family != socket.AF_UNIX:
        return False
    data = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(data)[1] == os.geteuid())


def _proof(key: bytes, *about: object) -> str:
    return hmac.new(key, json.dumps(about).encode(), "sha256").hexdigest()


def _proves(proof: object, key: bytes, *about: object) -> bool:
    """Whether something that was sent proves that its sender has the key."""
    sent = str(proof).encode(errors="replace")
    return hmac.compare_digest(sent, _proof(key, *about).encode())


def _another_program(rank: int) -> UserError:
    return UserError(
        f"rank {rank} found another program in the place of rank 0: another user has written into "
        "the store of this simulation's ranks (MASTER_ADDR, MASTER_PORT), or the machines have "
        "other keys"
    )
