"""What is asked of Ray, and the guard of a node. No Ray is needed here; see test_ray_cluster.py."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.datacenter.conftest import dry_run, wait_until

from isthmus.errors import UserError
from isthmus_datacenter.launch.datacenter import DatacenterLaunch
from isthmus_datacenter.launch.ray import RayLauncher
from isthmus_datacenter.launch.ray_node import RayNode

LAUNCH: dict[str, Any] = {"server": "head:9402", "name": "cluster-0", "ranks": 4, "nodes": 2}


def asked(*options: tuple[str, str], **changes: Any) -> dict[str, Any]:
    launch = DatacenterLaunch(**{**LAUNCH, **changes}, state=Path("/s"), options=options)
    first, _, _ = RayLauncher().render(launch).partition("\n")
    found: dict[str, Any] = json.loads(first.removeprefix("# "))
    return found


def test_a_node_is_one_bundle_and_nodes_are_machines() -> None:
    """Ray never divides a bundle, so the ranks of a node are together."""
    each = {"CPU": 4.0, "GPU": 4.0}
    assert asked() == {
        "name": "isthmus-cluster-0",
        "strategy": "STRICT_SPREAD",
        "bundles": [each, each],
    }
    assert asked(("colocate", "true"))["strategy"] == "PACK"
    assert asked(nodes=1) == {"name": "isthmus-cluster-0", "strategy": "PACK", "bundles": [each]}
    options = (("cpus", "32"), ("gpus", "0"), ("memory", "64Gi"), ("resource", "a100=0.5"))
    assert asked(*options)["bundles"][1] == {"CPU": 32.0, "memory": 2.0**36, "a100": 0.5}


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        (("partition", "gpu"), "--option partition is not known; known options are address, auth"),
        (("gpus", "two"), "--option gpus=two is not a whole number, such as 8"),
        (("cpus", "0"), "--option cpus=0 leaves the ranks no processor; give at least 1"),
        (("memory", "64"), "--option memory=64 is not a size, such as 64Gi"),
        (("wait", "-1"), "--option wait=-1 is not a number of seconds, such as 600"),
        (("authentication", "no"), "--option authentication=no is not token or none"),
        (("resource", "a100"), "--option resource=a100 is not of the form resource=NAME=AMOUNT"),
        (("resource", "a100=0"), "--option resource=a100=0 is not of the form resource=NAME=AMOU"),
        (("resource", "GPU=1"), "--option resource=GPU=1: Ray's own GPU has an option; use that"),
        (("address", "ray://head:10001"), "--option address=ray://head:10001 is one of Ray's cli"),
        (("address", "head"), "--option address 'head' is not of the form HOST:PORT"),
    ],
)
def test_an_option_that_ray_cannot_have_is_refused(option: tuple[str, str], sentence: str) -> None:
    with pytest.raises(UserError) as refused:
        asked(option)
    assert str(refused.value).startswith(sentence)


def test_the_script_has_the_environment_in_its_order_and_no_secrets(tmp_path: Path) -> None:
    secrets = tmp_path / "secrets.env"
    secrets.write_text("TOKEN=hush\n")
    secrets.chmod(0o600)
    prologue = tmp_path / "it's.sh"
    prologue.write_text('[ -z "$UNSET" ] && export SEEN="$TOKEN $OMP_NUM_THREADS $KEY"\n')
    state = tmp_path / "the state"
    state.mkdir()
    (state / "launch-ray.env").write_text("KEY=drawn\n")
    words = ("--env-file", str(secrets), "--prologue", str(prologue), "--option", "cpus=8")
    text = dry_run(*words, scheduler="ray", state=state)
    assert "hush" not in text
    assert "drawn" not in text
    prepared, _, _ = text.partition(f"{sys.executable} -m")
    shell = subprocess.run(
        ["bash", "-c", f'{prepared} pwd; echo "$SEEN"'], capture_output=True, text=True
    )
    assert (shell.stdout, shell.stderr) == (f"{state}\nhush 2 drawn\n", "")


def test_ray_is_named_if_it_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"is not installed; .*pip install .*\[ray\]'$"):
        RayLauncher().submit(DatacenterLaunch(**LAUNCH, state=tmp_path / "state"))
    assert not (tmp_path / "state").exists()


class Guarded:
    """A script under a guard, which this process holds as Ray's worker does."""

    def __init__(self, folder: Path, script: str) -> None:
        (folder / "script").write_text(script)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "isthmus_datacenter.launch.node_guard", str(folder / "script")],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.hears = self.process.stdin
        self.says = self.process.stdout

    def status(self) -> bytes:
        with self.says:
            status = self.says.read()
        self.process.wait()
        self.hears.close()
        return status


def lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_a_script_that_ends_leaves_none_of_its_processes(tmp_path: Path) -> None:
    guarded = Guarded(tmp_path, "sleep 6000 & echo $! >pid; exit 7")
    assert guarded.status() == b"7"
    assert not lives(int((tmp_path / "pid").read_text()))


def test_a_script_is_asked_to_end(tmp_path: Path) -> None:
    script = "trap 'touch asked; kill %1; exit 3' TERM; sleep 6000 & touch began; wait"
    guarded = Guarded(tmp_path, script)
    wait_until((tmp_path / "began").exists)
    os.write(guarded.hears.fileno(), b".")
    assert guarded.status() == b"3"
    assert (tmp_path / "asked").exists()


def test_what_a_lost_worker_has_started_is_killed(tmp_path: Path) -> None:
    """Also where Ray has killed the worker's children one by one."""
    guarded = Guarded(tmp_path, "trap '' TERM; sleep 6000 & echo $! >new; mv new pid; wait")
    wait_until((tmp_path / "pid").exists)
    guarded.process.wait()  # the guard itself is no child any more
    guarded.hears.close()
    assert guarded.status() == b"-9"
    end = time.monotonic() + 30
    while lives(int((tmp_path / "pid").read_text())):
        assert time.monotonic() < end


def test_a_node_that_is_to_end_while_it_reads_its_script_does_not_begin(tmp_path: Path) -> None:
    script = tmp_path / "script"
    os.mkfifo(script)
    text = f"touch {tmp_path}/began"
    node = RayNode(0)
    digest = hashlib.sha256(text.encode()).hexdigest()
    found: list[tuple[int, str]] = []

    def run() -> None:
        found.append(node.run(str(script), digest, str(tmp_path / "log"), "127.0.0.1:1"))

    running = threading.Thread(target=run, daemon=True)
    running.start()
    with script.open("w") as file:  # opens when the node reads
        node.leave()
        file.write(text)
    running.join(30)
    assert found == [(0, "")]
    assert not (tmp_path / "began").exists()
