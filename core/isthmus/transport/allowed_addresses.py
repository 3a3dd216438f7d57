"""Which addresses the owner of a participant lets others name, by patterns.

Who names an address could have a participant ask hosts inside its owner's network.

>>> is_allowed("https://hub.example.com/models/", ("https://*.example.com/*",))
True
>>> is_allowed("https://other.test/?.example.com/", ("https://*.example.com/*",))
False
"""

from __future__ import annotations

import fnmatch
import re
import urllib.parse
from collections.abc import Sequence

ANY = "*"
"""The pattern of all addresses."""
HTTPS = "https://"

_ADDRESS = re.compile(
    r"https://(?P<host>(?:[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?)(?P<path>(?:[/?][^#]*)?)"
)
"""An address with nothing in its host that two readers may take for something else."""

_IPV6 = re.compile(r"\[[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*\]")


def is_ipv6(host: str) -> bool:
    """Whether the host of a pattern is an IPv6 address in brackets, with a port or without."""
    return _IPV6.match(host) is not None


def is_allowed(address: str, patterns: Sequence[str]) -> bool:
    """Whether one of an owner's patterns is of this address.

    Host and port are compared with those of a pattern, and what follows with what follows there,
    so that no path looks like a host. Without a path, a pattern is for all of a host. An IPv6
    address is compared as it is written.
    """
    found = _ADDRESS.fullmatch(address)
    if found is None or ".." in re.split(r"[/\\?]", urllib.parse.unquote(found["path"])):
        return False
    for pattern in patterns:
        if pattern == ANY:
            return True
        host, slash, rest = pattern.removeprefix(HTTPS).partition("/")
        path = slash + rest if slash else ANY
        if is_ipv6(host):
            host = "[[]" + host[1:]  # for fnmatch its bracket would begin a set of characters
        if fnmatch.fnmatchcase(found["host"].lower(), host.lower()) and fnmatch.fnmatchcase(
            found["path"], path
        ):
            return True
    return False
