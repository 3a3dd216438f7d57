"""Ports of this machine for processes that begin to listen later, or again."""

import contextlib
import random
import socket

_CHANCE = random.SystemRandom()


def free_ports(count: int) -> int:
    """The first of some free ports in a row.

    They are below those that the system gives to connections, of which other tests have hundreds.
    No seed that a test has set decides them, or two processes of tests would take the same.
    """
    while True:
        first = _CHANCE.randrange(20_000, 32_000)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
