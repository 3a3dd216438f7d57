"""Which sources a device asks for a model's files, and what servers learn of them."""

import pytest

from isthmus.errors import UserError
from isthmus.transport.allowed_addresses import is_allowed
from isthmus_clients.device.owner_limits import WeightLimits
from isthmus_clients.device.weights.sources import check_sources


@pytest.mark.parametrize(
    ("pattern", "address"),
    [
        ("https://*.example.com/*", "https://other.test/?.example.com/"),
        ("https://*.example.com/*", "https://other.test/.example.com/"),
        ("https://*.example.com/*", "https://other.test?.example.com/"),
        ("https://*.example.com/*", "https://other.test#.example.com/"),
        ("https://*.example.com/*", "https://other.test:8443/.example.com/"),
        ("https://*.example.com/*", "https://other.test%2f.example.com/"),
        ("https://*.example.com/*", "https://other.test\\.example.com/"),
        ("https://*.example.com/*", "https://user@hub.example.com/"),
        ("https://*.example.com/*", "https://hub.example.com:8443/"),
        ("https://example.com*/*", "https://example.com@other.test/"),
        ("https://hub.example.com/ours/*", "https://hub.example.com/ours/../theirs/"),
        ("https://hub.example.com/ours/*", "https://hub.example.com/ours/%2e%2e/theirs/"),
        ("https://hub.example.com/ours/*", "https://hub.example.com/theirs/"),
        ("https://*/*.safetensors", "https://hub.example.com/x#/.safetensors"),
        ("*", "https://hub.example.com/x#y"),
    ],
)
def test_an_address_is_not_of_a_host_that_only_its_path_names(pattern, address):
    assert not is_allowed(address, (pattern,))


@pytest.mark.parametrize(
    ("pattern", "address"),
    [
        ("https://*.example.com/*", "https://hub.example.com/a/b?signature=.."),
        ("https://*.example.com", "https://HUB.Example.com/a/"),
        ("https://127.0.0.1:*", "https://127.0.0.1:8443/a/"),
        ("https://hub?.example.com/*", "https://hub1.example.com/a/"),
        ("https://hub.example.com/ours/*", "https://hub.example.com/ours/model/"),
        ("https://*", "https://[::1]:8443/a/"),
        ("*", "https://hub.example.com/a/"),
    ],
)
def test_an_address_of_a_host_that_the_owner_allows_is_asked(pattern, address):
    assert is_allowed(address, (pattern,))


def test_a_pattern_without_a_host_is_refused_when_the_device_starts():
    with pytest.raises(UserError, match=r"'hub\.example\.com/\*' has to begin with https://"):
        check_sources(WeightLimits(job_sources=("hub.example.com/*",)))
