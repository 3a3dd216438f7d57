"""What of a transcript is bound when all of its hashes are written anew, and what is not."""

import copy
import gzip
import io
import re

import pytest
from tests.server.read.transcript_fields import closed, opened, servers_word

from isthmus_server.read.transcript import Transcript
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.run_parts import RunParts
from isthmus_verify.check import check
from isthmus_verify.violation import Violation

PRIVATE = (
    "privacy.epsilon=50",
    "privacy.delta=0.01",
    "privacy.mechanism=distributed",
    "privacy.participations=4",  # an attempt fails, and is spent
)

SERVERS_WORD = (
    # Values of the job that are defaults, but for those on which checks depend.
    "run.job",
    # Charges before the first one of this run, as of a branch.
    "charge.charge.run",
    # How it was decided, besides regime, reason, start, kept models and groups.
    "plan.decision",
    # Figures, times and reasons.
    "failed.record.elapsed",
    "failed.record.epsilon",
    "failed.record.error",
    "failed.record.given_up",
    "failed.record.metrics",
    "failed.record.seconds",
    "failed.record.started_at",
    "failed.record.receipts.*.reason",
    "failed.record.receipts.*.examples",
    "failed.record.receipts.*.loss",
    "failed.record.receipts.*.steps",
    "round.optimizer",
    "round.record.comparisons",
    "round.record.cosine",
    "round.record.elapsed",
    "round.record.epsilon",
    "round.record.evaluation",
    "round.record.gradients",
    "round.record.groups",
    "round.record.metrics",
    "round.record.noise",
    "round.record.norms",
    "round.record.receipts.*.examples",
    "round.record.receipts.*.loss",
    "round.record.receipts.*.reason",
    "round.record.receipts.*.staleness",
    "round.record.receipts.*.steps",
    "round.record.seconds",
    "round.record.started_at",
    "round.record.training",
)
"""What the page about transcripts calls the server's word; whatever else is changed is found."""


@pytest.fixture
def recorded(deployment):
    """The transcript of a run of two rounds."""

    async def recorded(*overrides):
        await deployment.start()
        deployment.faults["a"][(2, 1)] = "the battery is empty"
        store = deployment.create_run("run", "rounds=2", *overrides)
        await Coordinator(RunParts.of(store, deployment.link)).run()
        return b"".join(Transcript(store).lines())

    return recorded


@pytest.mark.parametrize("overrides", [PRIVATE, ("federated.secure_aggregation=false",)])
async def test_each_field_is_bound_or_known_as_the_servers_word(recorded, overrides):
    data = await recorded(*overrides)
    unbound = servers_word(data)
    assert {name for name in unbound if not name.startswith(SERVERS_WORD)} == set()
    assert "round.record.metrics.*" in unbound, "what nothing binds is noticed by this test"


def _last(entries, kind):
    return [content for name, content in entries if name == kind][-1]


def _cheaper(entries):
    """Every charge, and what records state, is of a hundredth of the noise's cost."""
    for kind, content in entries:
        if kind == "charge" and "charge" in content:
            content["charge"]["event"]["rho"] /= 100
        if kind == "round":
            content["record"]["epsilon"] /= 100


def _to_others(entries):
    for kind, content in entries:
        if kind == "charge" and "charge" in content:
            content["charge"]["population"] = "others"


def _without_last_round(entries):
    """As if it never was, but that its devices have signed it."""
    entries[:] = [
        (kind, content)
        for kind, content in entries
        if content.get("record", content).get("round") != 2 or kind == "charge"
    ]
    final = entries[-1][1]
    final.update(status="running", final=None)


def _without_last_sum(entries):
    at = max(number for number, (kind, _) in enumerate(entries) if kind == "sum")
    del entries[at]


REWRITTEN = {
    "less was spent": (_cheaper, "and the noise that its devices have signed costs"),
    "another population was charged": (_to_others, "was charged to the population 'others'"),
    "a lower epsilon is stated": (
        lambda entries: _last(entries, "round")["record"].update(epsilon=0.01),
        "states epsilon 0.01, and its charges add up to",
    ),
    "no line of the ledger is remembered": (
        lambda entries: _last(entries, "round").update(ledger_head=""),
        "remembers line 0 of the privacy ledger, and an earlier commit line",
    ),
    "an unknown kind of charge": (
        lambda entries: entries[1][1]["charge"]["event"].update(kind="another"),
        "has the kind 'another'",
    ),
    "the last round left out": (_without_last_round, "of which the transcript has no plan"),
    "the last sum left out": (_without_last_sum, "has no signed sum, and an earlier round has one"),
    "no purpose": (
        lambda entries: _last(entries, "sum").update(purpose=""),
        "is not the one that the devices signed",
    ),
    "a job without privacy": (
        lambda entries: entries[0][1]["job"].update(privacy=None),
        "in the job",
    ),
    "a longer opened job": (
        lambda entries: entries[0][1]["job"]["federated"].update(mode="buffered"),
        "devices have opened the job without it, which means 'rounds'",
    ),
    "a regime that was not planned": (
        lambda entries: _last(entries, "round")["record"].update(reason="another"),
        "and was planned as 'federated' because",
    ),
    "the best model of none": (
        lambda entries: _last(entries, "end")["final"].update(best=True),
        "the final model is the best one, and the run has kept none",
    ),
    "better metrics at the end": (
        lambda entries: _last(entries, "end")["final"]["metrics"].update(accuracy=1.0),
        "the final model has other metrics than round 2",
    ),
    "a draw that nobody signed": (
        lambda entries: _last(entries, "plan").update(draw=7),
        "have signed the draw 0, and its plan has 7",
    ),
    "a cheaper round": (
        lambda entries: _last(entries, "round")["record"]["cost"].update(price=1.0),
        "has the price 1, and its devices and measurements 3",
    ),
}


async def test_what_is_rewritten_with_hashes_that_fit_is_found(recorded):
    data = await recorded(*PRIVATE)
    for rewrite, sentence in REWRITTEN.values():
        entries = copy.deepcopy(opened(data))
        rewrite(entries)
        entries[-1][1]["entries"] = len(entries)
        with pytest.raises(Violation, match=re.escape(sentence)):
            check(io.BytesIO(closed(entries)))
    entries = copy.deepcopy(opened(data))
    entries[0][1]["run"] = "another-run"
    verdict = check(io.BytesIO(closed(entries)))
    assert not any("sums of this run" in sentence for sentence in verdict.holds)
    assert any("sums of another run, 'table-" in sentence for sentence in verdict.unknown)


FORMS = {
    "a byte order mark": lambda data: b"\xef\xbb\xbf" + data,
    "other ends of lines": lambda data: data.replace(b"\n", b"\r\n"),
    "garbage at the end": lambda data: data + b"x",
    "an empty line": lambda data: data + b"\n",
    "no last end of a line": lambda data: data[:-1],
    "twice": lambda data: data + data,
    "an exponent": lambda data: re.sub(rb'"seconds":[\d.e-]+', b'"seconds":1e0', data, count=1),
    "a zero below zero": lambda data: data.replace(
        b'"datacenter_seconds":0.0', b'"datacenter_seconds":-0.0', 1
    ),
    "no number": lambda data: re.sub(rb'"seconds":[\d.e-]+', b'"seconds":NaN', data, count=1),
    "no finite number": lambda data: re.sub(rb'"seconds":[\d.e-]+', b'"seconds":1e999', data),
    "an escaped letter": lambda data: data.replace(b'"table"', b'"t\\u0061ble"', 1),
    "a key twice": lambda data: data.replace(b'{"content"', b'{"content":{},"content"', 1),
    "a space": lambda data: data.replace(b'{"content"', b'{ "content"', 1),
    "UTF-16": lambda data: data.decode().encode("utf-16"),
    "compressed": gzip.compress,
}


async def test_a_transcript_has_one_form(recorded):
    data = await recorded("federated.secure_aggregation=false")
    check(io.BytesIO(data))
    for form in FORMS.values():
        assert form(data) != data
        with pytest.raises(Violation):
            check(io.BytesIO(form(data)))
