"""A model of the seconds of a step on named GPUs: computing or memory traffic, and messages.

    step = max(operations / (share of the peak x peak), bytes / rate of the memory) + messages

Messages are not hidden behind computing, and each takes what a ring takes: of n ranks, with S bytes
of the larger side, a rate B and a latency a,

    all_reduce                      2 (n - 1) (S / n / B + a)
    all_gather, reduce_scatter,
    gather, scatter                   (n - 1) (S / n / B + a)
    broadcast, reduce               S / B + (n - 1) a
    send, recv                      S / B + a

B is that of the slowest part of the ring: of NVLink within a node; between nodes of the network,
once for each rank that the group has in a node, and at most that of NVLink. With all_to_all a rank
sends S / n to each other one, and what goes to other nodes by its own part of the network.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence

from isthmus.errors import UserError
from isthmus.job import Job
from isthmus.job.planned import FAKE, Figure, PlannedRanks, RankTraffic
from isthmus_server.plan.gpus import Gpu

PEAK_SHARES = {"bf16": 0.4, "fp32": 0.4, "fp8": 0.3}
"""Assumed shares of the peak rate that a step's operations reach, by the type of the factors.

They were chosen for steps of an 8B model with compiled blocks that torchtitan has published: of
bfloat16 on H100, and of float8 on H100 and H200. Only the linear layers multiply in float8, and its
share is of all operations. The share of float32 is taken from bfloat16."""
MODEL_ERROR = 0.2
"""Largest error of the model in steps that others have published (docs/measurements.md)."""
LINK_SHARE = 0.8
"""Assumed share of a link's rate that large messages reach."""
NODE_LATENCY = 3e-6
"""Assumed seconds of a step of a ring within a node."""
NETWORK_LATENCY = 10e-6
"""Assumed seconds of a step of a ring between nodes."""

_TWO_PASSES = frozenset({"all_reduce", "barrier"})
_WHOLE = frozenset({"broadcast", "reduce"})
_MESSAGES = frozenset({"send", "recv", "recv_any_source"})
_LOOPED = ("interleaved", "zero_bubble")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuNodes:
    """GPUs in nodes, in the order of the ranks."""

    gpu: Gpu
    gpus_per_node: int

    def link(self, group: Sequence[int]) -> tuple[float, float]:
        """Bytes per second of a ring of these ranks, and the seconds of one of its steps."""
        members = collections.Counter(rank // self.gpus_per_node for rank in group)
        inside = self.gpu.nvlink_gbps * 1e9 * LINK_SHARE
        if len(members) == 1:
            return inside, NODE_LATENCY
        across = min(members.values()) * self.gpu.network_gbps * 1e9 * LINK_SHARE
        return min(inside, across), NETWORK_LATENCY

    def seconds(self, traffic: RankTraffic) -> float:
        """Seconds of all of a rank's messages of one kind in one group."""
        ranks = len(traffic.ranks)
        rate, latency = self.link(traffic.ranks)
        hops = ranks - 1
        if traffic.operation in _MESSAGES:
            return traffic.size / rate + traffic.count * latency
        if traffic.operation in _WHOLE:
            return traffic.size / rate + traffic.count * hops * latency
        if traffic.operation == "all_to_all":
            return self._to_all(traffic, latency)
        passes = 2 if traffic.operation in _TWO_PASSES else 1
        return passes * hops * (traffic.size / ranks / rate + traffic.count * latency)

    def _to_all(self, traffic: RankTraffic, latency: float) -> float:
        """Each rank sends a part to each other one, and those to other nodes by its own network."""
        ranks = len(traffic.ranks)
        part = traffic.size / ranks / LINK_SHARE / 1e9
        members = collections.Counter(rank // self.gpus_per_node for rank in traffic.ranks)
        here = min(members.values())
        inside = (max(members.values()) - 1) * part / self.gpu.nvlink_gbps
        across = (ranks - here) * part / self.gpu.network_gbps if len(members) > 1 else 0.0
        return max(inside, across) + traffic.count * (ranks - 1) * latency


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTime:
    """The parts of a step's seconds on one rank."""

    computing: float
    memory: float
    """Seconds of what is read from the GPU's memory and written to it, at the least."""
    messages: float

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return max(self.computing, self.memory) + self.messages


def factor_type(job: Job) -> str:
    """The type of the factors of a job's matrix products, as `Gpu.tflops` has it."""
    if job.datacenter.float8:
        return "fp8"
    return "fp32" if job.datacenter.precision == "fp32" else "bf16"


def peak_of(gpu: Gpu, job: Job) -> float:
    """Operations per second of a GPU at most, for a job's precision.

    Raises:
        UserError: the GPU has no such type.
    """
    kind = factor_type(job)
    if kind not in gpu.tflops:
        raise UserError(f"{gpu.name} has no rate for {kind}; plan without datacenter.float8")
    return gpu.tflops[kind] * 1e12


def step_time(
    job: Job, ranks: PlannedRanks, nodes: GpuNodes, share: float | None
) -> StepTime | None:
    """The seconds of a step of a job, by the model above.

    Args:
        job: the job.
        ranks: what was found of its ranks.
        nodes: where they are.
        share: of the peak rate that operations reach; None for that of `PEAK_SHARES`.

    Returns:
        The parts; None if the operations or the messages of a step are not known.

    Raises:
        UserError: the GPU has no rate for the job's precision.
    """
    peak = peak_of(nodes.gpu, job)
    if ranks.operations is None or ranks.traffic is None:
        return None
    reached = (PEAK_SHARES[factor_type(job)] if share is None else share) * peak
    return StepTime(
        computing=ranks.operations * _recomputing(job) * _waiting(job, ranks.ranks) / reached,
        memory=memory_bytes(job, ranks) / (nodes.gpu.memory_gbps * 1e9),
        messages=sum(nodes.seconds(each) for each in ranks.traffic),
    )


def memory_bytes(job: Job, ranks: PlannedRanks) -> float:
    """Bytes that a step reads from a GPU's memory and writes to it, at the least.

    In each part of a batch weights are read forward and backward, of experts that ranks divide a
    rank's own, and activations are written and read; the optimizer reads and writes its state and
    the parameters, and gradients are written and read once.
    """
    section = job.datacenter.for_replicas(job.datacenter.replicas(ranks.ranks))
    shared = section.tensor_parallel * section.pipeline_parallel
    of_others = ranks.expert_elements * (1 - 1 / section.expert_parallel)
    size = 4 if section.precision == "fp32" else 2
    weights = (ranks.elements - of_others) * size / shared
    memory: Mapping[str, int] = ranks.layout.memory
    parts = section.accumulate
    kept = 2 * sum(memory.get(key, 0) for key in ("parameters", "gradients", "optimizer"))
    return parts * 2 * (weights + memory.get("activations", 0)) + kept


def _recomputing(job: Job) -> float:
    """How many times the operations are computed, with activations that are recomputed."""
    section = job.datacenter
    if section.checkpoint_activations is not True:
        return 1.0
    return 1 + 1 / 3 / section.checkpoint_every


def _waiting(job: Job, ranks: int) -> float:
    """How many times the time of computing a pipeline takes, with its ranks that are idle."""
    section = job.datacenter.for_replicas(job.datacenter.replicas(ranks))
    if section.pipeline_parallel == 1:
        return 1.0
    stages = 2 if section.schedule in _LOOPED else 1
    parts = section.microbatches_in_pipeline() or section.pipeline_parallel
    return 1 + (section.pipeline_parallel - 1) / (stages * parts)


def assumptions(job: Job, nodes: GpuNodes, share: float | None) -> list[str]:
    """What the model assumes, sentences."""
    gpu = nodes.gpu
    kind = factor_type(job)
    reached = PEAK_SHARES[kind] if share is None else share
    by = "assumed" if share is None else "given"
    found = [
        f"{gpu.name}: {gpu.tflops[kind]:g} TFLOPS in {kind} without sparsity, of which a share of "
        f"{reached:g} is reached ({by})",
        f"memory {gpu.memory_gib:g} GiB at {gpu.memory_gbps:g} GB/s, each tensor moved as often as "
        "the passes and the optimizer need",
        f"{nodes.gpus_per_node} GPUs in a node with NVLink at {gpu.nvlink_gbps:g} GB/s in one "
        f"direction, and a network of {gpu.network_gbps:g} GB/s for each GPU, of which a share of "
        f"{LINK_SHARE:g} is reached (assumed)",
        f"{NODE_LATENCY * 1e6:g} microseconds for a step of a ring in a node, and "
        f"{NETWORK_LATENCY * 1e6:g} between nodes (assumed)",
        "messages wait for computing and computing for them: where they overlap, a step is faster",
    ]
    if job.datacenter.float8:
        found.append("float8: messages are taken as those without it")
    if job.datacenter.checkpoint_activations == "operators":
        found.append("operators that are recomputed are not counted")
    return found


def figures(step: StepTime, how: str) -> list[Figure]:
    """The parts of a step."""
    return [
        Figure("computing in a step", step.computing, "s", how),
        Figure("memory traffic in a step", step.memory, "s", f"{how}, at the least"),
        Figure("messages in a step", step.messages, "s", f"{how}; messages {FAKE}"),
    ]
