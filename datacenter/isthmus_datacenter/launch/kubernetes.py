"""A Kubernetes manifest: an indexed Job with one pod per node, and a Service that names the pods.

Nothing beyond Kubernetes itself is needed on the cluster. The manifest is JSON, which is YAML.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
from typing import Any

from isthmus.errors import UserError
from isthmus_datacenter.launch import Launch

_PORT = 29400
_LEAVING_SECONDS = 30
_OPTIONS = {"image", "namespace", "claim", "secret", "gpus", "cpus", "memory"}
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,50}[a-z0-9])?")

# The first pod's two processes end together: the service's end is the pod's.
_SCRIPT = """set -eu
{agent} & agent=$!
if [ "$JOB_COMPLETION_INDEX" != 0 ]; then main=$agent; else {serve} & main=$!; fi
trap 'kill -TERM "$main" 2>/dev/null || true' TERM
status=0; wait "$main" || status=$?
while kill -0 "$main" 2>/dev/null; do status=0; wait "$main" || status=$?; done
exit "$status"
"""


def render(launch: Launch) -> str:
    """The manifest.

    Raises:
        UserError: an option is missing or unknown, or the name cannot be a pod's.
    """
    options = dict(launch.options)
    unknown = sorted(options.keys() - _OPTIONS)
    if unknown:
        raise UserError(
            f"--option {unknown[0]} is not known here; known are {', '.join(sorted(_OPTIONS))}"
        )
    for needed in ("image", "claim"):
        if needed not in options:
            raise UserError(f"kubernetes needs --option {needed}=NAME")
    if launch.environment is not None:
        raise UserError("on kubernetes, put the environment into a Secret: --option secret=NAME")
    name = f"isthmus-{launch.name}"
    if not _NAME.fullmatch(name):
        raise UserError(
            f"--name {launch.name!r} cannot name a pod; use up to 40 of a-z, 0-9 and -, and end "
            "with a letter or digit"
        )
    metadata: dict[str, Any] = {"name": name, "labels": {"app": name}}
    if "namespace" in options:
        metadata["namespace"] = options["namespace"]
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        # The pods find each other before they are ready: being ready takes each other.
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
                "spec": _pod(launch, name, options),
            },
        },
    }
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": [service, job]}, indent=2)


def _pod(launch: Launch, name: str, options: dict[str, str]) -> dict[str, Any]:
    control = f"{name}-0.{name}:{_PORT}"
    program = ("isthmus",)
    script = _SCRIPT.format(
        agent=launch.agent(control, program), serve=launch.serve(control, program)
    )
    limits = {"nvidia.com/gpu": options.get("gpus", str(launch.ranks))}
    limits |= {"cpu": options["cpus"]} if "cpus" in options else {}
    limits |= {"memory": options["memory"]} if "memory" in options else {}
    if limits["nvidia.com/gpu"] == "0":
        del limits["nvidia.com/gpu"]
    container: dict[str, Any] = {
        "name": "rank",
        "image": options["image"],
        "command": ["/bin/bash", "-c", script],
        "resources": {"limits": limits},
        "volumeMounts": [
            {"name": "state", "mountPath": str(launch.state)},
            {"name": "memory", "mountPath": "/dev/shm"},  # noqa: S108 - NCCL's shared memory
        ],
    }
    if "secret" in options:
        container["envFrom"] = [{"secretRef": {"name": options["secret"]}}]
    return {
        "subdomain": name,
        "restartPolicy": "OnFailure",
        "terminationGracePeriodSeconds": math.ceil(launch.grace_seconds) + _LEAVING_SECONDS,
        "containers": [container],
        "volumes": [
            {"name": "state", "persistentVolumeClaim": {"claimName": options["claim"]}},
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
        ],
    }


def submit(launch: Launch) -> str:
    """Hand the manifest to the cluster that kubectl is set up for; returns what it says.

    Raises:
        UserError: kubectl is not here, or says no.
    """
    try:
        done = subprocess.run(
            ["kubectl", "apply", "-f", "-"],
            input=render(launch),
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        raise UserError(
            "there is no kubectl on this machine; use --dry-run and apply the manifest elsewhere"
        ) from None
    if done.returncode:
        raise UserError(f"kubernetes did not take it: {' '.join(done.stderr.split())}")
    return "; ".join(done.stdout.splitlines())
