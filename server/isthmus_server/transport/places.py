"""Who of several callers has one of a bounded number of places, by their addresses.

Where the number is all that is bounded, one address can take every place and keep everybody else
out. Here a connection from an address with few of them always finds one, at the expense of an
address with many.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Collection
from typing import Protocol, TypeVar


class Placed(Protocol):
    """A connection that has one of a bounded number of places."""

    @property
    def network(self) -> str:
        """See `network_of`."""
        ...

    @property
    def is_idle(self) -> bool:
        """Whether nothing happens on the connection."""
        ...

    @property
    def dispensable(self) -> tuple[bool, float]:
        """How little the connection is needed: the less, the larger the value."""
        ...


P = TypeVar("P", bound=Placed)


def least_needed(newcomer: str, placed: Collection[P]) -> P | None:
    """The connection to close for one of `newcomer`; None if the new one is to be refused.

    Args:
        newcomer: the address, see `network_of`.
        placed: the connections that have all places.
    """
    counts = Counter(each.network for each in placed)
    own = counts.pop(newcomer, 0) + 1
    most = max(counts.values(), default=0)
    if most >= own:
        leaving = [each for each in placed if counts[each.network] == most]
    else:
        # Many devices behind one address must not close each other's connections in use.
        leaving = [each for each in placed if each.network == newcomer and each.is_idle]
    return max(leaving, key=lambda each: each.dispensable, default=None)


def network_of(host: str) -> str:
    """What counts as one address: an IPv4 address, or the network of 64 bits of an IPv6 address.

    >>> network_of("::ffff:192.0.2.7"), network_of("2001:db8::7"), network_of("fe80::1%eth0")
    ('192.0.2.7', '2001:db8::/64', 'fe80::/64')
    """
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, 64), strict=False))


_BALANCER = "balancer "


def balancer_network(host: str) -> str:
    """What counts as the address of all callers that one balancer does not name."""
    return _BALANCER + network_of(host)


def is_balancer(network: str) -> bool:
    """Whether an address stands for all callers of a balancer."""
    return network.startswith(_BALANCER)
