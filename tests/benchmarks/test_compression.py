"""The benchmark of compressed updates: what it reads from a report."""

import math

import compression
import compression_datacenters
import pytest


def test_bytes_are_those_of_a_device_and_accuracies_those_of_the_last_rounds():
    def row(accuracy, *receipts):
        keys = ("status", "bytes_in", "bytes_out")
        return {
            "metrics": {"accuracy": accuracy},
            "receipts": [dict(zip(keys, receipt, strict=True)) for receipt in receipts],
        }

    first = row(0.1, ("accepted", 300, 800), ("dropped", 0, 800))
    rows = [row(0.5, ("accepted", 100, 800)) for _ in range(compression.LAST)]
    outcome = compression.outcome_of({"rounds": [first, *rows]})
    assert outcome.accuracy == 0.5
    assert outcome.down == 800
    assert outcome.up == pytest.approx((300 + 100 * compression.LAST) / (1 + compression.LAST))


def test_rounds_of_two_datacenters_count_and_perplexity_is_of_the_last_rounds():
    def row(loss, *sizes):
        receipts = [{"status": "accepted", "bytes_in": size} for size in sizes]
        return {"metrics": {"loss": loss}, "receipts": receipts}

    rows = [row(5.0, 100, 300), *[row(2.0, 100, 100)] * compression_datacenters.LAST]
    outcome = compression_datacenters.outcome_of({"rounds": rows})
    assert outcome.up == 125
    assert outcome.perplexity == pytest.approx(math.exp(2))
    alone = [row(2.0, 0)] * compression_datacenters.LATE
    assert compression_datacenters.outcome_of({"rounds": [*alone, *rows]}).up == 125
    with pytest.raises(AssertionError):
        compression_datacenters.outcome_of({"rounds": [*alone, row(2.0, 0), *rows]})
