"""What the tables of a job are made of."""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

PositiveSeconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Price = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Day = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
DAYS: tuple[Day, ...] = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
TimeOfDay = Annotated[str, Field(pattern=r"^([01]\d|2[0-3]):[0-5]\d$")]


S = TypeVar("S", bound="Section")


class Section(BaseModel):
    """A table of the job: frozen, and strict about its keys."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        ser_json_inf_nan="constants",  # an `inf` in task.settings is one on every participant
    )


class Hours(Section):
    """Hours of the week, in UTC; over midnight if they close earlier than they open."""

    opens: TimeOfDay
    """HH:MM."""
    closes: TimeOfDay
    """HH:MM; the same as `opens` is all day."""
    days: tuple[Day, ...] = ()
    """Those on which they open: mon, tue, ...; none named is every day."""
