"""The files of a tokenizer in the folder that a model starts from, and their digest."""

from __future__ import annotations

import hashlib
from pathlib import Path

from isthmus.errors import UserError
from isthmus.start.files import digest_of

_NAMES = frozenset(
    {
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
        "merges.txt",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.json",
        "vocab.txt",
    }
)
_SUFFIXES = (".model", ".tiktoken")
"""Ends of the names of vocabularies of SentencePiece and tiktoken."""


def tokenizer_digest(folder: Path) -> str | None:
    """SHA-256 of the files of a folder's tokenizer, in hexadecimal, as of several weight files.

    They say how text becomes tokens, with the chat template. None if the folder has none of them,
    or is no folder.

    Raises:
        UserError: a file cannot be read.
    """
    if not folder.is_dir():
        return None
    digests = {}
    for path in sorted(folder.iterdir()):
        if path.name not in _NAMES and path.suffix not in _SUFFIXES:
            continue
        try:
            with path.open("rb") as file:
                digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}") from None
    return digest_of(digests) if digests else None
