"""How an extra is installed, by how Isthmus was."""

import importlib.metadata
import json

import pytest

from isthmus import __version__
from isthmus.extras import install_line

WHEEL = f"pip install 'isthmus-{__version__}-py3-none-any.whl[ray]'"


@pytest.mark.parametrize(
    ("origin", "line"),
    [
        (None, WHEEL),
        ({"url": "file:///tmp/isthmus.whl", "archive_info": {}}, WHEEL),
        ({"url": "file:///srv/isthmus", "dir_info": {}}, WHEEL),
        (
            {"url": "file:///srv/isthmus", "dir_info": {"editable": True}},
            "in the checkout of Isthmus, pip install -e '.[ray]'",
        ),
        ([], WHEEL),
    ],
)
def test_an_extra_is_installed_as_the_package_was(monkeypatch, origin, line):
    class Installed:
        version = __version__

        def read_text(self, name):
            assert name == "direct_url.json"
            return None if origin is None else json.dumps(origin)

    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Installed())
    assert install_line("ray") == line


def test_a_package_that_was_not_installed_has_no_wheel(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    assert install_line("ray") == "install Isthmus itself, with its extra 'ray'"
