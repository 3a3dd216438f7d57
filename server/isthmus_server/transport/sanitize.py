"""Validate and escape text and figures that participants send."""

from __future__ import annotations

import math

from isthmus.errors import UpdateError
from isthmus.printable import in_a_line
from isthmus.wire import link_pb2

MAX_FIGURE_NAME = 100
"""Characters in the name of a figure."""

MAX_FIGURES = 4096
"""Figures of one reply: the log of the run and the history of policies keep them."""

MAX_FIGURE = 1e200
"""Largest reported figure: sums over all devices, weighted by their examples, stay finite."""

MAX_COUNT = 1 << 53
"""Most steps, or examples, of a reply: sums of them are numbers that transcripts can hold."""

MAX_STEPS = 1000
"""Steps of a round that may have figures."""


def reason_of(reply: link_pb2.Reply) -> str:
    """Return why a participant failed a request, escaped."""
    return in_a_line(reply.failure.reason) or "it answered something else than was asked"


def check_figures(trained: link_pb2.Trained) -> None:
    """Check that the reported duration, averages and counts can be summed, printed and stored.

    Raises:
        UpdateError: one is not finite or has no printable name, there are too many, the duration is
            below 0, or a count is larger than any that is made.
    """
    for kind, count in (("steps", trained.steps), ("examples", trained.examples)):
        if count > MAX_COUNT:
            raise UpdateError(f"it reported {count} {kind}, and the most are {MAX_COUNT}")
    names = (*trained.training, *trained.evaluation, *trained.profile)
    if len(names) > MAX_FIGURES:
        raise UpdateError(
            f"it reported {len(names)} figures, and the most are {MAX_FIGURES}; have the task "
            "return fewer metrics"
        )
    for name in names:
        if not (name.isprintable() and len(name) <= MAX_FIGURE_NAME):
            raise UpdateError(f"the name {name[:MAX_FIGURE_NAME]!r} of a figure is not printable")
    figures = (trained.seconds, *trained.training.values())
    if not all(map(math.isfinite, figures)):
        raise UpdateError("its time or one of its figures is not finite")
    if any(abs(figure) > MAX_FIGURE for figure in figures):
        raise UpdateError(f"its time or one of its figures is above {MAX_FIGURE:g}")
    if len(trained.step_figures) > MAX_STEPS:
        raise UpdateError(
            f"it has figures of {len(trained.step_figures)} steps, and not {MAX_STEPS}"
        )
    for step in trained.step_figures:
        numbers = (step.loss, step.gradient_norm, step.learning_rate, step.units_per_second)
        if not all(math.isfinite(each) and abs(each) <= MAX_FIGURE for each in numbers):
            raise UpdateError(
                f"a figure of step {step.step} is not finite, or above {MAX_FIGURE:g}"
            )
    if trained.seconds < 0:
        raise UpdateError(f"its time of {trained.seconds:g} s is below 0")
