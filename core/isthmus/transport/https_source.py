"""Blobs of a web server over HTTPS, with ranges, so that an interrupted one continues.

An S3-compatible store is one too: a bucket's files have `https://` addresses, which the store signs
for a time if they are not public (a "presigned URL").
"""

from __future__ import annotations

import re
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from http.client import HTTPMessage, HTTPResponse
from typing import IO

from isthmus.errors import UserError, cause_of
from isthmus.identity.stations import tls_reason
from isthmus.transport.kept_connections import KeepingHandler, KeptConnection
from isthmus.transport.timely_answers import TimelyHandler

SECONDS = 20.0
"""Limit for a connection, and for each answer and read on it."""

_SKIP_BYTES = 256 << 10
_ABSENT = (403, 404, 410)
"""What web servers and object stores answer for a file that is not there for this caller."""
_NO_SUCH_RANGE = 416
_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")


class HttpsSource:
    """`https://HOST/FOLDER`: files with the SHA-256 of a blob as their names; or with names.

    Guarantees:
      * no redirection leads out of HTTPS, and the certificate of each server is verified;
      * a stream begins at the wanted byte, or there is none;
      * nothing is read of what comes with a redirection or an error;
      * only a proxy reads the login that is for it.
    """

    def __init__(
        self,
        target: str,
        names: Mapping[str, str] | None = None,
        skipped: Callable[[int], None] | None = None,
        *,
        allowed: Callable[[str], bool] | None = None,
        context: ssl.SSLContext | None = None,
        kept: KeptConnection | None = None,
    ) -> None:
        """Name the folder, or one file.

        Args:
            target: the address without `https:`.
            names: the name of each blob there by its SHA-256; None for the SHA-256 itself. With
                names an address that does not end in / is of one file: of the name that it ends
                with, or of the only one.
            skipped: is called with the size of each piece that a server without ranges sends
                before the wanted byte; what it raises ends that.
            allowed: whether a redirection to an address is followed; None for any over HTTPS.
            context: with the authorities that are trusted; None for those of this machine.
            kept: a connection that is used again; None for a new one each time.

        Raises:
            UserError: the address cannot be used.
        """
        address = f"https:{target}"
        try:
            parts = urllib.parse.urlsplit(address)
            usable = bool(parts.hostname) and (parts.port or 1) > 0 and target.startswith("//")
        except ValueError:
            usable = False
        if not usable or not address.isprintable() or " " in address:
            raise UserError(f"{address[:200]!r} is no address of the form https://HOST/FOLDER")
        if "@" in parts.netloc:
            raise UserError(
                f"https://...@{parts.netloc.rpartition('@')[2]} has a login, which is not sent; "
                "use an address without one, such as a presigned one"
            )
        self.named = f"https://{parts.netloc}{parts.path}"
        """The address without what may be secret in it, a signature."""
        self._skipped = skipped
        self._parts = parts
        self._names = names
        context = context or ssl.create_default_context()
        opening = TimelyHandler(context=context) if kept is None else KeepingHandler(context, kept)
        self._opener = urllib.request.build_opener(_OnlyHttps(allowed), opening)

    def open(self, sha256: str, size: int, offset: int) -> IO[bytes] | None:
        """See `BlobSource.open`.

        Raises:
            OSError: the server cannot be reached, or answers with an error.
        """
        address = self._address(sha256)
        if address is None:
            return None
        headers = {"User-Agent": "isthmus", "Accept-Encoding": "identity"}
        if offset:
            headers["Range"] = f"bytes={offset}-{size - 1}"
        request = urllib.request.Request(address, headers=headers)  # noqa: S310 - it is https
        try:
            answer = self._opener.open(request, timeout=SECONDS)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code in _ABSENT:
                return None
            if error.code == _NO_SUCH_RANGE:
                raise OSError(f"it has fewer than {size} bytes under this name") from None
            raise OSError(f"{self.named} answers {error.code} {error.reason}") from None
        except urllib.error.URLError as error:
            raise OSError(f"{self.named} cannot be reached: {reason_of(error)}") from None
        begin, total = _part(answer.headers, answer.status)
        if begin not in (0, offset) or total not in (size, None):
            answer.close()
            has = "another part" if begin not in (0, offset) else f"{total} bytes"
            raise OSError(f"it has {has} under this name, and the file has {size} bytes")
        # It may send all of it: read on to the byte that is wanted.
        try:
            self._skip(answer, offset - begin)
        except BaseException:
            answer.close()
            raise
        stream: IO[bytes] = answer
        return stream

    def _skip(self, stream: HTTPResponse, count: int) -> None:
        while count:
            data = stream.read1(min(_SKIP_BYTES, count))
            if not data:
                raise OSError("it ends early")
            count -= len(data)
            if self._skipped is not None:
                self._skipped(len(data))

    def _address(self, sha256: str) -> str | None:
        """The address of a blob; None if this source does not have it."""
        path = self._parts.path
        if self._names is None:
            name: str | None = sha256
            path = path.rstrip("/") + "/"
        else:
            name = self._names.get(sha256)
        if name is None:
            return None
        if path.endswith("/"):
            path += urllib.parse.quote(name)
        elif len(self._names or ()) > 1 and urllib.parse.unquote(path.rpartition("/")[2]) != name:
            return None  # it is of another file
        return urllib.parse.urlunsplit(self._parts._replace(path=path, fragment=""))


class _OnlyHttps(urllib.request.HTTPRedirectHandler):
    """Follows redirections, as of a hub to the servers with its files, but not out of HTTPS."""

    def __init__(self, allowed: Callable[[str], bool] | None) -> None:
        self._allowed = allowed

    def redirect_request(
        self,
        request: urllib.request.Request,
        stream: IO[bytes],
        code: int,
        message: str,
        headers: HTTPMessage,
        address: str,
    ) -> urllib.request.Request | None:
        """See `urllib.request.HTTPRedirectHandler`."""
        if not address.lower().startswith("https://"):
            stream.close()
            raise OSError("it redirects to an address without HTTPS")
        if self._allowed is not None and not self._allowed(address):
            stream.close()
            raise OSError("it redirects to an address that the owner does not allow")
        # Else urllib reads all that comes with it into memory, which may have no end.
        stream.close()
        following = super().redirect_request(request, stream, code, message, headers, address)
        if following is not None:
            # The login at a proxy, which gets it again if it leads there, too. Hosts that are
            # reached without it would read it.
            following.remove_header("Proxy-authorization")
        return following


def reason_of(error: urllib.error.URLError) -> str:
    """Why nothing could be asked, without the numbers of the system.

    >>> reason_of(urllib.error.URLError(ConnectionRefusedError(111, "Connection refused")))
    'Connection refused'
    """
    reason = error.reason
    if isinstance(reason, ssl.SSLCertVerificationError):
        return f"its certificate does not pass: {reason.verify_message}"
    if isinstance(reason, ssl.SSLError):
        return tls_reason(reason)
    return cause_of(reason) if isinstance(reason, Exception) else str(reason)


def _part(headers: HTTPMessage, status: int) -> tuple[int, int | None]:
    """The first byte of an answer, and the size of the whole file if the server says it."""
    if status == 206:
        found = _RANGE.fullmatch(headers.get("Content-Range", ""))
        if found is None:
            return -1, None
        return int(found[1]), None if found[2] == "*" else int(found[2])
    length = headers.get("Content-Length", "")
    return 0, int(length) if length.isascii() and length.isdigit() else None
