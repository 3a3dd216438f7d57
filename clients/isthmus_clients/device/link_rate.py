"""Whether this device's link is fast enough for a round, from what has moved on it so far."""

from __future__ import annotations

from isthmus.job import Job
from isthmus.transport.transfer_time import TransferTime


def too_slow(
    job: Job,
    received: TransferTime,
    sent: TransferTime,
    model_bytes: int,
    result_bytes: int,
    seconds: float = 0.0,
) -> str:
    """Why a round most likely ends without this device, before it begins; empty if it does not.

    A round gives a transfer the time that it takes at the job's `time.least_rate`, and its own time
    to all else. A direction of which nothing is known yet is not counted.

    Args:
        job: of the run.
        received: what this device has received.
        sent: what it has sent.
        model_bytes: that it receives in the round, at most.
        result_bytes: that it sends in the round.
        seconds: that the server gives the round for training; 0 for the job's own time.
    """
    time = job.time
    takes = 0.0
    allowed = seconds or time.first_round_seconds
    slowest = None
    for moved, count in ((received, model_bytes), (sent, result_bytes)):
        rate = moved.rate
        if rate is None:
            continue
        takes += count / rate
        allowed += count / time.least_rate
        slowest = rate if slowest is None else min(slowest, rate)
    if slowest is None or takes <= allowed:
        return ""
    return (
        f"this device's link moves {slowest / 1000:.3g} kB/s, at which the model and the update of "
        f"a round of {job.name} take {takes:.0f} s, and a round allows {allowed:.0f} s: it most "
        "likely ends without this device; use a faster link, or ask for a job with a lower "
        "time.least_rate or more time.round_seconds"
    )
