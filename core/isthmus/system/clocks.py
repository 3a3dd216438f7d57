"""Times of the wall clock for messages. Durations are measured with `time.monotonic`."""

from __future__ import annotations

import datetime

BY_SERVERS_CLOCK = "by the server's clock, which is at"
"""In refusals by a server whose clock may be wrong; participants add what their clock shows."""


CLOCK_METADATA = "isthmus-clock"
"""Key of the server's clock, in Unix seconds, in the metadata with which it accepts a stream."""


def utc(timestamp: float) -> str:
    """A time in Unix seconds as text.

    >>> utc(2_000_000_000)
    '2033-05-18 03:33:20 UTC'
    >>> utc(2**40)  # a peer can send any number
    '1099511627776 s after 1970'
    """
    try:
        time = datetime.datetime.fromtimestamp(timestamp, datetime.UTC)
    except (ValueError, OverflowError, OSError):
        return f"{timestamp:.0f} s after 1970"
    return f"{time:%Y-%m-%d %H:%M:%S} UTC"
