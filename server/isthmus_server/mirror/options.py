"""The options of a server that name its mirror, and its store of updates."""

from __future__ import annotations

import urllib.parse

from isthmus.errors import UserError
from isthmus_server.mirror.bucket import MirrorBucket, UploadBucket
from isthmus_server.mirror.folder import MirrorFolder
from isthmus_server.mirror.place import MirrorPlace, UploadStore


def place_named(named: str, url: str | None) -> MirrorPlace:
    """The place that options name.

    Args:
        named: `--mirror`, such as `file:/srv/www/models` or `s3:bucket/models`.
        url: `--mirror-url`; None for signed addresses of a store.

    Raises:
        UserError: it cannot be used.
    """
    kind, _, target = named.partition(":")
    is_place = _has_bucket(target) if kind == "s3" else kind == "file" and bool(target)
    if not is_place:
        raise UserError(
            f"--mirror {named} does not name a place: write file:/FOLDER or s3:BUCKET/PREFIX"
        )
    folder = None if url is None else checked_url(url)
    if kind == "file":
        if folder is None:
            raise UserError(
                f"--mirror {named} needs the address at which a web server serves that folder; "
                "give it with --mirror-url https://HOST/FOLDER"
            )
        return MirrorFolder(target, folder)
    return MirrorBucket(target, folder)


def store_named(named: str) -> UploadStore:
    """The store that an option names.

    Args:
        named: `--uploads`, such as `s3:bucket/updates`.

    Raises:
        UserError: it cannot be used.
    """
    kind, _, target = named.partition(":")
    if kind != "s3" or not _has_bucket(target):
        raise UserError(f"--uploads {named} does not name a store: write s3:BUCKET/PREFIX")
    return UploadBucket(target)


def _has_bucket(target: str) -> bool:
    """Whether `BUCKET/PREFIX` begins with a bucket: many write `s3://`, as other programs do."""
    return target.partition("/")[0] != ""


def checked_url(url: str) -> str:
    """The address of a folder on a web server, with a / at its end.

    Raises:
        UserError: devices would not use it.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        usable = parts.scheme == "https" and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        usable = False
    if not usable or parts.query or parts.fragment or "@" in parts.netloc or not _is_plain(url):
        raise UserError(
            f"--mirror-url {url[:200]!r} is no address of the form https://HOST/FOLDER, without a "
            "login or anything after the folder"
        )
    return url.rstrip("/") + "/"


def _is_plain(url: str) -> bool:
    return url.isascii() and url.isprintable() and not set(url) & set(' \\"<>')
