"""Rounds whose random groups are secure sums, combined by a robust rule."""

import copy
import functools
import io
import json

import pytest
import torch
from rich.console import Console
from tests.server.read.transcript_fields import closed, opened

from isthmus.errors import JobError
from isthmus_clients.device.secure_sessions import SecureSessions
from isthmus_server.read.export.model_card import model_card
from isthmus_server.read.report.report import read_report, show
from isthmus_server.read.transcript import Transcript
from isthmus_server.regimes.aggregation.coordinate_wise import Median
from isthmus_server.regimes.aggregation.norm_bound import BoundedSum
from isthmus_server.regimes.aggregation.rule import AggregatedRound, SingleUpdate
from isthmus_server.regimes.aggregation.rule_extension import RuleAggregator
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.run_parts import RunParts
from isthmus_server.storage.recovery import verify
from isthmus_verify.check import check
from isthmus_verify.violation import Violation

NINE = "abcdefghi"
FIFTEEN = "abcdefghijklmno"
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

HEAVY = """
def local_data(self, participant):
    return rows(2000 if participant.name in self.settings["heavy"] else 30, seed=1)

def optimizer(self, parameters, participant):
    rate = 1e-4 if participant.name in self.settings["heavy"] else 0.1
    return torch.optim.SGD(parameters, lr=rate)
"""
"""Devices with nearly all examples of their group, and updates of nearly zeros."""
LOSSY = """
def loss(self, output, target):
    factor = 50.0 if getattr(self, "lies", False) else 1.0
    return factor * super().loss(output, target)

def local_data(self, participant):
    self.lies = participant.name == "a"
    return super().local_data(participant)
"""
HUGE = """
def optimizer(self, parameters, participant):
    rate = 1e6 if participant.name in ("a", "b") else 0.1
    return torch.optim.SGD(parameters, lr=rate)
"""
FIVE = (
    "federated.robust=median",
    "federated.robust_groups=5",
    "federated.robust_minimum=3",
    "federated.cohort=15",
    "federated.quorum=15",
    "federated.local_steps=1",
)


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


async def test_more_liars_than_the_rule_withstands_are_said_in_the_report(deployment):
    """Two of five groups were long; the trimmed mean is made for one."""
    await deployment.start(HUGE, names=tuple(FIFTEEN))
    for name, rule, bad in (("few", "median", None), ("many", "trimmed-mean", 1)):
        store = deployment.create_run(name, "rounds=1", *FIVE, f"federated.robust={rule}")
        await Coordinator(RunParts.of(store, deployment.link)).run()
        console = Console(record=True, width=500, file=io.StringIO())
        show(read_report(store), console)
        text = console.export_text()
        said = f"robust='trimmed-mean' withstands any lies in {bad}; so it was in 1 of 1 rounds"
        assert (f"round 1: 2 of 5 random groups were left out, and federated.{said}" in text) == (
            bad is not None
        )


async def test_short_groups_of_two_liars_leave_no_others_out(deployment, trained):
    """Two of five groups are no majority, also if they are the shortest ones."""
    await deployment.start(HEAVY, names=tuple(FIFTEEN))
    record, honest = await trained("honest", *FIVE, "task.settings.heavy=[]")
    by_group = {receipt.group: receipt.participant for receipt in record.receipts}
    liars = sorted(by_group.values())[:2]
    heavy = f"task.settings.heavy={json.dumps(liars)}"
    record, update = await trained("lied to", *FIVE, heavy)
    norms = sorted(group.norm for group in record.groups.values())
    assert 3 * norms[1] < norms[2]
    assert not any(group.left_out for group in record.groups.values())
    cosine = torch.nn.functional.cosine_similarity(update, honest, dim=0)
    assert cosine > 0.9
    assert update.norm() > honest.norm() / 2


async def test_the_loss_of_a_round_is_that_of_the_group_in_the_middle(deployment, trained):
    """A policy that follows losses would follow those of one liar, whose group is left out."""
    await deployment.start(LOSSY, names=tuple(NINE))
    record, _ = await trained("run", *ROBUST)
    losses = sorted(group.loss for group in record.groups.values() if not group.left_out)
    (largest,) = (group.loss for group in record.groups.values() if group.left_out)
    assert len(losses) == 2
    assert record.training["federated"]["loss"] == pytest.approx(sum(losses) / 2)
    assert largest > 5 * losses[-1]


async def test_a_sum_that_honest_devices_cannot_have_is_no_group_s(
    deployment, trained, monkeypatch
):
    """The others go on, and the transcript of the run holds: its devices have signed that sum."""
    await deployment.start(names=tuple("abcdefghijkl"))
    join = SecureSessions.join

    def lying_join(self, attempt, vector, *more):
        if self._name == "a" and not attempt.config.whole:
            attempt.encode = functools.partial(lying, attempt, attempt.encode)
        return join(self, attempt, vector, *more)

    def lying(attempt, encode, *args, **kwargs):
        encode(*args, **kwargs)
        attempt._encoded.vector[0] += 1 << 28

    monkeypatch.setattr(SecureSessions, "join", lying_join)
    sizes = ("federated.cohort=12", "federated.robust_groups=4", "federated.quorum=9")
    record, _ = await trained("run", *ROBUST, *sizes)
    (bad,) = {receipt.group for receipt in record.receipts if receipt.participant == "a"}
    assert len(record.groups) == 3
    assert bad not in record.groups
    for receipt in record.receipts:
        assert (receipt.status == "accepted") == (receipt.group != bad)
    assert record.participants.accepted == 9
    assert not [each.damage for each in verify(deployment._stores[-1].directory) if each.damage]


async def test_a_group_out_of_all_proportion_is_left_out_and_fails_nothing(deployment, trained):
    """In two of five groups; the quorum is that of all devices."""
    await deployment.start(HUGE, names=tuple(FIFTEEN))
    deployment.link.enrolments.certified = True
    record, _ = await trained("run", *FIVE)
    bad = {receipt.group for receipt in record.receipts if receipt.participant in "ab"}
    assert {name for name, group in record.groups.items() if group.left_out} == bad
    assert record.participants.accepted == 15


async def test_what_one_group_says_of_its_clipping_ends_no_run(deployment, trained):
    await deployment.start(LONG, names=tuple(NINE))
    record, _ = await trained("honest", *ROBUST)
    norms = sorted(group.norm for group in record.groups.values())
    clip = 5 * norms[1]
    record, _ = await trained("run", *ROBUST, f"federated.clip={clip}", "federated.max_examples=64")
    assert record.training["federated"]["clipped"] > 0.01
    assert [group.left_out for group in record.groups.values()].count(True) == 1


async def test_a_model_card_counts_the_devices_of_the_groups_that_were_used(deployment):
    await deployment.start(LONG, names=tuple(NINE))
    store = deployment.create_run("run", "rounds=1", *ROBUST)
    await Coordinator(RunParts.of(store, deployment.link)).run()
    report = read_report(store)
    card = model_card(report, store.job, report.final, "model.safetensors", "0" * 64)
    assert "6 devices trained on data that stayed on them" in card
    assert "sums of their updates over at least 3 devices" in card


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
    asks_for_more = ("federated.cohort=12", "federated.clients=12", "time.join_seconds=4")
    more = ("federated.robust_groups=4", "federated.quorum=9")
    record, _ = await trained("run", *ROBUST, *asks_for_more, *more)
    assert record.groups.keys() == {f"random-{n}-of-3" for n in (1, 2, 3)}
    few = ("rounds=1", "attempts=1", "federated.robust_minimum=4")
    store = deployment.create_run("few", *ROBUST, *asks_for_more, *few)
    with pytest.raises(Exception, match="9 devices are ready, too few for 3 random groups of at"):
        await Coordinator(RunParts.of(store, deployment.link)).run()
    ended = [logged for logged, _ in store.proved_attempts()]
    asked = [(each.planned.invited, each.record.receipts) for each in ended]
    assert asked
    assert asked == [([], [])] * len(ended)  # nobody was


async def test_a_killed_run_repeats_the_same_groups(deployment):
    await deployment.start(names=tuple(NINE))
    whole = deployment.create_run("whole", "rounds=1", *ROBUST)
    final = await Coordinator(RunParts.of(whole, deployment.link)).run()
    store = deployment.create_run("killed", "rounds=1", *ROBUST)
    again = await deployment.run_until_killed_at_merge(store)
    groups = {entry.group for entry in again.unmaskings.about(again.run_id, 1, None)}
    assert groups == {f"random-{n}-of-3" for n in (1, 2, 3)}
    repeated = await Coordinator(RunParts.of(again, deployment.link)).run()
    assert repeated.model_sha256 == final.model_sha256


async def test_rules_are_made_with_the_groups_that_a_quorum_leaves(deployment):
    await deployment.start(names=tuple(NINE))
    share = ("federated.robust=trimmed-mean", "federated.robust_settings={share=0.2}")
    store = deployment.create_run("run", *ROBUST, *share)
    with pytest.raises(
        JobError, match=r"share=0\.2 of the groups at each end, .* only 3 of 3 random groups"
    ):
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


def blame_half_of_a_group(record):
    (bad,) = (name for name, group in record["groups"].items() if group["left_out"])
    blamed = [receipt for receipt in record["receipts"] if receipt["group"] == bad]
    blamed[0]["reason"] = ""


def leave_all_out(record):
    for group in record["groups"].values():
        group["left_out"] = True
    for receipt in record["receipts"]:
        receipt["reason"] = f"the sum of its group {receipt['group']} was left out: it is long"


def invent_names(record):
    names = {name: f"group {name}" for name in record["groups"]}
    record["groups"] = {names[name]: group for name, group in record["groups"].items()}
    for receipt in record["receipts"]:
        receipt["reason"] = ""
        receipt["group"] = names[receipt["group"]]
    for group in record["groups"].values():
        group["left_out"] = False


def move_a_device(record):
    one, *others = record["receipts"]
    one["group"] = next(each["group"] for each in others if each["group"] != one["group"])


FALSIFIED = {
    blame_another: "and its receipts say otherwise",
    blame_nobody: "and its receipts say otherwise",
    count_more: "counts 4 devices in the group 'random-1-of-3', and its receipts 3",
    hide_a_group: "has the groups",
    blame_half_of_a_group: "2 of 3 receipts in the group 'random-",
    leave_all_out: "has left out the sums of all of its groups",
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


async def test_names_of_groups_without_signed_sums_are_checked_too(deployment):
    await deployment.start(LONG, names=tuple(NINE))
    store = deployment.create_run("run", "rounds=1", *ROBUST)
    await Coordinator(RunParts.of(store, deployment.link)).run()
    entries = opened(b"".join(Transcript(store).lines()))
    entries = [entry for entry in entries if entry[0] != "sum"]
    (_, end) = entries[-1]
    end["entries"] = len(entries)
    check(io.BytesIO(closed(entries)))
    (record,) = (content["record"] for kind, content in entries if kind == "round")
    invent_names(record)
    with pytest.raises(Violation, match="are not of one division of its devices into 3 to 3"):
        check(io.BytesIO(closed(entries)))


async def test_an_honest_record_of_a_device_that_left_after_the_sum_is_verified(deployment):
    await deployment.start(names=tuple(NINE))
    store = deployment.create_run("run", "rounds=1", *ROBUST)
    await Coordinator(RunParts.of(store, deployment.link)).run()
    entries = opened(b"".join(Transcript(store).lines()))
    (record,) = (content["record"] for kind, content in entries if kind == "round")
    record["receipts"][0]["reason"] = "its update is in; later: the connection was lost"
    assert check(io.BytesIO(closed(entries))).holds


async def test_another_setting_of_the_rule_than_devices_have_opened_is_found(deployment):
    await deployment.start(names=tuple(NINE))
    store = deployment.create_run("run", "rounds=1", *ROBUST)
    await Coordinator(RunParts.of(store, deployment.link)).run()
    entries = opened(b"".join(Transcript(store).lines()))
    (_, begin), *_ = entries
    begin["job"]["federated"]["robust_settings"] = {"share": 0.4}
    with pytest.raises(Violation, match=r"'federated\.robust_settings' is"):
        check(io.BytesIO(closed(entries)))


async def test_a_key_that_is_twice_in_the_opened_job_is_found(deployment):
    """Devices may have taken the one value, and the verifier the other."""
    await deployment.start(names=tuple(NINE))
    store = deployment.create_run("run", "rounds=1", *ROBUST)
    await Coordinator(RunParts.of(store, deployment.link)).run()
    entries = opened(b"".join(Transcript(store).lines()))
    (_, begin), *_ = entries
    begin["opened"] = [text.replace("{", '{"name":"other",', 1) for text in begin["opened"]]
    with pytest.raises(Violation, match="the job that devices have opened has 'name' twice"):
        check(io.BytesIO(closed(entries)))
