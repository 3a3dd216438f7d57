"""Rounds with differential privacy: what is charged, whom the server asks, and when a run ends."""

import asyncio
import contextlib
import dataclasses
import hashlib
import itertools
import math
import shutil
from types import SimpleNamespace

import pytest
from tests.privacy.dp.charges import charge
from tests.server.budgets.epsilons import found_on_the_loop
from tests.server.rounds.results import LAYOUT

from isthmus.errors import ParticipantsMissing, UserError
from isthmus_privacy.dp.accounting import Composition, ZeroConcentrated
from isthmus_privacy.dp.ledger import HEAD_FILE, LEDGER_FILE, Ledger, LedgerDamaged, LedgerHead
from isthmus_server.budgets.budget import PrivacyBudget
from isthmus_server.budgets.populations import Populations
from isthmus_server.budgets.run_ledgers import RunLedgers
from isthmus_server.read.report.privacy.spending import read_spending
from isthmus_server.read.report.report import read_report
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.run_parts import RunParts
from isthmus_server.runs.operations.run_copies import branch_run
from isthmus_server.storage.events import RoundCommitted, RoundPlanned, WaitingForParticipants
from isthmus_server.storage.recovery import verify
from isthmus_server.storage.store import Store

DISTRIBUTED = ("privacy.mechanism=distributed", "privacy.epsilon=5", "privacy.delta=0.01")
GAUSSIAN = ("privacy.mechanism=gaussian", *DISTRIBUTED[1:])
PLAIN = "federated.secure_aggregation=false"


def charges(store):
    return list(Ledger.read(store.directory / LEDGER_FILE).entries.values())


@pytest.mark.parametrize("mechanism", ["distributed", "gaussian", "correlated"])
async def test_every_round_is_charged_and_the_report_says_what_was_spent(deployment, mechanism):
    await deployment.start()
    store = deployment.create_run("run", *DISTRIBUTED, f"privacy.mechanism={mechanism}")
    await Coordinator(RunParts.of(store, deployment.link)).run()
    report = read_report(store)
    assert [entry.outcome for entry in charges(store)] == ["committed"] * 3
    assert {entry.charge.devices for entry in charges(store)} == {("a", "b", "c")}
    spent = [record.epsilon for record in report.rounds]
    assert spent == sorted(spent)
    assert report.privacy.epsilon == spent[-1] <= 5
    assert spent[-1] == pytest.approx(5, rel=0.02)
    assert report.privacy.sentence.startswith("epsilon ")
    assert "of 5 at delta 0.01 for one device (zero-out)" in report.privacy.sentence
    # No loss of devices: it would be a figure without noise.
    assert all("loss" not in record.training["federated"] for record in report.rounds)
    spending = read_spending(store.directory)
    assert (spending.epsilon, spending.most_asked) == (spent[-1], 3)
    assert spending.by_device is None
    each = read_spending(store.directory, of_each=True).to_json()["by_device"]
    alike = {"asked": 3, "epsilon": spent[-1], "shared": None}
    assert each == [{"device": name, **alike} for name in "abc"]
    (*_, last) = read_spending(store.directory, of_each=True).lines()
    assert last == f"c: epsilon {spent[-1]:.4g}, asked 3 times"


@pytest.mark.parametrize("measured", [(), ("evaluation.devices=3", "evaluation.quorum=3")])
async def test_no_epsilon_is_found_on_the_event_loop(deployment, monkeypatch, measured):
    """It takes seconds, in which all links of the server would stand still."""
    await deployment.start(
        "def validation_data(self, participant):\n"
        "    return rows(20, seed=2)\n"
        "def device_metrics(self):\n"
        "    return {'loss': isthmus.Mean(0, 5)}"
    )
    store = deployment.create_run("run", *GAUSSIAN, PLAIN, *measured)
    coordinator = Coordinator(RunParts.of(store, deployment.link))
    on_the_loop = found_on_the_loop(monkeypatch)
    await coordinator.run()
    assert len(read_report(store).rounds) == 3
    assert on_the_loop == []


async def test_nor_of_devices_that_join_while_the_run_waits_for_them(deployment, monkeypatch):
    await deployment.start(names=())
    store = deployment.create_run("run", *GAUSSIAN, PLAIN, "rounds=1")
    coordinator = Coordinator(RunParts.of(store, deployment.link))
    on_the_loop = found_on_the_loop(monkeypatch)
    waits = asyncio.Event()

    def note(event):
        if isinstance(event, WaitingForParticipants):
            waits.set()

    coordinator.events.subscribe(note)
    running = asyncio.create_task(coordinator.run())
    await waits.wait()
    for name in "abc":
        deployment.network.dial(deployment.device(name), name)
    await running
    assert on_the_loop == []


async def test_a_run_whose_devices_have_no_budget_left_ends_before_its_first_round(
    deployment, tmp_path
):
    """As one does later: they would never be ready, however often a server tried it again."""
    await deployment.start(names=())
    populations = Populations(tmp_path / "privacy")
    with populations.ledger("devices") as ledger:
        ledger.reserve(charge("abc", run="another", mechanism="gaussian", rho=100.0))
    store = deployment.create_run("run", *GAUSSIAN, PLAIN, "time.join_seconds=2")
    coordinator = Coordinator(RunParts.of(store, deployment.link, populations=populations))
    waits = asyncio.Event()
    coordinator.events.subscribe(
        lambda event: waits.set() if isinstance(event, WaitingForParticipants) else None
    )
    running = asyncio.create_task(coordinator.run())
    await waits.wait()
    for name in "abc":
        deployment.network.dial(deployment.device(name), name)
    await running
    report = read_report(store)
    assert report.rounds == []
    assert report.reason.startswith("0 devices may be invited and the quorum is ")
    assert "or have no privacy budget left: epsilon " in report.reason
    assert report.reason.endswith(" is spent for good")


ONCE = (*GAUSSIAN, PLAIN, "rounds=2", "federated.clients=0", "privacy.participations=1")
"""Each device takes part in one of two rounds."""


async def test_a_run_waits_for_devices_with_budget_that_have_joined_and_are_away(
    deployment, monkeypatch
):
    """It would end for good, whose second half of the devices was disconnected for a moment."""
    await deployment.start()
    monkeypatch.setattr(deployment.link.enrolments, "clients", lambda: iter("abcdef"))
    store = deployment.create_run("run", *ONCE)
    coordinator = Coordinator(RunParts.of(store, deployment.link))

    def come(event):
        if isinstance(event, WaitingForParticipants) and coordinator.state.round == 1:
            for name in {*"def"} - deployment.link.peers.keys():
                deployment.network.dial(deployment.device(name), name)

    coordinator.events.subscribe(come)
    await coordinator.run()
    asked = [entry.charge.devices for entry in charges(store)]
    assert asked == [("a", "b", "c"), ("d", "e", "f")]


@pytest.mark.parametrize(("joined", "ends"), [("abcdef", False), ("abcde", True)])
async def test_a_run_is_paused_only_for_devices_that_can_make_a_quorum(
    deployment, monkeypatch, timeouts, joined, ends
):
    await deployment.start()
    monkeypatch.setattr(deployment.link.enrolments, "clients", lambda: iter(joined))
    store = deployment.create_run("run", *ONCE, "time.join_seconds=77")
    coordinator = Coordinator(RunParts.of(store, deployment.link))

    def pass_time(event):
        if isinstance(event, WaitingForParticipants) and coordinator.state.round == 1:
            asyncio.get_running_loop().call_soon(timeouts.advance, 77)

    coordinator.events.subscribe(pass_time)
    running = coordinator.run()
    if ends:
        await running
        assert "or have no privacy budget left: epsilon " in read_report(store).reason
        return
    sentence = r"ready: 0, while 3 may not be invited now \(3 of them never again: their privacy "
    with pytest.raises(ParticipantsMissing, match=sentence):
        await running
    assert read_report(store).reason


@pytest.mark.parametrize("policy", ["datacenter", "alternate"])
async def test_a_run_that_begins_with_the_datacenter_has_a_transcript_that_holds(
    run_with_datacenter, policy
):
    """Its first commit remembers the ledger without a line; the deployment checks transcripts."""
    settings = (*GAUSSIAN, PLAIN, f"strategy.policy={policy}", "federated.clients=3")
    store, coordinator, _ = await run_with_datacenter(*settings)
    await coordinator.run()
    assert len(read_report(store).rounds) == 3


@pytest.mark.parametrize("aggregation", [(), (PLAIN,)])
async def test_updates_are_clipped_and_count_the_same_and_the_server_adds_the_noise(
    deployment, aggregation
):
    """Without noise to speak of, the mean has the norm of the bound, in plain sums as well."""
    await deployment.start(
        "def local_data(self, participant):\n"
        "    return rows(5 if participant.name == 'a' else 50, seed=1)\n"
        "def optimizer(self, parameters, participant):\n"
        "    return torch.optim.SGD(parameters, lr=100.0)"
    )
    quiet = ("privacy.clip=0.01", "privacy.noise=1e-6", "privacy.epsilon=1e15", "rounds=1")
    store = deployment.create_run("quiet", *GAUSSIAN, *quiet, *aggregation)
    await Coordinator(RunParts.of(store, deployment.link)).run()
    (record,) = read_report(store).rounds
    assert 0.005 < record.norms["federated"] <= 0.01
    loud = ("privacy.clip=0.01", "privacy.noise=50", "rounds=4")
    store = deployment.create_run("loud", *GAUSSIAN, *loud, *aggregation, "seed=1")
    await Coordinator(RunParts.of(store, deployment.link)).run()
    squares = [record.norms["federated"] ** 2 for record in read_report(store).rounds]
    expected = 4 * (50 * 0.01 / 3) ** 2 * LAYOUT.size
    # Chi-square of 60 numbers: outside of these bounds once in 10^8 runs.
    assert len(squares) == 4
    assert 0.25 * expected < sum(squares) < 2.5 * expected


async def test_the_clipping_bound_follows_the_updates_and_survives_a_crash(deployment):
    """All updates are longer than the first bound, so that it grows by the same factor."""
    await deployment.start(
        "def optimizer(self, parameters, participant):\n"
        "    return torch.optim.SGD(parameters, lr=100.0)"
    )
    quiet = ("privacy.clip=0.01", "privacy.noise=1e-6", "privacy.epsilon=1e15", "rounds=4")
    store = deployment.create_run("run", *GAUSSIAN, *quiet, "privacy.clip_quantile=0.5")
    coordinator = Coordinator(RunParts.of(store, deployment.link))
    again = await deployment.run_until_killed(coordinator, RoundPlanned, 3)
    await Coordinator(RunParts.of(again, deployment.link)).run()
    report = read_report(again)
    expected = [0.01 * math.exp(0.1 * number) for number in range(4)]
    figures = [record.training["federated"] for record in report.rounds]
    assert [each["clip"] for each in figures] == pytest.approx(expected, rel=1e-4)
    assert [record.norms["federated"] for record in report.rounds] == pytest.approx(
        expected, rel=0.5
    )
    # How many devices were within the bound is a figure without noise.
    assert not any("within_clip" in each for each in figures)


async def test_the_run_ends_before_a_device_is_asked_for_more_than_its_budget(deployment):
    await deployment.start()
    noise = ("privacy.noise=1.0", "privacy.epsilon=9")
    store = deployment.create_run("run", *DISTRIBUTED, *noise, "rounds=50")
    await Coordinator(RunParts.of(store, deployment.link)).run()
    report = read_report(store)
    assert report.status == "finished"
    assert "have no privacy budget left" in report.reason
    assert report.privacy.epsilon <= 9
    rounds = len(report.rounds)
    assert 1 < rounds < 50
    event = charges(store)[0].charge.event
    ledger = Ledger.read(store.directory / LEDGER_FILE)
    one_more = ledger.spent_by("devices", "a").plus(event)
    assert one_more.epsilon(0.01) > 9


async def test_failed_attempts_are_spent(deployment):
    """The devices were asked, and the sum may have been opened."""
    await deployment.start()
    deployment.faults["b"][1, 1] = "the battery is empty"
    store = deployment.create_run("run", *DISTRIBUTED, "rounds=2", "privacy.participations=3")
    await Coordinator(RunParts.of(store, deployment.link)).run()
    assert [entry.outcome for entry in charges(store)] == ["failed", "committed", "committed"]
    report = read_report(store)
    assert report.failed_attempts[0].epsilon < report.rounds[0].epsilon


@pytest.mark.parametrize(("kind", "round_"), [(RoundPlanned, 2), (RoundCommitted, 2)])
async def test_a_crash_never_loses_a_charge(deployment, kind, round_):
    await deployment.start()
    store = deployment.create_run("run", *DISTRIBUTED, "privacy.noise=3", "rounds=3")
    again = await deployment.run_until_killed(
        Coordinator(RunParts.of(store, deployment.link)), kind, round_
    )
    before = charges(again)
    await Coordinator(RunParts.of(again, deployment.link)).run()
    entries = charges(again)
    assert len(before) == 2
    # An attempt that a crash has cut short is spent, and its repetition is charged again.
    assert len(entries) == (4 if kind is RoundPlanned else 3)
    assert [entry.charge for entry in entries[:2]] == [entry.charge for entry in before]


async def test_a_ledger_that_was_cut_or_edited_ends_the_run_before_anybody_is_asked(deployment):
    await deployment.start()
    store = deployment.create_run("run", *DISTRIBUTED, "privacy.noise=3", "rounds=3")
    again = await deployment.run_until_killed(
        Coordinator(RunParts.of(store, deployment.link)), RoundCommitted, 2
    )
    path = store.directory / LEDGER_FILE
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:1]))
    with pytest.raises(LedgerDamaged, match="the last ones were removed"):
        Coordinator(RunParts.of(again, deployment.link))
    path.write_bytes(b"".join(lines).replace(b'"rho":', b'"rho":0'))
    with pytest.raises(LedgerDamaged, match=r"line 1 of the privacy ledger .*, was changed"):
        Coordinator(RunParts.of(again, deployment.link))
    path.unlink()
    with pytest.raises(UserError, match="the last ones were removed"):
        Coordinator(RunParts.of(again, deployment.link))


async def test_charges_after_the_last_commit_cannot_be_cut_either(deployment):
    """Nothing is committed, so that the run's state knows no line; its log knows who was asked."""
    deployment.honest = False  # the run stays as it is without its ledger
    await deployment.start()
    deployment.faults["b"][1, 1] = "the battery is empty"
    store = deployment.create_run("run", *DISTRIBUTED, "privacy.noise=3", "rounds=2")
    again = await deployment.run_until_killed(
        Coordinator(RunParts.of(store, deployment.link)), RoundPlanned, 1
    )
    assert len(charges(store)) == 1
    (store.directory / LEDGER_FILE).write_bytes(b"")
    with pytest.raises(LedgerDamaged, match="the last ones were removed"):
        Coordinator(RunParts.of(again, deployment.link))
    (again.directory / HEAD_FILE).unlink()
    with pytest.raises(LedgerDamaged, match="no charge for round 1 attempt 1, whose devices"):
        Coordinator(RunParts.of(again, deployment.link))


async def test_an_older_copy_of_a_run_is_not_continued(deployment, tmp_path):
    """Both would add the same correlated noise to sums of other updates, and be charged once."""
    await deployment.start()
    populations = Populations(tmp_path / "populations")
    correlated = (*DISTRIBUTED, "privacy.mechanism=correlated", "rounds=3")
    store = deployment.create_run("run", *correlated)
    again = await deployment.run_until_killed(
        Coordinator(RunParts.of(store, deployment.link, populations=populations)), RoundCommitted, 1
    )
    copy = tmp_path / "copy"
    shutil.copytree(store.directory, copy)
    await Coordinator(RunParts.of(again, deployment.link, populations=populations)).run()
    refused = pytest.raises(LedgerDamaged, match="the run's directory is an older copy")
    with contextlib.closing(Store.open(copy)) as older, refused:
        Coordinator(RunParts.of(older, deployment.link, populations=populations))


async def test_a_branch_of_a_run_has_its_charges_and_noise_of_its_own(deployment, tmp_path):
    await deployment.start()
    correlated = (*DISTRIBUTED, "privacy.mechanism=correlated", "privacy.noise=20", "rounds=3")
    store = deployment.create_run("run", *correlated)
    again = await deployment.run_until_killed(
        Coordinator(RunParts.of(store, deployment.link)), RoundCommitted, 1
    )
    key = (store.directory / "privacy.key").read_bytes()
    before = charges(again)
    branch_run(again.directory, tmp_path / "branch")
    assert not (tmp_path / "branch/privacy.key").exists()
    with contextlib.closing(Store.open_to_continue(tmp_path / "branch")) as branch:
        await Coordinator(RunParts.of(branch, deployment.link)).run()
        assert branch.last_round() == 3
        entries = charges(branch)
    assert (tmp_path / "branch/privacy.key").read_bytes() != key
    assert entries[:1] == before
    assert [entry.charge.run for entry in entries] == [store.run_id, *[branch.run_id] * 2]
    whole = Ledger.read(tmp_path / "branch" / LEDGER_FILE)
    own = Ledger.read(store.directory / LEDGER_FILE)
    assert whole.epsilon("devices", 0.01) > own.epsilon("devices", 0.01)


async def test_an_older_ledger_of_the_population_is_not_continued(deployment, tmp_path):
    """Both of its files are there, or neither; the run has charges that it lacks."""
    await deployment.start()
    directory, older = tmp_path / "populations", tmp_path / "older"
    populations = Populations(directory)
    store = deployment.create_run("run", *DISTRIBUTED, "privacy.noise=3", "rounds=3")
    coordinator = Coordinator(RunParts.of(store, deployment.link, populations=populations))
    again = await deployment.run_until_killed(coordinator, RoundCommitted, 1)
    shutil.copytree(directory, older)
    coordinator = Coordinator(RunParts.of(again, deployment.link, populations=populations))
    again = await deployment.run_until_killed(coordinator, RoundCommitted, 2)
    refused = pytest.raises(LedgerDamaged, match=r"older/devices.ledger has no charge for round 2")
    with refused:
        Coordinator(RunParts.of(again, deployment.link, populations=Populations(older)))
    lost = pytest.raises(LedgerDamaged, match=r"lost/devices.ledger has no charge for round 1")
    with lost:
        Coordinator(RunParts.of(again, deployment.link, populations=Populations(tmp_path / "lost")))


async def test_a_charge_between_both_ledgers_survives_a_crash(deployment, tmp_path):
    """The run's ledger has it and that of the population not yet: nobody was asked."""
    await deployment.start()
    store = deployment.create_run("run", *DISTRIBUTED, "privacy.noise=3", "rounds=1")
    with Ledger.open(store.directory / LEDGER_FILE) as own:
        event = ZeroConcentrated(1 / 18)
        own.reserve(charge(("a", "b", "c"), event=event, run=store.run_id))
    populations = Populations(tmp_path / "populations")
    await Coordinator(RunParts.of(store, deployment.link, populations=populations)).run()
    shared = Ledger.read(tmp_path / "populations/devices.ledger")
    assert [each.charge for each in shared.entries.values()] == [
        each.charge for each in charges(store)
    ]
    assert len(charges(store)) == 2


async def test_a_job_whose_devices_were_charged_by_another_meanwhile_asks_nobody(
    deployment, tmp_path
):
    """Between the choice of a cohort and its charge, another job of the server may charge it."""
    await deployment.start()
    populations = Populations(tmp_path / "populations")
    store = deployment.create_run("run", *GAUSSIAN, "privacy.epsilon=6", "rounds=1", "attempts=1")
    coordinator = Coordinator(RunParts.of(store, deployment.link, populations=populations))
    event = coordinator.parts.budgets.devices.plan.event(store.run_id)

    def charge_meanwhile(spec):
        with populations.ledger("devices") as ledger:
            ledger.reserve(charge(("b",), event=event, run="another"))
        return charged(spec)

    charged = coordinator.parts.budgets.devices.charged
    coordinator.parts.budgets.devices.charged = charge_meanwhile
    with pytest.raises(UserError, match=r"1 devices of the round have no privacy budget left"):
        await coordinator.run()
    shared = Ledger.read(tmp_path / "populations/devices.ledger")
    assert [entry.charge.run for entry in shared.entries.values()] == ["another"]


async def test_runs_of_one_population_share_a_budget(deployment, tmp_path):
    await deployment.start()
    populations = Populations(tmp_path / "populations")
    reports = []
    for name, seed in (("one", 1), ("two", 2)):
        overrides = ("privacy.noise=1.0", "privacy.epsilon=6", "rounds=4", f"seed={seed}")
        store = deployment.create_run(name, *GAUSSIAN, *overrides)
        await Coordinator(RunParts.of(store, deployment.link, populations=populations)).run()
        reports.append(read_report(store))
    first, second = reports
    assert len(first.rounds) > len(second.rounds)
    assert "have no privacy budget left" in second.reason
    shared = Ledger.read(tmp_path / "populations/devices.ledger")
    assert len(shared.entries) == len(first.rounds) + len(second.rounds)
    assert shared.epsilon("devices", 0.01) <= 6


async def test_correlated_noise_keeps_its_separation_and_needs_its_key(deployment):
    await deployment.start(names=("a", "b", "c", "d", "e", "f"))
    overrides = (*DISTRIBUTED, "privacy.mechanism=correlated", "privacy.separation=2", "rounds=4")
    store = deployment.create_run("run", *overrides, "federated.clients=6")
    again = await deployment.run_until_killed(
        Coordinator(RunParts.of(store, deployment.link)), RoundCommitted, 2
    )
    key = again.directory / "privacy.key"
    assert key.stat().st_mode & 0o777 == 0o600
    secret = key.read_bytes()
    key.unlink()
    with pytest.raises(UserError, match=r"privacy\.key is missing"):
        Coordinator(RunParts.of(again, deployment.link))
    key.write_bytes(secret)
    await Coordinator(RunParts.of(again, deployment.link)).run()
    cohorts = [set(entry.charge.devices) for entry in charges(again)]
    assert all(not one & other for one, other in itertools.pairwise(cohorts))


async def test_the_noise_of_each_attempt_is_another(deployment):
    """Two runs that are equal but for the noise end with different models."""
    await deployment.start()
    models = []
    for name in ("one", "two"):
        _, final = await deployment.run(name, *GAUSSIAN, "rounds=1")
        models.append(final.model_sha256)
    assert models[0] != models[1]


async def test_devices_refuse_a_sum_without_the_noise_that_the_job_promises(
    deployment,
):
    await deployment.start()
    store = deployment.create_run("run", *DISTRIBUTED, "rounds=1", "attempts=1")
    coordinator = Coordinator(RunParts.of(store, deployment.link))
    plan = coordinator.parts.budgets.devices.plan
    coordinator.parts.budgets.devices.plan = dataclasses.replace(
        plan, multiplier=plan.multiplier / 2
    )
    with pytest.raises(UserError, match=r"round 1 failed"):
        await coordinator.run()
    (failed,) = read_report(store).failed_attempts
    assert any("was opened with noise of" in receipt.reason for receipt in failed.receipts)
    assert "accepted" not in {receipt.status for receipt in failed.receipts}


async def test_plain_rounds_have_no_loss_of_a_device_either(deployment):
    await deployment.start()
    store = deployment.create_run("run", *GAUSSIAN, PLAIN, "rounds=1")
    await Coordinator(RunParts.of(store, deployment.link)).run()
    (record,) = read_report(store).rounds
    assert {receipt.loss for receipt in record.receipts} == {None}
    assert record.training == {"federated": {}}


async def test_a_delta_that_would_publish_a_device_is_refused_before_anybody_is_asked(deployment):
    """A job with such a cohort is no job, but a policy may plan a larger one."""
    await deployment.start()
    overrides = ("privacy.delta=0.3", "federated.clients=0", "rounds=1")
    store = deployment.create_run("run", *DISTRIBUTED, *overrides)
    with Ledger.open(store.directory / LEDGER_FILE) as own:
        ledgers = RunLedgers(store.run_id, "devices", own)
        budget = PrivacyBudget(store.job, store.job.privacy, ledgers, store.directory)
        larger = SimpleNamespace(cohort=["a", "b", "c", "d"], round=1, attempt=1)
        with (
            pytest.raises(UserError, match=r"privacy\.delta=0\.3 is not below 1 / 4 devices"),
            budget.charged(larger),
        ):
            pytest.fail("nobody may be asked")
    assert charges(store) == []


async def test_a_damaged_ledger_is_found_by_the_check_of_a_run(deployment):
    await deployment.start()
    store = deployment.create_run("run", *DISTRIBUTED, "rounds=1")
    await Coordinator(RunParts.of(store, deployment.link)).run()
    assert "privacy ledger: 2 lines" in [found.checked for found in verify(store.directory)]
    path = store.directory / LEDGER_FILE
    path.write_bytes(path.read_bytes().replace(b'"a"', b'"x"'))
    damage = "".join(found.damage for found in verify(store.directory))
    assert "of the privacy ledger" in damage


async def test_a_device_says_what_its_sums_imply(deployment, caplog):
    """In its own log: every device counts for itself."""
    caplog.set_level("INFO", "isthmus_clients.training.secure")
    await deployment.start()
    store = deployment.create_run("run", *DISTRIBUTED, "privacy.noise=4", "rounds=2")
    await Coordinator(RunParts.of(store, deployment.link)).run()
    said = [each for each in caplog.messages if each.startswith("secure sum 2 of this device")]
    assert len(said) == 3
    epsilon = Composition().plus(ZeroConcentrated(1 / 32), 2).epsilon(1e-6)
    assert f"an epsilon of {epsilon:.3f}"[:-1] in said[0]


def test_a_population_whose_ledger_was_cut_or_lost_is_asked_for_nothing(tmp_path):
    """A new job would begin with nothing spent."""
    populations = Populations(tmp_path)
    with populations.ledger("devices") as ledger:
        ledger.settle(ledger.reserve(charge()), "committed")
        ledger.reserve(charge())
    with populations.ledger("devices") as ledger:
        assert ledger.spent_by("devices", "a") == Composition(rho=0.2)

    def begin(name):
        with populations.ledger(name):
            pass

    path, head = tmp_path / "devices.ledger", tmp_path / "devices.head"
    assert path.stat().st_mode & 0o777 == head.stat().st_mode & 0o777 == 0o600
    whole, last = path.read_bytes(), head.read_bytes()
    path.write_bytes(b"".join(whole.splitlines(keepends=True)[:-1]))
    with pytest.raises(LedgerDamaged, match="the last ones were removed"):
        begin("devices")
    path.unlink()
    with pytest.raises(LedgerDamaged, match=r"has 0 lines and had 3"):
        begin("devices")
    path.write_bytes(whole)
    head.unlink()
    with pytest.raises(LedgerDamaged, match=r"devices\.head is missing"):
        begin("devices")
    for damaged in (b"", b"x:y", b"\xff\xfe"):
        head.write_bytes(damaged)
        with pytest.raises(LedgerDamaged, match=r"devices\.head is missing or damaged"):
            begin("devices")
    # A crash between the two files: the line was given to nobody, and is spent.
    first = LedgerHead(1, hashlib.sha256(whole.splitlines()[0]).hexdigest())
    head.write_bytes(str(first).encode())
    begin("devices")
    assert head.read_bytes() == last
    (tmp_path / "new.ledger").touch()  # a crash before the first charge
    begin("new")
