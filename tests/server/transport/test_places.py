"""Whose place a new connection takes, when all are taken."""

import dataclasses
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from isthmus_server.transport.places import least_needed, network_of


@dataclasses.dataclass(eq=False)
class Connection:
    network: str
    dispensable: tuple[bool, float] = (False, 0.0)

    @property
    def is_idle(self):
        return self.dispensable[1] > 1.0


def site_of(network):
    """The first 48 bits of an IPv6 network of 64 bits, written in full; else the address."""
    return network.partition("::")[0].rpartition(":")[0] or network


addresses = st.sampled_from(
    ["192.0.2.1", "192.0.2.2", "2001:db8:1:1::1", "2001:db8:1:2::1", "2001:db8:2:1::1"]
)
networks = addresses.map(network_of)
connections = st.builds(
    Connection, networks, st.tuples(st.booleans(), st.floats(min_value=0.0, max_value=9.0))
)


@given(networks, st.lists(connections, min_size=1, max_size=20))
def test_nobody_loses_a_place_to_one_who_has_more(newcomer, placed):
    leaving = least_needed(newcomer, placed)
    places = Counter(each.network for each in placed)
    sites = Counter(site_of(each.network) for each in placed)
    site = site_of(newcomer)
    if leaving is None:
        assert all(count <= sites[site] for count in sites.values())
        assert not any(each.network == newcomer and each.is_idle for each in placed)
        return
    left = site_of(leaving.network)
    if left != site:
        assert sites[left] == max(sites.values()) > sites[site]
    elif leaving.network != newcomer:
        assert places[leaving.network] > places[newcomer]
    else:
        assert leaving.is_idle


def test_many_networks_of_one_renter_do_not_keep_others_out():
    """Each of its connections is from another network of 64 bits, and busy; it opens them again."""
    busy = [Connection(network_of(f"2001:db8:bad:{index:x}::1")) for index in range(127)]
    victim = Connection(network_of("2001:db8:a:1::1"), (True, 0.3))
    for index in range(127, 500):
        assert least_needed(network_of(f"2001:db8:bad:{index:x}::1"), [*busy, victim]) in busy
    full = [*busy, Connection(network_of("2001:db8:bad:ffff::1"))]
    assert least_needed(victim.network, full) in full


def test_devices_of_one_provider_do_not_lose_places_to_an_address_of_it():
    """Phones of one provider are in networks of 64 bits of one of 48; one of them floods."""
    phones = [
        Connection(network_of(f"2001:db8:a:{index:x}::1"), (True, 0.3)) for index in range(64)
    ]
    flood = [Connection(network_of("2001:db8:a:ff::1")) for _ in range(64)]
    assert least_needed(flood[0].network, [*phones, *flood]) is None
    assert least_needed(network_of("2001:db8:a:fe::1"), [*phones, *flood]) in flood
