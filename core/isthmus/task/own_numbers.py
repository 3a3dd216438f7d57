"""The random numbers that a task draws for the data of a participant: the same each time.

A task may split its data without a seed of its own. A server can ask one device alone to open a run
again, and would have its data drawn anew, and with them its vector for one model.

>>> import random
>>> with own_numbers(job_seed=1, name="a"):
...     first = random.random()
>>> with own_numbers(job_seed=1, name="a"):
...     random.random() == first
True
"""

from __future__ import annotations

import contextlib
import hashlib

from isthmus.task.scoring.host_generators import seeded


def own_numbers(
    job_seed: int, name: str, secret: bytes | None = None
) -> contextlib.AbstractContextManager[None]:
    """Within it PyTorch, NumPy and `random` give the same numbers each time to a participant.

    With a secret they follow from it alone, whatever job a server opens: a task that adds noise to
    its data has noise that the server does not know. Without one, as on the server's machine, they
    follow from the job's seed and the name, so that a run can be repeated.
    """
    from_job = f"isthmus/data/{job_seed}/{name}".encode()
    source = from_job if secret is None else b"isthmus/data-of-secret/" + secret
    return seeded(int.from_bytes(hashlib.sha256(source).digest(), "little"))
