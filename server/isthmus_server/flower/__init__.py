"""Flower integration: Flower strategies aggregate the updates of federated rounds.

Imported only for jobs with a `[federated.flower]` section.
"""

import isthmus.integrations.flower.messages  # noqa: F401 - before any flwr import: it disables telemetry
