"""Records of a run: their JSON documents, and the summary of receipts in one line."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.errors import UserError
from isthmus_server.storage.records import (
    CommittedState,
    Cost,
    Participants,
    Receipt,
    RoundRecord,
)

FIGURES = st.floats(allow_nan=False)


def committed(figure):
    """A round in which a device and the evaluation reported a figure."""
    receipt = Receipt(participant="a", regime="federated", status="accepted", loss=figure)
    return RoundRecord(
        round=1,
        attempt=1,
        regime="federated",
        reason="",
        started_at=1.0,
        seconds=1.0,
        elapsed=2.0,
        participants=Participants.of([receipt]),
        receipts=[receipt],
        cost=Cost.of([receipt], 1.0),
        metrics={"loss": figure},
        training={"federated": {"loss": figure}},
    )


def stored(record):
    """What is read back after a record was stored."""
    return type(record).from_json(json.loads(json.dumps(record.to_json())))


@given(FIGURES)
def test_a_round_is_read_back_as_it_was_stored_also_with_infinite_figures(figure):
    record = committed(figure)
    assert stored(record).receipts == record.receipts
    assert stored(record).to_json() == record.to_json()


def test_a_figure_that_is_nan_is_read_back_as_nan():
    record = stored(committed(math.nan))
    assert math.isnan(record.receipts[0].loss)
    assert math.isnan(record.metrics["loss"])


@given(st.dictionaries(st.text(), st.lists(FIGURES) | FIGURES))
def test_a_policy_finds_its_state_as_it_left_it(state):
    assert stored(CommittedState(policy_state=state)).policy_state == state


def test_a_damaged_record_is_refused_in_one_sentence():
    data = committed(1.0).to_json()
    data["receipts"][0]["seconds"] = None
    with pytest.raises(UserError, match=r"^a stored record is damaged \(receipts.0.seconds: "):
        RoundRecord.from_json(data)
