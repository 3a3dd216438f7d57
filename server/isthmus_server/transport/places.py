"""Who of several callers has one of a bounded number of places, by their addresses.

Where the number is all that is bounded, one address can take every place and keep everybody else
out. Here a connection from an address with few of them always finds one, at the expense of an
address with many. Who rents one IPv6 address often has 65,536 networks of 64 bits, so that those of
48 bits are compared first.
"""

from __future__ import annotations

import functools
import ipaddress
from collections import Counter
from collections.abc import Collection, Mapping
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
    site = _site(newcomer)
    places = Counter(_site(each.network) for each in placed)
    own = places.pop(site, 0) + 1
    most = max(places.values(), default=0)
    if most >= own:
        largest = [each for each in placed if places[_site(each.network)] == most]
        return _of_most(largest, Counter(each.network for each in largest))
    here = [each for each in placed if _site(each.network) == site]
    others = Counter(each.network for each in here)
    own = others.pop(newcomer, 0) + 1
    if max(others.values(), default=0) >= own:
        return _of_most(here, others)
    # Many devices behind one address must not close each other's connections in use.
    idle = [each for each in here if each.network == newcomer and each.is_idle]
    return max(idle, key=lambda each: each.dispensable, default=None)


def _of_most(placed: Collection[P], places: Mapping[str, int]) -> P:
    """The least needed connection of the addresses with most `places`."""
    most = max(places.values())
    leaving = [each for each in placed if places.get(each.network) == most]
    return max(leaving, key=lambda each: each.dispensable)


@functools.lru_cache(maxsize=1 << 14)
def _site(network: str) -> str:
    """What one renter mostly has: a network of 48 bits for one of 64 bits, else the address."""
    if not network.endswith("/64"):
        return network
    kind, _, address = network.rpartition(" ")
    return f"{kind} {ipaddress.IPv6Network(address).supernet(new_prefix=48)}"


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
