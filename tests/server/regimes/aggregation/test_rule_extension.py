"""Rounds and runs whose updates a rule aggregates."""

import asyncio

import pytest
import torch
from tests.outside_package import OutsidePackage
from tests.server.regimes.replies import LAYOUT, updating
from tests.server.regimes.test_plaintext import PreparedAttempt
from tests.server.waiting import wait_until

from isthmus.errors import UserError
from isthmus_server.read.report.report import read_report
from isthmus_server.regimes.base import AttemptFailed
from isthmus_server.regimes.run_aggregation import aggregation_of
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.run_parts import RunParts
from isthmus_server.storage.events import RoundCommitted
from isthmus_server.storage.records import Participants

KEPT = '''
"""A rule with state: the mean of the updates, plus half of the last result."""

import torch


class Momentum:
    needs_all = True

    def __init__(self, federated):
        self.last = None

    def begin(self, facts):
        return MomentumRound(self.last)

    def commit(self, state):
        self.last = state

    def reset(self):
        self.last = None

    def export_state(self):
        return ({} if self.last is None else {"last": self.last}), {}

    def import_state(self, tensors, values):
        self.last = tensors.get("last")


class MomentumRound:
    def __init__(self, last):
        self.last = last
        self.vectors = []

    def add(self, update):
        self.vectors.append(update.vector)

    def result(self):
        self.state = torch.stack(self.vectors).mean(dim=0)
        if self.last is not None:
            self.state += 0.5 * self.last
        return self.state


class Unusable:
    needs_all = False

    def __init__(self, federated):
        self.kind = federated.aggregation_settings["kind"]
        if self.kind == "init":
            raise KeyError("no")

    def begin(self, facts):
        if self.kind == "begin":
            raise ValueError("they are too few")
        return self

    def add(self, update):
        if self.kind == "add":
            raise ValueError("I do not like it")

    def result(self):
        return {"shape": torch.zeros(7), "holes": torch.full((3,), torch.nan)}.get(self.kind)


def nothing(federated):
    return 7


class NoReset:
    needs_all = False

    def __init__(self, federated):
        pass

    def begin(self, facts):
        return self

    def commit(self, state):
        pass

    def export_state(self):
        return {}, {}

    def import_state(self, tensors, values):
        pass


class NoState(NoReset):
    def add(self, update):
        self.vector = update.vector

    def result(self):
        return self.vector

    def reset(self):
        pass
'''


@pytest.fixture
def outside(tmp_path, monkeypatch):
    group = "isthmus.aggregation_rules"
    names = {
        "momentum": "Momentum",
        "unusable": "Unusable",
        "nothing": "nothing",
        "krum": "Momentum",
        "no-reset": "NoReset",
        "no-state": "NoState",
    }
    entries = {f"{group}/{name}": attribute for name, attribute in names.items()}
    package = OutsidePackage(tmp_path / "site", f"kept_{tmp_path.name}", KEPT, entries)
    with package.on_path(monkeypatch):
        yield


@pytest.fixture
def prepare(network, make_job, tmp_path):
    """Prepare an attempt of three devices under a rule."""

    async def prepare(*overrides):
        await network.listen()
        plain = ("federated.cohort=3", "federated.quorum=3")
        return PreparedAttempt(network, make_job(*plain, *overrides), LAYOUT, tmp_path)

    return prepare


async def test_a_round_uses_the_rule_and_ignores_the_order_of_arrival(prepare, network):
    attempt = await prepare("federated.aggregation=median")
    vectors = {"a": [1.0, 5.0, 9.0], "b": [2.0, 4.0, 90.0], "c": [-80.0, 6.0, 8.0]}
    results = []
    turn = {}

    def in_turn(name):
        async def respond(participant, request, model):
            await turn[name].wait()
            return await updating(vectors[name])(participant, request, model)

        return respond

    participants = {name: await network.join(name, in_turn(name)) for name in "abc"}
    for order in ("abc", "cab"):
        turn.update({name: asyncio.Event() for name in "abc"})
        running = asyncio.create_task(attempt.run(*"abc"))
        for name in order:
            seen = len(participants[name].receipts)
            turn[name].set()
            await wait_until(lambda name=name, seen=seen: len(participants[name].receipts) > seen)
        results.append(await running)
    for result in results:
        assert result.pseudo_gradient.tolist() == [1.0, 5.0, 9.0]
        assert Participants.of(result.receipts).accepted == 3


async def test_a_bad_update_is_left_out_and_no_more_than_the_cohort_is_taken(prepare, network):
    attempt = await prepare(
        "federated.aggregation=multi-krum",
        "federated.quorum=3",
        "federated.aggregation_settings.faulty=0",
        "federated.over_selection=2",
    )
    for name in "abcd":
        await network.join(name, updating())
    await network.join("bad", updating([torch.nan, 0, 0]))
    await network.join("heavy", updating(examples=21))
    result = await attempt.run("bad", "heavy", *"abcd")
    assert result.pseudo_gradient.tolist() == [1.0, 2.0, 3.0]
    assert Participants.of(result.receipts).accepted == 3
    reasons = {receipt.participant: receipt.reason for receipt in result.receipts}
    assert "is not finite" in reasons["bad"] or reasons["bad"] == "enough updates were in"


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("add", r"aggregation='unusable' failed in round 1: ValueError: I do not like it"),
        ("shape", r"aggregation='unusable' returned no vector of the 3 elements"),
        ("nothing", r"aggregation='unusable' returned no vector of the 3 elements"),
        ("holes", r"aggregation='unusable' returned a vector that is not finite"),
    ],
)
async def test_a_rule_that_breaks_its_contract_is_named(outside, prepare, network, kind, sentence):
    attempt = await prepare(
        "federated.aggregation=unusable", f"federated.aggregation_settings.kind={kind}"
    )
    for name in "abc":
        await network.join(name, updating())
    with pytest.raises(AttemptFailed, match=sentence) as caught:
        await attempt.run(*"abc")
    assert Participants.of(caught.value.receipts).accepted == 3


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("unusable", r"'unusable' cannot be constructed: KeyError: 'kind'"),
        ("nothing", r"'nothing' is not an aggregation rule: it has no begin\(\)"),
        ("no-reset", r"'no-reset' has commit\(\) and no reset\(\); a rule with state has both"),
        ("krum", r"'krum' is provided by several installed packages \(.*:Krum and .*:Momentum\)"),
        ("momentun", r"'momentun' is unknown; did you mean momentum\? installed are krum, median"),
    ],
)
def test_a_rule_that_cannot_be_used_is_reported(outside, make_job, name, sentence):
    with pytest.raises(UserError, match=sentence):
        aggregation_of(make_job(f"federated.aggregation={name}").federated, LAYOUT)


async def test_a_rule_whose_rounds_keep_no_state_is_named(outside, prepare, network):
    attempt = await prepare("federated.aggregation=no-state")
    for name in "abc":
        await network.join(name, updating())
    with pytest.raises(
        AttemptFailed, match=r"'no-state' has the methods of a rule with state, and"
    ):
        await attempt.run(*"abc")


def test_the_mean_is_no_rule_of_another_package(make_job, tmp_path, monkeypatch):
    entries = {"isthmus.aggregation_rules/mean": "Momentum"}
    package = OutsidePackage(tmp_path / "site", f"mean_{tmp_path.name}", KEPT, entries)
    sentence = r"'mean' is built in, and .*:Momentum of an installed package has the same name"
    with package.on_path(monkeypatch), pytest.raises(UserError, match=sentence):
        aggregation_of(make_job().federated, LAYOUT)


@pytest.mark.parametrize("rule", ["mean", "norm-bound"])
def test_a_limit_on_memory_that_has_no_effect_is_refused(make_job, rule):
    overrides = [f"federated.aggregation={rule}", "federated.aggregation_max_bytes=1000"]
    if rule == "norm-bound":
        overrides.append("federated.aggregation_settings.norm=1.0")
    with pytest.raises(UserError, match=rf"bytes=1000 has no effect on .*aggregation='{rule}'"):
        aggregation_of(make_job(*overrides).federated, LAYOUT)


async def test_a_cohort_that_a_rule_cannot_take_is_refused_before_a_gradient(
    outside, run_with_datacenter
):
    _, coordinator, datacenter = await run_with_datacenter(
        "federated.secure_aggregation=false",
        "federated.aggregation=unusable",
        "federated.aggregation_settings.kind=begin",
        "strategy.policy=hybrid",
        "strategy.merge=transfer",
        "attempts=1",
    )
    with pytest.raises(UserError, match=r"'unusable' failed in round 1: ValueError: they are"):
        await coordinator.run()
    assert not any(request.HasField("mean_gradient") for request in datacenter.requests)


PLAIN = ("federated.secure_aggregation=false", "federated.aggregation=momentum")


@pytest.mark.parametrize("method", ["commit", "reset", "export_state", "import_state"])
def test_a_rule_that_cannot_keep_its_state_is_named(outside, make_job, monkeypatch, method):
    extension = aggregation_of(make_job(PLAIN[1]).federated, LAYOUT)
    arguments = {"commit": [None], "import_state": [{}, {}]}.get(method, [])

    def defective(*arguments):
        raise KeyError("last")

    defective.__name__ = method
    monkeypatch.setattr(extension._rule, method, defective)
    sentence = rf"federated\.aggregation='momentum' failed in {method}\(\): KeyError: 'last'"
    with pytest.raises(UserError, match=sentence):
        getattr(extension, method)(*arguments)


async def test_a_rule_s_state_is_committed_with_the_round(outside, deployment):
    """A run that is killed after round 2 and continued ends as one that was not."""
    await deployment.start()
    _, whole = await deployment.run("whole", *PLAIN)
    store = deployment.create_run("killed", *PLAIN)
    coordinator = Coordinator(RunParts.of(store, deployment.link))
    again = await deployment.run_until_killed(coordinator, RoundCommitted, 2)
    continued = await Coordinator(RunParts.of(again, deployment.link)).run()
    assert continued.model_sha256 == whole.model_sha256
    _, other = await deployment.run("median", *PLAIN, "federated.aggregation=median")
    assert other.model_sha256 != whole.model_sha256


@pytest.mark.parametrize("merge", ["weighted", "projected", "transfer"])
async def test_a_hybrid_round_merges_the_rule_s_result(run_with_datacenter, merge):
    overrides = (
        "federated.secure_aggregation=false",
        "federated.aggregation=median",
        "strategy.policy=hybrid",
        f"strategy.merge={merge}",
        "rounds=2",
    )
    store, coordinator, _ = await run_with_datacenter(*overrides)
    await coordinator.run()
    report = read_report(store).to_json()
    assert [row["regime"] for row in report["rounds"]] == ["hybrid", "hybrid"]
