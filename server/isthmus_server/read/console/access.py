"""Who may read the console: a token of this user on loopback, an operator's certificate elsewhere.

Other users of the machine can connect to a loopback port, and a web page elsewhere can have a
browser connect to it under a name of its own (DNS rebinding). So a request needs the token, first
in the address that the command prints and then in a cookie, and must name a loopback host.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
from collections.abc import Callable
from pathlib import Path
from urllib.parse import parse_qsl, urlencode

from cryptography import x509
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from isthmus.errors import AdmissionRefused, UserError
from isthmus.identity import tls
from isthmus.system.private_files import check_private, make_private_directory, write_private_file

TOKEN_FILE = "console.token"  # noqa: S105 - a file's name
_TOKEN_LENGTH = 43

CERTIFICATE = "isthmus.certificate"
"""Key of a request's scope: the caller's certificate, verified by TLS."""

HEADERS = (
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        b"img-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)

_STRANGER = (
    "This console belongs to the user who started it.\n"
    "Open the address with ?token=... that `isthmus console` printed. A server's token is in the\n"
    "file console.token in its state directory.\n"
)

CheckCertificate = Callable[[x509.Certificate], None]
"""Raises `AdmissionRefused` unless the holder is an operator now; it may block."""


def kept_token(directory: Path) -> str:
    """The token of a directory that only this user can read; made at the first use.

    It is kept so that an open page goes on after a restart.

    Raises:
        UserError: the directory or the file can be read by others, or cannot be used.
    """
    path = directory / TOKEN_FILE
    try:
        if not path.exists():
            make_private_directory(directory)
            write_private_file(path, secrets.token_urlsafe(32).encode())
        check_private(path)
        token = path.read_text().strip()
    except OSError as error:
        raise UserError(f"{path} cannot be used ({error.strerror}); check permissions") from None
    if len(token) < _TOKEN_LENGTH:
        raise UserError(f"{path} is damaged; remove it, and a new token is made")
    return token


class GuardedApp:
    """Refuses requests that may not read the console, and sets the headers of all answers.

    Guarantees:
      * without the token, or an operator's certificate, no byte of a run is sent;
      * on loopback, a request that names another host is refused;
      * nothing but GET and HEAD is answered.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        token: str | None,
        cookie: str = "",
        check: CheckCertificate | None = None,
    ) -> None:
        """Guard an application.

        Args:
            app: the application.
            token: of a console on loopback; None with certificates.
            cookie: name of the cookie, which browsers share between ports.
            check: checks callers' certificates; None on loopback.
        """
        assert (token is None) != (check is None)
        self._app = app
        self._token = token
        self._cookie = cookie
        self._check = check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        answer = await self._refusal(Request(scope))

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *HEADERS]
            await send(message)

        await (self._app if answer is None else answer)(scope, receive, send_guarded)

    async def _refusal(self, request: Request) -> Response | None:
        """The answer to a request that may not be answered by the application."""
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse("The console only reads.\n", 405, {"allow": "GET, HEAD"})
        if self._check is not None:
            return await self._certificate_refusal(request, self._check)
        host = request.headers.get("host", "")
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if not tls.is_loopback(name):
            text = "Open the console at 127.0.0.1 or localhost.\n"
            return PlainTextResponse(text, 421)
        assert self._token is not None
        given = request.query_params.get("token")
        if given is not None:
            if not _same(given, self._token):
                return PlainTextResponse(_STRANGER, 403)
            answer = RedirectResponse(_without_token(request), 303)
            answer.set_cookie(self._cookie, self._token, httponly=True, samesite="strict", path="/")
            answer.headers["cache-control"] = "no-store"
            return answer
        if not _same(request.cookies.get(self._cookie, ""), self._token):
            return PlainTextResponse(_STRANGER, 403)
        return None

    async def _certificate_refusal(
        self, request: Request, check: CheckCertificate
    ) -> Response | None:
        certificate = request.scope.get(CERTIFICATE)
        with contextlib.suppress(AdmissionRefused):
            if certificate is not None:
                await asyncio.to_thread(check, certificate)
                return None
        return PlainTextResponse("This console is for operators of the server.\n", 403)


def _same(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode("utf-8", "replace"), other.encode())


def _without_token(request: Request) -> str:
    """The path of the request, and its query without the token."""
    pairs = parse_qsl(request.url.query, keep_blank_values=True)
    query = urlencode([(name, value) for name, value in pairs if name != "token"])
    path = "/" + request.url.path.lstrip("/")  # // would name another host
    return f"{path}?{query}" if query else path
