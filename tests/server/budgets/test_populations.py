"""Ledgers of populations that are older than what their runs have charged."""

import contextlib
import shutil

import pytest
from click.testing import CliRunner
from tests.privacy.dp.charges import charge

from isthmus.errors import UserError
from isthmus_privacy.dp.accounting import Composition, CorrelatedGaussian
from isthmus_privacy.dp.ledger import HEAD_FILE, LEDGER_FILE, Ledger, LedgerDamaged
from isthmus_server.budgets.populations import DIRECTORY, Populations, check_populations, of_server
from isthmus_server.budgets.run_budgets import RunBudgets
from isthmus_server.cli.server import server
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.run_parts import RunParts
from isthmus_server.runs.operations.adoption import adopt
from isthmus_server.runs.operations.retention import RetentionPolicy, prune
from isthmus_server.runs.operations.run_copies import branch_run, copy_run
from isthmus_server.storage.run_description import RunDescription
from isthmus_server.storage.store import Store

PRIVATE = ("privacy.mechanism=gaussian", "privacy.epsilon=8", "privacy.delta=0.01")


@pytest.fixture
def state(tmp_path):
    """The state directory of a server."""
    return tmp_path / "state"


@pytest.fixture
def charged(state, make_job, tmp_path):
    """Charge rounds of a run of the server, in its ledger and in that of its population."""

    def add(name, *charges, crash=False, population="devices"):
        directory = state / "runs" / name
        if not directory.exists():
            job = make_job(*PRIVATE, f"privacy.population={population}")
            Store.create(directory, job, tmp_path, f"id-{name}").close()
        with (
            Ledger.open(directory / LEDGER_FILE) as own,
            of_server(state).ledger(population) as shared,
        ):
            own.keep_head_in(directory / HEAD_FILE)
            for each in charges:
                of_run = charge(run=f"id-{name}", population=population, **each)
                numbers = [ledger.reserve(of_run) for ledger in (own, shared)]
                if crash:
                    continue
                for ledger, number in zip((own, shared), numbers, strict=True):
                    ledger.settle(number, "committed")
        return directory

    return add


def begin(state, name="devices"):
    """What a new job of the server does first; returns what a device has spent then."""
    with of_server(state).ledger(name) as ledger:
        return ledger.spent_by(name, "a").rho


def files(state, name="devices"):
    return state / "privacy" / f"{name}.ledger", state / "privacy" / f"{name}.head"


def test_a_ledger_rolled_back_with_its_head_is_refused_by_a_new_job(charged, state, tmp_path):
    charged("one", {"round": 1}, {"round": 2})
    older = shutil.copytree(state / "privacy", tmp_path / "older")
    charged("two", {"round": 1}, {"round": 2}, {"round": 3})
    assert begin(state) == pytest.approx(0.5)
    newer = shutil.copytree(state / "privacy", tmp_path / "newer")
    shutil.copytree(older, state / "privacy", dirs_exist_ok=True)
    with pytest.raises(LedgerDamaged) as refused:
        begin(state)
    sentence = str(refused.value)
    assert "devices.ledger does not have 3 of 3 charges of the run in " in sentence
    epsilon = Composition(rho=0.3).epsilon(0.01)
    assert f"runs/two, the first of round 1 attempt 1, epsilon {epsilon:.4g} at delta" in sentence
    assert sentence.endswith(f"move it out of {state / 'runs'}")
    told = CliRunner().invoke(server, ["verify", str(state)])
    assert "damaged" in told.output
    assert "does not have 3 of 3 charges" in told.output
    # One of the two files from the backup, and then both of the newer ones.
    ledger, head = files(state)
    shutil.copy(newer / "devices.head", head)
    with pytest.raises(LedgerDamaged, match="the last ones were removed"):
        begin(state)
    shutil.copy(newer / "devices.ledger", ledger)
    assert begin(state) == pytest.approx(0.5)
    assert check_populations(state) == ["devices"]


@pytest.mark.parametrize("crash", [False, True])
@pytest.mark.parametrize("way", ["both", "directory", "ledger", "head"])
def test_a_population_is_not_begun_anew_while_runs_have_charged_it(charged, state, way, crash):
    charged("one", {"round": 1}, crash=crash)
    ledger, head = files(state)
    match way:
        case "both":
            ledger.unlink()
            head.unlink()
        case "directory":
            shutil.rmtree(state / "privacy")
        case "ledger":
            ledger.unlink()
        case "head":
            head.unlink()
    with pytest.raises(LedgerDamaged):
        begin(state)
    with pytest.raises(LedgerDamaged):
        begin(state)  # the refusal has left nothing that passes for a new ledger
    with pytest.raises(LedgerDamaged):
        check_populations(state)
    assert begin(state, "others") == 0.0


def test_a_ledger_that_was_renamed_or_copied_is_refused_under_both_names(charged, state):
    charged("one", {"round": 1})
    charged("two", population="others")
    for source, target in zip(files(state), files(state, "others"), strict=True):
        shutil.copy(source, target)
    with pytest.raises(LedgerDamaged, match="is the ledger of the population 'devices'"):
        begin(state, "others")
    assert begin(state) == pytest.approx(0.1)
    for path in files(state):
        path.unlink()
    with pytest.raises(LedgerDamaged, match="is missing and had 1 of 1 charges"):
        begin(state)


async def test_what_a_committed_round_has_charged_is_known_without_its_ledger(
    deployment, state, tmp_path
):
    await deployment.start()
    store = deployment.create_run("state/runs/one", *PRIVATE, "rounds=2")
    coordinator = Coordinator(RunParts.of(store, deployment.link, populations=of_server(state)))
    await coordinator.run()
    shutil.rmtree(state / "privacy")
    for name in (LEDGER_FILE, HEAD_FILE):
        (store.directory / name).unlink()
    with pytest.raises(LedgerDamaged, match=r"there is no privacy ledger .*runs/one"):
        begin(state)


def test_a_charge_that_a_crash_kept_from_the_population_is_added(charged, state):
    """Wherever the crash was: the run is first, and nobody is asked before both have it."""
    directory = charged("one", {"round": 1})
    with Ledger.open(directory / LEDGER_FILE) as own:
        own.keep_head_in(directory / HEAD_FILE)
        own.reserve(charge(run="id-one", round=2, rho=0.25))
    assert check_populations(state) == ["devices"]
    assert begin(state) == pytest.approx(0.35)
    assert begin(state) == pytest.approx(0.35)
    shared = Ledger.read(files(state)[0])
    assert [entry.outcome for entry in shared.entries.values()] == ["committed", None]


@pytest.mark.parametrize("comparison", [False, True])
def test_a_run_that_is_continued_by_itself_is_charged_to_its_population(charged, state, comparison):
    """As by `isthmus run --resume`, or its budget would be one of its own."""
    run = charged("one", {"round": 1})
    charged("two", {"round": 1}, {"round": 2})
    if comparison:  # which has its ledgers next to its runs
        (state / "privacy").rename(state / "runs" / "privacy")
    with contextlib.closing(Store.open_to_write(run)) as store:
        budgets = RunBudgets.open(store, store.run_state(), None)
        with contextlib.closing(budgets):
            assert budgets.devices_spent == Composition(rho=0.3).epsilon(0.01)
            folder = state / "runs" if comparison else state
            another = Populations(folder / DIRECTORY)
            with pytest.raises(UserError, match="in use"), another.ledger("devices"):
                pass


def test_the_population_may_lead_by_what_no_run_knows_any_more(charged, state):
    """Runs that were deleted, are older copies in a backup, or whose last line has no outcome."""
    charged("one", {"round": 1})
    charged("two", {"round": 1}, crash=True)
    shutil.rmtree(state / "runs/one")
    assert begin(state) == pytest.approx(0.2)
    assert check_populations(state) == ["devices"]


def test_a_charge_that_only_the_population_has_given_back_is_refused(charged, state):
    directory = charged("one", {"round": 1}, crash=True)
    with of_server(state).ledger("devices") as shared:
        shared.settle(1, "released")
    assert begin(state) == 0.0  # the run's line was not written, as the disk was full
    with Ledger.open(directory / LEDGER_FILE) as own:
        own.keep_head_in(directory / HEAD_FILE)
        own.settle(1, "failed")
    with pytest.raises(LedgerDamaged, match="does not have 1 of 1 charges"):
        begin(state)


def test_equal_charges_of_a_round_that_was_done_again_are_counted(charged, state, tmp_path):
    charged("one", {"round": 1})
    older = shutil.copytree(state / "privacy", tmp_path / "older")
    charged("one", {"round": 1})
    assert begin(state) == pytest.approx(0.2)
    shutil.copytree(older, state / "privacy", dirs_exist_ok=True)
    with pytest.raises(LedgerDamaged, match="does not have 1 of 2 charges"):
        begin(state)


def test_rows_of_correlated_noise_are_compared_although_they_are_charged_once(
    charged, state, tmp_path
):
    event = CorrelatedGaussian(4.0, "id-one")
    charged("one", {"round": 1, "event": event})
    older = shutil.copytree(state / "privacy", tmp_path / "older")
    charged("one", {"round": 2, "event": event})
    shutil.copytree(older, state / "privacy", dirs_exist_ok=True)
    with pytest.raises(LedgerDamaged, match=r"does not have 1 of 2 charges .* round 2 attempt 1"):
        begin(state)


def test_a_run_of_another_server_is_refused_until_it_is_moved(charged, state, tmp_path):
    charged("one", {"round": 1})
    elsewhere = tmp_path / "elsewhere"
    shutil.move(state, elsewhere)
    charged("two", {"round": 1})
    imported = shutil.copytree(elsewhere / "runs/one", state / "runs/imported")
    with pytest.raises(LedgerDamaged, match="if another server has charged that run, move it out"):
        begin(state)
    shutil.move(imported, tmp_path / "imported")
    assert begin(state) == pytest.approx(0.1)


def test_copies_and_renamed_runs_of_the_server_are_no_reason_to_refuse(charged, state):
    directory = charged("one", {"round": 1})
    with Ledger.open(directory / LEDGER_FILE) as own:
        own.keep_head_in(directory / HEAD_FILE)
        own.reserve(charge(run="id-one", round=2))
    shutil.copytree(directory, state / "runs/copy")
    directory.rename(state / "runs/renamed")
    assert begin(state) == pytest.approx(0.2)  # the charge of the crash is added once


def test_a_damaged_ledger_of_a_run_is_not_passed_over(charged, state):
    path = charged("one", {"round": 1}) / LEDGER_FILE
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b'"a"', b'"x"'))
    with pytest.raises(LedgerDamaged, match=r"runs/one/privacy.ledger, .*was changed"):
        begin(state)
    path.write_bytes(whole.splitlines(keepends=True)[0])
    with pytest.raises(LedgerDamaged, match="the last ones were removed"):
        begin(state)
    path.write_bytes(whole + b'{"number":3')  # a crash while it was written
    assert begin(state) == pytest.approx(0.1)


def test_a_pruned_run_leaves_its_ledger(charged, state):
    directory = charged("one", {"round": 1})
    with contextlib.closing(Store.open_to_write(directory)) as store:
        store.finish("cancelled", "enough", None)
    decided = prune(state / "runs", RetentionPolicy(older_than=-1e9), dry_run=False)
    assert [(run.name, why) for run, why in decided] == [("one", "")]
    assert not directory.exists()
    assert begin(state) == pytest.approx(0.1)
    for path in files(state):
        path.unlink()
    with pytest.raises(LedgerDamaged, match=r"is missing and had 1 of 1 charges .*pruned/one-"):
        begin(state)


def test_other_folders_among_the_runs_are_passed_over(charged, state):
    charged("one", {"round": 1})
    (state / "runs/notes").mkdir()
    (state / "runs/README").write_text("about the runs")
    damaged = state / "runs/damaged"
    damaged.mkdir()
    (damaged / "job.json").write_text("{")
    with pytest.raises(UserError):
        RunDescription.read(damaged)
    assert begin(state) == pytest.approx(0.1)


@pytest.fixture
def compared(make_job, tmp_path):
    """A comparison of two runs, `a` with one charge and `b` with four; its directory."""
    folder = tmp_path / "comparison"
    populations = Populations(folder / DIRECTORY, (folder,))
    for name, rounds in (("a", 1), ("b", 4)):
        Store.create(folder / name, make_job(*PRIVATE), tmp_path, f"id-{name}").close()
        with (
            Ledger.open(folder / name / LEDGER_FILE) as own,
            populations.ledger("devices") as shared,
        ):
            own.keep_head_in(folder / name / HEAD_FILE)
            for round_ in range(rounds):
                of_run = charge(run=f"id-{name}", round=round_)
                for ledger in (own, shared):
                    ledger.settle(ledger.reserve(of_run), "committed")
    return folder


@pytest.mark.parametrize("way", ["branch", "copy", "export", "within"])
def test_a_branch_has_what_all_runs_have_charged_that_share_its_budget(compared, tmp_path, way):
    target = (compared if way == "within" else tmp_path / "elsewhere") / "new"
    source = compared / "a"
    if way == "copy":
        source = shutil.copytree(source, tmp_path / "copy")
    elif way == "export":
        copy_run(source, tmp_path / "copy", with_key=False)
        source = tmp_path / "copy"
    target.parent.mkdir(exist_ok=True)
    branch_run(source, target)
    with contextlib.closing(Store.open_to_continue(target)) as store:
        budgets = RunBudgets.open(store, store.run_state(), None)
        with contextlib.closing(budgets):
            assert budgets.devices is not None
            assert budgets.devices.spent == Composition(rho=0.5).epsilon(0.01)
            own = Ledger.read(target / LEDGER_FILE).entries.values()
            # Within the comparison its ledger is charged, and nothing is written twice.
            assert len(own) == (1 if way == "within" else 5)
            assert {entry.outcome for entry in own} == {"committed"}


def test_a_branch_of_a_copy_is_refused_where_its_budget_is_not_known(compared, tmp_path):
    copy_run(compared / "a", tmp_path / "copy", with_key=False)
    copy_run(tmp_path / "copy", tmp_path / "second", with_key=False)
    shutil.rmtree(compared)
    for copy in ("copy", "second"):
        with pytest.raises(UserError, match="shares the budget of 'devices' with other runs, and"):
            branch_run(tmp_path / copy, tmp_path / f"new-{copy}")


@pytest.mark.parametrize("way", ["removed", "moved", "adopted", "adopted copy"])
def test_a_run_that_has_lost_the_ledger_that_it_shares_is_refused(compared, tmp_path, way):
    """Or it would go on with a budget of its own, and forget what the others have spent."""
    run = compared / "a"
    with contextlib.closing(Store.open_to_write(run)) as store:
        RunBudgets.open(store, store.run_state(), None).close()
    if way == "removed":
        shutil.rmtree(compared / DIRECTORY)
    elif way == "moved":
        run = run.rename(tmp_path / "moved")
    else:
        copies = [tmp_path / "copy", tmp_path / "second"][: 2 if way == "adopted copy" else 1]
        for copy in copies:
            copy_run(run, copy, with_key=False)
            run = copy
        adopt(run, nothing_ran_since=True)
    sentence = "shares the budget of 'devices' with other runs"
    with contextlib.closing(Store.open_to_write(run)) as store:
        state = store.run_state()
        with pytest.raises(LedgerDamaged, match=sentence):
            RunBudgets.open(store, state, None)
    if way in ("removed", "moved"):
        with pytest.raises(UserError, match=sentence):
            branch_run(run, tmp_path / "new")
