"""Peak rates of GPUs by name, as their makers' data sheets have them.

Products of matrices are without sparsity; data sheets print twice as many with it.

- A10: "NVIDIA A10 Tensor Core GPU": 125 TFLOPS in bfloat16. L40S: "NVIDIA L40S": 362.
- A100: "NVIDIA A100 Tensor Core GPU": 312 TFLOPS in bfloat16, 19.5 in float32. It has no float8.
- H100: "NVIDIA H100 Tensor Core GPU", SXM: 1,979 TFLOPS in bfloat16 and 3,958 in float8, both with
  sparsity, 67 in float32. H200: "NVIDIA H200 Tensor Core GPU", SXM, and GH200: "NVIDIA GH200 Grace
  Hopper Superchip": the same. Their boards for PCIe, and NVL, are slower.
- B200: "NVIDIA DGX B200", an eighth of it: 72 PFLOPS in float8 with sparsity, and in bfloat16 half
  of that. In float32 "NVIDIA HGX B200", 600 TFLOPS for eight. GB200: "NVIDIA GB200 NVL72", a 72nd
  of it: 360 PFLOPS in bfloat16 with sparsity.

>>> peak_tflops("NVIDIA H200", "bf16")
989.5
>>> peak_tflops("NVIDIA GB200", "bf16"), peak_tflops("NVIDIA B200", "bf16")
(2500.0, 2250.0)
>>> peak_tflops("NVIDIA A100-SXM4-80GB", "fp8") is None
True

Another GPU, or a slower board, whose name has one of these in it, has no rate here:

>>> [peak_tflops(f"NVIDIA {name}", "bf16") for name in ("A10G", "RTX A1000", "H100 PCIe")]
[None, None, None]
"""

from __future__ import annotations

import re
from collections.abc import Mapping

PEAK_TFLOPS: Mapping[str, Mapping[str, float]] = {
    "H200": {"bf16": 989.5, "fp8": 1979.0, "fp32": 67.0},
    "GH200": {"bf16": 989.5, "fp8": 1979.0, "fp32": 67.0},
    "H100": {"bf16": 989.5, "fp8": 1979.0, "fp32": 67.0},
    "GB200": {"bf16": 2500.0},
    "B200": {"bf16": 2250.0, "fp8": 4500.0, "fp32": 75.0},
    "A100": {"bf16": 312.0, "fp32": 19.5},
    "L40S": {"bf16": 362.0},
    "A10": {"bf16": 125.0},
}
"""10**12 operations per second at most, by the type of the factors: bf16, fp8, fp32."""

_WORD = re.compile(r"[A-Za-z0-9]+")
_SLOWER = frozenset({"H100 PCIe", "H100 NVL", "H200 NVL"})
"""Words in the names of boards that are slower than what the table has for the first word."""


def known_name(device: str) -> str | None:
    """The name in the table of a device, by the name that CUDA has for it; None if it has none.

    >>> known_name("NVIDIA H100 80GB HBM3"), known_name("NVIDIA H100 NVL")
    ('H100', None)
    """
    words = set(_WORD.findall(device))
    if any(words.issuperset(slower.split()) for slower in _SLOWER):
        return None
    return next((name for name in PEAK_TFLOPS if name in words), None)


def peak_tflops(device: str, factors: str) -> float | None:
    """The peak rate of a device, by the name that CUDA has for it.

    Args:
        device: such as "NVIDIA H100 80GB HBM3".
        factors: the type of the factors: `bf16`, `fp8` or `fp32`.

    Returns:
        10**12 operations per second; None if the table has none.
    """
    name = known_name(device)
    return None if name is None else PEAK_TFLOPS[name].get(factors)
