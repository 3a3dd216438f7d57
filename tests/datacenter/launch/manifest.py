"""The part of Kubernetes' schema that manifests of launches use."""

# ruff: noqa: N815 - the schema has the names of Kubernetes

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


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


class NetworkPolicySpec(Strict):
    podSelector: dict[Literal["matchLabels"], dict[str, str]]
    policyTypes: list[Literal["Ingress", "Egress"]]
    ingress: list[dict[Literal["from"], list[dict[Literal["podSelector"], dict[str, Any]]]]]


class NetworkPolicy(Strict):
    apiVersion: Literal["networking.k8s.io/v1"]
    kind: Literal["NetworkPolicy"]
    metadata: Metadata
    spec: NetworkPolicySpec


class Container(Strict):
    name: str
    image: str
    command: list[str]
    resources: dict[Literal["limits", "requests"], dict[str, str]]
    volumeMounts: list[dict[Literal["name", "mountPath"], str]]
    env: list[dict[Literal["name", "value"], str]] | None = None
    envFrom: list[dict[Literal["secretRef"], dict[Literal["name"], str]]] | None = None
    securityContext: dict[Literal["capabilities"], dict[Literal["add"], list[str]]] | None = None


class PodSpec(Strict):
    affinity: dict[Literal["podAntiAffinity"], dict[str, list[dict[str, Any]]]] | None = None
    dnsPolicy: Literal["ClusterFirstWithHostNet"] | None = None
    hostNetwork: bool | None = None
    imagePullSecrets: list[dict[Literal["name"], str]] | None = None
    nodeSelector: dict[str, str] | None = None
    serviceAccountName: str | None = None
    subdomain: str
    tolerations: list[dict[Literal["key", "operator", "value", "effect"], str]] | None = None
    restartPolicy: Literal["OnFailure", "Never"]
    terminationGracePeriodSeconds: int
    containers: list[Container]
    volumes: list[dict[str, Any]]


class PodMetadata(Strict):
    labels: dict[str, str]
    annotations: dict[str, str] | None = None


class PodTemplate(Strict):
    metadata: PodMetadata
    spec: PodSpec


class JobSpec(Strict):
    completionMode: Literal["Indexed"]
    completions: int
    parallelism: int
    backoffLimit: int
    suspend: bool | None = None
    template: PodTemplate


class Job(Strict):
    apiVersion: Literal["batch/v1"]
    kind: Literal["Job"]
    metadata: Metadata
    spec: JobSpec


class Secret(Strict):
    apiVersion: Literal["v1"]
    kind: Literal["Secret"]
    metadata: Metadata
    stringData: dict[str, str]


class Manifest(Strict):
    apiVersion: Literal["v1"]
    kind: Literal["List"]
    items: tuple[Service, NetworkPolicy, Job] | tuple[Service, NetworkPolicy, Job, Secret]
