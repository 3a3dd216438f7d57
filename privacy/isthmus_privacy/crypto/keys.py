"""Signatures, key agreement, key derivation and authenticated encryption.

Ed25519 (RFC 8032), X25519 (RFC 7748) with ML-KEM-768 (FIPS 203), HKDF-SHA256 (RFC 5869) and
AES-256-GCM (SP 800-38D), all from `cryptography`. Every use has its own tag (`canonical.tagged`),
so that an output made for one purpose is never valid for another.

>>> alice, bob = OneTimeKey(), OneTimeKey()
>>> salt = bytes(32)
>>> key, ciphertext = alice.encapsulate(bob.public, salt, "share-key")
>>> bob.decapsulate(alice.public, ciphertext, salt, "share-key") == key
True
"""

from __future__ import annotations

import hashlib
import os

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey, MLKEM768PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from isthmus_privacy.crypto import refusal
from isthmus_privacy.crypto.canonical import tagged

KEY_BYTES = 32
SIGNATURE_BYTES = 64
ONE_TIME_KEY_BYTES = KEY_BYTES + 1184
"""A public key of `OneTimeKey`: an X25519 key, then an ML-KEM-768 key."""
CIPHERTEXT_BYTES = 1088
"""Size of a ciphertext of ML-KEM-768."""
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
    """A hybrid key pair of one client for one attempt at one round: X25519 and ML-KEM-768.

    A derived key stays secret as long as one of the two does. The secrets are combined as in
    X-Wing (Barbosa et al. 2024), with HKDF and everything that they depend on as its context.
    Both private keys follow from one secret of 32 bytes, which can be shared among neighbours.
    """

    def __init__(self, secret: bytes | None = None) -> None:
        """`secret` has 32 bytes; None draws one."""
        self._secret = os.urandom(KEY_BYTES) if secret is None else secret
        self._exchange = X25519PrivateKey.from_private_bytes(_expand(self._secret, "x25519", 32))
        self._kem = MLKEM768PrivateKey.from_seed_bytes(_expand(self._secret, "ml-kem-768", 64))
        self._agreed: dict[bytes, bytes] = {}
        """X25519 key of a peer to the secret that was agreed on when a key was encapsulated for it.

        Most neighbours send something back, and X25519 gives the same secret in both directions."""
        self.public: bytes = (
            self._exchange.public_key().public_bytes_raw()
            + self._kem.public_key().public_bytes_raw()
        )

    def secret_bytes(self) -> bytes:
        """The secret, for sharing among the neighbours."""
        return self._secret

    def derive(self, salt: bytes, tag: str, *fields: bytes) -> bytes:
        """Derive 32 bytes for one purpose that only holders of the secret can compute."""
        return derive(self._secret, salt, tag, *fields)

    def encapsulate(
        self, public: bytes, salt: bytes, tag: str, *fields: bytes
    ) -> tuple[bytes, bytes]:
        """Draw a key that only the two key holders can compute, for one purpose.

        Args:
            public: the peer's public key.
            salt: the roster hash: clients with different rosters derive different keys.
            tag: the purpose.
            fields: further context that the key is bound to.

        Returns:
            The 32-byte key, and the ciphertext from which the peer computes it.

        Raises:
            PeerMisbehaved: the peer's key is a point of low order (RFC 7748, section 6.1), or no
                ML-KEM-768 key (FIPS 203, section 7.2).
        """
        try:
            encapsulated, ciphertext = MLKEM768PublicKey.from_public_bytes(
                public[KEY_BYTES:]
            ).encapsulate()
        except ValueError:
            refusal.refuse("key-malformed", "a key in the roster is no key of ML-KEM-768")
            raise
        agreed = self._agreed[public[:KEY_BYTES]] = _agreed(self._exchange, public)
        return _combine(encapsulated, agreed, ciphertext, salt, tag, fields), ciphertext

    def decapsulate(
        self, public: bytes, ciphertext: bytes, salt: bytes, tag: str, *fields: bytes
    ) -> bytes:
        """Compute the key that the holder of `public` has drawn; the arguments are as there.

        A changed ciphertext gives another key (implicit rejection; FIPS 203, section 7.3).

        Raises:
            PeerMisbehaved: the peer's key is a point of low order.
        """
        encapsulated = self._kem.decapsulate(ciphertext)
        agreed = self._agreed.pop(public[:KEY_BYTES], None) or _agreed(self._exchange, public)
        return _combine(encapsulated, agreed, ciphertext, salt, tag, fields)


def is_usable(public: bytes) -> bool:
    """Whether a public key of `OneTimeKey` is neither of low order nor malformed."""
    try:
        MLKEM768PublicKey.from_public_bytes(public[KEY_BYTES:])
    except ValueError:
        return False
    # Every scalar is a multiple of 8, so any one shows a point of low order.
    return _agree(_ANY_SCALAR, public) is not None


def _combine(
    encapsulated: bytes,
    agreed: bytes,
    ciphertext: bytes,
    salt: bytes,
    tag: str,
    fields: tuple[bytes, ...],
) -> bytes:
    """The key that follows from both mechanisms, and from what it is for."""
    bound_to = hashlib.sha256(ciphertext).digest()
    return derive(encapsulated + agreed, salt, tag, bound_to, *fields)


def _agreed(private: X25519PrivateKey, public: bytes) -> bytes:
    """The X25519 secret.

    Raises:
        PeerMisbehaved: it is zero, because the point is of low order.
    """
    agreed = _agree(private, public)
    if agreed is None:
        refusal.refuse("key-of-low-order", "a key in the roster is a point of low order")
        return bytes(KEY_BYTES)
    return agreed


def _agree(private: X25519PrivateKey, public: bytes) -> bytes | None:
    """The X25519 secret; None if it is zero, because the point is of low order."""
    try:
        return private.exchange(X25519PublicKey.from_public_bytes(public[:KEY_BYTES]))
    except ValueError:
        return None


_ANY_SCALAR = X25519PrivateKey.from_private_bytes(bytes(KEY_BYTES))


def _expand(secret: bytes, tag: str, size: int) -> bytes:
    """HKDF-SHA256 of a one-time secret to the private key of one of the two mechanisms."""
    info = tagged("one-time-key", tag.encode())
    return HKDF(hashes.SHA256(), size, salt=None, info=info).derive(secret)


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
