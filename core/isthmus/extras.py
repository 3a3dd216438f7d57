"""How an extra of Isthmus is installed, for sentences about packages that are missing."""

from __future__ import annotations

import importlib.metadata
import json


def install_line(extra: str) -> str:
    """The command that installs an extra, from the wheel of this version or in the checkout.

    Isthmus is in no package index, so that its name alone would find nothing there. The line has no
    path, as a server may be told what a device lacks.

    Args:
        extra: as pyproject.toml names it.
    """
    try:
        installed = importlib.metadata.distribution("isthmus")
    except importlib.metadata.PackageNotFoundError:  # only its files are there
        return f"install Isthmus itself, with its extra {extra!r}"
    if _is_editable(installed):
        return f"in the checkout of Isthmus, pip install -e '.[{extra}]'"
    return f"pip install 'isthmus-{installed.version}-py3-none-any.whl[{extra}]'"


def _is_editable(installed: importlib.metadata.Distribution) -> bool:
    """Whether a checkout was installed to be edited (PEP 610), of which there may be no wheel."""
    try:
        origin = json.loads(installed.read_text("direct_url.json") or "{}")
        return bool(origin["dir_info"]["editable"])
    except (KeyError, TypeError, ValueError):
        return False
