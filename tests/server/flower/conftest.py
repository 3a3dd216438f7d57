import gc

import pytest


@pytest.fixture(autouse=True)
def _few_objects():
    """Flower collects garbage for every update it reads: in a process of torch's size, slowly."""
    gc.freeze()
    yield
    gc.unfreeze()
