"""Render a Kubernetes manifest: an indexed Job with one pod per node, and what their network needs.

A headless Service names the pods to each other, and a NetworkPolicy keeps other pods away.

The cluster needs nothing beyond Kubernetes itself. The manifest is JSON, which is valid YAML.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import subprocess
from pathlib import Path
from typing import Any

from isthmus.errors import UserError
from isthmus_datacenter.launch import (
    RESTARTS,
    SHUTDOWN_SECONDS,
    Launch,
    NodeShell,
    check_printable,
    read_prologue,
    single_options,
    waiting,
)

_PORT = 29400
"""Port of the control store, in the first pod."""
_SINGLE = {
    "claim",
    "colocate",
    "cpus",
    "gpus",
    "host-network",
    "image",
    "memory",
    "mount",
    "namespace",
    "queue",
    "secret",
    "service-account",
    "shm",
}
"""Options that can be given once."""
_REPEATABLE = {
    "annotation",
    "capability",
    "env",
    "label",
    "node-selector",
    "pull-secret",
    "resource",
    "toleration",
}
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|[kMGTPE]|[KMGTPE]i)?")
_NUMBERS = {
    "gpus": (re.compile(r"[0-9]+"), "a whole number, such as 8"),
    "cpus": (re.compile(r"[0-9]+(\.[0-9]+)?|[0-9]+m"), "a number, such as 8, 0.5 or 500m"),
    "memory": (_QUANTITY, "a size, such as 64Gi"),
    "shm": (_QUANTITY, "a size, such as 64Gi"),
    "colocate": (re.compile("true|false"), "true or false"),
    "host-network": (re.compile("true|false"), "true or false"),
}
"""Options with values of one form: the form, and what users are told."""
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NAME_LENGTH = 48
"""What users are told: Kubernetes adds the numbers of pods to a name."""
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,50}[a-z0-9])?")

_NODE = "JOB_COMPLETION_INDEX"
"""Environment variable of a pod of an indexed job, with its number."""
_QUEUE = "kueue.x-k8s.io/queue-name"
"""Label by which Kueue admits a job: when there is room for all its pods, and not before."""


class KubernetesLauncher:
    """The launcher of Kubernetes, with `kubectl`."""

    shares_files = False

    def render(self, launch: Launch) -> str:
        """Render the manifest.

        Raises:
            UserError: an option is missing, unknown or not valid, or the name is not for a pod.
        """
        check_printable(launch)
        for key, _ in launch.options:
            if key not in _SINGLE | _REPEATABLE:
                known = ", ".join(sorted(_SINGLE | _REPEATABLE))
                raise UserError(f"--option {key} is not known; known options are {known}")
        options = single_options(launch, _REPEATABLE)
        for required in ("image", "claim"):
            if not options.get(required):
                raise UserError(f"kubernetes needs --option {required}=NAME")
        if launch.environment is not None:
            raise UserError(
                "on kubernetes, put the environment into a Secret: --option secret=NAME"
            )
        for key, (form, allowed) in _NUMBERS.items():
            if key in options and not form.fullmatch(options[key]):
                raise UserError(f"--option {key}={options[key]} is not {allowed}")
        mount = _mount(launch, options)
        name = f"{launch.title}{launch.name}"
        if not _NAME.fullmatch(name):
            raise UserError(
                f"{launch.named_by} {launch.name!r} cannot name a pod; use up to "
                f"{_NAME_LENGTH - len(launch.title)} of a-z, 0-9 and -, and end with a letter or "
                "digit"
            )
        metadata: dict[str, Any] = {"name": name, "labels": {"app": name}}
        if "namespace" in options:
            metadata["namespace"] = options["namespace"]
        service = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata,
            # Pods resolve each other before they are ready: to become ready they need each other.
            "spec": {
                "clusterIP": "None",
                "publishNotReadyAddresses": True,
                "selector": {"job-name": name},
            },
        }
        # The store in which the ranks meet, and their messages, are for these pods only.
        own = {"matchLabels": {"app": name}}
        policy = {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": metadata,
            "spec": {
                "podSelector": own,
                "policyTypes": ["Ingress"],
                "ingress": [{"from": [{"podSelector": own}]}],
            },
        }
        template: dict[str, Any] = {"labels": {**_pairs(launch, "label"), "app": name}}
        if annotations := _pairs(launch, "annotation"):
            template["annotations"] = annotations
        job: dict[str, Any] = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": metadata,
            "spec": {
                "completionMode": "Indexed",
                "completions": launch.nodes,
                "parallelism": launch.nodes,
                "backoffLimit": RESTARTS,
                "template": {"metadata": template, "spec": _pod(launch, name, options, mount)},
            },
        }
        if "queue" in options:
            labels = {**metadata["labels"], _QUEUE: options["queue"]}
            job["metadata"] = {**metadata, "labels": labels}
            # Kueue begins the job: without it pods could start, and hold GPUs, one by one.
            job["spec"]["suspend"] = True
        items = [service, policy, job]
        if launch.secrets:
            items.append(_drawn_secret(launch, metadata))
        return json.dumps({"apiVersion": "v1", "kind": "List", "items": items}, indent=2)

    def submit(self, launch: Launch) -> str:
        """Apply the manifest to kubectl's current cluster; returns kubectl's output.

        Raises:
            UserError: the request is not valid, kubectl is not installed, or it failed.
        """
        try:
            completed = subprocess.run(
                ["kubectl", "apply", "-f", "-"],
                input=self.render(launch),
                capture_output=True,
                text=True,
                check=False,
            )
        except FileNotFoundError:
            raise UserError(
                "kubectl is not installed on this machine; use --dry-run and apply the manifest "
                "on another one"
            ) from None
        if completed.returncode:
            raise UserError(
                f"Kubernetes did not accept the manifest: {' '.join(completed.stderr.split())}"
            )
        return f"kubernetes: {'; '.join(completed.stdout.splitlines())}"


def _values(launch: Launch, option: str) -> list[str]:
    """The values of an option that can be repeated."""
    return [value for key, value in launch.options if key == option]


def _pairs(launch: Launch, option: str) -> dict[str, str]:
    """The values of an option of the form `--option OPTION=NAME=VALUE`, by name.

    Raises:
        UserError: one has another form, or a name is there twice.
    """
    pairs: dict[str, str] = {}
    for word in _values(launch, option):
        name, separator, value = word.partition("=")
        if not separator or not name:
            raise UserError(f"--option {option}={word} is not of the form {option}=NAME=VALUE")
        if name in pairs:
            raise UserError(f"--option {option}={name} is given twice; remove one of them")
        pairs[name] = value
    return pairs


def _toleration(word: str) -> dict[str, str]:
    """A toleration from `KEY[=VALUE][:EFFECT]`, the form of `kubectl taint`.

    Raises:
        UserError: it has another form.
    """
    taint, separator, effect = word.partition(":")
    key, has_value, value = taint.partition("=")
    if not key or (separator and effect not in _EFFECTS):
        raise UserError(
            f"--option toleration={word} is not of the form KEY[=VALUE][:EFFECT] with an effect of "
            f"{', '.join(_EFFECTS)}"
        )
    toleration = {"key": key, "operator": "Equal" if has_value else "Exists"}
    if has_value:
        toleration["value"] = value
    if effect:
        toleration["effect"] = effect
    return toleration


def _mount(launch: Launch, options: dict[str, str]) -> Path:
    """Where the pods have the claim."""
    mount = Path(options.get("mount", launch.claimed))
    if not mount.is_absolute() or ".." in mount.parts:
        raise UserError(f"--option mount={mount} is not an absolute path without `..`")
    if mount.parent == mount:
        raise UserError(
            f"the claim would be mounted at {mount}, in place of what the image has there; give a "
            f"{launch.kept_by} and --option mount=DIR such as /shared/runs/1 and /shared"
        )
    if not launch.state.is_relative_to(mount):
        raise UserError(
            f"--option mount={mount} is where the pods have the claim, and {launch.state} is not "
            "in it"
        )
    return mount


def _script(launch: Launch, shell: NodeShell) -> str:
    """What each pod runs."""
    first = launch.first(shell)
    prologue = list[str]()
    if launch.prologue is not None:
        prologue = ["set +u", read_prologue(launch.prologue).rstrip("\n"), "set -u"]
    lines = ["set -eu", *prologue, f"{launch.each(shell)} & main=$!"]
    if first is not None:
        lines += [f'if [ "${_NODE}" = 0 ]; then {first} & main=$!; fi']
    return "\n".join([*lines, *waiting("main", "TERM", "TERM"), 'exit "$status"', ""])


def _pod(launch: Launch, name: str, options: dict[str, str], mount: Path) -> dict[str, Any]:
    """The specification of a pod."""
    container = _container(launch, name, options, mount)
    memory: dict[str, Any] = {"medium": "Memory"}
    if "shm" in options:
        memory["sizeLimit"] = options["shm"]
    pod: dict[str, Any] = {
        "subdomain": name,
        "restartPolicy": "OnFailure",
        "terminationGracePeriodSeconds": math.ceil(launch.grace_seconds) + SHUTDOWN_SECONDS,
        "containers": [container],
        "volumes": [
            {"name": "state", "persistentVolumeClaim": {"claimName": options["claim"]}},
            {"name": "memory", "emptyDir": memory},
        ],
    }
    if launch.nodes > 1 and options.get("colocate") != "true":
        # `--nodes` are machines: pods on one machine would share its links.
        pod["affinity"] = {
            "podAntiAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": [
                    {
                        "labelSelector": {"matchLabels": {"app": name}},
                        "topologyKey": "kubernetes.io/hostname",
                    }
                ]
            }
        }
    if selector := _pairs(launch, "node-selector"):
        pod["nodeSelector"] = selector
    if tolerations := _values(launch, "toleration"):
        pod["tolerations"] = [_toleration(word) for word in tolerations]
    if pull_secrets := _values(launch, "pull-secret"):
        pod["imagePullSecrets"] = [{"name": secret} for secret in pull_secrets]
    if "service-account" in options:
        pod["serviceAccountName"] = options["service-account"]
    if options.get("host-network") == "true":
        pod["hostNetwork"] = True
        # Else a pod in the network of its host cannot resolve the service of the first pod.
        pod["dnsPolicy"] = "ClusterFirstWithHostNet"
    return pod


def _drawn_secret(launch: Launch, metadata: dict[str, Any]) -> dict[str, Any]:
    """A Secret of the variables that only the nodes know, drawn anew in each manifest."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata,
        "stringData": {name: secrets.token_hex(32) for name in launch.secrets},
    }


def _container(launch: Launch, name: str, options: dict[str, str], mount: Path) -> dict[str, Any]:
    """The container of a pod, with its resources and environment.

    Raises:
        UserError: an option has another form than Kubernetes takes.
    """
    control = f"{name}-0.{name}:{_PORT}"
    script = _script(launch, NodeShell(control, _NODE, ("isthmus",), ("torchrun",)))
    limits = {"nvidia.com/gpu": options.get("gpus", str(launch.ranks))}
    if "cpus" in options:
        limits["cpu"] = options["cpus"]
    if "memory" in options:
        limits["memory"] = options["memory"]
    if int(limits["nvidia.com/gpu"]) == 0:
        del limits["nvidia.com/gpu"]
    for resource, amount in _pairs(launch, "resource").items():
        if resource in ("cpu", "memory", "nvidia.com/gpu"):
            known = {"cpu": "cpus", "memory": "memory", "nvidia.com/gpu": "gpus"}[resource]
            raise UserError(f"--option resource={resource} is set by --option {known}; use that")
        if not _QUANTITY.fullmatch(amount):
            raise UserError(f"--option resource={resource}={amount} is not an amount, such as 1")
        limits[resource] = amount
    container: dict[str, Any] = {
        "name": "rank",
        "image": options["image"],
        "command": ["/bin/bash", "-c", script],
        "resources": {"limits": limits},
        "volumeMounts": [
            {"name": "state", "mountPath": str(mount)},
            {"name": "memory", "mountPath": "/dev/shm"},  # noqa: S108 - NCCL's shared memory
        ],
    }
    # The last value of a variable that is in both counts: that of the user.
    sources = [name] if launch.secrets else []
    if "secret" in options:
        sources.append(options["secret"])
    if sources:
        container["envFrom"] = [{"secretRef": {"name": source}} for source in sources]
    variables = _pairs(launch, "env")
    for variable in variables:
        if not _VARIABLE.fullmatch(variable) or variable == _NODE:
            raise UserError(f"--option env={variable} cannot name an environment variable here")
    if variables:
        container["env"] = [{"name": key, "value": value} for key, value in variables.items()]
    if capabilities := _values(launch, "capability"):
        container["securityContext"] = {"capabilities": {"add": capabilities}}
    return container
