"""Transcripts of honest runs in which a round is forged, and all hashes are written anew."""

import copy
import hashlib
import io
import json
import re
import time

import pytest
from tests.server.read.transcript_fields import closed, opened
from tests.server.rounds.policies import FOLLOWS_PLANS, TRANSFER, write_policy

from isthmus_server.read.transcript import Transcript
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.run_parts import RunParts
from isthmus_verify.chain import canonical
from isthmus_verify.charges import Charges
from isthmus_verify.check import check
from isthmus_verify.fields import Fields
from isthmus_verify.violation import Violation

OTHER = "e0" * 32
NOISE = (
    "privacy.epsilon=50",
    "privacy.delta=0.01",
    "privacy.mechanism=distributed",
    "privacy.participations=6",
)
BEST = ('evaluation.keep_best={name="loss",mode="max"}', "evaluation.deliver=best")
SAMPLED = {
    "kind": "sampled-gaussian",
    "noise_multiplier": 1.0,
    "sampling_probability": 0.5,
    "steps": 1,
}
KINDS = {
    "secure": (),
    "plain": ("federated.secure_aggregation=false",),
    "noise": NOISE,
    "gaussian": ("privacy.epsilon=50", "privacy.delta=0.01", "privacy.mechanism=gaussian"),
    "best": BEST,
    "average": ("strategy.served_average=0.5",),
    "scheduled": ("strategy.policy=schedule", "strategy.schedule=[{regime='federated'}]"),
    "buffered": ("federated.mode=buffered", "federated.buffer={concurrency=3}"),
    "robust": (
        "federated.robust=median",
        "federated.robust_groups=3",
        "federated.robust_minimum=3",
        "federated.cohort=9",
        "federated.quorum=9",
    ),
}
"""Runs of three rounds; the policy is `federated`, but for one."""

_RECORDED: dict[str, bytes] = {}


@pytest.fixture
def recorded(deployment):
    """The entries of a run of a kind, of which one is made."""

    async def recorded(kind):
        if kind not in _RECORDED:
            await deployment.start(names=tuple("abcdefghi" if kind == "robust" else "abc"))
            store = deployment.create_run("run", "rounds=3", *KINDS[kind])
            await Coordinator(RunParts.of(store, deployment.link)).run()
            _RECORDED[kind] = b"".join(Transcript(store).lines())
        return opened(_RECORDED[kind])

    return recorded


def _all(entries, kind):
    return [content for name, content in entries if name == kind]


def _record(entries, round_):
    return _all(entries, "round")[round_ - 1]["record"]


def _plan(entries, round_):
    return _all(entries, "plan")[round_ - 1]


def _count(record):
    """Have counts and costs of a record follow from its receipts."""
    stages = dict.fromkeys(("invited", "started", "sent", "accepted", "rejected", "dropped"), 0)
    cost = record["cost"]
    cost.update(bytes_up=0, bytes_down=0, device_bytes=0, device_seconds=0.0)
    for receipt in record["receipts"]:
        stages["invited"] += 1
        stages[receipt["status"]] += 1
        stages["started"] += receipt["started"]
        stages["sent"] += receipt["sent"]
        up = receipt["bytes_in"] + receipt["messages_in"]
        down = receipt["bytes_out"] + receipt["messages_out"]
        cost["bytes_up"] += up
        cost["bytes_down"] += down
        if receipt["regime"] == "federated":
            cost["device_bytes"] += up + down
            cost["device_seconds"] += receipt["seconds"]
    record["participants"] = stages


def _nobody_in(record):
    for receipt in record["receipts"]:
        receipt.update(status="dropped", reason="it left", started=False, sent=False, seconds=0.0)
    _count(record)


def _nobody_accepted(entries, round_=2):
    record = _record(entries, round_)
    for receipt in record["receipts"]:
        receipt.update(status="dropped", reason="it left")
    record["groups"] = {}
    _count(record)


def _without_sum(entries, number):
    at = [index for index, (kind, _) in enumerate(entries) if kind == "sum"][number - 1]
    del entries[at]


def _not_ended(entries):
    _all(entries, "end")[0].update(status="running", final=None)


def _as_failed(entries):
    """The last round becomes a failed attempt that nobody has begun."""
    at = max(number for number, (kind, _) in enumerate(entries) if kind == "round")
    record = entries[at][1]["record"]
    known = (
        "attempt cost elapsed epsilon metrics participants reason receipts regime round seconds "
        "started_at"
    )
    record = {key: record[key] for key in known.split()}
    record.update(error="all left", given_up=True, model_sha256=None)
    _nobody_in(record)
    record["cost"]["price"] = 0.0
    entries[at] = ("failed", {"record": record})
    _not_ended(entries)


def _without_outcome(entries):
    """The last round becomes an attempt that was cut short."""
    at = max(number for number, (kind, _) in enumerate(entries) if kind == "round")
    del entries[at]
    _not_ended(entries)


def _uncharged(entries, round_):
    """Without the charge of a round; of those that follow, all numbers fit."""
    charges = _all(entries, "charge")
    (number,) = (
        each["number"] for each in charges if each.get("charge", {}).get("round") == round_
    )
    gone = [each for each in charges if number in (each["number"], each.get("settles"))]
    entries[:] = [each for each in entries if each[1] not in gone]
    numbers = {}
    for new, each in enumerate(_all(entries, "charge"), 1):
        numbers[each["number"]] = new
        each["number"] = new
        if "settles" in each:
            each["settles"] = numbers[each["settles"]]
    lost = len(gone)
    for content in _all(entries, "round"):
        if content["record"]["round"] >= round_:
            content["ledger_head"] = str(int(content["ledger_head"]) - lost)


def _with_charge(entries, **changes):
    """One more charge before all others, with these changes; each record states no epsilon."""
    charges = _all(entries, "charge")
    for each in charges:
        each["number"] += 2
        if "settles" in each:
            each["settles"] += 2
    more = copy.deepcopy(charges[0]) | {"number": 1}
    more["charge"].update(what="comparison", **changes)
    settled = {"number": 2, "settles": 1, "outcome": "committed"}
    entries[1:1] = [("charge", more), ("charge", settled)]
    for content in _all(entries, "round"):
        content["ledger_head"] = str(int(content["ledger_head"]) + 2)
        content["record"]["epsilon"] = 0.001


def _charged_by_another(entries):
    """Nothing of what devices were asked for is this run's, and all of it is above the budget."""
    for content in _all(entries, "charge"):
        if "charge" in content:
            content["charge"]["run"] = "another"
            content["charge"]["event"]["noise_multiplier"] /= 20
    for content in _all(entries, "round"):
        content["record"]["epsilon"] = 1e6


def _commits(entries, round_, model, **more):
    """A commit has another model under all names."""
    content = _all(entries, "round")[round_ - 1]
    content["models"] = dict.fromkeys(content["models"], model) | more
    content["record"]["model_sha256"] = content["models"]["served"]


def _starts(entries, round_, name, digest):
    plan = _plan(entries, round_)
    plan["start"] = {"name": name, "sha256": digest}
    plan["decision"]["answer"]["start"] = name


def _model(entries, round_=1):
    return _all(entries, "round")[round_ - 1]["models"]["current"]


def _from_kept(entries, *, planned):
    true = _model(entries)
    _commits(entries, 1, OTHER, kept=true)
    if planned:
        _plan(entries, 1)["decision"]["answer"]["keep"] = {"kept": "current"}
    _starts(entries, 2, "kept", true)


def _from_served(entries):
    true = _model(entries)
    _commits(entries, 1, OTHER, served=true)
    _starts(entries, 2, "served", true)


def _from(name):
    """Round 2 begins with a model of which the transcript has no digest."""

    def forge(entries):
        _commits(entries, 1, OTHER)
        _starts(entries, 2, name, None)

    return forge


def _in_datacenter(entries, *, with_one):
    content = _all(entries, "round")[0]
    content.update(model_in_datacenter=True, models={"current": OTHER})
    content["record"]["model_sha256"] = None
    _plan(entries, 2)["start"]["sha256"] = None
    if with_one:
        _as_hybrid(entries, 1, ["dc"])


def _as_hybrid(entries, round_, datacenters):
    plan = _plan(entries, round_)
    plan["decision"]["answer"]["regime"] = "hybrid"
    plan["datacenters"] = datacenters
    record = _record(entries, round_)
    record["regime"] = "hybrid"
    for name in datacenters:
        receipt = copy.deepcopy(record["receipts"][0])
        nothing = dict.fromkeys(("bytes_in", "bytes_out", "messages_in", "messages_out"), 0)
        receipt.update(participant=name, regime="datacenter", seconds=0.0, **nothing)
        record["receipts"].append(receipt)
    _count(record)


def _moved_by_hybrid(entries, *datacenters):
    _commits(entries, 1, OTHER)
    _plan(entries, 2)["start"]["sha256"] = OTHER
    _as_hybrid(entries, 2, list(datacenters))


def _stranger(entries):
    entries[0][1]["job"]["exchange"]["buffers"] = "recompute"
    record = _record(entries, 1)
    receipt = copy.deepcopy(record["receipts"][0])
    receipt.update(participant="a datacenter", regime="datacenter", seconds=0.0)
    record["receipts"].append(receipt)
    _count(record)


def _other_best(entries):
    """The run remembers the model of another round as its best."""
    for content in _all(entries, "round")[1:]:
        content["models"]["best"] = _model(entries, 2)
    metrics = _record(entries, 2)["metrics"]
    _all(entries, "end")[0]["final"].update(
        model_sha256=_model(entries, 2), round=2, metrics=metrics
    )


def _last_for_best(entries):
    _all(entries, "end")[0]["final"].update(
        best=False,
        round=3,
        model_sha256=_model(entries, 3),
        metrics=_record(entries, 3)["metrics"],
    )


def _round_of_best(entries):
    _all(entries, "end")[0]["final"].update(round=2, metrics=_record(entries, 2)["metrics"])


def _delivers_last(entries):
    _last_for_best(entries)
    entries[0][1]["job"]["evaluation"]["deliver"] = "last"


def _averaged(entries):
    entries[0][1]["job"]["strategy"]["served_average"] = 0.5
    _from_served(entries)


def _device_of_nowhere(entries):
    record = _record(entries, 2)
    receipt = copy.deepcopy(record["receipts"][0])
    receipt.update(participant="z", status="dropped", reason="it left")
    record["receipts"].append(receipt)
    _count(record)
    record["cost"]["price"] += 1


FORGERIES = {
    "secure: nobody was accepted": (_nobody_accepted, "has accepted 0 devices"),
    "secure: nobody was accepted, without the sum": (
        lambda entries: (_nobody_accepted(entries), _without_sum(entries, 2)),
        "has accepted 0 devices",
    ),
    "robust: all groups were refused": (_nobody_accepted, "has accepted 0 devices"),
    "robust: nobody has begun what was signed": (
        _as_failed,
        "is in a signed sum of round 3 attempt 1, of which no receipt says that it has begun",
    ),
    "secure: nobody has begun what was signed": (
        _as_failed,
        "is in a signed sum of round 3 attempt 1, of which no receipt says that it has begun",
    ),
    "noise: a failed attempt, not charged": (
        lambda entries: (_uncharged(entries, 3), _as_failed(entries)),
        "round 3 attempt 1 asked devices without a charge",
    ),
    "noise: an attempt without an outcome, not charged": (
        lambda entries: (_uncharged(entries, 3), _without_outcome(entries)),
        "round 3 attempt 1 asked devices without a charge",
    ),
    "noise: a charge that is not added up": (
        lambda entries: _with_charge(entries, event=SAMPLED),
        "has the kind 'sampled-gaussian', and the unit of the charge is 'device'",
    ),
    "noise: a charge of examples that is another's": (
        lambda entries: _with_charge(entries, unit="example", adjacency="add-or-remove"),
        "has the kind 'zero-concentrated', and the unit of the charge is 'example'",
    ),
    "noise: a charge of examples": (
        lambda entries: _with_charge(
            entries, unit="example", adjacency="add-or-remove", event=SAMPLED
        ),
        "states epsilon 0.001, and its charges add up to",
    ),
    "gaussian: charges of another run": (
        _charged_by_another,
        "was charged by the run 'another', and its devices have signed a sum of this one",
    ),
    "noise: a round not charged": (
        lambda entries: (
            _uncharged(entries, 2),
            _nobody_in(_record(entries, 2)),
        ),
        "has accepted 0 devices",
    ),
    "secure: statistics of a datacenter that nobody asked": (
        _stranger,
        "'exchange.buffers' is 'recompute' in the job of the run",
    ),
    "scheduled: a kept model that never was one": (
        lambda entries: _from_kept(entries, planned=False),
        "as the model 'kept', and by its plan and the commits before it is none",
    ),
    "scheduled: a kept model that was another one": (
        lambda entries: _from_kept(entries, planned=True),
        f"as the model 'kept', and by its plan and the commits before it is {OTHER}",
    ),
    "scheduled: a served model that is not the current one": (
        _from_served,
        f"as the model 'served', and by its plan and the commits before it is {OTHER}",
    ),
    "secure: an average that the job does not serve": (
        _averaged,
        "'strategy.served_average' is 0.5 in the job of the run",
    ),
    "secure: a mean of models, which has no digest": (
        _from("current+initial"),
        "another start model than the last one, keeps models, or has groups or gradients, which "
        "the policy 'federated' never asks for",
    ),
    "scheduled: the first model again": (_from("initial"), "have signed another first model"),
    "scheduled: the mean of a model and itself": (
        _from("current+served"),
        f"and the run has {OTHER} in its place",
    ),
    "scheduled: an unknown model": (_from("another"), "has kept none of the name 'another'"),
    "secure: a model in no datacenter": (
        lambda entries: _in_datacenter(entries, with_one=False),
        "has its model only in a datacenter, and it was no round of one datacenter alone",
    ),
    "secure: a datacenter of the wrong policy": (
        lambda entries: _in_datacenter(entries, with_one=True),
        "has the regime 'hybrid', which the policy 'federated' never has",
    ),
    "scheduled: a model in a datacenter of a hybrid round": (
        lambda entries: _in_datacenter(entries, with_one=True),
        "has its model only in a datacenter, and it was no round of one datacenter alone",
    ),
    "scheduled: a hybrid round without a datacenter": (
        _moved_by_hybrid,
        "is 'hybrid', and its plan asked no datacenter",
    ),
    "scheduled: the start of a hybrid round": (
        lambda entries: _moved_by_hybrid(entries, "dc"),
        f"and the run has {OTHER} in its place",
    ),
    "scheduled: a datacenter in a federated round": (
        lambda entries: _plan(entries, 2).update(datacenters=["dc"]),
        "whom its plan has asked",
    ),
    "best: another one": (_other_best, "as the model 'best', and by its plan"),
    "best: the last one in its place": (_last_for_best, "and the job delivers the best"),
    "best: another round's": (_round_of_best, "and the best model is of round 1"),
    "best: delivered otherwise": (
        _delivers_last,
        "'evaluation.deliver' is 'best' in the job that devices have opened",
    ),
    "buffered: the start of a round": (
        lambda entries: (
            _commits(entries, 1, OTHER),
            _plan(entries, 2)["start"].update(sha256=OTHER),
        ),
        f"and the run has {OTHER} in its place",
    ),
    "buffered: a device that was never asked": (_device_of_nowhere, "whom its plan did not ask"),
}


@pytest.mark.parametrize("forgery", FORGERIES)
async def test_a_forged_round_is_found(recorded, forgery):
    forge, sentence = FORGERIES[forgery]
    entries = await recorded(forgery.partition(":")[0])
    check(io.BytesIO(closed(entries)))
    forge(entries)
    _all(entries, "end")[0]["entries"] = len(entries)
    with pytest.raises(Violation, match=re.escape(sentence)):
        check(io.BytesIO(closed(entries)))


async def test_what_is_said_of_the_final_model(recorded):
    best = " ".join(check(io.BytesIO(closed(await recorded("best")))).holds)
    assert "The final model is the best of those that were evaluated" in best
    assert "last committed one" not in best


async def test_figures_of_a_plain_round_have_any_names(recorded):
    """Those of a Flower app are what its clients call them, such as a mean of `examples`."""
    entries = await recorded("plain")
    for content in _all(entries, "round"):
        content["record"]["training"]["federated"].update(examples=0.5, unusable="nan")
    check(io.BytesIO(closed(entries)))


async def test_a_round_of_devices_that_is_shown_as_a_datacenters_is_said_to_be_unsigned(
    run_with_datacenter,
):
    store, coordinator, _ = await run_with_datacenter("rounds=4", "strategy.policy=alternate")
    await coordinator.run()
    entries = opened(b"".join(Transcript(store).lines()))
    assert "Whether 2 rounds of a datacenter alone were that" in _unknown(entries)
    _without_sum(entries, 1)
    first, second, *_ = _all(entries, "plan")
    second.update(decision=first["decision"], datacenters=first["datacenters"], invited=[], draw=0)
    of_datacenter = ("regime", "reason", "receipts", "participants", "cost", "training", "norms")
    _record(entries, 2).update({key: _record(entries, 1)[key] for key in of_datacenter})
    entries[-1][1]["entries"] -= 1
    assert "Whether 3 rounds of a datacenter alone were that" in _unknown(entries)


def _unknown(entries):
    return " ".join(check(io.BytesIO(closed(entries))).unknown)


async def test_a_served_average_is_the_servers_word(recorded):
    """Nothing tells the digest of an average, of which this is the only case."""
    entries = await recorded("average")
    for content in _all(entries, "round")[:2]:
        content["models"]["served"] = content["record"]["model_sha256"] = OTHER
    check(io.BytesIO(closed(entries)))


async def test_a_job_with_a_key_twice_is_refused_at_once(recorded):
    entries = await recorded("secure")
    keys = ",".join(f'"{number}":0' for number in range(200_000))
    entries[0][1]["opened"] = ["{" + keys + ',"7":0}']
    began = time.process_time()
    with pytest.raises(Violation, match="has '7' twice"):
        check(io.BytesIO(closed(entries)))
    assert time.process_time() - began < 20


async def test_a_budget_that_is_none_is_refused_at_once(recorded):
    """Before anything is computed by it: no epsilon is large enough for a delta below 0."""
    entries = await recorded("gaussian")
    job = entries[0][1]["job"]
    texts = [json.loads(text) for text in entries[0][1]["opened"]]
    for table in (job, *texts):
        table["privacy"]["delta"] = -0.01
    entries[0][1]["opened"] = [json.dumps(text) for text in texts]
    with pytest.raises(Violation, match=r"'privacy' of .* has a budget that is none"):
        check(io.BytesIO(closed(entries)))


OF_DEVICES = {
    "adjacency": "zero-out",
    "attempt": 1,
    "mechanism": "gaussian",
    "population": "devices",
    "run": "run",
    "unit": "device",
}


def test_a_line_of_the_ledger_has_one_form():
    charge = {"event": {"kind": "gaussian", "noise_multiplier": 1.0}, "round": 1, "what": "round"}
    charge = {**OF_DEVICES, **charge, "devices": ["a?"]}
    line = canonical({"charge": charge, "number": 1, "previous": "0" * 64}).decode()
    Charges("run").add(Fields({"line": line}, "an entry"))
    for other in "\ud800", "\u00e9":
        with pytest.raises(Violation, match="is not a JSON object in its canonical form"):
            Charges("run").add(Fields({"line": line.replace("?", other)}, "an entry"))


def test_what_a_large_fleet_has_spent_is_not_added_up_anew_for_each_round():
    charges = Charges("run")
    before = "0" * 64
    event = {"kind": "gaussian", "noise_multiplier": 1000.0}
    told = {**OF_DEVICES, "event": event}
    names = [f"{number:x}" for number in range(100_000)]
    for number in range(1, 2001):
        asked = names if number == 1 else names[number : number + 2]
        charge = {**told, "devices": asked, "round": number, "what": "round"}
        line = canonical({"charge": charge, "number": number, "previous": before})
        before = hashlib.sha256(line).hexdigest()
        charges.add(Fields({"line": line.decode()}, "an entry"))
    terms = Fields({"population": "devices", "delta": 1e-5}, "the job")
    began = time.process_time()
    spent = [charges.epsilon_at(number, terms) for number in range(1, 2001)]
    assert time.process_time() - began < 10
    assert spent == sorted(spent)
    assert spent[0] < spent[1] < spent[2] == spent[-1]


def test_a_charge_of_devices_names_some():
    """One that is everybody's changes what each of a fleet has spent, in a few bytes."""
    charge = {"event": {"kind": "gaussian", "noise_multiplier": 1.0}, "round": 1, "devices": []}
    charge = {**OF_DEVICES, **charge, "what": "comparison"}
    line = canonical({"charge": charge, "number": 1, "previous": "0" * 64}).decode()
    with pytest.raises(Violation, match="is for devices, and names none"):
        Charges("run").add(Fields({"line": line}, "an entry"))


async def test_a_deep_job_is_compared_in_one_walk(recorded):
    entries = await recorded("secure")
    deep = [0] * 300_000
    for _ in range(400):
        deep = {"a": deep}
    job = entries[0][1]["job"]
    job["task"]["settings"] = deep
    (text,) = entries[0][1]["opened"]
    opened_job = json.loads(text)
    opened_job["task"]["settings"] = deep
    entries[0][1]["opened"] = [json.dumps(opened_job)]
    began = time.process_time()
    # What the devices have signed is another job, which is found afterwards.
    with pytest.raises(Violation, match="had opened another job than this one"):
        check(io.BytesIO(closed(entries)))
    assert time.process_time() - began < 5


STARTS = {
    "initial": ((), [{}, {"start": "initial"}, {}]),
    "kept": ((), [{"keep": {"one": "current"}}, {}, {"start": "one", "keep": {"one": ""}}]),
    "best": ((BEST[0],), [{}, {"start": "best"}, {"start": "best"}]),
    "mean": ((), [{}, {"start": "current+initial"}, {}]),
    "mean of one": ((), [{}, {"start": "current+served"}, {}]),
    "served average": (
        ("strategy.served_average=0.5",),
        [{"keep": {"one": "served"}}, {"start": "served"}, {"start": "one"}],
    ),
    "after a datacenter": (
        (),
        [{}, {"regime": "datacenter"}, {"start": "served"}, {"regime": "datacenter"}, {}],
    ),
    "a datacenter first": (
        (),
        [{"regime": "datacenter"}, {}, {"regime": "datacenter"}, {"start": "initial"}],
    ),
    "hybrid": ((), [{"regime": "hybrid"}, TRANSFER, {"regime": "hybrid", "start": "initial"}]),
    "buffered, initial": (KINDS["buffered"], [{}, {"start": "initial"}, {}]),
    "buffered, kept": (
        KINDS["buffered"],
        [{"keep": {"one": "current"}}, {}, {"start": "one"}, {}],
    ),
    "buffered, gradients": (KINDS["buffered"], [{}, TRANSFER, TRANSFER, {}]),
}
UNKNOWN = {"mean": 1, "after a datacenter": 2, "a datacenter first": 1, "buffered, gradients": 2}
"""Rounds with sums of which the commits do not tell from which models the devices start."""


@pytest.mark.parametrize("kind", STARTS)
async def test_rounds_that_start_from_other_models_are_verified(
    run_with_datacenter, deployment, tmp_path, kind
):
    settings, plans = STARTS[kind]
    policy = write_policy(tmp_path, "starts", FOLLOWS_PLANS.format(plans=plans))
    store, coordinator, _ = await run_with_datacenter(policy, f"rounds={len(plans)}", *settings)
    await coordinator.run()
    verdict = check(io.BytesIO(b"".join(Transcript(store).lines())))
    unknown = [each for each in verdict.unknown if each.startswith("From which model")]
    count = UNKNOWN.get(kind, 0)
    assert [re.search(r"of (\d+) rounds", each)[1] for each in unknown] == [str(count)] * bool(
        count
    )
