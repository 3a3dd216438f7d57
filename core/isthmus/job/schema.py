"""The schema of job files: what to learn, how, and where, in one TOML file.

>>> job = parse_job('''
... name = "digits"
... [task]
... source = "task.py:Digits"
... ''', overrides=["federated.cohort=4", "federated.quorum=3"])
>>> job.federated.cohort, job.strategy.policy
(4, 'alternate')

The docstring of a field gives its meaning and unit; ``isthmus job schema`` prints them. Unknown
keys are errors, so that a misspelt key is never silently replaced by a default.
"""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pydantic
from pydantic import ValidationError, model_validator

from isthmus.errors import JobError, cause_of
from isthmus.job import cross_checks
from isthmus.job.flower import add_project_config
from isthmus.job.measurements import add_statistics
from isthmus.job.model import add_start
from isthmus.job.section import S, sentences
from isthmus.job.tables import JobTables


class Job(JobTables):
    """A task and all settings of its training."""

    @model_validator(mode="after")
    def _tables_fit_together(self) -> Job:
        cross_checks.check(self)
        return self


def load_job(path: Path, overrides: Iterable[str] = ()) -> Job:
    """Read and validate a job file; `overrides` are `key.sub=value` with TOML values.

    What the files of `task.statistics` and `model.start` say is put into the job.

    Raises:
        JobError: one sentence naming the file, the key, the value and what is allowed.
    """
    try:
        # Some editors begin a file with a byte-order mark.
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise JobError(f"there is no job file {path}") from None
    except IsADirectoryError:
        files = sorted(each.name for each in path.glob("*.toml"))
        advice = f"such as {path / files[0]}" if files else "and it has no .toml file"
        raise JobError(f"{path} is a directory; name the job file in it, {advice}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise JobError(f"{path} cannot be read: {cause_of(error)}") from error
    return parse_job(text, overrides, origin=str(path), folder=path.parent)


def parse_job(
    text: str,
    overrides: Iterable[str] = (),
    *,
    origin: str = "job",
    folder: Path | None = None,
) -> Job:
    """Validate the text of a job file; see `load_job`.

    `folder`: of the job file, from which its paths start, and where a `pyproject.toml` may have the
    configuration of the job's Flower app.
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise JobError(f"{origin} is not valid TOML: {error}") from error
    for override in overrides:
        apply_override(table, override)
    if folder is not None:
        add_project_config(table, folder)
        add_statistics(table, folder)
        add_start(table, folder)
    try:
        return Job.model_validate(table)
    except ValidationError as error:
        raise JobError(f"{origin}: {'; '.join(sentences(error, Job))}") from None


def write_job(job: Job) -> str:
    """Encode a job for the link, as JSON with only the values that are not defaults.

    A participant of the previous version, which lacks a new key, can thus read a job that does not
    use that key. Defaults are therefore part of the format: change one only together with the
    version of the link.
    """
    return job.model_dump_json(exclude_defaults=True)


def read_job(text: str) -> Job:
    """Read a job that `write_job` wrote.

    Raises:
        JobError: this version cannot read it.
    """
    try:
        return Job.model_validate_json(text)
    except ValidationError as error:
        first, *_ = sentences(error, Job)
        raise JobError(
            f"this version of Isthmus cannot read the job, which may be from a newer one: {first}"
        ) from None


def apply_override(table: dict[str, Any], override: str) -> None:
    """Put `a.b=value` into the table; a value that is not TOML is taken as a string.

    Raises:
        JobError: it has another form, or a part of its key is a value in the table.
    """
    key, separator, value = override.partition("=")
    path = key.strip().split(".")
    if not separator or not all(path):
        raise JobError(f"--set {override!r} is not of the form key.sub=value")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()
    for part in path[:-1]:
        inner = table.setdefault(part, {})
        if not isinstance(inner, dict):
            raise JobError(f"--set {override!r}: {part!r} is a value, not a table")
        table = inner
    table[path[-1]] = parsed


def parse_settings(kind: type[S], table: Mapping[str, Any], where: str) -> S:
    """Validate the settings of a part that brings its own, as `where.key` of the job.

    Raises:
        JobError: one sentence naming the key, the value and what is allowed.
    """
    try:
        return kind.model_validate(dict(table))
    except ValidationError as error:
        raise JobError("; ".join(sentences(error, kind, f"{where}."))) from None


def job_schema() -> dict[str, Any]:
    """The JSON schema of a job file."""
    return Job.model_json_schema()


def with_changes(job: Job, changes: Mapping[str, Any]) -> Job:
    """A validated copy with some keys changed: `{"strategy.policy": "federated"}`.

    Raises:
        JobError: the result is no valid job.
    """
    table = job.model_dump()
    for key, value in changes.items():
        *path, last = key.split(".")
        inner = table
        for part in path:
            inner[part] = {} if inner.get(part) is None else inner[part]
            inner = inner[part]
            if not isinstance(inner, dict):
                raise JobError(f"{key}: {part!r} is a value, not a table")
        inner[last] = copy.deepcopy(value)  # a later key may change a part of it
    try:
        return Job.model_validate(table)
    except pydantic.ValidationError as error:
        raise JobError("; ".join(sentences(error, Job))) from None
