"""Devices evaluate the model of a round, if the job asks the strategy for it."""

import pytest

APP = """
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message, context):
    arrays = message.content["arrays"].to_torch_state_dict()
    arrays["bias"] += {"a": 1.0, "b": 2.0, "c": 6.0}[context.node_config["name"]]
    metrics = MetricRecord({"num-examples": 1, "loss": 0.5})
    records = RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics})
    return Message(records, reply_to=message)


@app.evaluate()
def evaluate(message, context):
    name, config = context.node_config["name"], message.content["config"]
    assert config["server-round"] in (1, 2)
    if name == "b" and config["server-round"] == 2:
        raise RuntimeError("out of memory")
    bias = message.content["arrays"]["bias"].numpy()
    loss = float("nan") if name == "c" and config["server-round"] == 2 else float(bias.mean())
    metrics = MetricRecord({"num-examples": 1, "loss": loss})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
"""
JOB = (
    "federated.secure_aggregation=false",
    'federated.flower.app="app.py:app"',
    "rounds=2",
)
STRATEGY = 'federated.flower.strategy={name="FedAvg", options={fraction_evaluate=%s}}'


async def test_the_strategy_aggregates_what_devices_measure(deployment, tmp_path, caplog):
    (tmp_path / "app.py").write_text(APP)
    await deployment.start()
    plain, final = await deployment.run("plain", *JOB)
    report, same = await deployment.run("run", *JOB, STRATEGY % 1.0)
    assert same.model_sha256 == final.model_sha256
    assert [row["training"]["federated"] for row in plain["rounds"]] == [{"loss": 0.5}] * 2
    first, second = (row["training"]["federated"] for row in report["rounds"])
    bias = first["evaluate.loss"]
    assert first == {"loss": 0.5, "evaluate.loss": bias}
    # The model of a round adds 3; only the answer of `a` is usable in the second one.
    assert second == {
        "loss": 0.5,
        "evaluate.loss": pytest.approx(bias + 3, rel=1e-5),
        "evaluate.failed": 2.0,
    }
    said = {each.getMessage().partition(":")[0] for each in caplog.records}
    assert {each for each in said if "evaluate" in each} == {
        "b did not evaluate the model",
        "c did not evaluate the model",
    }
    assert report["rounds"][1]["participants"]["accepted"] == 3


async def test_a_share_of_the_cohort_evaluates_and_the_draw_is_repeatable(deployment, tmp_path):
    code = APP.replace("float(bias.mean())", 'float(ord(context.node_config["name"]))')
    (tmp_path / "app.py").write_text(code)
    await deployment.start()
    options = (*JOB, STRATEGY % 0.5, "rounds=1")
    one, _ = await deployment.run("one", *options)
    two, _ = await deployment.run("two", *options)
    figures = [report["rounds"][0]["training"]["federated"] for report in (one, two)]
    assert figures[0] == figures[1]
    assert figures[0]["evaluate.loss"] in map(ord, "abc")
