"""Rounds that are summed by group of devices."""

import pytest
import torch
from tests.server.rounds.test_measured_gradients import devices_gradient

from isthmus.errors import JobError
from isthmus.task import Participant
from isthmus_clients.device.agent import Agent
from isthmus_server.read.report.report import read_report
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.run_parts import RunParts
from isthmus_server.storage.unmasking_log import Unmasking

GROUPS = "federated.groups={minimum=3}"
SIX = ("federated.cohort=6", "federated.quorum=6", "federated.local_steps=1")
BY_GROUP = {"by_group": True}
NORTH, SOUTH = "abc", "def"


@pytest.fixture
def start(deployment):
    """Connect devices that have declared these groups; `-` is none."""

    async def start(groups):
        deployment.groups = {name: group for name, group in groups.items() if group != "-"}
        await deployment.start(names=tuple(groups))

    return start


@pytest.fixture
async def six(start):
    await start({**dict.fromkeys(NORTH, "north"), **dict.fromkeys(SOUTH, "south")})


def rounds_of(store):
    return read_report(store).rounds


async def test_the_sums_of_two_groups_have_the_mean_of_all_devices(six, deployment, planned):
    """Weighted by examples it is the plain mean; by weights of the plan, the weighted one."""
    plans = {
        "plain": {},
        "by_group": {"by_group": True},
        "north": {"by_group": True, "group_weights": {"south": 0.0}},
        "south": {"by_group": True, "group_weights": {"north": 0.0}},
    }
    updates, records = {}, {}
    for name, plan in plans.items():  # runs of their own: a device sums a model in one way only
        store = deployment.create_run(name, *planned([plan]), *SIX, GROUPS)
        coordinator = Coordinator(RunParts.of(store, deployment.link))
        await coordinator.run()
        updates[name] = coordinator.model.initial() - coordinator.model.vector
        (records[name],) = read_report(store).rounds
    north, south = updates["north"], updates["south"]
    assert (north - south).norm() > 1e-3
    for mean in (updates["by_group"], (north + south) / 2):
        torch.testing.assert_close(mean, updates["plain"], atol=1e-5, rtol=1e-4)
    assert records["plain"].groups == {}
    assert records["by_group"].as_past_round().groups == records["by_group"].groups
    for name in ("by_group", "north", "south"):
        for group, update in (("north", north), ("south", south)):
            figures = records[name].groups[group]
            assert (figures.devices, figures.examples) == (3, 60)
            assert figures.norm == pytest.approx(float(update.norm()), rel=1e-3)
            assert figures.gradient_norm is None
    pooled, plain = (records[name].training["federated"] for name in ("by_group", "plain"))
    assert pooled == pytest.approx(plain, rel=1e-3)


async def test_the_gradient_of_each_group_is_measured(
    run_with_datacenter, deployment, planned, tmp_path
):
    deployment.groups = {**dict.fromkeys(NORTH, "north"), **dict.fromkeys(SOUTH, "south")}
    plans = planned([{**BY_GROUP, "measure_gradients": True}])
    store, coordinator, datacenter = await run_with_datacenter(
        *plans, *SIX, "federated.clients=6", GROUPS, names=tuple(NORTH + SOUTH)
    )
    datacenter.gradient = torch.linspace(-0.2, 0.3, len(datacenter.gradient))
    await coordinator.run()
    (record,) = rounds_of(store)
    for name, devices in (("north", NORTH), ("south", SOUTH)):
        own = devices_gradient(tmp_path, devices)
        cosine = torch.cosine_similarity(own, datacenter.gradient, dim=0)
        assert record.groups[name].gradient_norm == pytest.approx(float(own.norm()), rel=1e-2)
        assert record.groups[name].cosine == pytest.approx(float(cosine), abs=1e-2)
    everyone = devices_gradient(tmp_path, NORTH + SOUTH)
    assert record.gradients.devices_norm == pytest.approx(float(everyone.norm()), rel=1e-2)


@pytest.mark.parametrize(
    ("groups", "more", "expected"),
    [
        ("nnnsss", (), {"n": 3, "s": 3}),
        ("nnnss-", (), {"n": 3, "*": 3}),  # two are too few: they are with those without a group
        ("nnnnss", (), {}),  # and so is the rest: one sum
        ("nnnnnn", (), {}),  # one group is all devices
        ("nnsstt", (), {}),
        ("nnnsss", ("federated.groups={minimum=3, names=['s']}",), {"s": 3, "*": 3}),
        ("nnnsss", ("federated.groups={minimum=4}",), {}),
    ],
)
async def test_small_groups_are_summed_with_the_rest(
    start, deployment, planned, groups, more, expected
):
    await start(dict(zip("abcdef", groups, strict=True)))
    store = deployment.create_run("run", *planned([{"by_group": True}]), *SIX, GROUPS, *more)
    await Coordinator(RunParts.of(store, deployment.link)).run()
    (record,) = rounds_of(store)
    assert {name: figures.devices for name, figures in record.groups.items()} == expected
    assert record.participants.accepted == 6


async def test_nothing_is_unmasked_if_a_group_fails(six, deployment, planned):
    """So all of them may take part in the next attempt, in one sum or in several."""
    deployment.faults["f"][1, 1] = "no power"
    store = deployment.create_run("run", *planned([{"by_group": True}]), *SIX, GROUPS)
    await Coordinator(RunParts.of(store, deployment.link)).run()
    report = read_report(store)
    (failed,) = report.failed_attempts
    assert "group south: secure aggregation stopped" in failed.error
    assert "nothing was unmasked" in failed.error
    assert {receipt.status for receipt in failed.receipts} <= {"dropped", "rejected"}
    assert report.rounds[0].groups.keys() == {"north", "south"}


async def test_a_round_is_committed_with_the_groups_that_are_left(start, deployment, planned):
    await start(dict(zip("abcdefg", "nnnnsss", strict=True)))
    deployment.faults["f"][1, 1] = "no power"
    settings = ("federated.cohort=7", "federated.quorum=4", GROUPS)
    store = deployment.create_run("run", *planned([{"by_group": True}]), *settings)
    await Coordinator(RunParts.of(store, deployment.link)).run()
    (record,) = rounds_of(store)
    assert {name: figures.devices for name, figures in record.groups.items()} == {"n": 4}
    assert record.training["federated"]["examples"] == 80


async def test_a_run_that_was_killed_while_groups_were_unmasked_repeats_the_same_groups(
    six, deployment, planned
):
    """Their devices take part for this model only with the same survivors."""
    plans = planned([{"by_group": True}, {"by_group": True}])
    whole = deployment.create_run("whole", *plans, *SIX, GROUPS)
    final = await Coordinator(RunParts.of(whole, deployment.link)).run()
    store = deployment.create_run("killed", *plans, *SIX, GROUPS)
    again = await deployment.run_until_killed_at_merge(store)
    unmasked = again.unmaskings.about(again.run_id, 1, None)
    assert {entry.group: "".join(sorted(entry.devices)) for entry in unmasked} == {
        "north": NORTH,
        "south": SOUTH,
    }
    assert (
        await Coordinator(RunParts.of(again, deployment.link)).run()
    ).model_sha256 == final.model_sha256


@pytest.mark.parametrize(("declared", "invited"), [("north", "abcdef"), ("south", "ghijkl")])
async def test_groups_are_repeated_only_if_their_devices_still_declare_them(
    start, deployment, planned, declared, invited
):
    """A device refuses the sum of a group that its owner has changed, in every attempt."""
    await start(
        {
            **dict.fromkeys("abc", "north"),
            **dict.fromkeys("def", "south"),
            **dict.fromkeys("ghijkl", "-"),
            "a": declared,
        }
    )
    settings = (*SIX, "federated.clients=12", "rounds=1", GROUPS)
    store = deployment.create_run("run", *planned([{"by_group": True}]), *settings)
    coordinator = Coordinator(RunParts.of(store, deployment.link))
    for group, devices in (("north", NORTH), ("south", SOUTH)):
        store.unmaskings.add(
            Unmasking(
                run_id=store.run_id,
                round=1,
                attempt=0,
                model_hash=coordinator.model.blob.sha256,
                draw=0,
                devices=frozenset(devices),
                group=group,
            )
        )
    await coordinator.run()
    report = read_report(store)
    assert report.failed_attempts == []
    assert "".join(receipt.participant for receipt in report.rounds[0].receipts) == invited


async def test_a_device_with_a_group_that_is_not_a_name_is_declined(start, deployment, planned):
    await start({**dict.fromkeys(NORTH, "north"), **dict.fromkeys(SOUTH, "south"), "g": "x y"})
    store = deployment.create_run("run", *planned([{"by_group": True}]), *SIX, GROUPS)
    await Coordinator(RunParts.of(store, deployment.link)).run()
    report = read_report(store)
    assert report.rounds[0].groups.keys() == {"north", "south"}
    (declined,) = (event for event in report.to_json()["events"] if event["kind"] == "declined")
    assert declined["reason"].startswith("its group is not 1 to 63 letters")


@pytest.mark.parametrize(
    ("shard", "declared", "group"),
    [((1, 6), "", "south"), ((2, 6), "", "north"), (None, "", ""), ((1, 6), "west", "west")],
)
def test_devices_that_this_machine_starts_are_in_the_groups_in_turn(
    make_job, shard, declared, group
):
    groups = "federated.groups={minimum=3, names=['north', 'south']}"
    job = make_job("federated.secure_aggregation=true", groups)
    agent = Agent(Participant(name="a", regime="federated", shard=shard), None, group=declared)
    assert agent._group_in(job) == group


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        ({"by_group": 1}, "by_group is neither True nor False"),
        ({"by_group": True, "regime": "datacenter"}, "in a round without devices"),
        ({"group_weights": {"north": 1.0}}, "in a round that is not summed by group"),
        ({**BY_GROUP, "group_weights": {"west": 1.0}}, "group 'west', where .* north, south"),
        ({**BY_GROUP, "group_weights": {"north": -1}}, "group 'north' is not a number from 0"),
        ({**BY_GROUP, "group_weights": {"north": 0, "south": 0, "*": 0}}, "0 to each group"),
    ],
)
async def test_a_plan_whose_groups_cannot_be_summed_is_refused(
    six, deployment, planned, plan, sentence
):
    store = deployment.create_run("run", *planned([plan]), *SIX, GROUPS)
    with pytest.raises(JobError, match=sentence):
        await Coordinator(RunParts.of(store, deployment.link)).run()


async def test_a_plan_for_groups_needs_a_job_with_groups(six, deployment, planned):
    store = deployment.create_run("run", *planned([{"by_group": True}]), *SIX)
    with pytest.raises(JobError, match=r"the job has no \[federated.groups\]"):
        await Coordinator(RunParts.of(store, deployment.link)).run()
