"""Base class and value types of a job's tables, and the messages for invalid ones."""

from __future__ import annotations

import difflib
import math
import unicodedata
from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from isthmus.errors import JobError

PositiveSeconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Price = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Day = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
DAYS: tuple[Day, ...] = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
GroupName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
"""Name of a group of devices, with the characters of a participant's name."""
ProvidedName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
"""Name of what Isthmus or another installed package provides, by an entry point."""
TimeOfDay = Annotated[str, Field(pattern=r"^([01]\d|2[0-3]):[0-5]\d$")]


def _sendable(table: Any, prefix: str = "") -> Any:
    """Return free values, such as the settings of a task, if JSON can carry them."""
    listed = enumerate(table) if isinstance(table, list | tuple) else ()
    for name, value in table.items() if isinstance(table, dict) else listed:
        key = f"{prefix}{name}"
        if isinstance(value, dict | list | tuple):
            _sendable(value, f"{key}.")
        elif isinstance(value, float) and not math.isfinite(value):
            raise ValueError(
                f"{key}={value} is not finite, and a job is sent as JSON, which has no such "
                "number; use a finite one"
            )
        elif not isinstance(value, str | int | float | None):  # TOML has dates and times besides
            raise ValueError(
                f"{key}={value} is a {type(value).__name__}, and a job is sent as JSON, which has "
                "none; write it as text in quotes"
            )
    return table


FREE = BeforeValidator(_sendable)
"""Validator of tables whose keys the job does not know: refuses nan, infinities, dates, times."""

S = TypeVar("S", bound="Section")

MAX_COUNT = 2**31 - 1
"""Largest number of rounds, steps, devices and the like: messages and tables hold it."""
MAX_AMOUNT = 2**62
"""Largest number of bytes or examples; sums of them stay below the largest number of a table."""

MAX_REAL = 1e18
"""Largest magnitude of a real number: costs of all rounds stay finite."""
MIN_REAL = 1e-38
"""Smallest magnitude of a real number that is not 0: so do quotients, and float32 can hold it."""
MAX_SECONDS = 1e9
"""Longest duration, 32 years; in hours, so many of them. Clocks and timers hold it."""
MAX_TEXT = 2048
"""Characters of the longest text: with the folder before it, a path may have 4,096 bytes."""
MAX_PART = 255
"""Bytes of the longest part of a path, as long as the longest name of a file."""


class Section(BaseModel):
    """A table of the job: immutable, and unknown keys are errors."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        allow_inf_nan=False,  # JSON, as which a job is stored and sent, has neither
    )

    @field_validator("*", mode="after")
    @classmethod
    def _can_be_held(cls, value: Any, field: ValidationInfo) -> Any:
        """Refuse numbers that messages and tables do not hold, or that overflow in products.

        And text that is no name of a file: most of a job's text names one, and where it is looked
        for, on another machine, such a name would be an error of the operating system.
        """
        if isinstance(value, str):
            return _checked_text(value)
        if type(value) is float:
            return _bounded(value, str(field.field_name))
        if type(value) is not int:
            return value
        is_amount = str(field.field_name).endswith(("bytes", "examples", "seed"))
        largest = MAX_AMOUNT if is_amount else MAX_COUNT
        if abs(value) > largest:
            raise ValueError(f"must be at most {largest}, and is {value}")
        return value


def _bounded(value: float, name: str) -> float:
    """Return a real number of a job if no cost, duration or size becomes infinite by it."""
    largest = MAX_SECONDS if name.endswith(("seconds", "hours")) else MAX_REAL
    if abs(value) > largest:
        raise ValueError(f"must be at most {largest:g}, and is {value:g}")
    if value and abs(value) < MIN_REAL:
        raise ValueError(f"must be 0 or at least {MIN_REAL:g}, and is {value:g}")
    return value


def _checked_text(value: str) -> str:
    """Return text of a job if it has no control characters, and no part that is too long."""
    if any(unicodedata.category(each) in ("Cc", "Cs") for each in value):
        raise ValueError(f"must have no control characters, and is {ascii(value)[:80]}")
    if len(value) > MAX_TEXT:
        raise ValueError(f"must have at most {MAX_TEXT} characters, and has {len(value)}")
    part = max(len(each.encode()) for each in value.split("/"))
    if part > MAX_PART and "://" not in value:
        raise ValueError(
            f"has a part of {part} bytes, and no name of a file has more than {MAX_PART}; "
            "shorten it"
        )
    return value


class Hours(Section):
    """Hours of the week, in UTC; they span midnight if `closes` is before `opens`."""

    opens: TimeOfDay
    """HH:MM."""
    closes: TimeOfDay
    """HH:MM; if equal to `opens`, the hours are all day."""
    days: tuple[Day, ...] = ()
    """Days on which they open: mon, tue, ...; empty for every day."""

    @classmethod
    def parse(cls, text: str) -> Hours:
        """Parse one line: the days, unless all, and the times of opening and closing.

        >>> Hours.parse("sat,sun 22:00-06:00")
        Hours(opens='22:00', closes='06:00', days=('sat', 'sun'))

        Raises:
            JobError: the text does not have this form.
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


class DeviceHours(Hours):
    """Hours in which some devices may be invited; several entries for one device add up."""

    devices: Annotated[str, Field(min_length=1)]
    """Names of the devices: `tablet-7`, or a pattern with `*`, `?` and `[...]` such as
    `tablet-*`."""


def sentences(error: ValidationError, kind: type[Section], prefix: str = "") -> list[str]:
    """Pydantic's errors in a table, each as `key=value: what is allowed`.

    Args:
        error: the validation error of the table.
        kind: the class of the table.
        prefix: of the keys of a nested table, with a dot at the end.
    """
    messages = []
    for item in error.errors(include_url=False):
        place = ".".join(str(part) for part in item["loc"])
        key = prefix + place
        if item["type"] == "extra_forbidden":
            messages.append(f"unknown key {key}{_suggestion(kind, item['loc'], prefix)}")
        elif item["type"] == "missing":
            messages.append(f"{key} is missing")
        elif item["type"] == "value_error":
            where = key if place else prefix.removesuffix(".")
            reason = str(item["ctx"]["error"])
            known = not where or reason.startswith(f"{where}.")  # it says itself where
            messages.append(reason if known else f"{where}: {reason}")
        elif item["type"] in _SHAPES:
            messages.append(f"{_shown(key, item['input'])}: must be a {_SHAPES[item['type']]}")
        else:
            wrong = item["msg"][0].lower() + item["msg"][1:]
            messages.append(f"{_shown(key, item['input'])}: {wrong}")
    return messages


def _shown(key: str, value: object) -> str:
    """`key=value` with a shortened value; only the value if the key is empty."""
    text = repr(value)
    if len(text) > _LONGEST_VALUE:
        text = f"{text[:_LONGEST_VALUE]}..."
    return f"{key}={text}" if key else text


_LONGEST_VALUE = 100
_SHAPES = {"model_type": "table", "dict_type": "table", "tuple_type": "list"}


def _suggestion(root: type[BaseModel], location: tuple[int | str, ...], prefix: str) -> str:
    """The end of a message: the same key of other tables, the closest of this one, or all of it."""
    section = root
    for part in location[:-1]:
        inner = _tables(section, str(part))
        if not inner:
            return ""
        section = inner[0]  # of `Table | None`, the table
    name = str(location[-1])
    if places := list(_places(root, name, prefix)):
        apart = " without a table" if places == [name] else ""
        return f"; write {' or '.join(places)}{apart}"
    known = list(section.model_fields)
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; known here: {', '.join(known) or 'none'}"


def _places(
    section: type[BaseModel],
    name: str,
    prefix: str,
    above: frozenset[type[BaseModel]] = frozenset(),
) -> Iterator[str]:
    """Where a table, or one in it, has a key of that name; `above` are the tables around it."""
    around = above | {section}
    for key in section.model_fields:
        if key == name:
            yield prefix + key
        for inner in _tables(section, key):
            if inner not in around:  # a table of which a key is such a table again has no end
                yield from _places(inner, name, f"{prefix}{key}.", around)


def _tables(section: type[BaseModel], key: str) -> list[type[BaseModel]]:
    """The tables that a key of a table can be; not those of a list."""
    field = section.model_fields.get(key)
    kind = None if field is None else field.annotation
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    return [each for each in kinds if isinstance(each, type) and issubclass(each, BaseModel)]
