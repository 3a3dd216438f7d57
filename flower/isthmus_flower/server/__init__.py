"""Flower strategies aggregate the updates of federated rounds, and reach devices by a `Grid`.

Imported only for jobs with a table `[federated.flower]`.
"""

import isthmus_flower.messages  # noqa: F401 - before any flwr import: it disables telemetry
