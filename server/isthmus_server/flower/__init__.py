"""Flower as a guest: its strategies make the next model of a federated round's updates.

Loaded only for jobs that name one (`[federated.flower]`).
"""

import isthmus.integrations.flower.messages  # noqa: F401 - before anything of flwr: it keeps it from phoning home
