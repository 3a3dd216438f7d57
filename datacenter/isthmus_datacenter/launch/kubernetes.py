"""Render a Kubernetes manifest: an indexed Job with one pod per node, and a headless Service.

The cluster needs nothing beyond Kubernetes itself. The manifest is JSON, which is valid YAML.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
from pathlib import Path
from typing import Any

from isthmus.errors import UserError
from isthmus_datacenter.launch import Launch, NodeShell, check_printable, waiting

_PORT = 29400
"""Port of the control store, in the first pod."""
_SHUTDOWN_SECONDS = 30
"""Time after the grace period for links to be closed and the ranks to end."""
_OPTIONS = {"image", "namespace", "claim", "secret", "gpus", "cpus", "memory", "mount"}
_NUMBERS = {
    "gpus": (re.compile(r"[0-9]+"), "a whole number, such as 8"),
    "cpus": (re.compile(r"[0-9]+(\.[0-9]+)?|[0-9]+m"), "a number, such as 8, 0.5 or 500m"),
}
"""Options that are numbers: their form, and what users are told."""
_NAME_LENGTH = 48
"""What users are told: Kubernetes adds the numbers of pods to a name."""
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,50}[a-z0-9])?")

_NODE = "JOB_COMPLETION_INDEX"
"""Environment variable of a pod of an indexed job, with its number."""


def render(launch: Launch) -> str:
    """Render the manifest.

    Raises:
        UserError: an option is missing, unknown or not valid, or the name is not for a pod.
    """
    check_printable(launch)
    options = dict(launch.options)
    unknown = sorted(options.keys() - _OPTIONS)
    if unknown:
        raise UserError(
            f"--option {unknown[0]} is not known; known options are {', '.join(sorted(_OPTIONS))}"
        )
    for required in ("image", "claim"):
        if not options.get(required):
            raise UserError(f"kubernetes needs --option {required}=NAME")
    if launch.environment is not None:
        raise UserError("on kubernetes, put the environment into a Secret: --option secret=NAME")
    for key, (form, allowed) in _NUMBERS.items():
        if key in options and not form.fullmatch(options[key]):
            raise UserError(f"--option {key}={options[key]} is not {allowed}")
    mount = _mount(launch, options)
    name = f"{launch.title}{launch.name}"
    if not _NAME.fullmatch(name):
        raise UserError(
            f"{launch.named_by} {launch.name!r} cannot name a pod; use up to "
            f"{_NAME_LENGTH - len(launch.title)} of a-z, 0-9 and -, and end with a letter or digit"
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
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": {
            "completionMode": "Indexed",
            "completions": launch.nodes,
            "parallelism": launch.nodes,
            "backoffLimit": 100,
            "template": {
                "metadata": {"labels": {"app": name}},
                "spec": _pod(launch, name, options, mount),
            },
        },
    }
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": [service, job]}, indent=2)


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
    lines = ["set -eu", f"{launch.each(shell)} & main=$!"]
    if first is not None:
        lines += [f'if [ "${_NODE}" = 0 ]; then {first} & main=$!; fi']
    return "\n".join([*lines, *waiting("main", "TERM", "TERM"), 'exit "$status"', ""])


def _pod(launch: Launch, name: str, options: dict[str, str], mount: Path) -> dict[str, Any]:
    control = f"{name}-0.{name}:{_PORT}"
    script = _script(launch, NodeShell(control, _NODE, ("isthmus",), ("torchrun",)))
    limits = {"nvidia.com/gpu": options.get("gpus", str(launch.ranks))}
    limits |= {"cpu": options["cpus"]} if "cpus" in options else {}
    limits |= {"memory": options["memory"]} if "memory" in options else {}
    if int(limits["nvidia.com/gpu"]) == 0:
        del limits["nvidia.com/gpu"]
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
    if "secret" in options:
        container["envFrom"] = [{"secretRef": {"name": options["secret"]}}]
    return {
        "subdomain": name,
        "restartPolicy": "OnFailure",
        "terminationGracePeriodSeconds": math.ceil(launch.grace_seconds) + _SHUTDOWN_SECONDS,
        "containers": [container],
        "volumes": [
            {"name": "state", "persistentVolumeClaim": {"claimName": options["claim"]}},
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
        ],
    }


def submit(launch: Launch) -> str:
    """Apply the manifest to kubectl's current cluster; returns kubectl's output.

    Raises:
        UserError: kubectl is not installed, or it failed.
    """
    try:
        completed = subprocess.run(
            ["kubectl", "apply", "-f", "-"],
            input=render(launch),
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
    return "; ".join(completed.stdout.splitlines())
