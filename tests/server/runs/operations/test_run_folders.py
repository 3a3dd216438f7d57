"""List, export, import and prune the runs of a folder."""

import contextlib
import hashlib
import io
import json
import os
import shutil
import time

import pytest
from click.testing import CliRunner
from rich.console import Console
from tests.privacy.dp.charges import charge
from tests.server.storage.conftest import new_run  # noqa: F401 - a fixture
from tests.server.storage.rounds import commit_round, plan_round

from isthmus.errors import DamagedError, UserError
from isthmus.system.file_identity import FileIdentity
from isthmus.system.sealed_files import read_sealed, write_sealed, write_sealed_bytes
from isthmus_privacy.dp.ledger import Ledger
from isthmus_server.cli.runs import runs
from isthmus_server.read.report.report import read_report, show
from isthmus_server.runs.local.session import LocalRun
from isthmus_server.runs.operations.retention import ListedRun, RetentionPolicy, to_prune
from isthmus_server.storage import audit
from isthmus_server.storage.records import FinalModel
from isthmus_server.storage.recovery import roll_back, verify
from isthmus_server.storage.run_place import FILE as PLACE
from isthmus_server.storage.store import Store


def command(*words):
    result = CliRunner().invoke(runs, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


@pytest.fixture
def ended(new_run):  # noqa: F811
    """A run with two rounds in `runs/`, which ended in a state, so many seconds ago."""

    def ended(name, state="finished", ago=0.0, settings=()):
        store = new_run(f"runs/{name}", *settings)
        for round_ in (1, 2, 3):
            commit_round(store, round_)
        model = store.write_final(b"model" * 3)
        final = None
        if state == "finished":
            digest = hashlib.sha256(b"model" * 3).hexdigest()
            final = FinalModel(
                metrics={"accuracy": 0.5}, model_sha256=digest, model_path=str(model), round=3
            )
        store.finish(state, "", final)
        store.close()
        at = time.time() - ago
        os.utime(store.directory / "run.head", (at, at))
        return store.directory

    return ended


def test_runs_are_listed_newest_first(ended):
    folder = ended("old", ago=1000).parent
    ended("new", "failed")
    (folder / "broken").mkdir()
    (folder / "broken/run.sqlite").write_bytes(b"nothing")
    (folder / "no-run").mkdir()
    rows = json.loads(command("list", folder, "--json"))
    assert {row["name"]: row["state"] for row in rows} == {
        "new": "failed",
        "broken": "damaged",
        "old": "finished",
    }
    assert [row["name"] for row in rows[:2]] == ["new", "old"]
    assert (rows[1]["rounds"], rows[1]["metrics"]) == (3, {"accuracy": 0.5})
    assert "finished" in command("list", folder)
    with pytest.raises(UserError, match="there is no folder of runs"):
        command("list", folder / "nowhere")


def test_a_run_is_exported_and_imported(ended, tmp_path):
    source = ended("one")
    assert "as of round 3" in command("export", source, tmp_path / "copy")
    assert command("import", tmp_path / "copy", tmp_path / "again").endswith("as it was exported\n")
    assert [finding for finding in verify(tmp_path / "again") if finding.damage] == []
    with pytest.raises(UserError, match="is not empty"):
        command("import", tmp_path / "copy", tmp_path / "again")
    (tmp_path / "copy/checkpoints/model-000003.safetensors").write_bytes(b"else")
    with pytest.raises(DamagedError, match=r"model-000003\.safetensors was changed"):
        command("import", tmp_path / "copy", tmp_path / "more")


def test_a_run_that_goes_on_elsewhere_is_cancelled_where_it_is_imported(new_run, tmp_path):  # noqa: F811
    store = new_run("one")
    commit_round(store, 1)
    command("export", store.directory, tmp_path / "copy")  # while another process has it open
    commit_round(store, 2)
    assert command("import", tmp_path / "copy", tmp_path / "again").endswith("and cancelled\n")
    with contextlib.closing(Store.open(tmp_path / "again")) as copy:
        assert copy.status()[0] == "cancelled"
        assert copy.last_round() == 1
    for again in (Store.open_to_continue, LocalRun.resumed, roll_back):
        with pytest.raises(
            UserError, match=r"is cancelled \(imported from .* nothing continues it"
        ):
            again(tmp_path / "again")


def test_a_copy_is_recognised_and_a_moved_run_is_not_taken_for_one(ended, tmp_path):
    run = ended("one", "failed")
    copied = pytest.raises(
        UserError, match=r"is a copy of .* in .*/one( and is .*)?, and nothing c"
    )
    for copy in (tmp_path / "copy", tmp_path / "another"):
        shutil.copytree(run, copy)
        for again in (Store.open_to_continue, roll_back):
            with copied:
                again(copy)
    with contextlib.closing(Store.open(copy)) as store:  # reports read it
        assert store.last_round() == 3
    moved = run.rename(tmp_path / "moved")
    Store.open_to_continue(moved).close()
    copy.rename(moved.with_name("copy-of-moved"))
    with copied:
        Store.open_to_continue(moved.with_name("copy-of-moved"))
    shutil.copytree(moved, copy)
    shutil.rmtree(moved)
    copy.rename(moved)  # put back from a copy of the files
    Store.open_to_continue(moved).close()
    Store.open_to_continue(moved).close()


def test_a_copy_in_a_directory_with_the_same_inode_number_is_recognised(ended, tmp_path):
    """`ext4` gives the number of a deleted directory to the next one."""
    run = ended("one", "failed")
    kept = tmp_path / "kept"
    shutil.copytree(run, kept)
    place = read_sealed(run / PLACE)
    # What another volume, or an inode that is used again, would give.
    for changes in (
        {"generation": (place["generation"] or 0) + 1},
        {"born": (place["born"] or 0) + 1},
        {"file": {**place["file"], "inode": place["file"]["inode"] + 1}},
    ):
        write_sealed(kept / PLACE, {**place, **changes, "inode": kept.stat().st_ino})
        with pytest.raises(UserError, match="is a copy of the run in"):
            Store.open_to_continue(kept)
    linked = tmp_path / "linked"
    shutil.copytree(run, linked, copy_function=os.link)  # which has the original's file
    with pytest.raises(UserError, match="is a copy of the run in"):
        Store.open_to_continue(linked)
    shutil.rmtree(linked)
    for _ in range(3):  # the file system may use the number at once
        shutil.rmtree(run)
        shutil.copytree(kept, run)
        write_sealed(run / PLACE, {**place, "path": str(tmp_path / "elsewhere")})
        with pytest.raises(
            UserError, match=r"is a copy of a run that was in .*elsewhere and is not"
        ):
            Store.open_to_continue(run)


def refused_as(copy):
    with pytest.raises(UserError, match=r"nothing continues a copy") as refused:
        Store.open_to_continue(copy)
    assert f"`isthmus runs branch {copy} NEW`" in str(refused.value)
    return str(refused.value).partition(", and nothing continues")[0]


def test_a_copy_says_where_the_original_is_as_far_as_that_is_known(ended, tmp_path):
    run = ended("one", "failed")
    copy = shutil.copytree(run, tmp_path / "copy")
    assert refused_as(copy) == f"{copy} is a copy of the run in {run}"
    command("export", copy, tmp_path / "exported")  # not of the copy, which nothing continues
    exported = (tmp_path / "exported").rename(tmp_path / "carried")
    assert refused_as(exported) == f"{exported} is a copy of the run in {run}"
    moved = run.rename(tmp_path / "moved")
    gone = f"is a copy of a run that was in {run} and is not found there"
    for each in (copy, exported):
        assert refused_as(each) == f"{each} {gone}"
    ended("one", "failed")  # another run has the name now
    assert refused_as(copy) == f"{copy} {gone}"
    Store.open_to_continue(moved).close()
    later = shutil.copytree(moved, tmp_path / "later")
    assert refused_as(later) == f"{later} is a copy of the run in {moved}"


def test_a_copy_of_a_branch_that_was_never_continued_names_the_branch(ended, tmp_path):
    command("branch", ended("one", "failed"), tmp_path / "new")
    copy = shutil.copytree(tmp_path / "new", tmp_path / "copy")
    assert refused_as(copy) == f"{copy} is a copy of the run in {tmp_path / 'new'}"


def test_files_put_back_in_the_place_of_a_private_run_are_named_as_such(ended, tmp_path):
    settings = (
        *("privacy.mechanism='gaussian'", "privacy.epsilon=8", "privacy.delta=1e-5"),
        "federated.secure_aggregation=false",
    )
    run = ended("one", "failed", settings=settings)
    shutil.copytree(run, tmp_path / "kept")
    shutil.rmtree(run)
    shutil.copytree(tmp_path / "kept", run)
    assert refused_as(run) == f"{run} is a copy of a run that was in this place before"
    said = command("adopt", run, "--original-is-gone", "--nothing-ran-since")
    assert "never continue what was here before, or another copy of it, again: " in said


def test_a_file_of_an_earlier_version_is_completed(ended):
    run = ended("one", "failed")
    place = read_sealed(run / PLACE)
    write_sealed(run / PLACE, {"inode": place["inode"], "path": place["path"]})
    Store.open_to_continue(run).close()
    completed = read_sealed(run / PLACE)
    assert FileIdentity.read(completed) == FileIdentity.of(run)
    assert FileIdentity.read(completed["file"]) == FileIdentity.of(run / PLACE)


def test_a_copy_takes_the_place_of_an_original_that_is_gone(ended, tmp_path):
    run = ended("one", "failed")
    (tmp_path / "state/runs").mkdir(parents=True)
    audit.record(tmp_path / "state", "submit", by="me")
    copy = tmp_path / "state/runs/copy"
    shutil.copytree(run, copy)
    with pytest.raises(UserError, match=r"`isthmus runs adopt .*copy --original-is-gone`"):
        Store.open_to_continue(copy)
    assert "Missing option '--original-is-gone'" in command("adopt", copy)
    said = command("adopt", copy, "--original-is-gone")
    assert f"never continue {run} again: if it is continued too, devices are asked twice" in said
    with contextlib.closing(Store.open_to_continue(copy)) as store:
        assert f"{store.run_id} from now on, after round 3" in said
        adopted = store.events()[-1]
        assert (adopted.kind, adopted.original) == ("adopted", str(run))
        console = Console(width=400, file=io.StringIO())
        show(read_report(store), console)
    assert audit.read(tmp_path / "state")[-1].details["run"] == "copy"
    assert f"had this copy take the place of {run}" in console.file.getvalue()
    with pytest.raises(UserError, match="is no copy; continue it with"):
        command("adopt", copy, "--original-is-gone")


def test_a_copy_of_a_run_with_privacy_is_adopted_with_a_second_statement(new_run, tmp_path):  # noqa: F811
    store = new_run(
        "one",
        "privacy.mechanism='correlated'",
        "privacy.epsilon=8",
        "privacy.delta=1e-5",
        "federated.secure_aggregation=false",
    )
    commit_round(store, 1)
    store.close()
    shutil.copytree(store.directory, tmp_path / "copy")
    words = ("adopt", tmp_path / "copy", "--original-is-gone")
    with pytest.raises(UserError, match=r"state --nothing-ran-since if .* or make a new run with"):
        command(*words)
    with pytest.raises(UserError, match="is a copy of the run in"):
        Store.open_to_continue(tmp_path / "copy")
    said = command(*words, "--nothing-ran-since")
    assert "the same noise is in two models, whose difference has none" in said
    Store.open_to_continue(tmp_path / "copy").close()
    shutil.rmtree(store.directory)
    shutil.copytree(tmp_path / "copy", store.directory)  # in the place where it was
    with pytest.raises(UserError, match="is a copy of the run in"):
        Store.open_to_continue(store.directory)


def test_an_exported_run_that_has_finished_is_a_copy_too(ended, tmp_path):
    command("export", ended("one"), tmp_path / "copy")
    command("import", tmp_path / "copy", tmp_path / "again")
    for directory in ("copy", "again"):
        with pytest.raises(UserError, match="is a copy of the run in"):
            Store.open_to_continue(tmp_path / directory)
    with pytest.raises(UserError, match="has finished: there is nothing to continue"):
        command("branch", tmp_path / "again", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_branch_is_another_run_after_the_same_round(new_run, tmp_path):  # noqa: F811
    store = new_run("one")
    commit_round(store, 1)
    commit_round(store, 2)
    plan_round(store, 3)
    command("export", store.directory, tmp_path / "copy")
    command("import", tmp_path / "copy", tmp_path / "again")
    said = command("branch", tmp_path / "again", tmp_path / "new")
    assert f"continue it with  isthmus run --resume --run-dir {tmp_path / 'new'}\n" in said
    with contextlib.closing(Store.open_to_continue(tmp_path / "new")) as branch:
        assert branch.run_id != store.run_id
        assert branch.run_id in said
        assert (branch.job, branch.base) == (store.job, store.base)
        assert branch.status() == ("running", "", None)
        state = branch.run_state()
        assert (state.round, state.attempts, state.cut_short) == (2, 0, None)
        assert state.models == store.run_state().models
    assert [finding for finding in verify(tmp_path / "new") if finding.damage] == []


def test_pruning_keeps_what_can_go_on_and_records_what_it_deletes(ended, tmp_path):
    folder = ended("new").parent
    audit.record(tmp_path, "submit", by="me")
    for name, state in (("a", "finished"), ("b", "cancelled"), ("c", "failed"), ("d", "paused")):
        ended(name, state, ago=100 * 24 * 3600)
    words = ("prune", folder, "--older-than", "30d")
    said = command(*words, "--dry-run")
    assert "would go a\n" in said
    assert "kept     d: it is paused and can go on\n" in said
    assert len(list(folder.iterdir())) == 5
    with contextlib.closing(Store.open_to_continue(folder / "a")) as used, used.locked():
        os.utime(folder / "a/run.head", (0, 0))
        assert "kept     a: another process has it open\n" in command(*words)
    assert sorted(path.name for path in folder.iterdir()) == ["a", "c", "d", "new"]
    command(*words, "--failed")
    assert not (folder / "c").exists()
    assert {entry.details["run"] for entry in audit.read(tmp_path)[1:]} >= {"b", "c"}
    with pytest.raises(UserError, match="say which runs are kept"):
        command("prune", folder)


@pytest.mark.parametrize("folder", ["state/runs", "comparison"])
def test_a_run_with_the_only_ledger_of_its_charges_is_kept(folder, ended, tmp_path, monkeypatch):
    """Also where next to it, or around it, are the ledgers of others."""
    path = tmp_path / folder / "one"
    path.parent.mkdir(parents=True)
    ended("one", ago=9e6).rename(path)
    charged = [charge(round=number, run="one") for number in (1, 2)]

    def charge_all(ledger, head, *charges):
        ledger.parent.mkdir(exist_ok=True)
        with Ledger.open(ledger) as opened:
            for each in charges:
                opened.settle(opened.reserve(each), "committed")
            opened.keep_head_in(head)

    def said():
        monkeypatch.chdir(path.parent)  # "." is the folder of a server's runs, too
        return command("prune", ".", "--older-than", "1d")

    charge_all(path / "privacy.ledger", path / "privacy.head", *charged)
    only = "kept     one: its privacy ledger is the only record of what devices were asked"
    assert only in said()
    privacy = path.parent.parent / "privacy"
    population = privacy / "devices.ledger", privacy / "devices.head"
    charge_all(*(each.with_stem("others") for each in population), charge(population="others"))
    assert only in said()
    charge_all(*population, charge(round=1, run="foreign"))
    assert only in said()
    charge_all(*population, charged[0])
    assert only in said()
    charge_all(*population, charged[1])
    if folder == "comparison":  # whose `privacy` is in the folder itself
        assert only in said()
        return
    audit.record(tmp_path / "state", "submit", by="me")
    assert "deleted  one\n" in said()
    assert len(list((tmp_path / "state/pruned").iterdir())) == 1
    assert audit.read(tmp_path / "state")[-1].action == "prune"


@pytest.mark.parametrize(
    ("policy", "gone"),
    [
        ({"keep_last": 1}, ["a2", "b2", "a3"]),
        ({"keep_last": 1, "keep_best": "accuracy"}, ["a2", "b2"]),
        ({"older_than": 250.0, "keep_best": "loss"}, ["a3"]),
        ({"keep_last": 2, "older_than": 50.0}, ["a3"]),
    ],
)
def test_a_run_is_kept_if_one_rule_keeps_it(policy, gone):
    def run(name, accuracy, ago):
        metrics = {"accuracy": accuracy, "loss": accuracy}
        return ListedRun(
            name=name, job=name[0], state="finished", metrics=metrics, changed=1000.0 - ago
        )

    listed = [
        run("a1", 0.5, 100),
        run("b1", 0.9, 150),
        run("a2", 0.1, 200),
        run("b2", 0.2, 250),
        run("a3", 0.8, 300),
    ]
    decided = to_prune(listed, RetentionPolicy(**policy), 1000.0)
    assert [run.name for run, why in decided if not why] == gone


@pytest.mark.parametrize(
    ("modes", "mode", "kept"),
    [
        ({}, "", "high"),
        ({}, "min", "low"),
        ({"rmse": "min"}, "", "low"),
        ({"rmse": "min"}, "max", "high"),
        ({"other": "min"}, "", "high"),
    ],
)
def test_the_best_run_is_the_one_that_its_job_or_the_operator_means(modes, mode, kept):
    runs_ = [
        ListedRun(name=name, job="j", state="finished", metrics={"rmse": value}, modes=modes)
        for name, value in (("high", 2.0), ("low", 1.0))
    ]
    decided = to_prune(runs_, RetentionPolicy(keep_best="rmse", mode=mode), 1000.0)
    assert [run.name for run, why in decided if why] == [kept]


def test_pruning_reads_from_the_job_or_the_option_which_metric_is_the_best(ended):
    folder = ended("old", ago=9e6, settings=('evaluation.keep_best={name="accuracy",mode="min"}',))
    (listed,) = json.loads(command("list", folder.parent, "--json"))
    assert listed["modes"] == {"accuracy": "min"}
    words = ("prune", folder.parent, "--older-than", "1d", "--dry-run", "--keep-best")
    for option in ("accuracy", "accuracy:max"):
        assert "kept     old: it has the best accuracy of its job\n" in command(*words, option)


def test_a_misspelt_metric_deletes_nothing(ended):
    folder = ended("old", ago=9e6).parent
    with pytest.raises(UserError, match=r"'acuracy': no run in .* has this metric; .* accuracy$"):
        command("prune", folder, "--older-than", "1d", "--keep-best", "acuracy")
    assert (folder / "old").exists()


def test_a_run_without_a_number_is_not_the_best_one():
    runs_ = [
        ListedRun(name=name, state="finished", metrics={"loss": value})
        for name, value in (("nan", float("nan")), ("good", 0.5), ("bad", 2.0))
    ]
    decided = to_prune(runs_, RetentionPolicy(keep_best="loss"), time.time())
    assert [run.name for run, why in decided if why] == ["good"]


def test_pruning_leaves_links_and_completes_what_was_interrupted(ended, tmp_path):
    elsewhere = ended("old", ago=9e6).rename(tmp_path / "elsewhere")
    folder = tmp_path / "runs"
    (folder / "link").symlink_to(elsewhere)
    (folder / ".gone.pruned").mkdir()
    assert "kept     link: it is a link" in command("prune", folder, "--older-than", "1d")
    assert [path.name for path in folder.iterdir()] == ["link"]
    assert (elsewhere / "run.sqlite").exists()


@pytest.mark.parametrize(
    "table", [[], {"format": 1}, {"format": 1, "kind": "run", "files": {"job.json": "x"}}]
)
def test_a_manifest_of_another_program_is_refused(ended, tmp_path, table):
    command("export", ended("one"), tmp_path / "copy")
    write_sealed_bytes(tmp_path / "copy/MANIFEST", json.dumps(table).encode())
    with pytest.raises(UserError, match="copy is not an exported run: its MANIFEST is none that"):
        command("import", tmp_path / "copy", tmp_path / "again")
