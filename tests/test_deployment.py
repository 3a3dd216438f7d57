"""The files in deploy/: units, images and manifests are valid, and start commands that exist."""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from isthmus import __version__ as isthmus_version
from isthmus.cli import isthmus
from tests.machine import HELM, needs_helm, needs_systemd

DEPLOY = Path(__file__).parents[1] / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
CHART = DEPLOY / "helm/isthmus"
CHOICES = {
    "server": [],
    "all": [
        *(
            "devices.enabled=true",
            'devices.policy=jobs = ["keyboard-*"]',
            "datacenter.enabled=true",
        ),
        *("server.hosts={a.example,10.0.0.1}", "datacenter.nodes=2", "images.client.tag=v1"),
        *("imagePullSecrets[0].name=pull", "server.storage.className=fast"),
    ],
    "devices elsewhere": [
        *("server.enabled=false", "devices.enabled=true", "devices.join=a.example:9401"),
        "datacenter.enabled=false",
    ],
}
"""Values of the chart."""

EXPOSED = {
    "isthmus-server.service": 20,
    "isthmus-device.service": 55,
    "isthmus-datacenter.service": 60,
}
"""Most of the exposure that `systemd-analyze security` may find, in tenths."""


def documents(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text()))


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    assert HELM is not None
    environment = {**os.environ, "HELM_CACHE_HOME": "/nonexistent"}
    return subprocess.run(
        [HELM, *arguments], capture_output=True, text=True, timeout=60, env=environment
    )


@functools.cache
def rendered(choice: str) -> list[dict[str, Any]]:
    """The manifests of a release `fleet` in the namespace `edge`."""
    sets = [part for value in CHOICES[choice] for part in ("--set", value)]
    done = helm("template", "fleet", str(CHART), "--namespace", "edge", *sets)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def containers(manifests: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for document in manifests:
        spec = document.get("spec", {}).get("template", {}).get("spec", {})
        yield from (*spec.get("initContainers", ()), *spec.get("containers", ()))


def commands_in(script: str) -> Iterator[list[str]]:
    """The arguments of `isthmus` in a shell script."""
    for line in re.findall(r"\bisthmus ((?:client|server|datacenter) [^&|;]*)", script):
        yield shlex.split(line)


def started() -> Iterator[tuple[str, list[str]]]:
    """The arguments of `isthmus` in each file."""
    for unit in UNITS:
        (line,) = re.findall(r"^ExecStart=(.*)$", unit.read_text(), re.MULTILINE)
        for name, value in re.findall(r"^Environment=(\w+)=(.*)$", unit.read_text(), re.MULTILINE):
            line = line.replace(f"${{{name}}}", value)
        yield unit.name, shlex.split(line)[1:]
    for service in documents(DEPLOY / "containers/compose.yaml")[0]["services"].values():
        yield "compose.yaml", service["command"]
    for choice in CHOICES if HELM else ():
        for container in containers(rendered(choice)):
            yield from (
                ("chart", words) for words in commands_in(container.get("command", [""])[-1])
            )
            if "args" in container:
                yield "chart", container["args"]


@pytest.mark.parametrize(("file", "arguments"), list(started()))
def test_what_is_started_is_a_command_with_these_options(file, arguments):
    here = {"/data": "/", "/policy/policy.toml": __file__}  # options that want a path that exists
    arguments = [here.get(word, word) for word in arguments]
    command: click.Command = isthmus
    while isinstance(command, click.Group):
        context = click.Context(command)
        name, *arguments = arguments
        found = command.get_command(context, name)
        assert found is not None, (file, name)
        command = found
    command.make_context(command.name, arguments)  # raises where an option is unknown


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
@needs_systemd
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


@needs_helm
def test_the_chart_has_no_faults():
    done = helm("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == isthmus_version


@needs_helm
@pytest.mark.parametrize("choice", CHOICES)
def test_the_chart_renders_to_manifests_of_kubernetes(choice):
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for document in rendered(choice):
        kubernetes_validate.validate(document, "1.30", strict=True)
    kinds = sorted(document["kind"] for document in rendered(choice))
    assert (
        kinds
        == {
            "server": ["Service", "StatefulSet"],
            "all": [
                "ConfigMap",
                "DaemonSet",
                "Job",
                "NetworkPolicy",
                "Service",
                "Service",
                "StatefulSet",
            ],
            "devices elsewhere": ["DaemonSet"],
        }[choice]
    )


@needs_helm
def test_devices_and_datacenter_join_the_server_of_the_release():
    text = json.dumps(rendered("all"))
    for role in ("client", "datacenter"):
        assert f"exec isthmus {role} join fleet-server.edge.svc:9401 --token-file" in text
    assert "client join a.example:9401" in json.dumps(rendered("devices elsewhere"))
    for host in ("fleet-server.edge.svc", "a.example", "10.0.0.1"):
        assert f"--host {host}" in text


@needs_helm
@pytest.mark.parametrize(
    ("value", "key"),
    [
        ("server.jobs=0", "server.jobs"),
        ("server.replicas=2", "replicas"),
        ("devices.join=a.example", "devices.join"),
        ("datacenter.ranks=many", "datacenter.ranks"),
    ],
)
def test_values_that_cannot_be_are_refused_with_their_key(value, key):
    done = helm("template", "fleet", str(CHART), "--set", value)
    assert done.returncode != 0
    assert key in done.stderr.replace("/", ".")


@needs_helm
@pytest.mark.parametrize("choice", CHOICES)
def test_no_container_has_more_rights_than_it_needs(choice):
    for container in containers(rendered(choice)):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
    for document in rendered(choice):
        pod = document.get("spec", {}).get("template", {}).get("spec")
        if pod is not None:
            assert pod["securityContext"]["runAsNonRoot"] is True
            assert pod["automountServiceAccountToken"] is False


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
