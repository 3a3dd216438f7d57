"""What installed packages provide by entry points: aggregation rules, trackers and others.

Each kind is a group of entry points. The name of an entry is what users write in a job or on the
command line, and its value is the class or function that is called. What Isthmus itself ships of a
kind is registered in the same way, in its own metadata; `docs/extend.md` lists the groups.
"""

from __future__ import annotations

import difflib
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from isthmus.errors import UserError


def provided(group: str) -> dict[str, list[EntryPoint]]:
    """The entries of a group by name; a name that several packages provide has several."""
    found: dict[str, list[EntryPoint]] = {}
    for entry in entry_points(group=group):
        found.setdefault(entry.name, []).append(entry)
    return found


def load_provided(group: str, name: str, shown: str) -> Any:
    """Import what a package provides under a name.

    Args:
        group: of the entry points, such as `isthmus.trackers`.
        name: of the entry.
        shown: how a message names it, such as `federated.selection='nearest'`.

    Raises:
        UserError: no package provides it, several do, or it cannot be imported.
    """
    found = provided(group)
    entries = found.get(name, [])
    if not entries:
        if not found:
            raise UserError(
                f"{shown} is unknown: no package provides entry points of the group {group}; "
                "install isthmus again"
            )
        close = difflib.get_close_matches(name, list(found), n=1)
        meant = f"; did you mean {close[0]}?" if close else ";"
        raise UserError(f"{shown} is unknown{meant} installed are {', '.join(sorted(found))}")
    if len(entries) > 1:
        values = " and ".join(sorted(entry.value for entry in entries))
        raise UserError(
            f"{shown} is provided by several installed packages ({values}); uninstall all but one"
        )
    try:
        return entries[0].load()
    except (Exception, SystemExit) as error:  # third-party code may raise anything
        raise UserError(
            f"{shown} cannot be imported from {entries[0].value}: {type(error).__name__}: {error}"
        ) from error


def make_provided(group: str, name: str, shown: str, *arguments: Any) -> Any:
    """Import what a package provides under a name, and call it.

    Args:
        group: of the entry points.
        name: of the entry.
        shown: how a message names it.
        arguments: of the call.

    Raises:
        UserError: it cannot be imported, or it raised.
    """
    factory = load_provided(group, name, shown)
    try:
        return factory(*arguments)
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # third-party code may raise anything
        raise UserError(
            f"{shown} cannot be constructed: {type(error).__name__}: {error}"
        ) from error
