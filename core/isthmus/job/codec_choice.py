"""What a job says of a codec: which one, for what, and with which settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class CodecChoice(NamedTuple):
    """A codec that a job names, whichever of its keys does; codecs are constructed with it."""

    key: str
    """Key of the job that names the codec, such as `federated.codec`."""
    name: str
    """Name of an entry point of the group `isthmus.update_codecs`."""
    settings_key: str
    """The table of the settings, for messages about them."""
    settings: Mapping[str, Any]

    @property
    def shown(self) -> str:
        """How messages name it."""
        return f"{self.key}={self.name!r}"
