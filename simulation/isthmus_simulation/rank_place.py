"""The place of this process in a group of ranks, from the environment, and how the ranks meet."""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

from isthmus.errors import UserError
from isthmus.system.channel import Channel

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # not in its __all__

START_SECONDS = 300.0
"""For all ranks to start."""
_CONNECT_SECONDS = 10.0
_ADDRESS = "coordinator"
"""Key of the store, for where rank 0 listens."""


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

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> RankPlace | None:
        """From the variables that torchrun sets; None without them.

        Raises:
            UserError: one of them is not a number.
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
        return cls(
            rank=number("RANK"),
            ranks=ranks,
            local_rank=number("LOCAL_RANK", "0"),
            is_one_machine=number("LOCAL_WORLD_SIZE", "1") == ranks,
            has_rank_0=number("GROUP_RANK", "0") == 0,
            host=environment["MASTER_ADDR"],
            port=number("MASTER_PORT"),
            has_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            incarnation=environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
        )

    def listen(self) -> tuple[socket.socket, str, Store]:
        """Listen for the ranks, in rank 0.

        Returns:
            The listening socket, the token that the ranks of this start know, and the store that
            they have it from; keep that until they have connected.

        Raises:
            UserError: the store cannot be reached.
        """
        store = self._store(is_master=not self.has_store)
        host = "127.0.0.1" if self.is_one_machine else self.host
        listener = socket.create_server((host if self.is_one_machine else "", 0))
        token = secrets.token_hex(16)
        address = {"host": host, "port": listener.getsockname()[1], "token": token}
        store.set(_ADDRESS, json.dumps(address))
        return listener, token, store

    def connect(self) -> tuple[Channel, str]:
        """Connect to rank 0; returns also the token.

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
        address = json.loads(store.get(_ADDRESS))
        host = address["host"]
        port = address["port"]
        try:
            connected = socket.create_connection((host, port), _CONNECT_SECONDS)
        except OSError as error:
            raise UserError(
                f"rank {self.rank} cannot reach rank 0 at {host}:{port} ({error}); the machines of "
                "a simulation must reach each other at any port"
            ) from None
        return channel_of(connected), address["token"]

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


def channel_of(connected: socket.socket) -> Channel:
    """Messages and vectors on a connected socket; TCP notices a machine that vanishes."""
    connected.settimeout(None)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 6)):
        if hasattr(socket, option):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return Channel(connected)
