"""Real devices to compare simulated ones with."""

from tests.server.conftest import deployment, network

__all__ = ["deployment", "network"]
