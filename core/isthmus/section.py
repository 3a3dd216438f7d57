"""What the tables of a job are made of."""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from isthmus.errors import JobError

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

    @classmethod
    def parse(cls, text: str) -> Hours:
        """From one line: days, if not all, and when they open and close.

        >>> Hours.parse("sat,sun 22:00-06:00")
        Hours(opens='22:00', closes='06:00', days=('sat', 'sun'))

        Raises:
            JobError: it is not of this form.
        """
        days, _, times = text.strip().rpartition(" ")
        opens, _, closes = times.partition("-")
        try:
            table = {"opens": opens, "closes": closes, "days": days.split(",") if days else []}
            return Hours.model_validate(table)
        except ValidationError:
            raise JobError(
                f"the hours {text!r} are not of the form 22:00-06:00 or sat,sun 22:00-06:00"
            ) from None
