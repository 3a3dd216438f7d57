"""How much memory a rank's device has."""

from __future__ import annotations

import os

import torch


def memory_bytes(device: torch.device) -> int:
    """All memory of a device; of the machine, for its processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
