"""Signatures, key agreement, key derivation and authenticated encryption.

Ed25519 (RFC 8032), X25519 (RFC 7748), HKDF-SHA256 (RFC 5869) and AES-256-GCM (SP 800-38D), all
from `cryptography`. Every use has its own tag (`canonical.tagged`), so that an output made for one
purpose is never valid for another.

>>> alice, bob = OneTimeKey(), OneTimeKey()
>>> salt = bytes(32)
>>> alice.agree(bob.public, salt, "pair") == bob.agree(alice.public, salt, "pair")
True
"""

from __future__ import annotations

import os

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from isthmus_privacy.crypto import refusal
from isthmus_privacy.crypto.canonical import tagged

KEY_BYTES = 32
SIGNATURE_BYTES = 64
SEALING_BYTES = 12 + 16
"""Overhead of `seal`: a random nonce and the authentication tag."""


class SigningKey:
    """An Ed25519 private key. It signs tagged fields only."""

    def __init__(self, private: bytes | None = None) -> None:
        """`private` is the 32-byte seed; None generates a key."""
        self._key = (
            Ed25519PrivateKey.generate()
            if private is None
            else Ed25519PrivateKey.from_private_bytes(private)
        )
        self.public: bytes = self._key.public_key().public_bytes_raw()

    def sign(self, tag: str, *fields: bytes) -> bytes:
        """Sign `tagged(tag, *fields)`; the signature has 64 bytes."""
        return self._key.sign(tagged(tag, *fields))


def verify(public: bytes, signature: bytes, tag: str, *fields: bytes) -> bool:
    """Check a signature of `tagged(tag, *fields)` against a public key."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, tagged(tag, *fields))
    except (InvalidSignature, ValueError):
        return False
    return True


class OneTimeKey:
    """An X25519 key pair of one client for one attempt at one round."""

    def __init__(self, private: bytes | None = None) -> None:
        """`private` is the 32-byte scalar; None generates one."""
        self._key = (
            X25519PrivateKey.generate()
            if private is None
            else X25519PrivateKey.from_private_bytes(private)
        )
        self.public: bytes = self._key.public_key().public_bytes_raw()

    def private_bytes(self) -> bytes:
        """The scalar, for secret sharing among the neighbours."""
        return self._key.private_bytes_raw()

    def agree(self, public: bytes, salt: bytes, tag: str, *fields: bytes) -> bytes:
        """Derive 32 bytes for one purpose that only the two key holders can compute.

        Args:
            public: the peer's public key.
            salt: the roster hash: clients with different rosters derive different keys.
            tag: the purpose.
            fields: further context that the key is bound to.

        Raises:
            PeerMisbehaved: the peer's key is a point of low order (RFC 7748, section 6.1).
        """
        secret = bytes(KEY_BYTES)
        try:
            secret = self._key.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError:
            refusal.refuse("key-of-low-order", "a key in the roster is a point of low order")
        return derive(secret, salt, tag, *fields)


def derive(secret: bytes, salt: bytes, tag: str, *fields: bytes) -> bytes:
    """HKDF-SHA256 to 32 bytes, with `tagged(tag, *fields)` as its info."""
    return HKDF(hashes.SHA256(), KEY_BYTES, salt=salt, info=tagged(tag, *fields)).derive(secret)


def seal(key: bytes, plaintext: bytes, bound_to: bytes) -> bytes:
    """Encrypt and authenticate; the result starts with a random 96-bit nonce."""
    nonce = os.urandom(12)
    return nonce + AESGCM(key).encrypt(nonce, plaintext, bound_to)


def unseal(key: bytes, sealed: bytes, bound_to: bytes) -> bytes | None:
    """Decrypt; None if the key, the bytes or the bound context differ from those of `seal`."""
    try:
        return AESGCM(key).decrypt(sealed[:12], sealed[12:], bound_to)
    except InvalidTag:
        return None
