"""Renews a participant's certificate in time, and reports clocks that disagree.

The server ends certificates by its clock, so that the time to renew one is measured by the server's
clock as well: it is in every welcome, and elapsed time is added. A wrong clock on this machine
changes nothing, unless it is so wrong that TLS rejects the server's certificate. In that case, and
if the server's clock is wrong, the participant tries again until the clock is right.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from isthmus.errors import AdmissionRefused, UpdateError
from isthmus.grpc_errors import HANDSHAKE_FAILURES, NOT_PASSED
from isthmus.identity.membership import Membership
from isthmus.printable import in_a_line
from isthmus.system.clocks import BY_SERVERS_CLOCK, utc
from isthmus.transport.stream import Stream
from isthmus.wire import link_pb2

TOLERANCE_SECONDS = 300.0
"""Clocks that differ by more are reported."""

_LONGEST_SLEEP = 600.0
"""Most seconds between two checks of the certificate, for machines that are suspended."""

_LATEST_CLOCK = 2.0**37
"""A later time (in the year 6325) is not a server's."""

_NO_SERVER = "a balancer that passes TLS on may have no server behind it now"

log = logging.getLogger(__name__)


class CertificateRenewal:
    """The certificate of one participant on its connections to the server.

    Guarantees:
      * a certificate is renewed when a third of its life is left by the server's clock;
      * requests that are not granted are repeated at least a hundredth of its life apart;
      * a certificate is replaced only by one that ends later;
      * each request is signed at most once, with one nonce, and only on the stream on which it was
        sent.
    """

    def __init__(self, membership: Membership, now: Callable[[], float] = time.time) -> None:
        """`now` returns this machine's time in Unix seconds."""
        self._membership = membership
        self._now = now
        self._server_clock: float | None = None
        """The server's time at the last welcome."""
        self._answered = asyncio.Event()
        """Set while no request is unanswered."""
        self._answered.set()
        self._unsigned = b""
        """The last request on this stream (DER), until it is signed or answered."""
        self._welcomed_at = 0.0
        """Monotonic time of the last welcome."""
        self._reported = False

    def welcomed(self, clock: float) -> None:
        """Take the server's time (Unix seconds) from its welcome.

        Raises:
            UpdateError: it is no time.
        """
        if not 0 <= clock <= _LATEST_CLOCK:
            raise UpdateError(f"the server's welcome has clock={clock}")
        self._answered.set()
        self._unsigned = b""
        self._server_clock = clock
        self._welcomed_at = time.monotonic()
        differs = abs(clock - self._now()) > TOLERANCE_SECONDS
        if differs and not self._reported:
            log.warning("set the clock that is wrong: %s", self.clocks())
        self._reported = differs

    def server_time(self) -> float:
        """The server's time now, as far as it is known, else this machine's."""
        if self._server_clock is None:
            return self._now()
        return self._server_clock + time.monotonic() - self._welcomed_at

    def clocks(self) -> str:
        """What both clocks show, for messages."""
        own = f"this machine's clock is at {utc(self._now())}"
        if self._server_clock is None:
            return own
        return f"{own} and the server's at {utc(self.server_time())}"

    def doubt(self, reason: str) -> str:
        """What to add to the reason why no stream was opened, if a clock may be at fault."""
        certificate = self._membership.certificate
        now = self._now()
        if BY_SERVERS_CLOCK in reason:
            return f"; this machine's clock is at {utc(now)}"
        if not any(words in reason for words in HANDSHAKE_FAILURES):
            return ""
        begin = certificate.not_valid_before_utc.timestamp()
        end = certificate.not_valid_after_utc.timestamp()
        # Whose certificate is refused has been reached. Who closes a connection may be in between.
        in_between = "" if NOT_PASSED in reason else _NO_SERVER
        if in_between and begin <= now < end and self._agree():
            return f"; this machine's certificate is valid, and the clocks agree: {in_between}"
        more = in_between and f"; or {in_between}"
        return (
            "; maybe a clock is wrong, or this machine has to join again: its certificate is valid "
            f"from {utc(begin)} to {utc(end)}, and {self.clocks()}{more}"
        )

    def _agree(self) -> bool:
        """Whether the server's clock is known, and this machine's shows about the same."""
        known = self._server_clock is not None
        return known and abs(self.server_time() - self._now()) <= TOLERANCE_SECONDS

    async def run(self, stream: Stream) -> None:
        """Request the next certificate on an open stream whenever it is time."""
        membership = self._membership
        while True:
            left = membership.renew_at - self.server_time()
            if left > 0:
                await asyncio.sleep(min(left, _LONGEST_SLEEP))
                continue
            self._answered.clear()
            self._unsigned = membership.next_request()
            renew = link_pb2.Renew(signing_request=self._unsigned)
            await stream.send(link_pb2.Envelope(renew=renew))
            end = membership.certificate.not_valid_after_utc.timestamp()
            pause = max((end - self.server_time()) / 10, membership.life / 100)
            await asyncio.sleep(min(pause, _LONGEST_SLEEP))

    async def settled(self, seconds: float) -> None:
        """Wait until no request is unanswered, but no longer than that."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._answered.wait()

    async def take(self, renewed: link_pb2.Renewed, stream: Stream) -> bool:
        """Store the certificate in the server's answer; returns whether it contains one.

        If it has a nonce instead, the request is sent again, signed with that.
        """
        membership = self._membership
        request = self._unsigned
        self._unsigned = b""
        try:
            if renewed.nonce and request:
                self._sign(request, renewed.nonce, stream)
                return False
            if not renewed.certificate:
                raise AdmissionRefused(in_a_line(renewed.reason))
            await asyncio.to_thread(membership.renewed, renewed.certificate)
        except (AdmissionRefused, OSError) as error:
            self._answered.set()
            log.warning("the certificate of %s was not renewed: %s", membership.name, error)
            return False
        self._answered.set()
        end = membership.certificate.not_valid_after_utc.timestamp()
        log.info("the certificate of %s is renewed until %s", membership.name, utc(end))
        return True

    def _sign(self, request: bytes, nonce: bytes, stream: Stream) -> None:
        """Send a request again, with a proof that it is made now.

        Raises:
            AdmissionRefused: the nonce does not have the length of one.
        """
        renew = link_pb2.Renew(
            signing_request=request, proof=self._membership.proof_of(request, nonce)
        )
        # Not awaited, so that the stream is read while it cannot be written.
        stream.spawn(stream.send(link_pb2.Envelope(renew=renew)))
