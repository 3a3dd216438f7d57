"""GPUs of plans by name: peak rates, memory and links, as their makers' data sheets have them.

Peak rates are those of `isthmus.job.gpu_rates`. A link's rate is that of one direction: the data
sheets' figure for NVLink is of both.

- A100: "NVIDIA A100 Tensor Core GPU", SXM with 80 GB: 2,039 GB/s, NVLink 600 GB/s. DGX A100:
  200 Gb/s for each GPU.
- H100: "NVIDIA H100 Tensor Core GPU", SXM: 80 GB, 3.35 TB/s, NVLink 900 GB/s. DGX H100: 400 Gb/s
  for each GPU.
- H200: "NVIDIA H200 Tensor Core GPU", SXM: 141 GB, 4.8 TB/s. DGX H200: 400 Gb/s for each GPU.
- B200: "NVIDIA DGX B200", an eighth of it: 1,440 GB, 64 TB/s, NVLink 14.4 TB/s, and 400 Gb/s for
  each GPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from isthmus.errors import UserError
from isthmus.job.gpu_rates import PEAK_TFLOPS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """What a GPU can do at most."""

    name: str
    tflops: Mapping[str, float]
    """10**12 operations per second, by the type of the factors: bf16, fp8, fp32."""
    memory_gib: float
    """About what CUDA reports, which is not what the name says."""
    memory_gbps: float
    """10**9 bytes per second from and to its memory."""
    nvlink_gbps: float
    """10**9 bytes per second to the other GPUs of the node, in one direction."""
    network_gbps: float
    """10**9 bytes per second to other nodes, of one GPU's part of the network, in one direction."""


GPUS = {
    "a100": Gpu(
        name="A100",
        tflops=PEAK_TFLOPS["A100"],
        memory_gib=79.0,
        memory_gbps=2039.0,
        nvlink_gbps=300.0,
        network_gbps=25.0,
    ),
    "h100": Gpu(
        name="H100",
        tflops=PEAK_TFLOPS["H100"],
        memory_gib=79.0,
        memory_gbps=3350.0,
        nvlink_gbps=450.0,
        network_gbps=50.0,
    ),
    "h200": Gpu(
        name="H200",
        tflops=PEAK_TFLOPS["H200"],
        memory_gib=139.0,
        memory_gbps=4800.0,
        nvlink_gbps=450.0,
        network_gbps=50.0,
    ),
    "b200": Gpu(
        name="B200",
        tflops=PEAK_TFLOPS["B200"],
        memory_gib=178.0,
        memory_gbps=8000.0,
        nvlink_gbps=900.0,
        network_gbps=50.0,
    ),
}
"""By the names of `--gpu`."""


def gpu_of(name: str) -> Gpu:
    """A GPU by its name.

    Raises:
        UserError: it is not in the table.
    """
    if name not in GPUS:
        known = ", ".join(GPUS)
        raise UserError(
            f"--gpu {name} is not in the table ({known}); give the rate of another one by --tflops"
        )
    return GPUS[name]
