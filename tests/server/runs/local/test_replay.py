"""`isthmus prove --replay`: a recorded run is trained again, to the same models or a sentence."""

import json
import re

import pytest

from isthmus.errors import UserError
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.run_parts import RunParts
from isthmus_server.runs.local.replay import Recording, ReplayCoordinator
from isthmus_server.runs.operations.run_copies import branch_run
from isthmus_server.storage.events import RoundPlanned, RunAdopted
from isthmus_server.storage.store import Store

PLAIN = "federated.secure_aggregation=false"
CLIENTS = tuple(f"client-{index}" for index in range(4))
REPEATABLE = {
    "plain": (PLAIN,),
    "secure": (),
    "compressed": ("federated.compression={}",),
    "rounded": ("federated.codec=rounded", PLAIN),
    "median": (PLAIN, "federated.aggregation=median"),
    "momentum": (
        PLAIN,
        "strategy.server_optimizer.name=Adam",
        "strategy.server_optimizer.options={lr=0.05}",
        "strategy.served_average=0.5",
    ),
    "best model": (
        PLAIN,
        'evaluation.keep_best={name="accuracy",mode="max"}',
        "evaluation.deliver=best",
    ),
    "a budget of two rounds": (PLAIN, "budget=6", "rounds=9"),
}


@pytest.fixture
def record(deployment):
    """Record a run; returns its store."""

    async def record(*overrides):
        deployment.of_one_machine = True
        await deployment.start(names=CLIENTS)
        store = deployment.create_run("recorded", "rounds=2", *overrides)
        await Coordinator(RunParts.of(store, deployment.link)).run()
        return store

    return record


def second(deployment, tmp_path, store, recording):
    """What trains a recorded run again, in another directory."""
    again = Store.create(tmp_path / "again", store.job, store.base)
    deployment._stores.append(again)
    return ReplayCoordinator(RunParts.of(again, deployment.link), recording)


@pytest.mark.parametrize("kind", REPEATABLE)
async def test_a_run_gives_the_same_models_again(record, deployment, tmp_path, kind):
    store = await record(*REPEATABLE[kind])
    recording = Recording.of(store)
    assert len(recording.rounds) == 2
    final = await second(deployment, tmp_path, store, recording).run()
    assert final.model_sha256 == recording.final.model_sha256


async def test_failed_attempts_do_not_matter(record, deployment, tmp_path):
    for name in CLIENTS:
        deployment.faults[name] = {(2, 1): "the battery is empty"}
    store = await record(PLAIN)
    recording = Recording.of(store)
    assert recording.rounds[1].planned.attempt == 2
    final = await second(deployment, tmp_path, store, recording).run()
    assert final.model_sha256 == recording.final.model_sha256


async def test_a_run_whose_policy_would_decide_otherwise_follows_the_record(
    record, deployment, tmp_path
):
    """The second round asks two devices, as in the record and not as the job says."""
    store = await record(PLAIN, "federated.quorum=2")
    planned = json.loads(
        store.log.connection.execute("SELECT planned FROM attempts WHERE round=2").fetchone()[0]
    )
    two = planned["invited"][:2]
    recording = Recording.of(store)
    rounds = list(recording.rounds)
    rounds[1] = type(rounds[1])(
        planned=type(rounds[1].planned).from_json({**planned, "invited": two}), models={}
    )
    coordinator = second(
        deployment, tmp_path, store, Recording(rounds=rounds, final=recording.final)
    )
    with pytest.raises(UserError, match="trained again, the final model is"):
        await coordinator.run()
    asked = [each.planned.invited for each in Recording.of(coordinator.store).rounds]
    assert [len(each) for each in asked] == [3, 2]


async def test_the_first_round_with_another_model_is_named(record, deployment, tmp_path):
    store = await record(PLAIN, "rounds=3")
    first, second_round, third = Recording.of(store).rounds
    changed = type(second_round)(second_round.planned, dict.fromkeys(second_round.models, "0" * 64))
    recording = Recording([first, changed, third], Recording.of(store).final)
    coordinator = second(deployment, tmp_path, store, recording)
    with pytest.raises(UserError, match=r"round 2, trained again, gives the model [0-9a-f]{64}"):
        await coordinator.run()
    assert coordinator.state.round == 2


async def test_a_task_that_was_changed_since_gives_another_model(
    record, deployment, tmp_path, write_task
):
    store = await record(PLAIN)
    recording = Recording.of(store)
    write_task("def model(self):\n    torch.manual_seed(5)\n    return nn.Linear(4, 3)")
    deployment.link.peers.clear()
    await deployment.link.stop()
    deployment.link = await deployment.network.listen()
    for name in CLIENTS:
        deployment.network.dial(deployment.device(name), name)
    with pytest.raises(UserError, match="round 1, trained again, gives the model"):
        await second(deployment, tmp_path, store, recording).run()


async def test_participants_of_other_machines_are_refused(run_with_datacenter):
    store, coordinator, _ = await run_with_datacenter(PLAIN, "strategy.policy=hybrid", "rounds=1")
    await coordinator.run()
    with pytest.raises(UserError, match="'a' of round 1 is not a participant that this job starts"):
        Recording.of(store)


NOT_REPEATABLE = {
    "noise": (
        ("privacy.epsilon=5", "privacy.delta=0.01", "privacy.mechanism=distributed"),
        "it adds noise, which is drawn anew each time",
    ),
    "buffered": (
        (PLAIN, "federated.mode=buffered", "federated.buffer={concurrency=3}"),
        "the order in which updates arrive decides its models",
    ),
}


@pytest.mark.parametrize("kind", NOT_REPEATABLE)
async def test_what_does_not_repeat_is_refused(record, kind):
    overrides, reason = NOT_REPEATABLE[kind]
    store = await record(*overrides)
    with pytest.raises(UserError, match=f"cannot be trained again: {re.escape(reason)}"):
        Recording.of(store)


async def test_a_round_that_lost_a_device_is_refused(record, deployment):
    deployment.faults["client-1"] = {(1, 1): "the battery is empty"}
    store = await record(PLAIN, "federated.quorum=2", "federated.cohort=4")
    with pytest.raises(UserError, match=r"'client-1' was rejected in round 1, and when that"):
        Recording.of(store)


async def test_a_run_that_went_on_in_a_copy_is_refused(record):
    """A copy has nothing of what devices and ranks had kept, such as the state of an optimizer."""
    store = await record(PLAIN)
    store.log_event(RunAdopted(original="/runs/one", by="ann", stated="original is gone"))
    with pytest.raises(UserError, match="it went on in a copy, where its participants began"):
        Recording.of(store)


async def test_a_branch_is_refused(deployment, tmp_path):
    deployment.of_one_machine = True
    await deployment.start(names=CLIENTS)
    store = deployment.create_run("first", "rounds=2", PLAIN)
    again = await deployment.run_until_killed(
        Coordinator(RunParts.of(store, deployment.link)), RoundPlanned, 2
    )
    again.close()
    branch_run(again.directory, tmp_path / "branch")
    branch = Store.open_to_continue(tmp_path / "branch")
    deployment._stores.append(branch)
    await Coordinator(RunParts.of(branch, deployment.link)).run()
    with pytest.raises(UserError, match="its rounds up to 1 are those of another run, of which"):
        Recording.of(branch)


async def test_a_run_under_way_is_refused(deployment):
    await deployment.start()
    store = deployment.create_run("run", "rounds=1")
    with pytest.raises(UserError, match="it is running, and only a run with a final model can be"):
        Recording.of(store)


async def test_random_groups_that_a_crash_has_repeated_are_those_of_the_record(
    deployment, tmp_path
):
    """Without a device that was lost, nine would be divided in another way."""
    deployment.of_one_machine = True
    names = tuple(f"client-{index}" for index in range(12))
    await deployment.start(names=names)
    deployment.faults["client-0"][1, 1] = "no power"
    robust = (
        "federated.cohort=12",
        "federated.quorum=9",
        "federated.robust=median",
        "federated.robust_groups=4",
        "federated.robust_minimum=3",
    )
    store = deployment.create_run("recorded", "rounds=1", *robust)
    store = await deployment.run_until_killed_at_merge(store)
    await Coordinator(RunParts.of(store, deployment.link)).run()
    recording = Recording.of(store)
    (recorded,) = recording.rounds
    assert [len(each) for each in recorded.groups.values()] == [3, 3, 3]
    assert all(name.endswith("-of-4") for name in recorded.groups)
    final = await second(deployment, tmp_path, store, recording).run()
    assert final.model_sha256 == recording.final.model_sha256
