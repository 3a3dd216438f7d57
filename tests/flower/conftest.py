"""Devices on a real link, and whole runs with them."""

import gc

import pytest
from tests.server.conftest import deployment, network, run_with_datacenter, timeouts

__all__ = ["deployment", "network", "run_with_datacenter", "timeouts"]


@pytest.fixture(autouse=True)
def _frozen_garbage():
    """Freeze objects: Flower collects garbage for every update, which PyTorch makes slow."""
    gc.freeze()
