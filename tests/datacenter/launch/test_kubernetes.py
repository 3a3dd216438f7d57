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
from isthmus_datacenter.launch.datacenter import DatacenterLaunch
from isthmus_datacenter.launch.kubernetes import KubernetesLauncher

LAUNCH: dict[str, Any] = {"server": "head:9402", "name": "cluster-0", "ranks": 4, "nodes": 2}


def test_the_manifest_matches_the_schema() -> None:
    words = ("image=registry/isthmus:1", "claim=shared", "secret=keys", "namespace=ml")
    options = [word for option in words for word in ("--option", option)]
    text = dry_run(*options, scheduler="kubernetes", state=Path("/state"))
    manifest = Manifest.model_validate_json(text)
    service, policy, job = manifest.items
    pod = job.spec.template.spec
    (container,) = pod.containers
    assert job.spec.completions == job.spec.parallelism == 2
    assert service.metadata.name == pod.subdomain == "isthmus-cluster-0"
    assert service.spec.selector == {"job-name": job.metadata.name}
    # Only pods of this datacenter reach the store of its ranks.
    (admitted,) = policy.spec.ingress
    (pods,) = admitted["from"]
    assert pods["podSelector"] == policy.spec.podSelector
    assert (
        policy.spec.podSelector["matchLabels"].items() <= job.spec.template.metadata.labels.items()
    )
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
        KubernetesLauncher().render(launch)


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        (("gpus", "two"), "--option gpus=two is not a whole number, such as 8"),
        (("gpus", "-1"), "--option gpus=-1 is not a whole number, such as 8"),
        (("cpus", "many"), "--option cpus=many is not a number, such as 8, 0.5 or 500m"),
        (("claim", ""), "kubernetes needs --option claim=NAME"),
        (("memory", "much"), "--option memory=much is not a size, such as 64Gi"),
        (("host-network", "yes"), "--option host-network=yes is not true or false"),
        (("toleration", "gpu:Never"), "--option toleration=gpu:Never is not of the form KEY[=VAL"),
        (("node-selector", "a100"), "--option node-selector=a100 is not of the form node-selector"),
        (("resource", "cpu=1"), "--option resource=cpu is set by --option cpus; use that"),
        (("resource", "rdma/ib=x"), "--option resource=rdma/ib=x is not an amount, such as 1"),
        (("env", "A-B=1"), "--option env=A-B cannot name an environment variable here"),
        (("mount", "/"), "the claim would be mounted at /, in place of what the image has there; "),
        (("mount", "state"), "--option mount=state is not an absolute path without `..`"),
        (("mount", "/a/../state"), "--option mount=/a/../state is not an absolute path without"),
    ],
)
def test_an_option_that_pods_cannot_have_is_refused(option: tuple[str, str], sentence: str) -> None:
    options = {"image": "i", "claim": "c"} | dict([option])
    launch = DatacenterLaunch(**LAUNCH, state=Path("/state"), options=tuple(options.items()))
    with pytest.raises(UserError) as refused:
        KubernetesLauncher().render(launch)
    assert str(refused.value).startswith(sentence)


@pytest.mark.parametrize("cpus", ["8", "0.5", "500m"])
def test_numbers_of_kubernetes_are_limits(cpus: str) -> None:
    options = (("image", "i"), ("claim", "c"), ("gpus", "00"), ("cpus", cpus))
    text = KubernetesLauncher().render(
        DatacenterLaunch(**LAUNCH, state=Path("/s"), options=options)
    )
    (container,) = Manifest.model_validate_json(text).items[2].spec.template.spec.containers
    assert container.resources["limits"] == {"cpu": cpus}


def test_pods_have_what_a_cluster_asks_of_them(tmp_path: Path) -> None:
    prologue = tmp_path / "prologue.sh"
    prologue.write_text("export NCCL_DEBUG=WARN\nulimit -l unlimited\n")
    words = [
        *("--prologue", str(prologue)),
        *("image=i", "claim=c", "service-account=trainer", "queue=research", "shm=64Gi"),
        *("host-network=true", "pull-secret=one", "pull-secret=two"),
        *("node-selector=nvidia.com/gpu.product=H100", "toleration=nvidia.com/gpu:NoSchedule"),
        *("toleration=team=vision", "env=NCCL_SOCKET_IFNAME=eth0", "env=EMPTY="),
        *("resource=rdma/ib=2", "capability=IPC_LOCK", "annotation=k8s.v1.cni.cncf.io/networks=n"),
        "label=team=vision",
    ]
    options = words[:2] + [part for word in words[2:] for part in ("--option", word)]
    text = dry_run(*options, scheduler="kubernetes", state=Path("/state"))
    job = Manifest.model_validate_json(text).items[2]
    pod = job.spec.template.spec
    (container,) = pod.containers
    assert job.spec.suspend is True  # until Kueue admits all pods at once
    assert job.metadata.labels["kueue.x-k8s.io/queue-name"] == "research"
    assert job.spec.template.metadata.labels == {"team": "vision", "app": "isthmus-cluster-0"}
    assert job.spec.template.metadata.annotations == {"k8s.v1.cni.cncf.io/networks": "n"}
    assert pod.serviceAccountName == "trainer"
    assert pod.imagePullSecrets == [{"name": "one"}, {"name": "two"}]
    assert pod.nodeSelector == {"nvidia.com/gpu.product": "H100"}
    assert pod.tolerations == [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "team", "operator": "Equal", "value": "vision"},
    ]
    assert (pod.hostNetwork, pod.dnsPolicy) == (True, "ClusterFirstWithHostNet")
    assert pod.volumes[1] == {
        "name": "memory",
        "emptyDir": {"medium": "Memory", "sizeLimit": "64Gi"},
    }
    assert container.env == [
        {"name": "NCCL_SOCKET_IFNAME", "value": "eth0"},
        {"name": "EMPTY", "value": ""},
    ]
    assert container.resources["limits"] == {"nvidia.com/gpu": "4", "rdma/ib": "2"}
    assert container.securityContext == {"capabilities": {"add": ["IPC_LOCK"]}}
    script = container.command[2]
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert script.index("ulimit -l unlimited") < script.index("datacenter agent")


@pytest.mark.parametrize(
    ("nodes", "more", "is_apart"),
    [(2, (), True), (1, (), False), (2, (("colocate", "true"),), False)],
)
def test_each_pod_has_a_machine_of_its_own(
    nodes: int, more: tuple[tuple[str, str], ...], is_apart: bool
) -> None:
    launch = DatacenterLaunch(
        **{**LAUNCH, "nodes": nodes},
        state=Path("/s"),
        options=(("image", "i"), ("claim", "c"), *more),
    )
    job = Manifest.model_validate_json(KubernetesLauncher().render(launch)).items[2]
    apart = {
        "podAntiAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [
                {
                    "labelSelector": {"matchLabels": {"app": "isthmus-cluster-0"}},
                    "topologyKey": "kubernetes.io/hostname",
                }
            ]
        }
    }
    assert job.spec.template.spec.affinity == (apart if is_apart else None)
