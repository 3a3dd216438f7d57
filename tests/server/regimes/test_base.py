"""The extension that a job configures in place of the built-in aggregation."""

import pytest

from isthmus.errors import RoundFailed, UserError
from isthmus.job.federated import FederatedSection
from isthmus.tensors.exchange_set import TensorLayout
from isthmus_server.regimes import base
from isthmus_server.regimes.base import AttemptFailed, load_extension
from isthmus_server.storage.records import Receipt

LAYOUT = TensorLayout.from_shapes({"weight": (3,)})


class EntryPoint:
    """An installed entry point; `load` returns a function that records its arguments."""

    def __init__(self, name):
        self.name = name
        self.made = []

    def load(self):
        def make(federated, layout):
            self.made.append((federated, layout))
            return f"the extension {self.name}"

        return make


@pytest.fixture
def install(monkeypatch):
    """Install extensions of these names."""

    def install(*names):
        entries = [EntryPoint(name) for name in names]

        def entry_points(group):
            assert group == base.EXTENSIONS
            return entries

        monkeypatch.setattr(base, "entry_points", entry_points)
        return entries

    return install


def test_a_job_without_a_table_of_an_extension_has_none(install):
    flower, absent = install("flower", "absent_from_the_schema")
    assert load_extension(FederatedSection(), LAYOUT) is None
    assert (flower.made, absent.made) == ([], [])


def test_without_installed_extensions_there_is_none(install):
    install()
    assert load_extension(FederatedSection(), LAYOUT) is None


def test_the_configured_extension_is_made_for_the_section_and_the_layout(install):
    """Any key of `[federated]` that is set is a table to `load_extension`."""
    flower, mode = install("flower", "mode")
    section = FederatedSection()
    assert load_extension(section, LAYOUT) == "the extension mode"
    assert mode.made == [(section, LAYOUT)]
    assert flower.made == []


def test_two_configured_extensions_are_one_sentence_with_both_tables(install):
    entries = install("selection", "mode")
    with pytest.raises(UserError) as caught:
        load_extension(FederatedSection(), LAYOUT)
    assert str(caught.value) == (
        "[federated.mode] and [federated.selection] both replace the aggregation; "
        "remove all but one"
    )
    assert all(entry.made == [] for entry in entries)


@pytest.mark.parametrize(
    ("receipts", "certain"),
    [
        ({"a": "refused", "b": "not connected"}, True),
        ({"a": "refused"}, False),  # b was asked, and nothing is known of it
        ({}, False),
        ({"a": "refused", "b": "late"}, False),
        ({"a": "refused", "b": "accepted"}, False),
    ],
)
def test_it_is_certain_that_all_have_refused_only_by_a_receipt_of_each(receipts, certain):
    kinds = {
        "refused": {"status": "rejected", "started": False, "sent": True},
        "not connected": {"status": "dropped", "started": False},
        "late": {"status": "dropped", "late": True},
        "accepted": {"status": "accepted"},
    }
    given = [
        Receipt(participant=name, regime="federated", **kinds[kind])
        for name, kind in receipts.items()
    ]
    assert AttemptFailed("too few", given).all_refused("ab") is certain
    assert not RoundFailed("too few").all_refused("ab")
