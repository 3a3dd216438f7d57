"""The examples of docs/extend.md work: packages outside the repository, each used by a real job."""

import hashlib
import http.server
import json
import re
import threading
from pathlib import Path
from typing import ClassVar

import pytest
import yaml
from tests.outside_package import OutsidePackage

from isthmus.tensors.exchange_set import TensorLayout
from isthmus.transport.blob_sources import Filling, NamedSource
from isthmus.transport.blobs import Assembly, describe, into

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/extend.md").read_text()
SHAPES = {"bias": (3,), "weight": (3, 4)}
JOB = """
name = "extended"
rounds = 2
[task]
source = "task.py:Learn"
[strategy]
policy = "federated"
[federated]
clients = 3
cohort = 3
quorum = 3
secure_aggregation = false
"""


def example(name):
    """The Python block of the page that defines a class, and its lines."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    (block,) = [each for each in blocks if f"class {name}" in each]
    return block


@pytest.fixture
def extended(tmp_path, write_task, forked_commands):
    """Run a job with an example of the page installed; returns its report and its folder.

    The processes of the job do not import PyTorch anew, unless the test is `as_installed`.
    """
    write_task()

    def run(group, name, attribute, *arguments, as_installed=False):
        entry = {f"{group}/{name}": attribute}
        module = f"outside_{attribute.lower()}"
        package = OutsidePackage(tmp_path / "site", module, example(attribute), entry)
        (tmp_path / "job.toml").write_text(JOB)
        how = {"cwd": tmp_path, "forked_commands": None if as_installed else forked_commands}
        for command in (["job", "check", "job.toml"], ["run", "job.toml", "--run-dir", "run"]):
            options = [each for each in arguments if command[0] == "run" or "track" not in each]
            ended = package.isthmus(*command, *options, **how)
            assert ended.returncode == 0, ended.stdout + ended.stderr
        told = package.isthmus("report", "run", "--json", **how).stdout
        return json.loads(told), tmp_path

    return run


def accepted(report):
    return [row["participants"]["accepted"] for row in report["rounds"]]


def test_the_page_has_every_group_that_is_registered():
    groups = set(
        re.findall(r'entry-points\."(isthmus\.\w+)"', (ROOT / "pyproject.toml").read_text())
    )
    ours = {"commands", "privacy_commands", "doctor", "python", "checks", "plans"}
    ours |= {"federated_extensions"}
    ours |= {"app_checks", "device_work", "run_loops"}  # of one framework, with a table in the job
    expected = groups - {f"isthmus.{name}" for name in ours} | {"isthmus.policies"}
    assert set(re.findall(r"^\| `(isthmus\.\w+)` \|", PAGE, re.M)) == expected
    assert "extend.md" in yaml.dump(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])


def test_the_examples_are_short():
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    assert max(len(block.strip().splitlines()) for block in blocks) <= 34


def test_an_aggregation_rule_from_outside(extended):
    report, _ = extended(
        "isthmus.aggregation_rules",
        "sign-vote",
        "SignVote",
        "--set=federated.aggregation=sign-vote",
        "--set=federated.aggregation_settings={step=0.125}",
    )
    assert accepted(report) == [3, 3]
    # Every element of a vote is one step up or down, or 0 if no device moved it.
    norm = report["rounds"][0]["norms"]["federated"]
    assert (norm / 0.125) ** 2 == pytest.approx(round((norm / 0.125) ** 2))


def test_a_selection_of_devices_from_outside(extended):
    report, _ = extended(
        "isthmus.device_selections",
        "longest-waiting",
        "LongestWaiting",
        "--set=federated.selection=longest-waiting",
        "--set=federated.cohort=2",
        "--set=federated.quorum=2",
        "--set=rounds=3",
    )
    invited = [[receipt["participant"] for receipt in row["receipts"]] for row in report["rounds"]]
    names = sorted({name for cohort in invited for name in cohort})
    # All have 20 examples, so that among those that waited for as long, names decide.
    a, b, c = names
    assert invited == [[a, b], [a, c], [a, b]]


def test_a_tracker_from_outside(extended):
    report, folder = extended("isthmus.trackers", "csv", "CsvRounds", "--track=csv=figures.csv")
    rows = (folder / "run/tracking/csv/figures.csv").read_text().splitlines()
    logged = {row.split(",")[0]: row for row in rows if ",participants/accepted," in row}
    assert list(logged) == ["1", "2"]
    assert all(float(row.split(",")[2]) == 3 for row in logged.values())
    assert report["status"] == "finished"


def test_an_update_codec_from_outside(extended):
    report, _ = extended(
        "isthmus.update_codecs",
        "half",
        "HalfPrecision",
        "--set=federated.codec=half",
        "--set=federated.download_codec=half",
        as_installed=True,
    )
    assert accepted(report) == [3, 3]
    sent = {receipt["bytes_in"] for row in report["rounds"] for receipt in row["receipts"]}
    model = TensorLayout.from_shapes(SHAPES).nbytes
    assert sent == {model - 2 * 15}  # 15 elements, halved
    received = [{receipt["bytes_out"] for receipt in row["receipts"]} for row in report["rounds"]]
    assert received == [{model}, {8 + 2 * 15}]


def test_a_codec_of_secure_sums_from_outside(extended):
    report, _ = extended(
        "isthmus.update_codecs",
        "projection",
        "Projection",
        "--set=federated.secure_aggregation=true",
        "--set=federated.compression={codec='projection', settings={one_in=3}}",
    )
    assert accepted(report) == [3, 3]
    # Of 15 elements 5 are sent, in 26 bits each, and in 5 as soon as their magnitude is known.
    sent = [{receipt["bytes_in"] for receipt in row["receipts"]} for row in report["rounds"]]
    (first,), (second,) = sent
    assert first - second == 17 - 4


class Mirror(http.server.BaseHTTPRequestHandler):
    """Serves one blob, of which it sends half before it closes the first connection."""

    blob = b""
    asked: ClassVar[list[str]] = []

    def do_GET(self):
        self.asked.append(self.headers["Range"])
        if hashlib.sha256(self.blob).hexdigest() != self.path.rpartition("/")[2]:
            self.send_error(404)
            return
        start = int(self.headers["Range"].removeprefix("bytes=").partition("-")[0])
        self.send_response(206)
        self.send_header("Content-Length", str(len(self.blob) - start))
        self.end_headers()
        end = len(self.blob) // 2 if len(self.asked) == 1 else None
        self.wfile.write(self.blob[start:end])

    def log_message(self, *_):
        pass


async def test_a_source_of_blobs_from_outside(tmp_path, monkeypatch):
    entry = {"isthmus.blob_sources/http": "WebSource"}
    package = OutsidePackage(tmp_path, "outside_web", example("WebSource"), entry)
    Mirror.blob = bytes(range(256)) * (1 << 13)  # 2 MiB
    Mirror.asked.clear()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Mirror)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    try:
        with package.on_path(monkeypatch):
            source = NamedSource(f"http://127.0.0.1:{server.server_port}/blobs")
            for payload, is_there in ((Mirror.blob, True), (b"another", False)):
                name = describe(payload)
                memory = bytearray(name.size)
                found = await Filling(Assembly(name, into(memory)), [source]).run()
                assert (found.complete, bytes(memory) == payload) == (is_there, is_there)
    finally:
        server.shutdown()
        serving.join()
        server.server_close()
    half = 1 << 20
    size = 1 << 21
    assert Mirror.asked == [f"bytes=0-{size - 1}", f"bytes={half}-{size - 1}", "bytes=0-6"]


@pytest.mark.parametrize("command", [("client", "start"), ("datacenter", "launch", "--ranks", "1")])
def test_a_source_that_is_not_installed_is_refused(tmp_path, command):
    package = OutsidePackage(tmp_path / "site", "nothing", "", {})
    words = ("--server", "127.0.0.1:9", "--name", "a", "--state", tmp_path / "state")
    refused = package.isthmus(*command, *words, "--blobs", "http://mirror", cwd=tmp_path)
    assert refused.returncode == 1
    assert refused.stderr == (
        "isthmus: --blobs http://mirror is unknown; did you mean https? installed are file, https\n"
    )


def test_a_launcher_from_outside(tmp_path, monkeypatch):
    """The nodes are started by a stand-in for ssh, which writes what it was asked to run."""
    entry = {"isthmus.launchers/ssh": "SshLauncher"}
    package = OutsidePackage(tmp_path / "site", "outside_ssh", example("SshLauncher"), entry)
    ssh = tmp_path / "ssh"
    asked_file = tmp_path / "asked"
    ssh.write_text(
        f'#!/bin/sh\necho "$*" >>{asked_file}\n'
        # The service ends the launch, and does so after the agents have begun.
        f'case "$*" in *serve*) until [ "$(wc -l <{asked_file})" = 3 ]; do sleep 0.1; done; esac\n'
    )
    ssh.chmod(0o755)
    words = ("datacenter", "launch", "--scheduler", "ssh", "--server", "127.0.0.1:9402")
    words += ("--name", "dc", "--ranks", "2", "--nodes", "2", "--state", tmp_path / "state")
    refused = package.isthmus(*words, "--option", "hosts=one", cwd=tmp_path)
    assert refused.stderr == "isthmus: ssh needs --option hosts=A,B,... of --nodes 2 alone\n"
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    started = package.isthmus(*words, "--option", "hosts=one,two", cwd=tmp_path)
    assert started.stdout == "ssh: all nodes ended\n", started.stderr
    asked = asked_file.read_text().splitlines()
    agent = f"datacenter agent --state {tmp_path / 'state'} --control one:29400"
    agents = [line for line in asked if line.endswith(agent)]
    assert sorted(line.split("; ")[0] for line in agents) == ["one NODE=0", "two NODE=1"]
    (service,) = set(asked) - set(agents)
    assert service.startswith("one ")
    assert "datacenter serve --server 127.0.0.1:9402 --name dc --ranks 2 --nodes 2" in service
