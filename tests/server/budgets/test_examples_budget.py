"""Rounds of a datacenter whose examples are protected: what is charged, and when a run ends."""

import pytest
from tests.privacy.dp.charges import charge

from isthmus.errors import JobError, UserError
from isthmus.job import read_job
from isthmus_privacy.dp.accounting import Composition, SampledGaussian
from isthmus_privacy.dp.ledger import HEAD_FILE, LEDGER_FILE, Ledger, LedgerDamaged
from isthmus_server.budgets.populations import Populations
from isthmus_server.read.export.model_card import model_card
from isthmus_server.read.report.privacy.spending import read_spending
from isthmus_server.read.report.report import read_report
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.run_parts import RunParts
from isthmus_server.runs.local.session import LocalRun
from isthmus_server.storage.events import RoundPlanned
from isthmus_server.storage.recovery import verify

PRIVATE = (
    "strategy.policy=datacenter",
    "datacenter.zero_stage=0",
    "datacenter.batch_size=8",
    "datacenter.steps=5",
    "datacenter.privacy.delta=1e-4",
    "datacenter.privacy.examples=200",
    "datacenter.privacy.epsilon=30",
    "datacenter.privacy.noise=4",
)
STEPS = SampledGaussian(4.0, 0.04, 5)
DEVICES = ("privacy.mechanism=gaussian", "privacy.epsilon=5", "privacy.delta=1e-4")


def entries(path):
    return list(Ledger.read(path).entries.values())


async def test_every_round_is_charged_and_the_report_says_what_was_spent(run_with_datacenter):
    store, coordinator, datacenter = await run_with_datacenter(*PRIVATE)
    await coordinator.run()
    charged = entries(store.directory / LEDGER_FILE)
    assert [(each.charge.event, each.outcome) for each in charged] == [(STEPS, "committed")] * 3
    assert {(each.charge.unit, each.charge.adjacency) for each in charged} == {
        ("example", "add-or-remove")
    }
    expected = Composition().plus(STEPS, 3).epsilon(1e-4)
    report = read_report(store)
    assert report.privacy is None
    assert report.examples_privacy.epsilon == expected
    sentence = report.examples_privacy.sentence
    assert sentence.endswith(
        "at delta 0.0001 for one example of the datacenter (add-or-remove), spent in 15 steps"
    )
    assert sentence in model_card(report, store.job, report.final, "model.safetensors", "00")
    spending = read_spending(store.directory)
    assert spending.to_json()["examples"]["epsilon"] == expected
    assert spending.lines()[1:] == [
        sentence,
        *(f"training {n} attempt 1: 5 steps of a datacenter, dp-sgd, committed" for n in (1, 2, 3)),
    ]
    with pytest.raises(UserError, match=r"is a run without \[privacy\], .* leave out --devices$"):
        read_spending(store.directory, of_each=True)
    assert "privacy ledger: 6 lines" in {finding.checked for finding in verify(store.directory)}
    opened = next(each.open for each in datacenter.requests if each.HasField("open"))
    assert read_job(opened.job).datacenter.privacy.noise == 4


async def test_the_noise_is_found_and_sent_to_the_datacenter(run_with_datacenter):
    keys = PRIVATE[:-2]
    store, coordinator, datacenter = await run_with_datacenter(
        *keys, "datacenter.privacy.epsilon=2", "rounds=2"
    )
    await coordinator.run()
    opened = next(each.open for each in datacenter.requests if each.HasField("open"))
    noise = read_job(opened.job).datacenter.privacy.noise
    assert {each.charge.event for each in entries(store.directory / LEDGER_FILE)} == {
        SampledGaussian(noise, 0.04, 5)
    }
    assert 1.9 < read_report(store).examples_privacy.epsilon <= 2


async def test_the_run_ends_before_a_round_that_would_overspend(run_with_datacenter):
    budget = Composition().plus(STEPS, 2).epsilon(1e-4)
    store, coordinator, _ = await run_with_datacenter(
        *PRIVATE, f"datacenter.privacy.epsilon={budget}"
    )
    await coordinator.run()
    report = read_report(store)
    assert (report.status, len(report.rounds)) == ("finished", 2)
    assert f"examples is used up: epsilon {budget:.4g} of {budget:.4g}" in report.reason
    assert "5 more steps would make it" in report.reason


async def test_devices_and_examples_are_charged_apart(run_with_datacenter):
    keys = ("strategy.policy=hybrid", "federated.secure_aggregation=false", "rounds=1")
    store, coordinator, _ = await run_with_datacenter(*PRIVATE, *DEVICES, *keys)
    await coordinator.run()
    path = store.directory / LEDGER_FILE
    assert [each.charge.unit for each in entries(path)] == ["device", "example"]
    report = read_report(store)
    ledger = Ledger.read(path)
    assert report.privacy.epsilon == ledger.epsilon("devices", 1e-4)
    assert report.examples_privacy.epsilon == ledger.epsilon("datacenter", 1e-4)


async def test_both_are_added_up_only_if_the_job_says_that_people_overlap(run_with_datacenter):
    keys = ("strategy.policy=hybrid", "federated.secure_aggregation=false", "rounds=1")
    overlap = "datacenter.privacy.overlap=true"
    store, coordinator, _ = await run_with_datacenter(*PRIVATE, *DEVICES, *keys, overlap)
    await coordinator.run()
    charged = [each.charge.event for each in entries(store.directory / LEDGER_FILE)]
    assert len(charged) == 2
    both = Composition().plus(charged[0]).plus(charged[1])
    spent = read_report(store).examples_privacy
    assert (spent.together, spent.together_delta) == (both.epsilon(1e-4), 1e-4)
    assert max(spent.epsilon, read_report(store).privacy.epsilon) < spent.together
    assert "for somebody with a device and one example" in read_spending(store.directory).lines()[1]


async def test_a_crash_never_loses_a_charge(run_with_datacenter, deployment):
    _, coordinator, _ = await run_with_datacenter(*PRIVATE, "rounds=2")
    again = await deployment.run_until_killed(coordinator, RoundPlanned, 2)
    assert [each.outcome for each in entries(again.directory / LEDGER_FILE)] == [
        "committed",
        "failed",
    ]
    await Coordinator(RunParts.of(again, deployment.link)).run()
    assert len(entries(again.directory / LEDGER_FILE)) == 3
    assert read_report(again).examples_privacy.steps == 15


async def test_charges_after_the_last_commit_cannot_be_cut(run_with_datacenter, deployment):
    """Its last line is in a file, and without that the run's log knows who was asked."""
    _, coordinator, _ = await run_with_datacenter(*PRIVATE, "rounds=2")
    again = await deployment.run_until_killed(coordinator, RoundPlanned, 2)
    path = again.directory / LEDGER_FILE
    lines = path.read_bytes().splitlines(keepends=True)
    (cut,) = [number for number, line in enumerate(lines) if b'"round":2' in line]
    path.write_bytes(b"".join(lines[:cut]))
    with pytest.raises(LedgerDamaged, match="the last ones were removed"):
        Coordinator(RunParts.of(again, deployment.link))
    (again.directory / HEAD_FILE).unlink()
    with pytest.raises(LedgerDamaged, match="no charge for round 2 attempt 1, whose datacenter"):
        Coordinator(RunParts.of(again, deployment.link))


async def test_runs_of_a_server_share_the_budget_of_a_population(
    run_with_datacenter, deployment, tmp_path
):
    _, coordinator, _ = await run_with_datacenter(*PRIVATE, "rounds=1")
    await coordinator.run()
    populations = Populations(tmp_path / "privacy")
    with populations.ledger("datacenter") as ledger:
        other = {"population": "datacenter", "unit": "example", "run": "another"}
        ledger.reserve(charge((), event=STEPS, **other))
    budget = Composition().plus(STEPS, 2).epsilon(1e-4)
    keys = ("datacenter.ranks=1", "federated.clients=3", f"datacenter.privacy.epsilon={budget}")
    store = deployment.create_run("second", *PRIVATE, *keys)
    await Coordinator(RunParts.of(store, deployment.link, populations=populations)).run()
    assert len(read_report(store).rounds) == 1
    assert "examples is used up" in read_report(store).reason


async def test_a_budget_that_no_noise_meets_is_refused(run_with_datacenter):
    keys = ("datacenter.privacy.epsilon=1e-9", "datacenter.batch_size=200")
    with pytest.raises(UserError, match=r"epsilon=1e-09 .* would need noise of more than 10000"):
        await run_with_datacenter(*PRIVATE[:-1], *keys)


async def test_noise_with_which_one_step_overspends_is_refused_before_there_is_a_run(
    make_job, tmp_path
):
    too_little = ("datacenter.privacy.noise=0.5", "datacenter.privacy.epsilon=1")
    job = make_job(*PRIVATE, "datacenter.ranks=1", *too_little)
    with pytest.raises(JobError, match=r"^datacenter\.privacy\.noise=0\.5 is too little: a single"):
        LocalRun.new(job, tmp_path, tmp_path / "run")
    assert not (tmp_path / "run").exists()


async def test_a_population_of_devices_is_none_of_examples(deployment, tmp_path):
    """Their epsilons would be added up, and the budget of one be spent by the other."""
    await deployment.start()
    populations = Populations(tmp_path / "populations")
    with populations.ledger("clinic") as shared:
        shared.reserve(charge(("a", "b"), run="another", population="clinic"))
    settings = ("datacenter.ranks=1", "datacenter.privacy.population=clinic")
    store = deployment.create_run("run", *PRIVATE, *settings)
    sentence = "other runs protect each device of the population 'clinic', and this job each exam"
    with pytest.raises(UserError, match=sentence):
        RunParts.of(store, deployment.link, populations=populations)
