"""Devices that take part in every round without effect are counted for the operator."""

import io
import logging
import math
import re

import pytest
from click.testing import CliRunner
from rich.console import Console
from tests.server.service.conftest import fleet  # noqa: F401 - a fixture
from tests.server.storage.records import round_record

from isthmus_clients.commands import client
from isthmus_clients.device.own_figures import OwnFigures
from isthmus_clients.device.update_tally import FILE, UpdateTally
from isthmus_server.read.report.progress import ProgressView
from isthmus_server.read.report.report import read_report, show
from isthmus_server.read.report.unused_updates import unused_updates
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.run_parts import RunParts
from isthmus_server.storage.events import EventStream
from isthmus_server.storage.records import Receipt, UpdateNoise

FAILS_ON_D = """
def optimizer(self, parameters, participant):
    if participant.name == "d":
        raise ValueError("no such column")
    return torch.optim.SGD(parameters, lr=0.1)
"""


async def test_one_device_that_fails_in_every_round_is_counted(deployment, caplog):
    agents = {}
    connect = deployment.device

    def device(name):
        made = connect(name)
        agents[name] = made.agent
        return made

    deployment.device = device
    await deployment.start(FAILS_ON_D, names=("a", "b", "c", "d"))
    shown = io.StringIO()
    events = EventStream()
    events.subscribe(ProgressView(Console(file=shown, width=300)))
    store = deployment.create_run("run", "federated.cohort=4", "rounds=10")
    with caplog.at_level(logging.WARNING):
        await Coordinator(RunParts.of(store, deployment.link, events)).run()
    sentence = "1 of 4 devices without a usable update in each of the last 10 rounds; `isthmus"
    assert shown.getvalue().count(sentence) == 1
    report = read_report(store)
    page = io.StringIO()
    show(report, Console(file=page, width=300))
    assert sentence in page.getvalue()
    assert unused_updates(report.rounds[:2]) == []
    assert unused_updates(report.rounds[3:])[0].startswith("1 of 4 devices without a usable")
    assert agents["a"]._secure._tally.sentence == "10 updates, all of them usable"
    counted = "10 updates, 10 of them without effect (weight 0), the last 10 in a row"
    assert agents["d"]._secure._tally.sentence.startswith(counted)
    warnings = [
        each.getMessage() for each in caplog.records if "trains without effect" in each.message
    ]
    assert [each.split(":")[1].split(",")[0] for each in warnings] == [" 3 updates", " 10 updates"]


def test_plain_updates_of_no_weight_are_counted_with_their_devices():
    def weighed(number, weights):
        receipts = [
            Receipt(participant=name, regime="federated", status="accepted", examples=weight)
            for name, weight in weights.items()
        ]
        return round_record(number, receipts, training={"federated": {"loss": 1.0}})

    always = [weighed(number, {"a": 5, "b": 0, "c": number % 2}) for number in range(1, 5)]
    assert unused_updates(always) == [
        "1 of 3 devices with a weight of 0 in each of the last 4 rounds: b"
    ]
    assert unused_updates([*always, weighed(5, {"a": 5, "b": 1})]) == []


@pytest.mark.parametrize("mechanism", ["distributed", "gaussian", "correlated"])
async def test_means_that_are_noise_alone_are_told(deployment, mechanism, tmp_path, monkeypatch):
    """With differential privacy nobody but the owners sees that a task fails."""
    # Noise has no seed: at the three deviations of the product it is told in 995 of 1,000 runs.
    monkeypatch.setattr("isthmus_server.read.report.unused_updates._SURE", 8.0)
    fails = tmp_path / "fails"
    fails.touch()
    await deployment.start(
        "def optimizer(self, parameters, participant):\n"
        "    import os\n"
        f"    if os.path.exists({str(fails)!r}):\n"
        "        raise ValueError('no such column')\n"
        "    return torch.optim.SGD(parameters, lr=100.0)"
    )
    private = (
        f"privacy.mechanism={mechanism}",
        "privacy.epsilon=1e6",
        "privacy.delta=0.01",
        "privacy.noise=0.1",
        "rounds=4",
    )
    shown = io.StringIO()
    events = EventStream()
    events.subscribe(ProgressView(Console(file=shown, width=500)))
    store = deployment.create_run("run", *private)
    await Coordinator(RunParts.of(store, deployment.link, events)).run()
    sentence = "the devices' means of the last 4 rounds are as long as their noise alone; a mean"
    assert shown.getvalue().count(sentence) == 1
    report = read_report(store)
    page = io.StringIO()
    show(report, Console(file=page, width=500))
    assert sentence in page.getvalue()
    squares = sum(record.norms["federated"] ** 2 for record in report.rounds)
    expected = sum(record.noise.deviation**2 * record.noise.elements for record in report.rounds)
    assert 0.2 * expected < squares < 3 * expected
    fails.unlink()
    trains = deployment.create_run("trains", *private, "seed=1")
    await Coordinator(RunParts.of(trains, deployment.link)).run()
    assert unused_updates(read_report(trains).rounds) == []


def test_an_update_of_the_length_that_would_be_seen_is_seen():
    """Exact lengths: of noise alone, and with the update that the sentence names."""
    elements = 1000
    noise = UpdateNoise(deviation=0.5, elements=elements)

    def records(update):
        norm = math.sqrt(update**2 + 0.25 * elements)
        return [
            round_record(number, norms={"federated": norm}, noise=noise) for number in range(1, 6)
        ]

    (sentence,) = unused_updates(records(0.0))
    visible = float(re.search(r"more than (\S+) would be seen", sentence)[1])
    assert unused_updates(records(visible)) == []
    assert unused_updates(records(0.5 * visible)) == [sentence]
    # A round whose noise is not known, as of an older run, says nothing.
    older = round_record(6, norms={"federated": 1.0})
    assert unused_updates([*records(0.0), older]) == []


async def test_an_owner_asks_whether_the_device_trains(fleet):  # noqa: F811
    await fleet.listen()
    member = await fleet.member("phone-0")

    def status():
        return CliRunner().invoke(client, ["status", "--state", str(member.directory)]).output

    assert status() == f"phone-0 of {member.server}: no updates so far\n"
    UpdateTally(member.directory).note(True)
    UpdateTally(member.directory).note(False)  # after a restart
    assert "2 updates, 1 of them without effect (weight 0), the last 1 in a row" in status()
    UpdateTally(member.directory).note(True)
    assert "3 updates, 1 of them without effect (weight 0), but not the last" in status()
    (member.directory / FILE).write_text("nonsense")
    UpdateTally(member.directory).note(True)
    assert "1 update, all of them usable" in status()


async def test_an_owner_asks_what_models_achieve_on_the_own_data(fleet):  # noqa: F811
    await fleet.listen()
    member = await fleet.member("phone-0")

    def status():
        output = CliRunner().invoke(client, ["status", "--state", str(member.directory)]).output
        return output.splitlines()[1:]

    assert status() == []
    OwnFigures(member.directory).note("heart-1", 3, {"loss": 0.25, "accuracy": 0.75})
    OwnFigures(member.directory).note("other\x1b[2J", 1, {"loss": math.nan})  # after a restart
    OwnFigures(member.directory).note("heart-1", 4, {"loss": 0.125})
    assert status() == [
        "on its own data: other\\x1b[2J, model of round 1: loss nan",
        "on its own data: heart-1, model of round 4: loss 0.125",
    ]
    for number in range(100):
        OwnFigures(member.directory).note(f"run-{number}", 1, {str(i): 1.0 for i in range(200)})
    assert len(status()) == 16
    (member.directory / "figures.json").write_text("nonsense")
    OwnFigures(member.directory).note("heart-1", 5, {"loss": 0.5})
    assert status() == ["on its own data: heart-1, model of round 5: loss 0.5"]
