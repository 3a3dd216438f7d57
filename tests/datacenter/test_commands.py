"""Options of `isthmus datacenter launch`."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.datacenter.conftest import dry_run

from isthmus.errors import UserError
from isthmus_datacenter.commands import datacenter


def test_a_secrets_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    secrets = tmp_path / "secrets.env"
    secrets.write_text("TOKEN=hush\n")
    secrets.chmod(0o644)
    with pytest.raises(UserError, match=r"mode 644 and may hold secrets; run `chmod 600 "):
        dry_run("--env-file", str(secrets))


def test_a_missing_tasks_directory_is_refused(tmp_path: Path) -> None:
    base = ["launch", "--ranks", "1", "--server", "127.0.0.1:1", "--name", "x"]
    words = [*base, "--state", str(tmp_path), "--tasks", str(tmp_path / "nowhere")]
    error = CliRunner().invoke(datacenter, words).exception
    assert isinstance(error, UserError)
    assert str(error) == f"--tasks {tmp_path}/nowhere is not a directory on this machine"


@pytest.mark.parametrize(
    ("words", "scheduler", "sentence"),
    [
        (["--option", "partition"], "slurm", "'partition' is not of the form KEY=VALUE"),
        (["--option", "a b=c"], "slurm", "'a b=c' is not of the form KEY=VALUE"),
        (["--option", "comment=a\nb"], "slurm", "comment has a line break"),
        (["--option", "--nodes=2"], "slurm", "'--nodes=2' begins with a dash; write the name of"),
        (["--option", "qos=a", "--option", "qos=b"], "slurm", "--option qos is given twice; rem"),
        ([], "kubernetes", "kubernetes needs --option image=NAME"),
        (
            ["--option", "speed=1"],
            "kubernetes",
            "speed is not known; known options are annotation, capability, claim",
        ),
        ([], "pbs", "--scheduler pbs is unknown; installed are kubernetes, ray, slurm"),
        ([], "local", "--nodes, --option, --env-file and --prologue need --scheduler"),
    ],
)
def test_invalid_options_are_refused(words: list[str], scheduler: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        dry_run(*words, scheduler=scheduler)
