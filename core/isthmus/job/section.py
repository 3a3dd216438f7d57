"""What the tables of a job are made of, and what is said of one that is wrong."""

from __future__ import annotations

import difflib
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


def sentences(error: ValidationError, kind: type[Section], prefix: str = "") -> list[str]:
    """Pydantic's findings in a table, each as `key=value: what is allowed`.

    Args:
        error: of the table.
        kind: what the table should be.
        prefix: of its keys, with a dot at the end, where it is part of another.
    """
    found = []
    for item in error.errors(include_url=False):
        place = ".".join(str(part) for part in item["loc"])
        key = prefix + place
        if item["type"] == "extra_forbidden":
            found.append(f"unknown key {key}{_suggestion(kind, item['loc'])}")
        elif item["type"] == "missing":
            found.append(f"{key} is missing")
        elif item["type"] == "value_error":
            where = key if place else prefix.removesuffix(".")
            found.append((f"{where}: " if where else "") + str(item["ctx"]["error"]))
        elif item["type"] in _SHAPES:
            found.append(f"{_shown(key, item['input'])}: a {_SHAPES[item['type']]} is wanted")
        else:
            wrong = item["msg"][0].lower() + item["msg"][1:]
            found.append(f"{_shown(key, item['input'])}: {wrong}")
    return found


def _shown(key: str, value: object) -> str:
    """A key and so much of its value that a sentence stays one; the value alone of all of it."""
    text = repr(value)
    if len(text) > _LONGEST_VALUE:
        text = f"{text[:_LONGEST_VALUE]}..."
    return f"{key}={text}" if key else text


_LONGEST_VALUE = 100
_SHAPES = {"model_type": "table", "dict_type": "table", "tuple_type": "list"}


def _suggestion(section: type[BaseModel], location: tuple[int | str, ...]) -> str:
    """The closest known key of the same table, or all of them."""
    for part in location[:-1]:
        field = section.model_fields.get(str(part))
        inner = field.annotation if field is not None else None
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return ""
        section = inner
    known = list(section.model_fields)
    close = difflib.get_close_matches(str(location[-1]), known, n=1)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; known here: {', '.join(known) or 'none'}"
