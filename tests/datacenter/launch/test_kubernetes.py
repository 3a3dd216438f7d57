"""The manifest for Kubernetes, checked against its schema."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.datacenter.conftest import dry_run
from tests.datacenter.launch.manifest import Manifest

from isthmus.errors import UserError
from isthmus_datacenter.launch import kubernetes
from isthmus_datacenter.launch.datacenter import DatacenterLaunch

LAUNCH: dict[str, Any] = {"server": "head:9402", "name": "cluster-0", "ranks": 4, "nodes": 2}


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
    launch = DatacenterLaunch(
        **{**LAUNCH, "name": "Cluster_0"},
        state=Path("/state"),
        options=(("image", "i"), ("claim", "c")),
    )
    with pytest.raises(UserError, match="'Cluster_0' cannot name a pod"):
        kubernetes.render(launch)


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        (("gpus", "two"), "--option gpus=two is not a whole number, such as 8"),
        (("gpus", "-1"), "--option gpus=-1 is not a whole number, such as 8"),
        (("cpus", "many"), "--option cpus=many is not a number, such as 8, 0.5 or 500m"),
        (("claim", ""), "kubernetes needs --option claim=NAME"),
        (("mount", "/"), "the claim would be mounted at /, in place of what the image has there; "),
        (("mount", "state"), "--option mount=state is not an absolute path without `..`"),
        (("mount", "/a/../state"), "--option mount=/a/../state is not an absolute path without"),
    ],
)
def test_an_option_that_pods_cannot_have_is_refused(option: tuple[str, str], sentence: str) -> None:
    options = {"image": "i", "claim": "c"} | dict([option])
    launch = DatacenterLaunch(**LAUNCH, state=Path("/state"), options=tuple(options.items()))
    with pytest.raises(UserError) as refused:
        kubernetes.render(launch)
    assert str(refused.value).startswith(sentence)


@pytest.mark.parametrize("cpus", ["8", "0.5", "500m"])
def test_numbers_of_kubernetes_are_limits(cpus: str) -> None:
    options = (("image", "i"), ("claim", "c"), ("gpus", "00"), ("cpus", cpus))
    text = kubernetes.render(DatacenterLaunch(**LAUNCH, state=Path("/s"), options=options))
    (container,) = Manifest.model_validate_json(text).items[1].spec.template.spec.containers
    assert container.resources["limits"] == {"cpu": cpus}
