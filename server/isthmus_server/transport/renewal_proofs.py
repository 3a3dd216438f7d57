"""Proofs that a device at an aggregator requests its next certificate itself, and now.

At the server's own port TLS proves this. An aggregator could make a request itself, or record one
and send it again for as long as the present certificate lasts, so that the device would have a
certificate for longer than its owner wants.
"""

from __future__ import annotations

import contextlib
import secrets
import time

from isthmus.errors import AdmissionRefused
from isthmus.identity import tls

NONCE_SECONDS = 300.0
"""Time in which a nonce counts. An answer may wait behind chunks on a slow link; little against the
week for which a certificate is valid."""

UNSIGNED = (
    "behind an aggregator a device has to sign this request with the server's nonce; if it does "
    "not, upgrade Isthmus on it, or have it connect to the server itself"
)
"""Reason that a device reads which knows of no nonces."""


class RenewalProofs:
    """The proofs on one stream of a device at an aggregator.

    Guarantees:
      * a request counts only with a proof by the key of the stream's certificate, or of the one
        that was issued last on the stream;
      * a proof counts once, on the stream on which the server has sent its nonce, and for
        `NONCE_SECONDS`; no other server process accepts it;
      * a stream has at most one nonce.
    """

    def __init__(self, certificate: bytes) -> None:
        """`certificate` (PEM) is that of the stream."""
        self._certificate = certificate
        self._newest: bytes | None = None
        """The certificate (PEM) that was last issued on this stream."""
        self._nonce: bytes | None = None
        """What was sent and has not been used yet."""
        self._ends = 0.0
        """Monotonic time from which on it counts no more."""

    def new_nonce(self) -> bytes:
        """A nonce for one proof; an earlier one counts no more."""
        self._nonce = secrets.token_bytes(tls.NONCE_BYTES)
        self._ends = time.monotonic() + NONCE_SECONDS
        return self._nonce

    def check(self, request: bytes, proof: bytes) -> None:
        """Check the proof of a signing request (DER), and use the nonce up.

        Raises:
            AdmissionRefused: there is no nonce now, or it is no proof of it and of the request.
        """
        nonce = self._nonce
        self._nonce = None
        if nonce is None:
            raise AdmissionRefused(f"the server has sent no nonce for this proof: {UNSIGNED}")
        if time.monotonic() > self._ends:
            raise AdmissionRefused(
                f"the server's nonce in this request was sent more than {NONCE_SECONDS:g} s ago"
            )
        # A device keeps its key if it cannot store the certificate that was issued for the next.
        if self._newest is not None:
            with contextlib.suppress(AdmissionRefused):
                tls.check_proof(self._newest, nonce, request, proof)
                return
        tls.check_proof(self._certificate, nonce, request, proof)

    def issued(self, certificate: bytes) -> None:
        """A certificate (PEM) was issued on the stream."""
        self._newest = certificate
