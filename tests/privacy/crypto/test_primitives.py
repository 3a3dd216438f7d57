"""Primitives against the test vectors of their standards, derived values against pinned ones."""

import hashlib

import pytest
import torch
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import given
from hypothesis import strategies as st

from isthmus.errors import UserError
from isthmus_privacy.crypto import keys
from isthmus_privacy.crypto.canonical import DOMAIN, PositionSet, tagged
from isthmus_privacy.crypto.keys import OneTimeKey, SigningKey
from isthmus_privacy.crypto.masking import TILE, add_masks, cipher, ring_vector


def keystream(key, size):
    return cipher(key).update(bytes(size))


def test_x25519_rfc7748_section_5_2():
    scalar = bytes.fromhex("a546e36bf0527c9d3b16154b82465edd62144c0ac1fc5a18506a2244ba449ac4")
    point = bytes.fromhex("e6db6867583030db3594c1a424b15f7c726624ec26b3353b10a903a6d0ab1c4c")
    agreed = X25519PrivateKey.from_private_bytes(scalar).exchange(
        X25519PublicKey.from_public_bytes(point)
    )
    expected = "c3da55379de9c6908e94ea4df28d084f32eccf03491c71f754b4075577a28552"
    assert agreed.hex() == expected


def test_a_hybrid_key_depends_on_both_mechanisms_and_on_its_ciphertext():
    alice, bob, salt = OneTimeKey(bytes([1]) * 32), OneTimeKey(bytes([2]) * 32), bytes(32)
    key, ciphertext = alice.encapsulate(bob.public, salt, "pair", b"x")
    assert bob.decapsulate(alice.public, ciphertext, salt, "pair", b"x") == key
    agreed = bob._exchange.exchange(X25519PublicKey.from_public_bytes(alice.public[:32]))
    encapsulated = bob._kem.decapsulate(ciphertext)
    digest = hashlib.sha256(ciphertext).digest()
    assert key == keys.derive(encapsulated + agreed, salt, "pair", digest, b"x")
    changed = bytes([ciphertext[0] ^ 1]) + ciphertext[1:]
    stranger = OneTimeKey(bytes([3]) * 32).public
    for other in (
        bob.decapsulate(alice.public, changed, salt, "pair", b"x"),
        bob.decapsulate(stranger[:32] + alice.public[32:], ciphertext, salt, "pair", b"x"),
        bob.decapsulate(alice.public, ciphertext, salt, "share", b"x"),
        bob.decapsulate(alice.public, ciphertext, salt, "pair", b"y"),
        bob.decapsulate(alice.public, ciphertext, bytes([1]) * 32, "pair", b"x"),
    ):
        assert other != key


class CountingExchange:
    """An X25519 private key that counts how often it is used."""

    def __init__(self, key):
        self.key = key
        self.count = 0

    def exchange(self, peer):
        self.count += 1
        return self.key.exchange(peer)


def test_two_keys_that_encapsulate_for_each_other_agree_once_and_do_not_keep_it():
    alice, bob, salt = OneTimeKey(), OneTimeKey(), bytes(32)
    alice._exchange = exchange = CountingExchange(alice._exchange)
    key, ciphertext = alice.encapsulate(bob.public, salt, "pair")
    back, ciphertext_back = bob.encapsulate(alice.public, salt, "pair")
    assert bob.decapsulate(alice.public, ciphertext, salt, "pair") == key != back
    assert alice.decapsulate(bob.public, ciphertext_back, salt, "pair") == back
    assert exchange.count == 1
    assert not alice._agreed
    # What is not kept is computed again.
    assert alice.decapsulate(bob.public, ciphertext_back, salt, "pair") == back
    assert exchange.count == 2


def test_a_secret_of_32_bytes_gives_the_same_hybrid_key_everywhere():
    public = OneTimeKey(bytes(range(32))).public
    assert len(public) == keys.ONE_TIME_KEY_BYTES
    assert (
        hashlib.sha256(public).hexdigest()
        == "91095dc40fc3f72aa67741db397c474e67ab43aaf91f92e91f9f4408eee8e644"
    )


def test_hkdf_rfc5869_a_1():
    okm = HKDF(
        hashes.SHA256(),
        42,
        salt=bytes.fromhex("000102030405060708090a0b0c"),
        info=bytes.fromhex("f0f1f2f3f4f5f6f7f8f9"),
    ).derive(b"\x0b" * 22)
    assert okm.hex() == (
        "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865"
    )


def test_derive_is_hkdf_with_our_tag_as_info():
    expected = HKDF(hashes.SHA256(), 32, salt=b"s" * 32, info=tagged("pair", b"a", b"b"))
    assert keys.derive(b"k" * 32, b"s" * 32, "pair", b"a", b"b") == expected.derive(b"k" * 32)


def test_ed25519_rfc8032_section_7_1_test_1():
    key = SigningKey(
        bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
    )
    assert key.public.hex() == "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"
    assert key._key.sign(b"").hex() == (
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e06522490155"
        "5fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b"
    )
    assert keys.verify(key.public, key.sign("a", b"b"), "a", b"b")
    assert not keys.verify(key.public, key.sign("a", b"b"), "b", b"b")
    assert not keys.verify(key.public, key._key.sign(b""), "a")


def test_aes_256_ctr_sp800_38a_f_5_5():
    key = bytes.fromhex("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4")
    counter = bytes.fromhex("f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff")
    plain = bytes.fromhex("6bc1bee22e409f96e93d7e117393172aae2d8a571e03ac9c9eb76fac45af8e51")
    sealed = Cipher(algorithms.AES(key), modes.CTR(counter)).encryptor().update(plain)
    assert sealed.hex() == "601ec313775789a5b7a7f504bbf3d228f443e3ca4d62b59aca84e990cacaf5c5"


@pytest.mark.parametrize(
    ("bits", "prefix"),
    [(16, "eda3a433dfdf8a1f"), (32, "8c3fbd14d1434033"), (64, "1345b96a10720311")],
)
@pytest.mark.parametrize("threads", [1, 3])
def test_masks(bits, prefix, threads):
    payload = bytearray(100_003 * bits // 8)
    add_masks(ring_vector(payload, bits), [bytes(range(32))], [], threads=threads)
    assert hashlib.sha256(payload).hexdigest()[:16] == prefix
    assert bytes(payload) == keystream(bytes(range(32)), len(payload))


@given(
    size=st.sampled_from([0, 1, 5, TILE - 1, TILE, TILE + 1, 3 * TILE + 17]),
    bits=st.sampled_from([16, 32, 64]),
    threads=st.integers(1, 4),
    plus=st.integers(0, 3),
    minus=st.integers(0, 70),
)
def test_masks_are_added_and_taken_away_in_the_ring(size, bits, threads, plus, minus):
    added, taken = ([bytes([i + 1, j]) * 16 for j in range(n)] for i, n in enumerate((plus, minus)))
    vector = ring_vector(bytearray(size * bits // 8), bits)
    expected = torch.zeros_like(vector)
    for key in added:
        expected += ring_vector(bytearray(keystream(key, size * bits // 8)), bits)
    for key in taken:
        expected -= ring_vector(bytearray(keystream(key, size * bits // 8)), bits)
    add_masks(vector, added, taken, threads=threads)
    assert torch.equal(vector, expected)


def test_a_machine_with_the_other_order_of_bytes_is_refused_in_a_sentence(monkeypatch):
    monkeypatch.setattr("sys.byteorder", "big")
    with pytest.raises(UserError, match="needs a little-endian machine"):
        ring_vector(bytearray(8), 32)


def test_low_order_points_are_refused():
    peer = OneTimeKey().public
    for point in (bytes(32), b"\x01" + bytes(31)):
        with pytest.raises(Exception, match="low order"):
            OneTimeKey().encapsulate(point + peer[32:], bytes(32), "pair")


def test_sealing_binds_key_and_context():
    sealed = keys.seal(b"k" * 32, b"share", b"context")
    assert keys.unseal(b"k" * 32, sealed, b"context") == b"share"
    assert keys.unseal(b"k" * 32, sealed, b"another") is None
    assert keys.unseal(b"x" * 32, sealed, b"context") is None


def test_tags_separate_every_use():
    assert tagged("a") == (len(DOMAIN) + 1).to_bytes(4, "little") + b"isthmus/secagg/3/a"
    assert tagged("t", b"ab", b"c") != tagged("t", b"a", b"bc")


def test_sets_of_clients_are_bitmaps():
    assert PositionSet(10, frozenset({0, 9})).bits == b"\x01\x02"
