"""Isthmus jobs on Flower's own runtime: the ServerApp and the ClientApp of a job."""

import isthmus_flower.messages  # noqa: F401 - before any flwr import: it disables telemetry
