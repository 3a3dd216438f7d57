import json
import logging
import re
import tomllib
from pathlib import Path

import click
import pytest

from isthmus import __version__, cli
from isthmus.errors import UserError
from isthmus.extras import install_line

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


@pytest.fixture
def isthmus(capsys, monkeypatch):
    """Type a command; get its exit code, output and error output."""

    def typed(*arguments):
        monkeypatch.setattr("sys.argv", ["isthmus", *map(str, arguments)])
        try:
            cli.main()
            code = 0
        except SystemExit as stop:
            code = stop.code
        out, err = capsys.readouterr()
        return code, out, err

    return typed


@pytest.fixture
def job_file(write_task, tmp_path):
    write_task()
    path = tmp_path / "job.toml"
    path.write_text('name = "table"\n[task]\nsource = "task.py:Learn"\n')
    return path


def test_version(isthmus):
    assert isthmus("--version") == (0, f"isthmus, version {__version__}\n", "")


def test_a_command_that_ends_with_a_code_of_its_own_sets_the_exit_status(isthmus, monkeypatch):
    @click.command()
    def damaged():
        raise click.exceptions.Exit(1)

    monkeypatch.setattr(cli, "isthmus", damaged)
    assert isthmus()[0] == 1


def test_check_summarises_a_job(isthmus, job_file):
    code, out, _ = isthmus("job", "check", job_file, "--set", "rounds=3")
    assert code == 0
    assert out == (
        f"{job_file} is fine: 3 rounds of Learn, policy alternate, 0 clients, 0 datacenter ranks\n"
        "tried   one batch of held-out data (accuracy, loss)\n"
        "level   a curious server, without noise: a server that follows the protocol learns sums "
        "of at least 6 devices' updates, and no single one; one that lies can craft models whose "
        "sums show single examples, which only noise of the devices bounds ([privacy] mechanism = "
        '"distributed")\n'
        "        on a server; of `isthmus run` and `isthmus simulate` nothing is claimed, as "
        "their devices are processes of your own user\n"
        "owners  need in policy.toml: clients_min = 5\n"
    )


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("sed=1", "unknown key sed; did you mean seed?"),
        ("task.source=nowhere.py:Learn", "there is no file"),
        ("nonsense", "--set 'nonsense' is not of the form key.sub=value"),
        ("federated=3", "federated=3: must be a table"),
        ("strategy.policy=nope", "strategy.policy='nope' is unknown; choose one of "),
        ("strategy.policy=nope:Nope", "cannot be constructed: ModuleNotFoundError"),
        (
            "strategy.policy=nope.py:Nope",
            "instead of a module; use nope:Nope, installed or in",
        ),
        ("strategy.settings.a=1", "unknown key strategy.settings.a"),
        (
            'federated={clients=8, secure_aggregation=false, flower.app="nowhere.py:app"}',
            "federated.flower.app='nowhere.py:app': there is no file",
        ),
        ("strategy.server_optimizer.name=Nope", "is not an optimizer of torch.optim"),
    ],
)
def test_a_user_error_is_one_sentence_and_exit_code_1(isthmus, job_file, setting, sentence):
    code, out, err = isthmus("job", "check", job_file, "--set", setting)
    assert (code, out) == (1, "")
    assert err.startswith("isthmus: ")
    assert sentence in err
    assert err.count("\n") == 1


def test_the_schema_is_json(isthmus):
    code, out, _ = isthmus("job", "schema")
    assert code == 0
    assert json.loads(out)["title"] == "Job"


def test_an_unknown_command_exits_with_code_2(isthmus):
    code, _, err = isthmus("jbo")
    assert code == 2
    assert "No such command 'jbo'" in err


def test_no_sentence_installs_isthmus_from_an_index_that_does_not_have_it():
    root = Path(__file__).parents[2]
    found = [
        str(path.relative_to(root))
        for part in ("core", "clients", "server", "datacenter", "flower", "docs", "examples")
        for pattern in ("*.py", "*.md")
        for path in (root / part).rglob(pattern)
        if re.search(r"install [\"']?isthmus\[", path.read_text())
    ]
    assert found == []


@pytest.mark.parametrize(
    ("package", "extra"),
    [
        ("isthmus_clients", "client"),
        ("isthmus_datacenter", "datacenter"),
        ("isthmus_server", "server"),
        ("isthmus_simulation", "server"),
        ("isthmus_chaos", "server"),
    ],
)
def test_a_command_with_missing_packages_names_them(isthmus, monkeypatch, package, extra):
    class Absent:
        module = f"{package}.commands"

        def load(self):
            raise ModuleNotFoundError("no numpy", name="numpy")

    monkeypatch.setattr(cli, "entry_points", lambda **kwargs: [Absent()])
    code, _, err = isthmus("datacenter")
    assert code == 1
    assert "needs the package 'numpy', which is not installed" in err
    assert install_line(extra) in err
    assert extra in PROJECT["optional-dependencies"]


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (PermissionError(13, "Permission denied", "runs/a"), 1, "runs/a: Permission denied"),
        (OSError(28, "No space left on device", "runs/a"), 75, "runs/a: No space left on device"),
        (OSError(5, "Input/output error"), 75, "Input/output error"),
        (TimeoutError(), 1, "TimeoutError"),
        (BrokenPipeError(32, "Broken pipe"), 1, ""),  # as of `| head`: nobody reads any more
    ],
)
def test_an_operating_system_error_is_at_most_one_sentence(isthmus, monkeypatch, error, code, said):
    @click.command()
    def refused():
        raise error

    monkeypatch.setattr(cli, "isthmus", refused)
    assert isthmus() == (code, "", said and f"isthmus: {said}\n")


def test_a_user_error_because_of_a_failing_disk_is_exit_code_75(isthmus, monkeypatch):
    @click.command()
    def started():
        try:
            raise OSError(5, "Input/output error")
        except OSError as error:
            raise UserError(f"the lock cannot be used: {error.strerror}") from None

    monkeypatch.setattr(cli, "isthmus", started)
    assert isthmus() == (75, "", "isthmus: the lock cannot be used: Input/output error\n")


def test_pytorchs_internal_log_is_not_shown(isthmus, monkeypatch, caplog):
    @click.command()
    def noted():
        logging.getLogger("torch.half.loaded").info("cache_hits: 0")
        logging.getLogger("isthmus").info("linked")

    monkeypatch.setattr(cli, "isthmus", noted)
    logging.getLogger("torch").setLevel(logging.NOTSET)  # as before it is loaded
    with caplog.at_level(logging.INFO):
        isthmus()
    assert caplog.messages == ["linked"]


def test_an_interrupt_is_exit_code_130(isthmus, monkeypatch):
    @click.command()
    def interrupted():
        raise click.Abort

    monkeypatch.setattr(cli, "isthmus", interrupted)
    code, _, _ = isthmus()
    assert code == 130
