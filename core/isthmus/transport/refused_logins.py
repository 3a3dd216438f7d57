"""Keep a login that a proxy refuses from being tried until its account is locked.

Many networks lock an account after five wrong passwords within half an hour. A participant tries
to connect far more often, so that it waits after a refusal, unless the login is changed.

>>> refused = RefusedLogin()
>>> refused.note("Basic eDp5", "it does not accept the user name and the password")
>>> refused.is_same("Basic eDp5"), refused.is_same("Basic eDp6")
(True, False)
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

_FIRST_SECONDS = 60.0
_LATER_SECONDS = 15 * 60.0
"""Pauses before the same login is tried again: with these, and the second try that finds the
reason, there are at most four in half an hour."""
_LOOK_SECONDS = 1.0
"""Time between two looks at the login."""


class RefusedLogin:
    """The login that a proxy has refused last."""

    def __init__(self) -> None:
        self.sentence = ""
        """What the refusal was told as; empty if there was none."""
        self._login = ""
        self._times = 0
        self._noted_at = -math.inf
        """Monotonic time of the last refusal."""

    def note(self, login: str, sentence: str) -> None:
        """Take note that a login was refused."""
        self._times = self._times + 1 if self.is_same(login) else 1
        self._login = login
        self._noted_at = time.monotonic()
        self.sentence = sentence

    def is_same(self, login: str) -> bool:
        """Whether a login is the one that was refused."""
        return bool(self.sentence) and login == self._login

    def is_resting(self, login: str) -> bool:
        """Whether a login was refused so lately that nothing is asked with it besides."""
        return self.is_same(login) and time.monotonic() < self._noted_at + _LATER_SECONDS

    def forget(self) -> None:
        """Take note that a proxy let this participant through."""
        self.sentence = ""

    async def pause(self, read: Callable[[], str]) -> None:
        """Wait until the login that was refused may be tried again, or until it is another one.

        `read` returns the login.
        """
        seconds = _FIRST_SECONDS if self._times == 1 else _LATER_SECONDS
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and self.is_same(read()):  # noqa: ASYNC110 - a file
            await asyncio.sleep(min(left, _LOOK_SECONDS))
