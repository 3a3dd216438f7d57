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
from isthmus.identity.tls import aggregator_host
from isthmus_server.cli.aggregator import check_name
from tests.machine import HELM, needs_helm, needs_systemd

DEPLOY = Path(__file__).parents[1] / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
STANDBY = DEPLOY / "systemd/standby.conf"
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
    "standby": ["server.standby.claim=fleet"],
    "aggregators": [
        "aggregators.enabled=true",
        *("aggregators.autoscaling.enabled=true", "aggregators.service.type=LoadBalancer"),
    ],
    "aggregators elsewhere": [
        *("server.enabled=false", "aggregators.enabled=true", "aggregators.replicas=3"),
        *("aggregators.join=a.example:9401", "aggregators.storage.className=fast"),
        *("aggregators.moving.className=local", "aggregators.moving.size=9Gi"),
    ],
    "devices at aggregators": [
        *("aggregators.enabled=true", "devices.enabled=true"),
        "server.extraArgs={--connected=2000,--mirror,s3:bucket/models}",
        "server.environmentSecret=store",
    ],
    "devices with servers": [
        *("server.enabled=false", "aggregators.enabled=true", "aggregators.join=a.example:9401"),
        *("devices.enabled=true", "devices.join=a.example:9401"),
        "devices.servers={b.example:9500,wss://a.example/isthmus}",
    ],
    "devices elsewhere": [
        *("server.enabled=false", "devices.enabled=true", "devices.join=a.example:9401"),
        "datacenter.enabled=false",
    ],
}
"""Values of the chart."""

EXPOSED = {
    "isthmus-server.service": 20,
    "isthmus-aggregator.service": 20,
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
    for unit in (*UNITS, STANDBY):
        (line,) = re.findall(r"^ExecStart=(.+)$", unit.read_text(), re.MULTILINE)
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
def test_what_is_started_is_a_command_with_these_options(file, arguments, tmp_path):
    # Options that want a path that exists, and may be written.
    folders = dict.fromkeys(("/data", "/moving", "/var/cache/isthmus-aggregator"), str(tmp_path))
    here = {**folders, "/policy/policy.toml": __file__}
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
            "standby": ["Service", "StatefulSet"],
            "aggregators": [
                "HorizontalPodAutoscaler",
                "NetworkPolicy",
                "PodDisruptionBudget",
                *("Service", "Service", "StatefulSet", "StatefulSet"),
            ],
            "aggregators elsewhere": [
                *("NetworkPolicy", "PodDisruptionBudget", "Service", "StatefulSet"),
            ],
            "devices at aggregators": [
                *("DaemonSet", "NetworkPolicy", "PodDisruptionBudget"),
                *("Service", "Service", "StatefulSet", "StatefulSet"),
            ],
            "devices with servers": [
                *("DaemonSet", "NetworkPolicy", "PodDisruptionBudget", "Service", "StatefulSet"),
            ],
            "devices elsewhere": ["DaemonSet"],
        }[choice]
    )


@needs_helm
def test_a_server_and_its_standby_share_a_claim_and_are_on_two_nodes():
    (alone,) = [each for each in rendered("server") if each["kind"] == "StatefulSet"]
    (pair,) = [each for each in rendered("standby") if each["kind"] == "StatefulSet"]
    assert (alone["spec"]["replicas"], pair["spec"]["replicas"]) == (1, 2)
    assert "volumeClaimTemplates" in alone["spec"]
    assert "volumeClaimTemplates" not in pair["spec"]
    pod = pair["spec"]["template"]["spec"]
    assert {"name": "state", "persistentVolumeClaim": {"claimName": "fleet"}} in pod["volumes"]
    assert "--standby" in pod["containers"][0]["args"]
    (rule,) = pod["affinity"]["podAntiAffinity"].values()
    assert rule[0]["labelSelector"]["matchLabels"] == pair["spec"]["selector"]["matchLabels"]
    assert pair["spec"]["updateStrategy"] == {"type": "OnDelete"}


def part_of(choice: str, kind: str, name: str = "fleet-aggregator") -> dict[str, Any]:
    """The manifest of a kind and name."""
    (found,) = [
        each
        for each in rendered(choice)
        if (each["kind"], each["metadata"]["name"]) == (kind, name)
    ]
    return found


@needs_helm
def test_all_that_is_for_aggregators_selects_their_pods() -> None:
    pods = part_of("aggregators", "StatefulSet")["spec"]
    labels = pods["template"]["metadata"]["labels"]
    service = part_of("aggregators", "Service")["spec"]
    budget = part_of("aggregators", "PodDisruptionBudget")["spec"]
    policy = part_of("aggregators", "NetworkPolicy")["spec"]
    selectors = [each["selector"]["matchLabels"] for each in (pods, budget)]
    selectors += [service["selector"], policy["podSelector"]["matchLabels"]]
    assert selectors == [labels] * 4
    (container,) = pods["template"]["spec"]["containers"]
    (port,) = container["ports"]
    assert port["containerPort"] == service["ports"][0]["port"] == 9500
    assert policy["ingress"] == [{"ports": [{"port": 9500, "protocol": "TCP"}]}]
    server = part_of("aggregators", "StatefulSet", "fleet-server")["spec"]
    (target,) = policy["egress"][1]["to"]
    assert target["podSelector"] == server["selector"]
    assert policy["egress"][1]["ports"] == [
        {"port": port["containerPort"], "protocol": "TCP"}
        for port in server["template"]["spec"]["containers"][0]["ports"]
    ]
    assert part_of("aggregators elsewhere", "NetworkPolicy")["spec"]["egress"][1] == {}


@needs_helm
def test_the_autoscaler_alone_says_how_many_aggregators_there_are() -> None:
    scaler = part_of("aggregators", "HorizontalPodAutoscaler")["spec"]
    pods = part_of("aggregators", "StatefulSet")
    assert scaler["scaleTargetRef"] == {
        "apiVersion": pods["apiVersion"],
        "kind": pods["kind"],
        "name": pods["metadata"]["name"],
    }
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (2, 8)
    assert "replicas" not in pods["spec"]
    # A share of the CPU is of what is requested.
    assert "cpu" in pods["spec"]["template"]["spec"]["containers"][0]["resources"]["requests"]
    assert part_of("aggregators elsewhere", "StatefulSet")["spec"]["replicas"] == 3


@needs_helm
def test_an_aggregator_s_pod_joins_once_with_the_token_of_its_name(tmp_path: Path) -> None:
    pods = part_of("aggregators", "StatefulSet")["spec"]
    (join,) = pods["template"]["spec"]["initContainers"]
    assert join["env"] == [
        {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    ]
    (claim,) = pods["volumeClaimTemplates"]
    assert {"name": claim["metadata"]["name"], "mountPath": "/state"} in join["volumeMounts"]
    # The script itself, with another state directory and a command that prints its arguments.
    script = join["command"][-1].replace("/state", str(tmp_path))
    printing = tmp_path / "isthmus"
    printing.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    printing.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "POD": "fleet-aggregator-3"}

    def words() -> list[str]:
        done = subprocess.run(
            ["sh", "-c", script], env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout.split()

    state = tmp_path / "aggregator"
    assert words() == [
        *("server", "aggregator", "join", str(state), "fleet-server.edge.svc:9401"),
        *("--token-file", "/secrets/fleet-aggregator-3"),
    ]
    state.mkdir()
    (state / "member.json").touch()
    assert words() == []


@needs_helm
def test_what_moves_at_an_aggregator_has_a_limited_space_of_its_own() -> None:
    pods = part_of("aggregators", "StatefulSet")["spec"]["template"]["spec"]
    (container,) = pods["containers"]
    folder = container["args"][container["args"].index("--folder") + 1]
    (mount,) = [each for each in container["volumeMounts"] if each["mountPath"] == folder]
    assert {"name": mount["name"], "emptyDir": {"sizeLimit": "20Gi"}} in pods["volumes"]
    elsewhere = part_of("aggregators elsewhere", "StatefulSet")["spec"]["template"]["spec"]
    (volume,) = [each for each in elsewhere["volumes"] if each["name"] == mount["name"]]
    claim = volume["ephemeral"]["volumeClaimTemplate"]["spec"]
    assert claim["storageClassName"] == "local"
    assert claim["resources"] == {"requests": {"storage": "9Gi"}}


def test_what_moves_at_an_aggregator_of_the_unit_is_in_a_directory_that_systemd_makes() -> None:
    unit = (DEPLOY / "systemd/isthmus-aggregator.service").read_text()
    (directory,) = re.findall(r"^CacheDirectory=(.+)$", unit, re.MULTILINE)
    (command,) = re.findall(r"^ExecStart=(.+)$", unit, re.MULTILINE)
    assert f"--folder /var/cache/{directory}" in command


@needs_systemd
def test_the_drop_in_for_a_standby_fits_the_unit_of_the_server(tmp_path):
    unit = "isthmus-server.service"
    command = str(Path(sys.executable).with_name("isthmus"))
    (tmp_path / f"{unit}.d").mkdir()
    for source, target in (
        (DEPLOY / "systemd" / unit, tmp_path / unit),
        (STANDBY, tmp_path / f"{unit}.d/standby.conf"),
    ):
        target.write_text(source.read_text().replace("/opt/isthmus/bin/isthmus", command))
    done = subprocess.run(
        ["systemd-analyze", "verify", tmp_path / unit], capture_output=True, text=True, timeout=60
    )
    assert unit not in done.stderr, done.stderr
    assert STANDBY.name not in done.stderr, done.stderr


@needs_helm
def test_devices_and_datacenter_join_the_server_of_the_release():
    text = json.dumps(rendered("all"))
    for role in ("client", "datacenter"):
        assert f"exec isthmus {role} join fleet-server.edge.svc:9401 --token-file" in text
    assert "client join a.example:9401" in json.dumps(rendered("devices elsewhere"))
    for host in ("fleet-server.edge.svc", "a.example", "10.0.0.1"):
        assert f"--host {host}" in text


def dialled(choice: str) -> list[str]:
    """The addresses that devices are started with."""
    (container,) = part_of(choice, "DaemonSet", "fleet-device")["spec"]["template"]["spec"][
        "containers"
    ]
    words = container["args"]
    return [words[at + 1] for at, word in enumerate(words) if word == "--server"]


@needs_helm
def test_devices_dial_the_aggregators_of_the_release_and_then_its_server() -> None:
    aggregators = part_of("devices at aggregators", "Service")
    server = part_of("devices at aggregators", "Service", "fleet-server")
    (first,) = aggregators["spec"]["ports"]
    link = server["spec"]["ports"][0]
    assert dialled("devices at aggregators") == [
        f"{aggregators['metadata']['name']}.edge.svc:{first['port']}",
        f"{server['metadata']['name']}.edge.svc:{link['port']}",
    ]
    assert dialled("devices with servers") == ["b.example:9500", "wss://a.example/isthmus"]
    for choice in ("all", "devices elsewhere"):
        assert dialled(choice) == []


@needs_helm
def test_the_hosts_that_devices_dial_are_in_the_certificates() -> None:
    """The aggregators' host is that of the tokens in docs/deploy.md, and can be that of one."""
    aggregators, server = (
        address.rpartition(":")[0] for address in dialled("devices at aggregators")
    )
    for name in (aggregators, f"{aggregators}_2"):
        check_name(name, None)
        assert aggregator_host(name) == aggregators
    guide = (DEPLOY.parent / "docs/deploy.md").read_text()
    assert "RELEASE-aggregator.NAMESPACE.svc" in guide
    pods = part_of("devices at aggregators", "StatefulSet", "fleet-server")
    (init,) = pods["spec"]["template"]["spec"]["initContainers"]
    (words,) = commands_in(init["command"][-1])
    assert words[words.index("--host") + 1] == server


@needs_helm
def test_further_options_and_a_store_s_variables_reach_the_server() -> None:
    pods = part_of("devices at aggregators", "StatefulSet", "fleet-server")
    (container,) = pods["spec"]["template"]["spec"]["containers"]
    assert container["args"][-3:] == ["--connected=2000", "--mirror", "s3:bucket/models"]
    assert container["envFrom"] == [{"secretRef": {"name": "store"}}]
    (plain,) = part_of("server", "StatefulSet", "fleet-server")["spec"]["template"]["spec"][
        "containers"
    ]
    assert "envFrom" not in plain


@needs_helm
@pytest.mark.parametrize(
    ("value", "key"),
    [
        ("server.jobs=0", "server.jobs"),
        ("server.replicas=2", "replicas"),
        ("aggregators.replicas=0", "aggregators.replicas"),
        ("aggregators.join=a.example", "aggregators.join"),
        (
            "aggregators.enabled=true,aggregators.autoscaling.enabled=true,aggregators.replicas=9",
            "aggregators.autoscaling.maxReplicas",
        ),
        ("server.standby.claim=Fleet_1", "server.standby.claim"),
        ("devices.join=a.example", "devices.join"),
        ("devices.servers={a.example}", "devices.servers"),
        (
            "aggregators.enabled=true,devices.enabled=true,devices.join=a.example:9401",
            "devices.servers",
        ),
        (
            "aggregators.enabled=true,devices.enabled=true,aggregators.join=a.example:9401",
            "devices.servers",
        ),
        ("server.enabled=false,devices.enabled=true", "devices.join"),
        ("server.enabled=false,aggregators.enabled=true", "aggregators.join"),
        ("server.enabled=false,datacenter.enabled=true", "datacenter.join"),
        ("server.extraArgs=--quiet", "server.extraArgs"),
        ("datacenter.ranks=many", "datacenter.ranks"),
    ],
)
def test_values_that_cannot_be_are_refused_with_their_key(value, key):
    done = helm("template", "fleet", str(CHART), "--set", value)
    assert done.returncode != 0
    assert key in done.stderr.replace("/", ".")


@needs_helm
def test_names_of_digits_and_paths_with_commas_stay_what_they_are() -> None:
    sets = (
        *("server.environmentSecret=1", "server.standby.claim=2", "datacenter.claim=3"),
        *("datacenter.tokenSecret=4", "datacenter.environmentSecret=5", "devices.tokenSecret=6"),
        *("aggregators.tokenSecret=7", "devices.dataPath=/srv/a\\, b: c"),
    )
    enabled = [f"{part}.enabled=true" for part in ("aggregators", "devices", "datacenter")]
    done = helm(
        *("template", "fleet", str(CHART)),
        *(part for value in enabled for part in ("--set", value)),
        *(part for value in sets for part in ("--set-string", value)),
    )
    assert done.returncode == 0, done.stderr
    named: list[object] = []
    for document in yaml.safe_load_all(done.stdout):
        pod = (document or {}).get("spec", {}).get("template", {}).get("spec", {})
        for container in pod.get("containers", ()):
            named += [each["secretRef"]["name"] for each in container.get("envFrom", ())]
        for volume in pod.get("volumes", ()):
            named.append(volume.get("secret", {}).get("secretName"))
            named.append(volume.get("persistentVolumeClaim", {}).get("claimName"))
            named.append(volume.get("hostPath", {}).get("path"))
    expected = {*"1234567", "/srv/a, b: c", "/var/lib/isthmus"}
    assert {each for each in named if each is not None} == expected


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
