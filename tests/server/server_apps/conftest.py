import gc

import pytest


@pytest.fixture(autouse=True)
def _frozen_garbage():
    """Freeze objects: Flower collects garbage for every update, which PyTorch makes slow."""
    gc.freeze()
    yield
    gc.unfreeze()
