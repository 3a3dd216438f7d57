"""The place of this process in a group of ranks, from the environment, and how the ranks meet."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import secrets
import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

from isthmus.errors import UserError
from isthmus.printable import in_a_line
from isthmus.system.channel import Channel

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # not in its __all__

START_SECONDS = 300.0
"""For all ranks to start."""
KEY_VARIABLE = "ISTHMUS_SIMULATION_KEY"
"""Environment variable with what the ranks of several machines know, and nobody else."""
_KEY_CHARACTERS = 32
"""Fewest of its value: half of what `openssl rand -hex 32` prints."""
_CONNECT_SECONDS = 10.0
_ADDRESS = "coordinator"
"""Key of the store, for where rank 0 listens."""
_ADDRESS_BYTES = 1 << 12
"""Most of it that is read."""


@dataclasses.dataclass(frozen=True)
class RankPlace:
    """One rank of a group that torchrun, or something like it, has started."""

    rank: int
    ranks: int
    local_rank: int
    """Number among the ranks of this machine."""
    is_one_machine: bool
    """Whether all ranks are on this machine."""
    has_rank_0: bool
    """Whether rank 0 is on this machine."""
    host: str
    """The machine of rank 0, which has the store of the group."""
    port: int
    has_store: bool
    """Whether torchrun runs the store; else rank 0 does."""
    incarnation: str
    """Differs between starts of the group that share a store."""
    key: bytes | None = dataclasses.field(default=None, repr=False)
    """Key of the ranks of several machines; None without one, and on one machine, which needs
    none."""

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> RankPlace | None:
        """From the variables that torchrun sets; None without them.

        Raises:
            UserError: one of them is not a number, or the key is too short.
        """
        if any(name not in environment for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")):
            return None

        def number(name: str, default: str = "") -> int:
            text = environment.get(name, default)
            if not (text.isascii() and text.isdecimal()):
                raise UserError(
                    f"the variable {name} of the environment is {text!r} and not a number; start "
                    "the ranks of a simulation with torchrun"
                )
            return int(text)

        ranks = number("WORLD_SIZE")
        is_one_machine = number("LOCAL_WORLD_SIZE", "1") == ranks
        secret = environment.get(KEY_VARIABLE, "")
        if secret and len(secret) < _KEY_CHARACTERS:
            raise UserError(
                f"the variable {KEY_VARIABLE} of the environment has {len(secret)} characters; set "
                f"it to at least {_KEY_CHARACTERS} random ones, the same on each machine, such as "
                "`openssl rand -hex 32` prints"
            )
        has_key = bool(secret) and not is_one_machine
        return cls(
            rank=number("RANK"),
            ranks=ranks,
            local_rank=number("LOCAL_RANK", "0"),
            is_one_machine=is_one_machine,
            has_rank_0=number("GROUP_RANK", "0") == 0,
            host=environment["MASTER_ADDR"],
            port=number("MASTER_PORT"),
            has_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            incarnation=environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
            key=hashlib.sha256(secret.encode()).digest() if has_key else None,
        )

    def check_key(self) -> None:
        """Refuse ranks on several machines that could not know each other.

        Raises:
            UserError: they have no key.
        """
        if not self.is_one_machine and self.key is None:
            raise UserError(
                f"the ranks of a simulation on several machines need the variable {KEY_VARIABLE} "
                "with the same secret on each, such as `openssl rand -hex 32` prints (where all "
                "are on one machine, LOCAL_WORLD_SIZE says so)"
            )

    def listen(self) -> tuple[socket.socket, Store]:
        """Listen for the ranks, in rank 0.

        Returns:
            The listening socket, and the store that the ranks have its address from; keep that
            until they have connected.

        Raises:
            UserError: the store cannot be reached.
        """
        store = self._store(is_master=not self.has_store)
        address: dict[str, object]
        if self.is_one_machine:
            # A name of the kernel and no file, which nobody would have to delete.
            name = f"isthmus-simulation-{secrets.token_hex(16)}"
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(f"\0{name}")
            listener.listen()
            address = {"name": name}
        else:
            listener = socket.create_server(("", 0))
            address = {"host": self.host, "port": listener.getsockname()[1]}
        store.set(_ADDRESS, json.dumps(address))
        return listener, store

    def connect(self) -> socket.socket:
        """Connect to what the store says is rank 0, which anyone could have written.

        Raises:
            UserError: it cannot be reached.
        """
        from torch.distributed import DistError

        store = self._store(is_master=False)
        try:
            store.wait([_ADDRESS], timedelta(seconds=START_SECONDS))
        except DistError:
            raise UserError(
                f"rank {self.rank} has waited {START_SECONDS:g} s for rank 0; see what rank 0 says"
            ) from None
        try:
            address = json.loads(store.get(_ADDRESS)[:_ADDRESS_BYTES])
            if self.is_one_machine:
                where = str(address["name"])
            else:
                host = str(address["host"])
                port = int(address["port"])
                where = f"{host}:{port}"
        except (ValueError, KeyError, TypeError, RecursionError):
            raise UserError(
                f"rank {self.rank} found something else than an address in the store of this "
                "simulation's ranks (MASTER_ADDR, MASTER_PORT), where another program wrote it"
            ) from None
        try:
            if self.is_one_machine:
                return _connected_to(where)
            return socket.create_connection((host, port), _CONNECT_SECONDS)
        except (OSError, ValueError, OverflowError) as error:
            sentence = f"rank {self.rank} cannot reach rank 0 at {in_a_line(where)} ({error})"
            if not self.is_one_machine:
                sentence += "; the machines of a simulation must reach each other at any port"
            raise UserError(sentence) from None

    def _store(self, *, is_master: bool) -> Store:
        from torch.distributed import (  # type: ignore[attr-defined]  # not in its __all__
            DistError,
            PrefixStore,
            TCPStore,
        )

        try:
            store = TCPStore(
                self.host,
                self.port,
                is_master=is_master,
                wait_for_workers=False,
                timeout=timedelta(seconds=START_SECONDS),
            )
        except DistError as error:
            raise UserError(
                f"the ranks of the simulation cannot meet at {self.host}:{self.port} "
                f"(MASTER_ADDR, MASTER_PORT): {str(error).splitlines()[0]}"
            ) from None
        return PrefixStore(f"isthmus-simulation-{self.incarnation}", store)


def _connected_to(name: str) -> socket.socket:
    connected = socket.socket(socket.AF_UNIX)
    try:
        connected.connect(f"\0{name}")
    except BaseException:
        connected.close()
        raise
    return connected


def channel_of(connected: socket.socket) -> Channel:
    """Messages and vectors on a connected socket; over TCP it notices a machine that vanishes."""
    connected.settimeout(None)
    if connected.family == socket.AF_UNIX:
        return Channel(connected)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 6)):
        if hasattr(socket, option):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return Channel(connected)
