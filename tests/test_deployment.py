"""The files in deploy/: units, images and manifests are valid, and start commands that exist."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from isthmus.cli import isthmus

DEPLOY = Path(__file__).parents[1] / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
MANIFESTS = [
    path
    for path in sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    if path.name != "kustomization.yaml"
]
EXPOSED = {
    "isthmus-server.service": 20,
    "isthmus-device.service": 55,
    "isthmus-datacenter.service": 60,
}
"""Most of the exposure that `systemd-analyze security` may find, in tenths."""


def documents(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text()))


def containers(path: Path) -> Iterator[dict[str, Any]]:
    for document in documents(path):
        spec = document.get("spec", {}).get("template", {}).get("spec", {})
        yield from (*spec.get("initContainers", ()), *spec.get("containers", ()))


def started() -> Iterator[tuple[str, list[str]]]:
    """The arguments of `isthmus` in each file."""
    for unit in UNITS:
        (line,) = re.findall(r"^ExecStart=(.*)$", unit.read_text(), re.MULTILINE)
        for name, value in re.findall(r"^Environment=(\w+)=(.*)$", unit.read_text(), re.MULTILINE):
            line = line.replace(f"${{{name}}}", value)
        yield unit.name, shlex.split(line)[1:]
    for service in documents(DEPLOY / "containers/compose.yaml")[0]["services"].values():
        yield "compose.yaml", service["command"]
    for path in MANIFESTS:
        for container in containers(path):
            script = " ".join(container.get("command", ["", "", ""])[2:])
            words = shlex.split(script.partition("exec isthmus ")[2])
            yield path.name, container.get("args", words)


@pytest.mark.parametrize(("file", "arguments"), list(started()))
def test_what_is_started_is_a_command_with_these_options(file, arguments):
    command: click.Command = isthmus
    while isinstance(command, click.Group):
        context = click.Context(command)
        name, *arguments = arguments
        found = command.get_command(context, name)
        assert found is not None, (file, name)
        command = found
    command.make_context(command.name, arguments)  # raises where an option is unknown


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="there is no systemd here")
def test_a_unit_is_valid_and_confined(unit, tmp_path):
    copy = tmp_path / unit.name
    command = Path(sys.executable).with_name("isthmus")
    copy.write_text(unit.read_text().replace("/opt/isthmus/bin/isthmus", str(command)))
    done = subprocess.run(
        ["systemd-analyze", "verify", copy], capture_output=True, text=True, timeout=60
    )
    assert unit.name not in done.stderr, done.stderr
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=yes", f"--threshold={EXPOSED[unit.name]}", copy],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_a_manifest_follows_the_schema_of_kubernetes(path):
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for document in documents(path):
        kubernetes_validate.validate(document, "1.30", strict=True)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_no_container_has_more_rights_than_it_needs(path):
    for container in containers(path):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
    for document in documents(path):
        pod = document.get("spec", {}).get("template", {}).get("spec")
        if pod is not None:
            assert pod["securityContext"]["runAsNonRoot"] is True
            assert pod["automountServiceAccountToken"] is False


def test_kustomize_has_every_manifest():
    (listed,) = documents(DEPLOY / "kubernetes/kustomization.yaml")
    assert sorted(listed["resources"]) == [path.name for path in MANIFESTS]


def test_compose_confines_its_services():
    (compose,) = documents(DEPLOY / "containers/compose.yaml")
    for service in compose["services"].values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]


def test_the_script_for_boards_is_a_valid_script():
    subprocess.run(["sh", "-n", DEPLOY / "boards/enrol.sh"], check=True, timeout=20)
    used = subprocess.run(
        [DEPLOY / "boards/enrol.sh"], capture_output=True, text=True, timeout=20, stdin=None
    )
    assert used.returncode == 2
    assert "usage" in used.stderr
