"""A store of PyTorch whose values are signed: who can reach its port cannot command the ranks.

PyTorch's TCPStore authenticates nobody, and what it holds decides what ranks execute: commands,
and the addresses at which they meet. Its values are therefore followed by a code of their key and
content (HMAC-SHA-256, RFC 2104) under a secret that service, agents and ranks have from elsewhere.
What somebody else can still do is to hinder: delete keys, make keys whose presence alone ends a
command or an agent, write values that are refused, and fill the memory of the service.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from torch.distributed import Store  # type: ignore[attr-defined]  # public, but not in an __all__

from isthmus.errors import IsthmusError, UserError
from isthmus.system.private_files import check_private, write_private_file

KEY_BYTES = 32
MAX_VALUE_BYTES = 1 << 24
"""Longer values are refused; the longest one is a command with the job and the tensors' names."""
_DIGEST = hashlib.sha256
_DIGEST_BYTES = _DIGEST().digest_size


class ForgedValueError(IsthmusError):
    """A value in the store that nobody has written who knows the key."""


class SignedStore(Store):
    """The values of another store, signed; what is deleted and which keys exist is not.

    Counters (`add`) have no signature: nothing but the number of those who have arrived may depend
    on them. Keep a reference while process groups use it: they hold only the part in C++.
    """

    def __init__(self, store: Store, key: bytes) -> None:
        """`store` holds the values; `key` has `KEY_BYTES`."""
        super().__init__()
        if len(key) != KEY_BYTES:
            raise ValueError(f"a key has {KEY_BYTES} bytes, not {len(key)}")
        self._store = store
        self._key = key
        self._clones: list[SignedStore] = []

    def set(self, key: str, value: str | bytes) -> None:
        """Store a value."""
        self._store.set(key, self._signed(key, value))  # type: ignore[arg-type]  # takes bytes too

    def get(self, key: str) -> bytes:
        """Wait for a key; returns its value.

        Raises:
            ForgedValueError: it is not signed.
        """
        return self._verified(key, self._store.get(key))

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        """Store a value if the present one is as expected, `""` for none; returns what is stored.

        Raises:
            ForgedValueError: that is not signed.
        """
        # Signing is deterministic, so equal values are equal with their signatures.
        expected = self._signed(key, expected_value) if expected_value else b""
        desired = self._signed(key, desired_value)
        stored = self._store.compare_set(key, expected, desired)  # type: ignore[arg-type]  # as well
        return self._verified(key, stored)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for keys; returns their values.

        Raises:
            ForgedValueError: one is not signed.
        """
        values = self._store.multi_get(list(keys))
        return [self._verified(key, value) for key, value in zip(keys, values, strict=True)]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Store several values."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def add(self, key: str, value: int) -> int:
        """Add to a counter, which is not signed; returns it."""
        return int(self._store.add(key, value))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys exist."""
        return bool(self._store.check(list(keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys exist."""
        if timeout is None:
            self._store.wait(list(keys))
        else:
            self._store.wait(list(keys), timeout)

    def delete_key(self, key: str) -> bool:
        """Delete a key; returns whether it was there."""
        return bool(self._store.delete_key(key))

    def clone(self) -> SignedStore:
        """A `SignedStore` of the same store, over a connection of its own."""
        clone = SignedStore(self._store.clone(), self._key)  # type: ignore[attr-defined]  # not in the stubs
        # PyTorch's process groups hold its C++ part only, and Python would free the other one.
        self._clones.append(clone)
        return clone

    def set_timeout(self, timeout: timedelta) -> None:
        """Limit for each wait."""
        super().set_timeout(timeout)
        self._store.set_timeout(timeout)

    def has_extended_api(self) -> bool:
        """PyTorch then uses none of `append` and the queues, whose values have no signature."""
        return False

    def _signed(self, key: str, value: str | bytes) -> bytes:
        content = value.encode() if isinstance(value, str) else bytes(value)
        if len(content) > MAX_VALUE_BYTES:
            raise ValueError(
                f"a value of {len(content)} bytes is too long for the store of the ranks; the "
                f"maximum is {MAX_VALUE_BYTES}"
            )
        return content + self._code(key, content)

    def _verified(self, key: str, value: bytes) -> bytes:
        value = bytes(value)
        content = value[:-_DIGEST_BYTES]
        code = value[-_DIGEST_BYTES:]
        if len(content) <= MAX_VALUE_BYTES and hmac.compare_digest(code, self._code(key, content)):
            return content
        raise ForgedValueError(
            f"the control store has a value at {key!r} that is not signed with this datacenter's "
            "key: another program has written it, or a node has another key file"
        )

    def _code(self, key: str, content: bytes) -> bytes:
        name = key.encode()
        # The length keeps the two apart: no other key and content are the same bytes.
        return hmac.digest(self._key, len(name).to_bytes(8, "big") + name + content, _DIGEST)


def new_key() -> bytes:
    """A key for one service, as random as the operating system can make it."""
    return secrets.token_bytes(KEY_BYTES)


def write_key_file(path: Path) -> bytes:
    """Put a new key into a file of mode 0600, in place of an earlier one; returns it.

    What was signed for an earlier start of the service is then worth nothing.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    key = new_key()
    write_private_file(path, key.hex().encode())
    return key


def read_key_file(path: Path) -> bytes:
    """The key in a file.

    Raises:
        FileNotFoundError: there is none.
        UserError: others can read it, or it is no key.
    """
    check_private(path)
    try:
        key = bytes.fromhex(path.read_text(encoding="ascii"))
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise UserError(
            f"{path} is not a key of the control store; the service makes it anew when it starts"
        )
    return key
