"""The job's table `[exchange]`: what participants exchange besides trainable parameters."""

from __future__ import annotations

from typing import Literal

from isthmus.job.section import Section


class ExchangeSection(Section):
    """What participants exchange besides trainable parameters."""

    buffers: Literal["average", "frozen"] = "average"
    """Running statistics of normalisation layers such as BatchNorm: `average`, the participants'
    mean, like parameters but without the server optimizer; `frozen`, those that the model was built
    with, by which layers normalise in training too."""
