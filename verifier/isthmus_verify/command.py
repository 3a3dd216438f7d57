"""The command ``isthmus-verify``."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
from pathlib import Path

from cryptography import x509

from isthmus_verify.check import check
from isthmus_verify.violation import Violation

_ENROLLER = "isthmus-enroller:"
_MAX_CERTIFICATE = 1 << 16
_HASH = re.compile("[0-9a-f]{64}")


def main(arguments: list[str] | None = None) -> int:
    """Check a transcript; returns the exit code: 1 for a violation, 2 for a wrong call."""
    parser = argparse.ArgumentParser(
        prog="isthmus-verify", description="Check a transcript that `isthmus prove` has written."
    )
    parser.add_argument("transcript", type=Path)
    parser.add_argument("--model", type=Path, help="the final model, model.safetensors")
    parser.add_argument("--head", help="the hash that the model card has of the transcript")
    parser.add_argument(
        "--authority", type=Path, help="certificate of the fleet's authority, authority.pem"
    )
    given = parser.parse_args(arguments)
    head = None if given.head is None else given.head.strip().lower()
    if head is not None and not _HASH.fullmatch(head):
        parser.error(
            f"--head {given.head!r} is not a hash; give all of its 64 hexadecimal digits, as "
            "`isthmus prove` and the model card have them"
        )
    try:
        authority = None if given.authority is None else authority_key(given.authority)
        with contextlib.ExitStack() as opened:
            transcript = opened.enter_context(given.transcript.open("rb"))
            model = None if given.model is None else opened.enter_context(given.model.open("rb"))
            verdict = check(transcript, head=head, authority=authority, model=model)
    except Violation as violation:
        print(f"isthmus-verify: {violation}", file=sys.stderr)
        return 1
    except OSError as error:
        print(
            f"isthmus-verify: {error.filename or given.transcript}: {error.strerror}",
            file=sys.stderr,
        )
        return 1
    lines = [
        f"head     {verdict.head}",
        *(f"holds    {sentence}" for sentence in verdict.holds),
        *(f"unknown  {sentence}" for sentence in verdict.unknown),
    ]
    return _shown(lines)


def _shown(lines: list[str]) -> int:
    """Print the outcome; returns the exit code, 1 if not all of it could be written."""
    try:
        print("\n".join(lines), flush=True)
    except OSError as error:
        # What is left in the buffer would be tried again when the process ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if not isinstance(error, BrokenPipeError):  # else the reader has closed it on purpose
            print(
                f"isthmus-verify: the outcome cannot be written: {error.strerror}", file=sys.stderr
            )
        return 1
    return 0


def authority_key(path: Path) -> bytes:
    """The key that signs enrolments, as the certificate of an authority states it.

    Raises:
        Violation: it states none.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        data = file.read(_MAX_CERTIFICATE)
    try:
        certificate = x509.load_pem_x509_certificate(data)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
        (stated,) = [uri for uri in uris if uri.startswith(_ENROLLER)]
        key = bytes.fromhex(stated.removeprefix(_ENROLLER))
    except (
        ValueError,
        x509.DuplicateExtension,
        x509.ExtensionNotFound,
        x509.InvalidVersion,
        x509.UnsupportedGeneralNameType,
    ):
        key = b""
    if len(key) != 32:
        raise Violation(f"{path} is no certificate of an authority of Isthmus")
    return key
