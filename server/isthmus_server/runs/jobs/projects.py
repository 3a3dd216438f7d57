"""Projects: which participants and operators belong together, from a file of the state directory.

>>> projects = Projects({"vision": Project(participants=("phone-*",), operators=("ada",))})
>>> projects.may_work("phone-7", "vision"), projects.may_work("phone-7", "")
(True, False)
>>> projects.chosen("ada", "")
'vision'
"""

from __future__ import annotations

import fnmatch
import tomllib
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from isthmus.errors import AdmissionRefused, UserError, cause_of
from isthmus.job.section import Section, sentences
from isthmus.names import checked_name

FILE = "projects.toml"
"""Name in the state directory."""


class Project(Section):
    """The members of a project; * in a pattern matches anything."""

    participants: tuple[str, ...] = ()
    """Patterns of names of devices and datacenters."""
    operators: tuple[str, ...] = ()
    """Patterns of names of operators."""


class Projects:
    """The projects of a server.

    Guarantees:
      * a participant of projects works for their jobs only; one of none, for all jobs;
      * an operator of projects sees and changes their jobs only; one of none, all jobs.
    """

    def __init__(self, table: Mapping[str, Project]) -> None:
        """`table` has the projects by name."""
        self._table = dict(table)
        self._found: dict[str, frozenset[str]] = {}
        """Projects of participants, by name: patterns are matched once."""

    @classmethod
    def load(cls, state: Path) -> Projects:
        """Read the file in a server's state directory; without one there are no projects.

        Raises:
            UserError: it cannot be read, or is not valid.
        """
        path = state / FILE
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        except FileNotFoundError:
            return cls({})
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path} cannot be read: {cause_of(error)}") from None
        except tomllib.TOMLDecodeError as error:
            raise UserError(f"{path} is not valid TOML: {error}") from None
        projects = {}
        for name, value in table.items():
            checked_name(name)
            try:
                projects[name] = Project.model_validate(value)
            except ValidationError as error:
                found = "; ".join(sentences(error, Project, f"{name}."))
                raise UserError(f"{path}: {found}") from None
        return cls(projects)

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._table)

    def may_work(self, participant: str, project: str) -> bool:
        """Whether a participant works for the jobs of a project, "" for jobs of none."""
        if participant not in self._found:
            self._found[participant] = frozenset(
                name
                for name, each in self._table.items()
                if _matches(participant, each.participants)
            )
        projects = self._found[participant]
        return not projects or project in projects

    def may_see(self, operator: str, project: str) -> bool:
        """Whether an operator sees and changes the jobs of a project, "" for jobs of none."""
        projects = self._of_operator(operator)
        return not projects or project in projects

    def chosen(self, operator: str, project: str) -> str:
        """The project of a job that an operator submits, who has named one, or none with "".

        Raises:
            AdmissionRefused: there is no such project, or it is not the operator's.
        """
        own = sorted(self._of_operator(operator))
        if not project and own:
            if len(own) > 1:
                raise AdmissionRefused(
                    f"{operator!r} is an operator of {', '.join(own)}; choose one with --project"
                )
            return own[0]
        if project and project not in (own or self._table):
            known = ", ".join(own or sorted(self._table)) or "none"
            raise AdmissionRefused(
                f"there is no project {project!r} for {operator!r} on this server; known: {known}"
            )
        return project

    def _of_operator(self, operator: str) -> list[str]:
        return [name for name, each in self._table.items() if _matches(operator, each.operators)]


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
