"""A malformed or inconsistent reply is refused, so that the other replies can be aggregated."""

import numpy as np
import pytest
import torch

from isthmus.errors import UpdateError
from isthmus.tensors.exchange_set import TensorLayout
from isthmus_flower import messages  # before flwr
from isthmus_flower.server.replies import check_reply, inconsistent_replies

LAYOUT = TensorLayout.from_shapes({"bias": (3,), "weight": (3, 2)})
ARRAYS = {"bias": np.ones(3, "f4"), "weight": np.ones((3, 2), "f4")}
METRICS = {"num-examples": 20, "train_loss": 0.5, "norms": [1.0, 2.0]}


def reply(arrays=ARRAYS, metrics=METRICS, **more):
    record = messages.ArrayRecord({name: messages.Array(values) for name, values in arrays.items()})
    return messages.RecordDict(
        {"arrays": record, "metrics": messages.MetricRecord(metrics), **more}
    )


def weight_of(records, max_examples=1000):
    scratch = torch.empty(LAYOUT.size)
    return check_reply(
        records, LAYOUT, scratch, weighted_by="num-examples", max_examples=max_examples
    )


def unreadable_reply():
    records = reply()
    array = records["arrays"]["bias"]
    records["arrays"]["bias"] = messages.Array(array.dtype, array.shape, "zip", array.data)
    return records


@pytest.mark.parametrize("kind", ["f2", "f4", "f8"])
def test_float_arrays_of_the_models_shapes_are_accepted_with_their_weight(kind):
    arrays = {name: values.astype(kind) for name, values in ARRAYS.items()}
    assert weight_of(reply(arrays, config=messages.ConfigRecord({"more": "any value"}))) == 20
    assert weight_of(reply(metrics={"num-examples": 0.0})) == 0


def test_arrays_are_reordered_as_in_the_layout():
    records = reply({name: ARRAYS[name] for name in ("weight", "bias")})
    weight_of(records)
    assert list(records["arrays"]) == ["bias", "weight"]


@pytest.mark.parametrize(
    ("records", "says"),
    [
        (reply({"bias": ARRAYS["bias"]}), "the array 'weight' is missing"),
        (reply({**ARRAYS, "more": np.ones(1)}), "the array 'more' is unknown"),
        (reply({**ARRAYS, "bias": np.ones(4)}), r"the array 'bias' is float64 of shape \(4,\)"),
        (
            reply({**ARRAYS, "bias": np.ones(3, "i4")}),
            "the array 'bias' is int32, not a float type",
        ),
        (reply({**ARRAYS, "bias": np.full(3, np.inf)}), "the array 'bias' is not finite"),
        (unreadable_reply(), "the array 'bias' cannot be read"),
        (reply(more=messages.ArrayRecord()), "2 array records and 1 metric records"),
        (reply(more=messages.MetricRecord()), "1 array records and 2 metric records"),
        (messages.RecordDict(), "0 array records and 0 metric records"),
        (reply(metrics={"loss": 1.0}), "its num-examples=None is not a number from 0 to "),
        (reply(metrics={"num-examples": [1, 2]}), r"its num-examples=\[1, 2\] is not a number"),
        (reply(metrics={"num-examples": -1}), "its num-examples=-1 is not a number"),
        (reply(metrics={"num-examples": 1, "loss": float("nan")}), "the metric 'loss' is not fin"),
        (reply(metrics={"num-examples": 1, "l": [float("inf")]}), "the metric 'l' is not finite"),
    ],
)
def test_a_reply_that_a_strategy_would_fail_on_is_refused(records, says):
    with pytest.raises(UpdateError, match=says):
        weight_of(records)


@pytest.mark.parametrize("weight", [1000.5, 1001, 1e30])
def test_a_weight_above_the_jobs_limit_is_refused(weight):
    with pytest.raises(UpdateError, match=r"from 0 to .*max_examples=1000$"):
        weight_of(reply(metrics={"num-examples": weight}))
    assert weight_of(reply(metrics={"num-examples": 1000})) == 1000


@pytest.mark.parametrize(
    "deviating",
    [
        reply(metrics={"num-examples": 20, "norms": [1.0, 2.0]}),
        reply(metrics={**METRICS, "mine": 1}),
        reply(metrics={**METRICS, "norms": [1.0]}),
        reply(metrics={**METRICS, "norms": 1.0}),
        messages.RecordDict({"mine": reply()["arrays"], "metrics": reply()["metrics"]}),
        messages.RecordDict({"arrays": reply()["arrays"], "mine": reply()["metrics"]}),
    ],
)
def test_replies_with_other_names_than_most_are_inconsistent(deviating):
    assert inconsistent_replies({1: deviating, 2: reply(), 3: reply()}) == {1}
    assert inconsistent_replies({1: reply(), 2: deviating}) == {2}
    assert inconsistent_replies({1: deviating}) == inconsistent_replies({}) == set()
