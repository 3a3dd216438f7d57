"""The figures of a plan are those of the run that follows: bytes, epsilon and price."""

import contextlib

import pytest

from isthmus.task import load_task
from isthmus_server.plan.options import PlanOptions
from isthmus_server.plan.plan import JobPlan
from isthmus_server.read.report.privacy.spending import read_spending
from isthmus_server.read.report.report import read_report
from isthmus_server.storage.store import Store

PLAIN = "federated.secure_aggregation=false"
FIXED = ("federated.clip=1.0", "federated.max_examples=20")


def planned(job, folder, **options):
    task = load_task(job.task.source, job.task.settings, base=folder)
    return JobPlan.of(job, task, folder, PlanOptions(**options))


def job_of(folder):
    with contextlib.closing(Store.open(folder)) as store:
        return store.job


@pytest.mark.parametrize(
    ("overrides", "is_exact"),
    [
        ((PLAIN,), True),
        ((PLAIN, "federated.control_variates=3"), True),
        ((PLAIN, "federated.codec=rounded", "federated.codec_settings={bits=4}"), False),
        ((PLAIN, "federated.download_bits=3"), False),
        (FIXED, True),
        ((), False),
        (("federated.compression={bits=3, one_in=2}",), True),
        (("federated.compression={bits=8, one_in=1}", *FIXED), True),
        (("exchange.exclude=['weight']",), False),
        (("privacy={mechanism='distributed', epsilon=5, delta=0.01}",), True),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
async def test_bytes_are_those_of_the_receipts(overrides, is_exact, deployment, tmp_path):
    await deployment.start()
    report, _ = await deployment.run("run", *overrides)
    devices = planned(job_of(tmp_path / "run"), tmp_path).sides.devices
    rows = report["rounds"]
    sent = [devices.sent[0], *[devices.sent[-1]] * (len(rows) - 1)]
    for number, (row, figure) in enumerate(zip(rows, sent, strict=True)):
        for receipt in row["receipts"]:
            assert figure.value <= receipt["bytes_in"] <= figure.highest
            if number == 0:
                assert receipt["bytes_out"] == devices.received[0].value
            assert receipt["bytes_out"] <= devices.received[0].value
    moved = [
        sum(receipt[key] for row in rows for receipt in row["receipts"])
        for key in ("bytes_out", "bytes_in")
    ]
    for found, figure in zip(moved, devices.run, strict=True):
        assert figure.value <= found <= figure.highest
    if is_exact:
        assert moved == [figure.highest for figure in devices.run]


@pytest.mark.parametrize("mechanism", ["distributed", "gaussian", "correlated"])
async def test_epsilon_is_that_of_the_ledger(mechanism, deployment, tmp_path):
    await deployment.start()
    settings = ("privacy.epsilon=5", "privacy.delta=0.01")
    await deployment.run("run", f"privacy.mechanism={mechanism}", *settings)
    plan = planned(job_of(tmp_path / "run"), tmp_path)
    (figure,) = plan.sides.privacy
    assert figure.value == read_spending(tmp_path / "run").epsilon
    assert "delta 0.01" in figure.how


async def test_the_cost_is_that_of_the_report(deployment, tmp_path):
    await deployment.start("def validation_data(self, participant):\n    return rows(8, seed=1)")
    report, _ = await deployment.run(
        "run", "prices.client_update=3.0", "evaluation.devices=3", "evaluation.every=2"
    )
    plan = planned(job_of(tmp_path / "run"), tmp_path)
    (figure,) = plan.sides.cost
    assert figure.value == pytest.approx(sum(row["cost"]["price"] for row in report["rounds"]))


async def test_hybrid_rounds_cost_what_their_receipts_do(run_with_datacenter, tmp_path):
    _, coordinator, _ = await run_with_datacenter(
        "strategy.policy=hybrid", "prices.datacenter_step=0.5", "datacenter.steps=4", "rounds=2"
    )
    await coordinator.run()
    store = coordinator.store
    plan = planned(store.job, tmp_path)
    assert [figure.name for figure in plan.sides.cost] == ["all rounds hybrid"]
    spent = sum(record.cost.price for record in read_report(store).rounds)
    assert plan.sides.cost[0].value == pytest.approx(spent)


async def test_hybrid_rounds_with_transfer_send_the_gradient_too(run_with_datacenter, tmp_path):
    _, coordinator, _ = await run_with_datacenter(
        "strategy.policy=hybrid", "strategy.merge=transfer", "datacenter.steps=4", "rounds=2"
    )
    await coordinator.run()
    devices = planned(coordinator.store.job, tmp_path).sides.devices
    receipts = [
        receipt
        for record in read_report(coordinator.store).rounds
        for receipt in record.receipts
        if receipt.regime == "federated"
    ]
    assert {receipt.bytes_out for receipt in receipts} == {devices.received[-1].value}
    down = sum(receipt.bytes_out for receipt in receipts)
    assert devices.run[0].value <= down <= devices.run[0].highest
