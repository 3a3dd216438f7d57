"""Who may read the pages and metrics of a server from other machines."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from cryptography import x509

from isthmus.errors import AdmissionRefused
from isthmus.identity import tls
from isthmus_server.transport.event_loop import LoopObserver


class CallerCheck(Protocol):
    """How a listener that other machines reach knows its callers."""

    def context(self) -> ssl.SSLContext:
        """TLS with the server's current certificate; it must request the caller's."""
        ...

    def check(self, certificate: x509.Certificate) -> None:
        """Check the certificate that a caller presented, and that TLS has verified.

        Raises:
            AdmissionRefused: its holder may not read metrics.
        """
        ...


class OperatorsOnly:
    """Admits operators whose certificate is in the registry."""

    def __init__(
        self,
        pair: Callable[[], tuple[bytes, bytes]],
        authority: Callable[[], x509.Certificate],
        loop: LoopObserver,
        registered: Callable[[tls.Subject], Coroutine[Any, Any, None]],
    ) -> None:
        """Take what the control plane knows.

        Args:
            pair: returns the server's current key and certificate (PEM).
            authority: returns the certificate that signed those of all participants.
            loop: the loop of the control plane.
            registered: raises `AdmissionRefused` if a participant is not one any more; runs in
                that loop.
        """
        self._pair = pair
        self._authority = authority
        self._loop = loop
        self._registered = registered

    def context(self) -> ssl.SSLContext:
        """TLS 1.3 with the server's certificate, and callers of its authority."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=tls.pem(self._authority()).decode())
        key, certificate = self._pair()
        # OpenSSL reads keys from files only; this one is in memory.
        file = os.memfd_create("pair")
        try:
            os.write(file, key + certificate)
            context.load_cert_chain(f"/proc/self/fd/{file}")
        finally:
            os.close(file)
        return context

    def check(self, certificate: x509.Certificate) -> None:
        """Admit an operator that is not revoked.

        Raises:
            AdmissionRefused: it is no operator's, or not any more.
        """
        subject = tls.subject_of(certificate)
        if subject.kind != "operator":
            raise AdmissionRefused(f"{subject.name!r} is a {subject.kind}, not an operator")
        self._loop.ask(lambda: self._registered(subject))
