"""The report of a run and its JSON schema."""

import dataclasses
import json
from io import StringIO

import jsonschema
import pytest
from click.testing import CliRunner
from rich.console import Console
from tests.server.storage.records import (
    FINAL,
    comparison_record,
    failed_attempt,
    planned_attempt,
    round_record,
)
from tests.server.strategy.observations import comparison_of, observe

from isthmus.errors import UserError
from isthmus_server.cli import run as commands
from isthmus_server.read.pages.report_page import html_page
from isthmus_server.read.report import explanation_page, report
from isthmus_server.read.report.explain import explain
from isthmus_server.read.report.progress import ProgressView
from isthmus_server.read.report.report import Report, read_report
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.run_parts import RunParts
from isthmus_server.storage.events import (
    ParticipantDeclined,
    ParticipantJoined,
    ParticipantLeft,
    ParticipantReady,
    RoundCommitted,
    RunStopped,
)
from isthmus_server.storage.records import CommittedState, Cost, Receipt
from isthmus_server.storage.store import Store
from isthmus_server.strategy import Stop


@pytest.fixture
def validate():
    """Check a report against the schema that the command prints."""
    schema = json.loads(CliRunner().invoke(commands.report, ["--schema"]).output)
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema).validate


def test_a_run_that_just_began_has_a_valid_report(validate, make_job, tmp_path):
    Store.create(tmp_path / "run", make_job(), tmp_path).close()
    result = CliRunner().invoke(commands.report, [str(tmp_path / "run"), "--json"])
    report = json.loads(result.output)
    validate(report)
    assert (report["status"], report["rounds"], report["final"]) == ("running", [], None)


async def test_reports_of_runs_with_failed_attempts_are_valid(validate, deployment):
    await deployment.start()
    deployment.faults["b"][2, 1] = "no power"
    report, _ = await deployment.run("run", "rounds=2")
    validate(report)
    assert len(report["failed_attempts"]) == 1
    assert Report.from_json(report).to_json() == report


async def test_the_report_of_a_run_that_failed_is_valid(validate, deployment):
    await deployment.start(names=("a",))
    store = deployment.create_run("run", "federated.clients=3", "time.join_seconds=0.1")
    with pytest.raises(UserError):
        await Coordinator(RunParts.of(store, deployment.link)).run()
    report = read_report(store).to_json()
    validate(report)
    assert (report["status"], report["final"]) == ("failed", None)


async def test_the_report_of_a_run_with_a_datacenter_is_valid(validate, run_with_datacenter):
    store, coordinator, _ = await run_with_datacenter("strategy.policy=alternate", "rounds=2")
    await coordinator.run()
    report = read_report(store).to_json()
    validate(report)
    assert [record["model_sha256"] is None for record in report["rounds"]] == [True, False]


def test_a_report_with_every_kind_of_record_is_valid(validate, make_job, tmp_path):
    store = Store.create(tmp_path / "run", make_job(), tmp_path)
    receipt = Receipt(participant="a", regime="federated", status="dropped", reason="lost")
    planned = planned_attempt(1)
    comparison = comparison_of(("current", "served"), [0.1])
    store.plan(planned)
    store.fail(failed_attempt(1, [receipt]))
    store.plan(planned_attempt(1, attempt=2))
    comparisons = [comparison_record(comparison.models, comparison)]
    record = round_record(1, [receipt], attempt=2, comparisons=comparisons, cosine=0.5)
    store.commit(record, CommittedState())
    stopped = planned_attempt(2, plan=Stop("enough"), observation=observe(2)).decision
    for event in (
        ParticipantJoined(participant="a"),
        ParticipantReady(participant="a", examples=3),
        ParticipantDeclined(participant="b", reason="no data"),
        ParticipantLeft(participant="a", reason="lost"),
        RunStopped(round=2, reason="enough", decision=stopped),
    ):
        store.log_event(event)
    store.finish("finished", "enough", FINAL)
    report = read_report(store).to_json()
    store.close()
    validate(report)
    assert report["rounds"][0]["comparisons"][0]["result"]["models"] == ["current", "served"]


@pytest.mark.parametrize(
    ("key", "value"), [("status", 3), ("rounds", {}), ("final", {"metrics": {}})]
)
def test_the_schema_refuses_other_documents(validate, make_job, tmp_path, key, value):
    store = Store.create(tmp_path / "run", make_job(), tmp_path)
    report = read_report(store).to_json()
    store.close()
    with pytest.raises(jsonschema.ValidationError):
        validate({**report, key: value})


def test_a_report_needs_the_directory_of_a_run():
    with pytest.raises(UserError, match=r"^give the directory of a run, or --schema$"):
        CliRunner().invoke(commands.report, [], catch_exceptions=False)


@pytest.mark.parametrize(
    ("figures", "sentence"),
    [
        ({"unusable": 2.0}, "2 of 3 devices had no usable update; their own logs say why"),
        ({"clipped": 0.31}, "31.00% of the elements of the devices' updates were out of range and"),
        (
            {"over_range": 1.0},
            "1 of 3 devices had a training loss outside of -1000 to 1000, which counts as the end",
        ),
        (
            {"over_weight": 1.0, "weight_max": 4000.0},
            "1 of 3 devices have more examples than the largest weight of this sum, which was",
        ),
        (
            {"other_weight": 2.0},
            "2 of 3 devices gave coarse or equal weights, by their owners' choice: the mean is not",
        ),
        ({"clipped": 1e-9}, "less than 0.01% of the elements of the devices' updates were out of"),
    ],
)
def test_what_changes_a_sum_is_shown_by_every_view(make_job, tmp_path, figures, sentence):
    """Otherwise an operator would not notice a task that fails everywhere, or a tight range."""
    store = Store.create(tmp_path / "run", make_job(), tmp_path)
    receipts = [
        Receipt(participant=name, regime="federated", status="accepted") for name in ("a", "b", "c")
    ]
    store.plan(planned_attempt(1))
    record = round_record(1, receipts, training={"federated": {"loss": 1.0, **figures}})
    store.commit(record, CommittedState())
    output = StringIO()
    console = Console(file=output, width=200)
    report.show(read_report(store), console)
    explanation_page.show(explain(store), console)
    with ProgressView(console) as view:
        view(RoundCommitted(record=record))
    store.close()
    assert output.getvalue().count(sentence) == 3


def test_the_page_says_what_participants_sent_and_received(make_job, tmp_path):
    """In failed attempts, too; evaluations have no receipts, only a cost."""
    store = Store.create(tmp_path / "run", make_job(), tmp_path)

    def receipts(*moved, regime="federated"):
        return [
            Receipt(
                participant=f"{regime}-{number}",
                regime=regime,
                status="accepted",
                bytes_in=up,
                bytes_out=down,
            )
            for number, (up, down) in enumerate(moved)
        ]

    def shown():
        output = StringIO()
        report.show(read_report(store), Console(file=output, width=200))
        return output.getvalue()

    store.plan(planned_attempt(1))
    store.fail(failed_attempt(1, receipts((0, 0))))
    assert " MB" not in shown()
    store.plan(planned_attempt(1, attempt=2))
    store.fail(failed_attempt(1, receipts((0, 2_000_000)), attempt=2))
    store.plan(planned_attempt(1, attempt=3))
    devices = receipts((31_250, 2_000_000), (31_250, 750_000))
    datacenters = receipts((4_000_000, 8_000_000), regime="datacenter")
    store.commit(round_record(1, devices + datacenters, attempt=3), CommittedState())
    assert (
        "devices sent 0.0625 MB and received 4.75 MB, each at most 0.0312 MB and 2 MB in one "
        "attempt\ndatacenters sent 4 MB and received 8 MB, each at most 4 MB and 8 MB in one "
        "attempt\n"
    ) in shown()
    store.plan(planned_attempt(2))
    cost = dataclasses.replace(Cost.of([], 1.0), device_bytes=500_000)
    store.commit(round_record(2, cost=cost), CommittedState())
    assert "in one attempt; with evaluations and comparisons 5.31 MB in all\n" in shown()
    page = html_page(read_report(store))
    assert "<p>Devices sent 0.0625 MB and received 4.75 MB, each at most 0.0312 MB" in page
    assert "<p>Datacenters sent 4 MB and received 8 MB, each at most" in page
    store.close()


def test_names_of_metrics_are_not_folded_in_a_narrow_terminal(make_job, tmp_path):
    store = Store.create(tmp_path / "run", make_job(), tmp_path)
    metrics = {"accuracy": 0.583, "public_accuracy": 0.98, "public_loss": 0.1022}
    reason = "phase 1 of 3 is datacenter, its round 1 of 2"
    store.plan(planned_attempt(1))
    store.commit(round_record(1, metrics=metrics, reason=reason), CommittedState())
    output = StringIO()
    report.show(read_report(store), Console(file=output, width=80))
    store.close()
    assert {"public_accuracy", "public_loss"} < set(output.getvalue().split())


@pytest.mark.parametrize(("width", "below"), [(72, True), (80, False), (120, False)])
def test_words_are_whole_in_a_narrow_terminal(make_job, tmp_path, width, below):
    """Where reasons have no room in the table, they are below it."""
    store = Store.create(tmp_path / "run", make_job(), tmp_path)
    metrics = {"accuracy": 0.583, "public_accuracy": 0.98, "public_loss": 0.1022}
    reason = "phase 1 of 3 is datacenter, its round 1 of 2"
    store.plan(planned_attempt(1))
    record = round_record(1, metrics=metrics, reason=reason, regime="datacenter", seconds=1234.5)
    store.commit(record, CommittedState())
    store.plan(planned_attempt(2))
    store.fail(failed_attempt(2, regime="datacenter", error="4 are needed, of the 2 that answered"))
    output = StringIO()
    report.show(read_report(store), Console(file=output, width=width))
    store.close()
    text = output.getvalue()
    assert {"datacenter", "datacenter,", "needed,", "answered", *metrics} <= set(text.split())
    assert ("\n  round 2: 4 are needed, of the 2 that answered\n" in text) is below
    assert ("┃ because" in text) is not below


@pytest.mark.parametrize("width", [40, 72, 80, 120])
def test_figures_are_not_cut_in_a_narrow_terminal(make_job, tmp_path, width):
    store = Store.create(tmp_path / "run", make_job(), tmp_path)
    metrics = {"accuracy": 0.583, "public_accuracy": 0.98, "public_loss": 0.1022}
    store.plan(planned_attempt(1, attempt=12))
    reason = "the policy's third phase, which goes on to the end"
    record = round_record(1, metrics=metrics, reason=reason, attempt=12)
    record = dataclasses.replace(
        record, seconds=1234.56, cost=dataclasses.replace(record.cost, price=98.75)
    )
    store.commit(record, CommittedState())
    output = StringIO()
    report.show(read_report(store), Console(file=output, width=width))
    store.close()
    for figure in ("1 try 12", "98.75", "1234.56"):
        assert f"│ {figure}" in output.getvalue()


def test_devices_that_were_lost_for_one_reason_are_told_in_a_line():
    reasons = ["the round's 5 s were over"] * 200 + ["not finite:\nlower the rate"]
    reasons += [f"it cannot train on shard {number}" for number in range(10)]
    receipts = [
        Receipt(participant=f"d{number}", regime="federated", status="dropped", reason=reason)
        for number, reason in enumerate(reasons)
    ]
    lines = report.told_receipts(receipts)
    assert lines[0] == ("d0 and 199 more dropped", "the round's 5 s were over")
    assert lines[1] == ("d200 dropped", r"not finite:\nlower the rate")
    assert lines[2] == ("d201 dropped", "it cannot train on shard 0")
    assert lines[8:] == [("and 4 more", "other reasons")]
