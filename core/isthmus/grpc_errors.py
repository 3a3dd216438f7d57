"""Map gRPC errors to short user messages.

gRPC's own texts are long and change between versions.

>>> short_message("failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:9400: "
...               "Failed to connect to remote host: Connection refused")
'nothing listens there (connection refused)'
"""

from __future__ import annotations

import re

import grpc

from isthmus.printable import in_a_line

_LONGEST = 200

NOT_PASSED = "its certificate does not pass"
"""In the message for a server's certificate that was not accepted."""
NO_PROTOCOL = "what answers there takes none of gRPC's connections over TLS"
"""In the message for what offers other protocols in TLS, as balancers do that end it."""
LOGIN_REFUSED = "the proxy answered 407"
"""The message for a proxy that asks for a login, or does not accept the one that it was given."""
NOT_LINKED = "this aggregator has no link to its server now"
"""The answer of an aggregator that waits for its server."""
_CLOSED = "it closed the connection"
HANDSHAKE_FAILURES = (NOT_PASSED, _CLOSED)
"""In the messages for TLS handshakes that failed: the server's certificate was not accepted, or
the server did not accept this participant's."""

_REFUSED = "nothing listens there (connection refused)"
_NO_WAY = "there is no way to it in the network"
_SILENT = "it did not answer in time"
UNREACHED = (_REFUSED, _NO_WAY, _SILENT)
"""The messages for servers that cannot be reached at all."""

_KNOWN = (
    (r"(?:VERIFY_FAILED|BAD_SIGNATURE): ([\w ]+)", rf"{NOT_PASSED}: \1"),
    (r"Hostname Verification Check", "its certificate is for another name than the one dialled"),
    (r"NO_APPLICATION_PROTOCOL", NO_PROTOCOL),
    (r"WRONG_VERSION_NUMBER", "what answers there does not speak TLS"),
    (r"HTTP proxy returned response code (\d+)", r"the proxy answered \1"),
    (r"HTTP/2|http1", "what answers there does not speak gRPC"),
    (r"Connection refused", _REFUSED),
    (r"resolv|hostname lookup|DNS", "the name has no known address"),
    (r"Cancelling all calls|GOAWAY", "it was stopped"),
    (r"No such file or directory", "there is no such socket"),
    (r"No route to host|Network is unreachable", _NO_WAY),
    (r"(?i)timed? ?out|deadline", _SILENT),
    (r"Connection reset|Broken pipe", "the connection was cut"),
    (r"Socket closed|Stream removed", _CLOSED),
)


def short_message(details: str) -> str:
    """A short message for the details of an `UNAVAILABLE` error; unknown ones are shortened."""
    for pattern, message in _KNOWN:
        match = re.search(pattern, details)
        if match is not None:
            return in_a_line(match.expand(message))
    last = details.rpartition("last error: ")[2]
    if len(last) > _LONGEST:
        last = last[:_LONGEST].rpartition(" ")[0] + " ..."
    return in_a_line(last) or "no reason was given"


def details_of(error: grpc.RpcError | grpc.aio.AioRpcError) -> str:
    """The sentence with which the other side ended a call, escaped."""
    assert isinstance(error, grpc.Call | grpc.aio.AioRpcError)
    return in_a_line(error.details() or "")
