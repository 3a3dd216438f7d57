"""The manifest for Kubernetes, checked against its schema."""

# ruff: noqa: N815 - the schema has the names of Kubernetes

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict
from tests.datacenter.conftest import dry_run

from isthmus.errors import UserError
from isthmus_datacenter.launch import Launch, kubernetes

LAUNCH = {"server": "head:9402", "name": "cluster-0", "ranks": 4, "nodes": 2}


class Strict(BaseModel):
    """The part of Kubernetes' schema that the manifest uses; any other key is an error."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Metadata(Strict):
    name: str
    namespace: str | None = None
    labels: dict[str, str]


class ServiceSpec(Strict):
    clusterIP: Literal["None"]
    publishNotReadyAddresses: Literal[True]
    selector: dict[str, str]


class Service(Strict):
    apiVersion: Literal["v1"]
    kind: Literal["Service"]
    metadata: Metadata
    spec: ServiceSpec


class Container(Strict):
    name: str
    image: str
    command: list[str]
    resources: dict[Literal["limits", "requests"], dict[str, str]]
    volumeMounts: list[dict[Literal["name", "mountPath"], str]]
    envFrom: list[dict[Literal["secretRef"], dict[Literal["name"], str]]] | None = None


class PodSpec(Strict):
    subdomain: str
    restartPolicy: Literal["OnFailure", "Never"]
    terminationGracePeriodSeconds: int
    containers: list[Container]
    volumes: list[dict[str, Any]]


class PodTemplate(Strict):
    metadata: dict[Literal["labels"], dict[str, str]]
    spec: PodSpec


class JobSpec(Strict):
    completionMode: Literal["Indexed"]
    completions: int
    parallelism: int
    backoffLimit: int
    template: PodTemplate


class Job(Strict):
    apiVersion: Literal["batch/v1"]
    kind: Literal["Job"]
    metadata: Metadata
    spec: JobSpec


class Manifest(Strict):
    apiVersion: Literal["v1"]
    kind: Literal["List"]
    items: tuple[Service, Job]


def test_the_manifest_matches_the_schema() -> None:
    words = ("image=registry/isthmus:1", "claim=shared", "secret=keys", "namespace=ml")
    options = [word for option in words for word in ("--option", option)]
    text = dry_run(*options, scheduler="kubernetes", state=Path("/state"))
    manifest = Manifest.model_validate_json(text)
    service, job = manifest.items
    pod = job.spec.template.spec
    (container,) = pod.containers
    assert job.spec.completions == job.spec.parallelism == 2
    assert service.metadata.name == pod.subdomain == "isthmus-cluster-0"
    assert service.spec.selector == {"job-name": job.metadata.name}
    assert container.resources["limits"] == {"nvidia.com/gpu": "4"}
    assert container.envFrom == [{"secretRef": {"name": "keys"}}]
    assert {each["name"] for each in container.volumeMounts} == {
        each["name"] for each in pod.volumes
    }
    script = container.command[2]
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert "--control isthmus-cluster-0-0.isthmus-cluster-0:29400" in script
    assert sys.executable not in script


def test_a_name_that_is_not_valid_for_a_pod_is_refused() -> None:
    launch = Launch(
        **{**LAUNCH, "name": "Cluster_0"},  # type: ignore[arg-type]
        state=Path("/state"),
        options=(("image", "i"), ("claim", "c")),
    )
    with pytest.raises(UserError, match="'Cluster_0' cannot name a pod"):
        kubernetes.render(launch)
