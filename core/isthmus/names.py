"""Names of participants and task packages, safe as file names and in certificates.

>>> is_name("phone-0"), is_name("../phone")
(True, False)
"""

from __future__ import annotations

import re

from isthmus.errors import UserError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def is_name(text: str) -> bool:
    """Whether a text is 1 to 63 letters, digits, dots, dashes and underscores."""
    return _NAME.fullmatch(text) is not None


def checked_name(name: str) -> str:
    """Return the name unchanged.

    Raises:
        UserError: the name has other characters or another length than `is_name` allows.
    """
    if not is_name(name):
        raise UserError(
            f"name={name!r} is not 1 to 63 letters, digits, dots, dashes or underscores, "
            "beginning with a letter or digit"
        )
    return name
