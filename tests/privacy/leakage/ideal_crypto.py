"""Keys, signatures and shares at almost no cost: they decide nothing about which sums open.

Devices of the model take each decision in the product's own code. Only what that code calls is
replaced: a signature is a number under which is noted what was signed, and what is sealed is empty.
No attempt of the model forges what a signature or a seal would have prevented.

What all devices of an attempt compute from the same message is computed once.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import os
from collections.abc import Iterator

import pytest

import isthmus_clients.device.active_run as active_run
import isthmus_clients.device.task_host as task_host
import isthmus_privacy.purpose as purpose
import isthmus_privacy.secagg.client as client
import isthmus_privacy.secagg.cohort as cohort
import isthmus_privacy.secagg.config as config
import isthmus_privacy.secagg.history as history
from isthmus.job import vector_settings
from isthmus.job.schema import Job, read_job
from isthmus_privacy.crypto import keys, shamir
from isthmus_privacy.crypto.canonical import Message, tagged_hash
from isthmus_privacy.secagg.messages import (
    PART_BYTES,
    SEALED_BYTES,
    SEALED_FOR_TWO_BYTES,
    SHARE_BYTES,
)

_numbers = itertools.count(1)


class IdealSigningKey:
    """An identity whose signatures nobody can forge, because nobody tries."""

    def __init__(self, public: bytes) -> None:
        self.public = public

    def sign(self, tag: str, *fields: bytes) -> bytes:
        signature = next(_numbers).to_bytes(keys.SIGNATURE_BYTES, "big")
        _signed[signature] = self.public, tag, fields
        return signature


_signed: dict[bytes, tuple[bytes, str, tuple[bytes, ...]]] = {}


def forget_signatures() -> None:
    """Forget those of sequences that have ended."""
    _signed.clear()


def _verify(public: bytes, signature: bytes, tag: str, *fields: bytes) -> bool:
    return _signed.get(signature) == (public, tag, fields)


class IdealOneTimeKey:
    """A key pair that differs from all others, and derives nothing."""

    def __init__(self) -> None:
        name = next(_numbers).to_bytes(keys.KEY_BYTES, "big")
        self.public = name + hashlib.sha256(name).digest().ljust(keys.ONE_TIME_KEY_BYTES - 32)

    def secret_bytes(self) -> bytes:
        return bytes(keys.KEY_BYTES)


_SEALED = {False: bytes(SEALED_BYTES), True: bytes(SEALED_FOR_TWO_BYTES)}
_SHARES = {False: bytes(2 * SHARE_BYTES), True: bytes(4 * SHARE_BYTES + PART_BYTES)}
_SHARE = bytes(SHARE_BYTES)
_PART = bytes(PART_BYTES)


def sealed_for(config: config.RoundConfig) -> bytes:
    """What a client seals for a neighbour."""
    return _SEALED[config.is_for_two]


@contextlib.contextmanager
def ideal_crypto() -> Iterator[pytest.MonkeyPatch]:
    """Replace keys, signatures and shares in this process."""
    _settings.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keys, "verify", _verify)
        patch.setattr(client, "OneTimeKey", IdealOneTimeKey)
        ideal = cohort.Cohort
        patch.setattr(ideal, "seal", lambda self, *args, **kwargs: sealed_for(self.config))
        patch.setattr(
            ideal, "unseal_shares", lambda self, *args, **kwargs: _SHARES[self.config.is_for_two]
        )
        patch.setattr(ideal, "unseal_part", lambda *args, **kwargs: _PART)
        patch.setattr(ideal, "own_part", lambda *args: _PART)
        patch.setattr(ideal, "next_part", lambda *args: _PART)
        patch.setattr(ideal, "next_part_commitment", lambda *args: b"")
        patch.setattr(ideal, "commitment_in", lambda *args: b"")
        patch.setattr(ideal, "seal_next_parts", lambda *args: b"")
        patch.setattr(ideal, "mask_seeds", lambda *args: dict.fromkeys(args[3] | args[4]))
        patch.setattr(
            shamir,
            "split",
            lambda secrets, points, threshold: [_SHARE * len(secrets)] * len(points),
        )
        decoded = functools.lru_cache(maxsize=256)(config.RoundConfig.from_bytes)
        patch.setattr(config.RoundConfig, "from_bytes", decoded)
        read = functools.lru_cache(maxsize=1024)(read_job)
        for module in (active_run, task_host):
            patch.setattr(module, "read_job", read)
        patch.setattr(vector_settings, "vector_settings", _settings_of)
        patch.setattr(os, "fsync", lambda handle: None)
        patch.setattr(Message, "to_bytes", _to_bytes)
        hashed = functools.lru_cache(maxsize=4096)(tagged_hash)
        for module in (client, cohort, config, history, purpose):
            patch.setattr(module, "tagged_hash", hashed)
        patch.setattr(config.RoundConfig, "check", _check)
        yield patch


_write = Message.to_bytes


def _to_bytes(message: Message) -> bytes:
    """The bytes of a message, which does not change, are those of before."""
    known = message.__dict__.get("_bytes")
    if known is None:
        known = message.__dict__["_bytes"] = _write(message)
    return known


_original_check = config.RoundConfig.check


def _check(checked: config.RoundConfig) -> None:
    if "_checked" not in checked.__dict__:
        _original_check(checked)
        checked.__dict__["_checked"] = True


_settings: dict[int, tuple[Job, str]] = {}
_original = vector_settings.vector_settings


def _settings_of(job: Job) -> str:
    """The settings of a job that was read once, which thus has one identity."""
    if id(job) not in _settings:
        _settings[id(job)] = job, _original(job)
    return _settings[id(job)][1]
