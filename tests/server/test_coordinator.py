import asyncio
import hashlib
import io
import json
import re
import shutil

import pytest
import torch
from rich.console import Console

from isthmus.errors import UserError
from isthmus.wire import link_pb2
from isthmus_server.model import mmap_buffer
from isthmus_server.model.global_model import GlobalModel
from isthmus_server.rounds import trainer
from isthmus_server.rounds.attempt_log import AttemptLog
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.storage.events import (
    EventStream,
    ParticipantDeclined,
    RoundCommitted,
    RoundPlanned,
    WaitingForParticipants,
)
from isthmus_server.views.progress import ProgressView
from isthmus_server.views.report import Report, read_report, show


async def test_a_federated_run_from_start_to_end(place, tmp_path):
    await place.listen()
    report, final = await place.run("run", "federated.local_epochs=3")
    assert report["status"] == "finished"
    assert report["reason"] == "all rounds are done"
    assert [row["round"] for row in report["rounds"]] == [1, 2, 3]
    for row in report["rounds"]:
        assert (row["regime"], row["attempt"]) == ("federated", 1)
        assert row["participants"] == {
            "invited": 3,
            "started": 3,
            "sent": 3,
            "accepted": 3,
            "rejected": 0,
            "dropped": 0,
        }
        assert [receipt["participant"] for receipt in row["receipts"]] == list(place.names)
        assert row["cost"]["price"] == 3.0
    losses = [row["metrics"]["loss"] for row in report["rounds"]]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.9 * losses[0]
    assert report["final"] == final.to_json()
    assert final.metrics == report["rounds"][-1]["metrics"]
    written = (tmp_path / "run" / "model.safetensors").read_bytes()
    assert final.model_sha256 == hashlib.sha256(written).hexdigest()
    assert final.model_sha256 == report["rounds"][-1]["model_sha256"]


async def test_the_report_has_the_keys_programs_rely_on(place):
    await place.listen()
    report, _ = await place.run("run", "rounds=1")
    assert json.loads(json.dumps(report)) == report
    assert {"run_id", "job", "status", "rounds", "final"} <= report.keys()
    assert {"metrics", "model_sha256", "model_path"} <= report["final"].keys()
    (row,) = report["rounds"]
    assert {
        "round",
        "attempt",
        "regime",
        "reason",
        "seconds",
        "participants",
        "receipts",
        "metrics",
        "cost",
        "epsilon",
        "model_sha256",
    } <= row.keys()
    assert {"invited", "started", "sent", "accepted", "rejected", "dropped"} == row[
        "participants"
    ].keys()
    kinds = [event["kind"] for event in report["events"]]
    assert sorted(kinds) == ["joined"] * 3 + ["ready"] * 3


async def test_the_same_seed_and_participants_give_the_same_bytes(place):
    await place.listen()
    shas = [
        (await place.run(name, "rounds=2", f"seed={seed}"))[1].model_sha256
        for name, seed in (("one", 1), ("again", 1), ("other", 2))
    ]
    assert shas[0] == shas[1]
    assert shas[0] != shas[2]


@pytest.mark.parametrize(
    ("kind", "round_"),
    [(RoundPlanned, 1), (RoundCommitted, 1), (RoundPlanned, 2), (RoundCommitted, 3)],
)
async def test_a_run_that_was_killed_goes_on_to_the_same_bytes(place, kind, round_):
    await place.listen()
    momentum = (
        "strategy.server_optimizer.name=Adam",
        "strategy.server_optimizer.options={lr=0.05}",
    )
    whole, final = await place.run("whole", *momentum)

    store = place.create("killed", *momentum)
    again = await place.killed(Coordinator(store, place.link), kind, round_)
    assert again.status()[0] == "running"
    assert again.run_state().round == round_ - (kind is RoundPlanned)
    resumed = await Coordinator(again, place.link).run()
    assert resumed.model_sha256 == final.model_sha256
    rows = read_report(again).to_json()["rounds"]
    assert [row["model_sha256"] for row in rows] == [row["model_sha256"] for row in whole["rounds"]]


async def test_a_run_that_was_killed_when_it_had_finished_asks_nobody_again(place):
    """The datacenter has let go of its checkpoints by then."""
    await place.listen()
    store = place.create("run", "rounds=1")
    final = await Coordinator(store, place.link).run()
    again = place.reopen(store)
    place.link.peers.clear()
    assert await Coordinator(again, place.link).run() == final
    assert read_report(again).to_json()["status"] == "finished"


async def test_spilling_a_large_model_does_not_change_the_result(place, monkeypatch):
    """Sent from its checkpoint, or in the first round from a file, and with failures."""
    await place.listen()
    place.faults["b"][2, 1] = "no power"
    _, final = await place.run("small")
    spills = []
    monkeypatch.setattr(trainer, "LARGE_BYTES", 0)
    monkeypatch.setattr(mmap_buffer, "LARGE_BYTES", 0)
    spill = GlobalModel.spill
    monkeypatch.setattr(
        GlobalModel, "spill", lambda model, scratch: (spill(model, scratch), spills.append(1))
    )
    report, same = await place.run("large")
    assert same.model_sha256 == final.model_sha256
    assert [row["attempt"] for row in report["rounds"]] == [1, 2, 1]
    assert len(spills) == 4


async def test_an_attempt_that_fails_is_made_again_and_paid_for(place):
    await place.listen()
    place.faults["b"][2, 1] = "no power"
    output = io.StringIO()
    events = EventStream()
    with ProgressView(Console(file=output, width=200)) as view:
        events.subscribe(view)
        report, final = await place.run("run", events=events)
    assert report["status"] == "finished"
    (failed,) = report["failed_attempts"]
    assert (failed["round"], failed["attempt"]) == (2, 1)
    assert "clients_min=3" in failed["error"]
    assert "b: no power" in failed["error"]
    assert [receipt["participant"] for receipt in failed["receipts"]] == list(place.names)
    assert [(row["round"], row["attempt"]) for row in report["rounds"]] == [(1, 1), (2, 2), (3, 1)]
    assert failed["cost"]["price"] == 3.0

    said = output.getvalue()
    assert "round 2, try 1 failed" in said
    assert f"sha256  {final.model_sha256}" in said
    output = io.StringIO()
    show(Report.from_json(report), Console(file=output, width=200))
    page = output.getvalue()
    assert "2 try 2" in page
    assert "round 2: b rejected: no power" in page
    assert "cost 12" in page

    place.faults["b"].clear()
    _, undisturbed = await place.run("undisturbed")
    assert undisturbed.model_sha256 == final.model_sha256


async def test_a_round_that_keeps_failing_ends_the_run_with_one_sentence(place):
    await place.listen()
    place.faults["c"] |= {(1, 1): "no power", (1, 2): "no power"}
    store = place.create("run", "attempts=2")
    with pytest.raises(UserError) as caught:
        await Coordinator(store, place.link).run()
    sentence = str(caught.value)
    assert sentence.startswith("round 1 failed 2 times; the last time because: ")
    assert "c: no power" in sentence
    report = read_report(store).to_json()
    assert (report["status"], report["reason"], report["final"]) == ("failed", sentence, None)
    assert len(report["failed_attempts"]) == 2
    assert store.run_state().spent == 6.0

    again = place.reopen(store)
    await Coordinator(again, place.link).run()
    assert read_report(again).to_json()["status"] == "finished"
    assert read_report(again).to_json()["rounds"][0]["attempt"] == 3


async def test_a_run_directory_that_cannot_be_written_is_one_sentence(place):
    await place.listen()
    store = place.create("run")
    coordinator = Coordinator(store, place.link)

    def lose(event):
        if isinstance(event, RoundCommitted):
            shutil.rmtree(store.checkpoints.directory)

    coordinator.events.subscribe(lose)
    with pytest.raises(UserError, match=r"could not be used: .*model-000002.* see to it, then"):
        await coordinator.run()
    assert store.status()[0] == "failed"
    assert len(read_report(store).to_json()["rounds"]) == 1


async def test_a_budget_ends_the_run_before_it_is_overdrawn(place):
    await place.listen()
    report, _ = await place.run("run", "budget=7.5")
    assert report["reason"] == (
        "the budget of 7.5 is used up: 6 is spent and a federated round costs 3"
    )
    assert len(report["rounds"]) == 2


async def test_attempts_that_fail_do_not_overdraw_it(place):
    await place.listen()
    place.faults["b"][2, 1] = "no power"
    report, _ = await place.run("run", "budget=8")
    assert report["reason"] == (
        "the budget of 8 is used up: 6 is spent and a federated round costs 3"
    )
    assert (len(report["rounds"]), len(report["failed_attempts"])) == (1, 1)


async def test_a_budget_for_nothing_still_gives_a_model(place):
    await place.listen()
    report, final = await place.run("run", "budget=0.5")
    assert report["rounds"] == []
    assert final.metrics.keys() == {"accuracy", "loss"}


async def test_too_few_devices_are_one_sentence(place, net, clock):
    await place.listen(names=("a",))
    store = place.create("run", "federated.clients=3", "time.join_seconds=77")
    coordinator = Coordinator(store, place.link)
    running = asyncio.create_task(coordinator.run())
    await net.until(lambda: coordinator.roster.clients)
    await clock.over(77)  # for all that this machine starts
    await clock.over(77)  # for those that the round needs
    with pytest.raises(UserError) as caught:
        await running
    assert str(caught.value) == (
        "1 edge clients are ready and a federated round needs 3 (federated.quorum); "
        "waited up to 77 s (time.join_seconds)"
    )
    assert read_report(store).to_json()["status"] == "failed"


async def test_a_device_that_declines_says_why(place):
    await place.listen("""
        def local_data(self, participant):
            return rows(0 if participant.name == "b" else 20, seed=1)
    """)
    store = place.create("run")
    with pytest.raises(UserError, match=r"; b declined: local_data\(\) of b is empty"):
        await Coordinator(store, place.link).run()
    (event,) = (event for event in store.events() if isinstance(event, ParticipantDeclined))
    assert event.participant == "b"


async def test_a_device_with_another_frozen_base_does_not_train(place):
    await place.listen("""
        def model(self):
            import os

            model = nn.Linear(4, 3)
            model.bias.requires_grad_(False).copy_(torch.tensor(list(os.urandom(3))))
            return model
    """)
    sentence = (
        "; a, b, c declined: this device's model is not the server's: the frozen parameter 'bias' "
        "has other values here than there; is it loaded from the same file"
    )
    with pytest.raises(UserError, match=sentence):
        await Coordinator(place.create("run"), place.link).run()


async def test_what_all_devices_decline_for_is_said_once_and_at_once(place):
    await place.listen("""
        def local_data(self, participant):
            raise OSError("the camera is off")
    """)
    store = place.create("run", "federated.clients=3")
    with pytest.raises(UserError) as caught:
        await Coordinator(store, place.link).run()
    said = r"0 edge clients are ready .*quorum\); a, b, c declined: local_data\(\) .*camera is off"
    assert re.fullmatch(said, str(caught.value))


async def test_evaluation_happens_when_the_job_says_so(place):
    await place.listen()
    report, _ = await place.run("run", "evaluation.every=2")
    assert [bool(row["metrics"]) for row in report["rounds"]] == [False, True, True]


async def test_a_policy_may_lie_beside_the_task(place, tmp_path):
    await place.listen()
    (tmp_path / "policy_beside_the_task.py").write_text(
        "from isthmus_server.strategy import Plan\n"
        "class Mine:\n"
        "    def __init__(self, strategy): pass\n"
        "    def plan(self, seen):\n"
        "        turns = seen.state.get('turns', 0) + 1\n"
        "        return Plan('federated', f'turn {turns}', {'turns': turns})\n"
    )
    report, _ = await place.run("run", "strategy.policy=policy_beside_the_task:Mine", "rounds=2")
    assert [row["reason"] for row in report["rounds"]] == ["turn 1", "turn 2"]


# -- with a datacenter ---------------------------------------------------------------------------


async def test_regimes_alternate_and_the_model_goes_where_it_is_needed(with_ranks):
    store, coordinator, ranks = await with_ranks("strategy.policy=alternate", "rounds=5")
    final = await coordinator.run()
    report = read_report(store).to_json()
    regimes = [row["regime"] for row in report["rounds"]]
    assert regimes == ["datacenter", "federated", "datacenter", "federated", "datacenter"]
    assert [row["model_sha256"] is None for row in report["rounds"]] == [True, False] * 2 + [True]
    asked = [request.WhichOneof("work") for request in ranks.asked]
    assert asked == ["open", *["train_steps", "export"] * 3, "close"]
    work = [request.train_steps for request in ranks.asked if request.HasField("train_steps")]
    assert [(one.from_step, one.until_step) for one in work] == [(0, 50), (50, 100), (100, 150)]
    assert all(one.HasField("model") for one in work)
    assert not any(one.hand_back for one in work)
    assert torch.equal(coordinator.model.vector, ranks.vector)
    assert final.metrics == {"loss": 0.75, "accuracy": 0.5}
    assert report["rounds"][0]["cost"]["price"] == 0.5
    assert ranks.asked[-1].close.finished


async def test_datacenter_rounds_in_a_row_move_no_model(with_ranks):
    store, coordinator, ranks = await with_ranks("strategy.policy=datacenter")
    await coordinator.run()
    work = [request.train_steps for request in ranks.asked if request.HasField("train_steps")]
    assert [one.HasField("model") for one in work] == [True, False, False]
    assert [request.WhichOneof("work") for request in ranks.asked].count("export") == 1
    assert len(read_report(store).to_json()["rounds"]) == 3


async def test_a_hybrid_round_merges_both_pseudo_gradients(with_ranks):
    store, coordinator, _ = await with_ranks(
        "strategy.policy=hybrid",
        "rounds=1",
        "strategy.datacenter_weight=0.25",
        "federated.local_steps=0",
    )
    before = coordinator.model.vector.clone()
    await coordinator.run()
    # The devices made no step, and the ranks took 0.05 off.
    torch.testing.assert_close(coordinator.model.vector, before - 0.25 * 0.05)
    (row,) = read_report(store).to_json()["rounds"]
    assert row["participants"]["accepted"] == 4
    assert row["cost"]["price"] == 3.5
    assert row["training"].keys() == {"federated", "datacenter"}


async def test_a_model_that_cannot_be_fetched_is_a_failed_attempt_in_the_log(with_ranks):
    store, coordinator, ranks = await with_ranks("strategy.policy=alternate", "rounds=2")
    ranks.fail_exports = 1
    await coordinator.run()
    (failed,) = read_report(store).to_json()["failed_attempts"]
    assert (failed["round"], failed["error"]) == (2, "dc: the disk is full")
    assert read_report(store).to_json()["rounds"][1]["attempt"] == 2


async def test_a_killed_run_whose_model_is_in_the_datacenter_fetches_it_again(with_ranks, place):
    _, coordinator, _ = await with_ranks("strategy.policy=alternate", "rounds=2")
    again = await place.killed(coordinator, RoundCommitted, 1)
    assert again.run_state().model_in_datacenter
    await Coordinator(again, place.link).run()
    assert [row["regime"] for row in read_report(again).to_json()["rounds"]] == [
        "datacenter",
        "federated",
    ]


async def test_a_model_whose_datacenter_comes_back_last_is_waited_for(with_ranks, place, net):
    """After a restart of the server it may be back long after the devices."""
    _, coordinator, ranks = await with_ranks(
        "strategy.policy=alternate", "rounds=2", "attempts=1", "datacenter.ranks=0"
    )
    again = await place.killed(coordinator, RoundCommitted, 1)
    place.link.disconnect("dc", "it is away")
    published = []
    resumed = Coordinator(again, place.link)
    resumed.events.subscribe(published.append)
    running = asyncio.create_task(resumed.run())
    waiting = WaitingForParticipants(clients=0, datacenters=1)
    await net.until(lambda: waiting in published or running.done())
    await net.join("dc", ranks.work, role=link_pb2.DATACENTER)
    final = await running
    assert read_report(again).to_json()["rounds"][1]["attempt"] == 1
    assert final.model_sha256 == read_report(again).to_json()["rounds"][1]["model_sha256"]


async def test_devices_that_were_in_an_attempt_when_the_server_died_are_waited_for(
    place, net, monkeypatch
):
    """They may have unmasked its sum, and refuse another one of nearly the same devices."""
    names = ("a", "b", "c", "d")
    await place.listen(names=names)
    fewer = (
        "seed=3",
        "federated.clients=0",
        "federated.cohort=4",
        "federated.quorum=3",
        "attempts=1",
    )
    store = place.create("run", *fewer)
    coordinator = Coordinator(store, place.link)

    async def require(regime):
        assert await coordinator.roster.wait_for(devices=names)

    def die(*_, **fields):
        raise place.Killed

    monkeypatch.setattr(coordinator.roster, "require", require)
    with monkeypatch.context() as patched:
        patched.setattr(AttemptLog, "commit", die)  # the sum is unmasked by then
        with pytest.raises(place.Killed):
            await coordinator.run()
    place.link.disconnect("d", "it is away")
    published = []
    again = Coordinator(place.reopen(store), place.link)
    again.events.subscribe(published.append)
    running = asyncio.create_task(again.run())
    waiting = WaitingForParticipants(clients=4, datacenters=0)
    await net.until(lambda: waiting in published or running.done())
    net.call(place.device("e"), "e")  # nor is another one asked instead
    net.call(place.device("f"), "f")
    await net.until(lambda: {"e", "f"} <= again.roster.clients.keys() or running.done())
    net.call(place.device("d"), "d")
    await running
    receipts = read_report(again.store).to_json()["rounds"][0]["receipts"]
    assert [receipt["participant"] for receipt in receipts] == list(names)


async def test_one_regime_that_fails_fails_the_attempt_of_both(with_ranks, place):
    store, coordinator, ranks = await with_ranks("strategy.policy=hybrid", "rounds=1", "attempts=1")
    place.faults["a"][1, 1] = "no power"
    with pytest.raises(UserError, match="a: no power"):
        await coordinator.run()
    assert not ranks.asked[-1].close.finished  # it can be gone on with
    (failed,) = read_report(store).to_json()["failed_attempts"]
    assert {receipt["participant"] for receipt in failed["receipts"]} >= set(place.names)
