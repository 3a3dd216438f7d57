"""Rounds whose random groups are secure sums, combined by a robust rule."""

import copy
import io

import pytest
import torch
from tests.server.deployment import Killed
from tests.server.read.transcript_fields import closed, opened

from isthmus.errors import JobError
from isthmus_server.read.report.report import read_report
from isthmus_server.read.transcript import Transcript
from isthmus_server.regimes.aggregation.coordinate_wise import Median
from isthmus_server.regimes.aggregation.norm_bound import BoundedSum
from isthmus_server.regimes.aggregation.rule import AggregatedRound, SingleUpdate
from isthmus_server.regimes.aggregation.rule_extension import RuleAggregator
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.run_parts import RunParts
from isthmus_verify.check import check
from isthmus_verify.violation import Violation

NINE = "abcdefghi"
ROBUST = (
    "federated.robust=median",
    "federated.robust_groups=3",
    "federated.robust_minimum=3",
    "federated.cohort=9",
    "federated.quorum=9",
    "federated.local_steps=1",
)
LONG = """
def optimizer(self, parameters, participant):
    rate = 5.0 if participant.name == "a" else 0.1
    return torch.optim.SGD(parameters, lr=rate)
"""


@pytest.fixture
def trained(deployment):
    """Run a job of one round; returns its record and what it has subtracted from the model."""

    async def trained(name, *overrides):
        store = deployment.create_run(name, "rounds=1", *overrides)
        coordinator = Coordinator(RunParts.of(store, deployment.link))
        await coordinator.run()
        (record,) = read_report(store).rounds
        return record, coordinator.model.initial() - coordinator.model.vector

    return trained


def group_means(record, updates):
    """The mean update of each group of a round, of the single updates of a plain one."""
    devices = {}
    for receipt in record.receipts:
        devices.setdefault(receipt.group, []).append(receipt.participant)
    return {
        group: sum(updates[name][0] * updates[name][1] for name in names)
        / sum(updates[name][0] for name in names)
        for group, names in devices.items()
    }


def by_median(means):
    return Median.combine(None, torch.stack(means).sort(dim=0).values)


def by_trimmed_mean(means):
    return torch.stack(means).sort(dim=0).values[1:-1].mean(dim=0)


def by_norm_bound(means):
    facts = AggregatedRound(
        round=1, size=len(means[0]), cohort=dict.fromkeys("abc", 3), quorum=3, max_updates=3
    )
    bounded = BoundedSum(facts, 0.01)
    for name, mean in zip("abc", means, strict=True):
        bounded.add(SingleUpdate(device=name, examples=3, vector=mean.clone()))
    return bounded.result()


RULES = {
    "median": (by_median, ()),
    "trimmed-mean": (by_trimmed_mean, ("federated.robust_settings={share=0.34}",)),
    "norm-bound": (by_norm_bound, ("federated.robust_settings={norm=0.01}",)),
}


@pytest.fixture
def single_updates(trained, monkeypatch):
    """The examples and the update of each device, of a plain round of the same training."""

    async def single_updates():
        found = {}
        add = RuleAggregator._called

        def noting(self, function, *arguments):
            if arguments and isinstance(arguments[0], SingleUpdate):
                update = arguments[0]
                found[update.device] = (update.examples, update.vector.clone())
            return add(self, function, *arguments)

        with monkeypatch.context() as patched:
            patched.setattr(RuleAggregator, "_called", noting)
            plain = ("federated.secure_aggregation=false", "federated.aggregation=median")
            await trained("plain", *plain, *ROBUST[3:])
        return found

    return single_updates


async def test_each_rule_over_groups_is_the_plain_rule_over_their_means(
    deployment, trained, single_updates
):
    await deployment.start(names=tuple(NINE))
    updates = await single_updates()
    # What rounding in a secure sum may change, see `isthmus_privacy.secagg.ranges`.
    rounding = 1e-4 * max(float(update.abs().max()) for _, update in updates.values())
    for name, (expected, settings) in RULES.items():
        record, update = await trained(name, *ROBUST, f"federated.robust={name}", *settings)
        means = group_means(record, updates)
        assert record.groups.keys() == means.keys() == {f"random-{n}-of-3" for n in (1, 2, 3)}
        result = expected(list(means.values()))
        torch.testing.assert_close(update, result, atol=rounding, rtol=0)
        for group, mean in means.items():
            assert record.groups[group].devices == 3
            assert record.groups[group].norm == pytest.approx(float(mean.norm()), rel=1e-3)
            assert not record.groups[group].left_out


async def test_a_long_group_is_left_out_and_its_receipts_name_the_group(deployment, trained):
    await deployment.start(LONG, names=tuple(NINE))
    record, _ = await trained("run", *ROBUST)
    (bad,) = {receipt.group for receipt in record.receipts if receipt.participant == "a"}
    assert {name for name, group in record.groups.items() if group.left_out} == {bad}
    for receipt in record.receipts:
        assert receipt.status == "accepted"
        named = f"the sum of its group {bad} was left out" in receipt.reason
        assert named == (receipt.group == bad)
        assert named or not receipt.reason


async def test_groups_are_drawn_anew_in_each_round_and_alike_in_each_run(deployment):
    await deployment.start(names=tuple(NINE))
    drawn = {}
    for name in ("one", "other"):
        store = deployment.create_run(name, "rounds=2", *ROBUST)
        await Coordinator(RunParts.of(store, deployment.link)).run()
        drawn[name] = [
            {receipt.participant: receipt.group for receipt in record.receipts}
            for record in read_report(store).rounds
        ]
    assert drawn["one"] == drawn["other"]
    assert drawn["one"][0] != drawn["one"][1]


async def test_nothing_is_opened_where_too_few_groups_are_left(deployment):
    """Never a smaller sum, and never the mean of all instead."""
    await deployment.start(names=tuple(NINE))
    deployment.faults["a"][1, 1] = "no power"
    store = deployment.create_run("run", "rounds=1", *ROBUST[:-2], "federated.quorum=6")
    await Coordinator(RunParts.of(store, deployment.link)).run()
    report = read_report(store)
    (failed,) = report.failed_attempts
    assert "2 groups are left and a robust rule needs 3; nothing was unmasked" in failed.error
    assert report.rounds[0].participants.accepted == 9


async def test_a_round_goes_on_without_a_group_that_has_lost_a_device(deployment, trained):
    await deployment.start(names=tuple("abcdefghijkl"))
    deployment.faults["a"][1, 1] = "no power"
    sizes = ("federated.cohort=12", "federated.robust_groups=4", "federated.quorum=9")
    record, _ = await trained("run", *ROBUST, *sizes)
    assert [group.devices for group in record.groups.values()] == [3, 3, 3]
    (lost,) = {receipt.group for receipt in record.receipts if receipt.participant == "a"}
    assert lost not in record.groups


async def test_fewer_devices_make_fewer_groups_and_too_few_a_sentence(deployment, trained):
    await deployment.start(names=tuple(NINE))
    more = ("federated.cohort=12", "federated.robust_groups=4", "federated.quorum=9")
    record, _ = await trained("run", *ROBUST, *more, "federated.clients=12")
    assert record.groups.keys() == {f"random-{n}-of-3" for n in (1, 2, 3)}
    few = ("federated.robust_minimum=4", "federated.cohort=12", "federated.clients=12")
    store = deployment.create_run("few", "rounds=1", "attempts=1", *ROBUST, *few)
    with pytest.raises(Exception, match="9 devices are ready, too few for 3 random groups of at"):
        await Coordinator(RunParts.of(store, deployment.link)).run()


async def test_a_killed_run_repeats_the_same_groups(deployment):
    await deployment.start(names=tuple(NINE))
    whole = deployment.create_run("whole", "rounds=1", *ROBUST)
    final = await Coordinator(RunParts.of(whole, deployment.link)).run()
    store = deployment.create_run("killed", "rounds=1", *ROBUST)
    coordinator = Coordinator(RunParts.of(store, deployment.link))

    def die(spec, results):
        raise Killed

    coordinator.parts.merger.merge = die
    with pytest.raises(Killed):
        await coordinator.run()
    again = deployment.reopen(store)
    groups = {entry.group for entry in again.unmaskings.about(again.run_id, 1, None)}
    assert groups == {f"random-{n}-of-3" for n in (1, 2, 3)}
    repeated = await Coordinator(RunParts.of(again, deployment.link)).run()
    assert repeated.model_sha256 == final.model_sha256


async def test_rules_are_made_with_the_groups_that_a_quorum_leaves(deployment):
    await deployment.start(names=tuple(NINE))
    share = ("federated.robust=trimmed-mean", "federated.robust_settings={share=0.2}")
    store = deployment.create_run("run", *ROBUST, *share)
    with pytest.raises(JobError, match=r"over 3 of 3 groups: federated.robust_settings.share=0\.2"):
        RunParts.of(store, deployment.link)


def blame_another(record):
    for group in record["groups"].values():
        group["left_out"] = not group["left_out"]


def blame_nobody(record):
    for receipt in record["receipts"]:
        receipt["reason"] = ""


def count_more(record):
    record["groups"]["random-1-of-3"]["devices"] += 1


def hide_a_group(record):
    del record["groups"]["random-1-of-3"]


def move_a_device(record):
    one, *others = record["receipts"]
    one["group"] = next(each["group"] for each in others if each["group"] != one["group"])


FALSIFIED = {
    blame_another: "and its receipts say otherwise",
    blame_nobody: "and its receipts say otherwise",
    count_more: "counts 4 devices in the group 'random-1-of-3', and its receipts 3",
    hide_a_group: "has the groups",
    move_a_device: "and it has signed a sum of 'random-",
}


async def test_a_transcript_whose_groups_are_not_those_of_its_receipts_is_found(deployment):
    await deployment.start(LONG, names=tuple(NINE))
    store = deployment.create_run("run", "rounds=1", *ROBUST)
    await Coordinator(RunParts.of(store, deployment.link)).run()
    entries = opened(b"".join(Transcript(store).lines()))
    check(io.BytesIO(closed(entries)))
    for falsify, sentence in FALSIFIED.items():
        changed = copy.deepcopy(entries)
        (record,) = (content["record"] for kind, content in changed if kind == "round")
        falsify(record)
        with pytest.raises(Violation, match=sentence):
            check(io.BytesIO(closed(changed)))
