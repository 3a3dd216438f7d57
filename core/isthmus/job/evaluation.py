"""The job's table `[evaluation]`: when and how the model is evaluated."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from isthmus.job.section import Section


class EvaluationSection(Section):
    """Central evaluation on held-out data."""

    every: Annotated[int, Field(ge=1)] = 1
    """Rounds between evaluations; the last round is always evaluated."""
    batch_size: Annotated[int, Field(ge=1)] = 512
    """Examples in one batch."""
