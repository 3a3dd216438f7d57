"""What a run measured, and the error of its forecasts."""

import dataclasses

import pytest
from tests.server.storage.records import comparison_record, planned_attempt, round_record

from isthmus_server.read.report.forecasts import compared
from isthmus_server.read.report.measurements import MeasuredFigure, forecast_errors, measured
from isthmus_server.storage.records import Cost, LoggedAttempt, Receipt
from isthmus_server.strategy.forecast import RoundForecast


def test_steps_bytes_and_dropouts_are_those_of_the_receipts():
    receipts = [
        Receipt(
            participant=f"client-{number}",
            regime="federated",
            status="accepted",
            steps=10,
            seconds=5.0 * (1 + number),
            bytes_in=100,
            bytes_out=200,
            messages_in=7,
            messages_out=3,
        )
        for number in range(3)
    ]
    receipts.append(Receipt(participant="client-3", regime="federated", status="dropped"))
    receipts.append(
        Receipt(
            participant="datacenter-0",
            regime="datacenter",
            status="accepted",
            steps=4,
            seconds=2.0,
            bytes_in=1000,
        )
    )
    record = dataclasses.replace(round_record(1), receipts=receipts, regime="hybrid", seconds=9.0)
    found = {each.name: each for each in measured([record])}
    assert found["step of a device"].median == 1.0
    assert (found["step of a device"].low, found["step of a device"].high) == (0.5, 1.5)
    assert found["step of a datacenter"].median == 0.5
    assert found["from a device in a round"].median == 100
    assert found["to a device in a round"].median == 200
    assert found["messages of a device in a round"].median == 10
    assert found["devices dropped"].median == 0.25
    assert found["devices dropped"].count == 4
    assert found["hybrid round"].median == 9.0


def test_nothing_was_measured_before_anything_ran():
    assert measured([]) == []
    assert MeasuredFigure.of("round", "s", [float("nan")]) is None


def test_the_error_of_forecasts_is_what_was_measured_divided_by_them():
    logged = []
    for number, factor in enumerate((1.0, 2.0, 4.0), 1):
        record = round_record(number)
        forecast = RoundForecast(
            price=record.cost.price / factor,
            device_bytes=0,
            seconds=record.seconds / factor,
        )
        planned = planned_attempt(number)
        decision = dataclasses.replace(planned.decision, forecast=forecast)
        planned = dataclasses.replace(planned, decision=decision)
        logged.append(LoggedAttempt(planned=planned, record=record))
    errors = {each.name: each for each in forecast_errors(logged)}
    assert errors.keys() == {"time", "cost"}
    assert errors["time"].ratio == pytest.approx(2.0)
    assert (errors["time"].low, errors["time"].high) == pytest.approx((1.0, 4.0))
    assert errors["cost"].count == 3
    assert "2 times the forecast time (1 to 4)" in errors["time"].text


async def test_a_report_has_both(deployment):
    await deployment.start()
    report, _ = await deployment.run("run", "rounds=3")
    names = {each["name"] for each in report["measured"]}
    assert {"federated round", "to a device in a round", "devices dropped"} <= names
    errors = {each["name"]: each for each in report["forecast_errors"]}
    assert errors["cost"]["ratio"] == 1.0
    assert errors["time"]["count"] == 2  # the first round has no forecast of its time


def test_a_round_is_compared_with_its_forecast_without_the_comparisons_before_it():
    """They were made, and paid, when the round was planned."""
    before = comparison_record(("current", "served"), price=6.0, device_bytes=500)
    cost = dataclasses.replace(Cost.of((), 4.0, [before]), device_bytes=700)
    record = round_record(3, cost=cost, comparisons=[before])
    forecast = RoundForecast(price=4.0, device_bytes=100, metric="loss")
    assert compared(forecast, record) == "compared with the forecast: 2 times the bytes"
    as_said = dataclasses.replace(forecast, device_bytes=205)
    assert compared(as_said, record) == "compared with the forecast: cost and bytes within 10%"
