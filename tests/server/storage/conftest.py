"""Run directories for tests of the store."""

import pytest

from isthmus_server.storage.store import Store


@pytest.fixture
def new_run(make_job, tmp_path):
    """Create a run in a new directory."""
    stores = []

    def new_run(name="run", *overrides):
        stores.append(Store.create(tmp_path / name, make_job(*overrides), tmp_path))
        return stores[-1]

    yield new_run
    for store in stores:
        store.close()


@pytest.fixture
def open_again():
    """Open the run of a store that is still open, as after a kill."""
    stores = []

    def open_again(store):
        stores.append(Store.open_to_continue(store.directory))
        return stores[-1]

    yield open_again
    for store in stores:
        store.close()
