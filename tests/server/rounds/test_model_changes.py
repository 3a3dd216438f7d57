"""Devices with an earlier model receive its change, and train from the same bytes."""

import pytest
from tests.server.deployment import NAMES
from tests.server.rounds.results import LAYOUT

from isthmus_privacy.compression.model_change import ChangeCodec
from isthmus_server.read.report.report import read_report
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.run_parts import RunParts
from isthmus_server.storage.events import RoundCommitted, RoundPlanned

WHOLE = LAYOUT.nbytes
CHANGE = ChangeCodec(LAYOUT.size, LAYOUT.size, 3).nbytes
PLAIN = ("federated.secure_aggregation=false",)
SETTINGS = ("federated.download_bits=3", "rounds=5")


def received(report):
    """Bytes of the model that each device of each round has received."""
    rows = report["rounds"]
    return [{r["participant"]: r["bytes_out"] for r in row["receipts"]} for row in rows]


@pytest.mark.parametrize("secure", ["true", "false"])
async def test_after_the_first_round_only_changes_are_sent(deployment, secure):
    await deployment.start()
    report, final = await deployment.run("run", *SETTINGS, f"federated.secure_aggregation={secure}")
    first, *others = received(report)
    assert first == dict.fromkeys(NAMES, WHOLE)
    assert others == [dict.fromkeys(NAMES, CHANGE)] * 4
    assert report["rounds"][-1]["model_sha256"] == final.model_sha256


async def test_a_device_that_missed_rounds_receives_the_changes_of_all_of_them(deployment):
    await deployment.start()
    for round_ in (2, 3):
        for attempt in (1, 2, 3):
            deployment.faults["c"][round_, attempt] = "the battery is empty"
    report, _ = await deployment.run("run", *SETTINGS, "federated.quorum=2", *PLAIN)
    rows = received(report)
    assert rows[3]["c"] in (CHANGE, 3 * CHANGE)
    assert {rows[3]["a"], rows[3]["b"]} == {CHANGE}
    assert all(row["status"] == "accepted" for row in report["rounds"][3]["receipts"])


@pytest.mark.parametrize(
    ("kind", "round_"), [(RoundPlanned, 3), (RoundCommitted, 2), (RoundCommitted, 4)]
)
async def test_a_killed_run_resumes_to_the_same_bytes(deployment, kind, round_):
    await deployment.start()
    momentum = ('strategy.server_optimizer={name="SGD",options={lr=0.5,momentum=0.9}}',)
    _, final = await deployment.run("whole", *SETTINGS, *momentum)
    store = deployment.create_run("killed", *SETTINGS, *momentum)
    again = await deployment.run_until_killed(
        Coordinator(RunParts.of(store, deployment.link)), kind, round_
    )
    resumed = await Coordinator(RunParts.of(again, deployment.link)).run()
    assert resumed.model_sha256 == final.model_sha256
    after = received(read_report(again).to_json())[round_ - (kind is RoundPlanned)]
    assert set(after.values()) == {WHOLE}  # the new process has no changes yet


async def test_a_change_that_leads_elsewhere_is_refused_and_the_whole_model_comes_next(
    deployment, monkeypatch
):
    await deployment.start()
    apply, broken = ChangeCodec.apply, []

    def wrong_once(codec, vector, payload):
        used = apply(codec, vector, payload)
        if isinstance(payload, memoryview) and not broken:
            broken.append(vector)
            vector[0] += 1
        return used

    monkeypatch.setattr(ChangeCodec, "apply", wrong_once)
    report, _ = await deployment.run("run", *SETTINGS, "federated.quorum=2", *PLAIN)
    rejected = [
        receipt
        for row in report["rounds"]
        for receipt in row["receipts"]
        if receipt["status"] != "accepted"
    ]
    assert len(rejected) == 1
    name = rejected[0]["participant"]
    third = {r["participant"]: r["bytes_out"] for r in report["rounds"][2]["receipts"]}
    assert third.pop(name) == WHOLE
    assert set(third.values()) == {CHANGE}


def test_modes_that_cannot_send_changes_refuse_them(make_job):
    for other in ("federated.mode=buffered", 'federated.flower={strategy={name="FedAvg"}}'):
        with pytest.raises(ValueError, match="download_bits needs mode = 'rounds' and no flower"):
            make_job("federated.download_bits=3", other)
