"""What frameworks register for the apps of a job is found by the job's table."""

from importlib.metadata import entry_points

import pytest

from isthmus.errors import JobError
from isthmus.job.apps import registered


def test_it_is_found_by_the_table_that_names_the_app(make_job):
    federated = make_job('federated.flower.app="app.py:app"').federated
    (entry,) = entry_points(group="isthmus.device_work", name="flower")
    assert registered("isthmus.device_work", federated) is entry.load()


def test_an_installation_that_registers_nothing_is_one_sentence(make_job):
    federated = make_job('federated.flower.app="app.py:app"').federated
    with pytest.raises(JobError) as caught:
        registered("isthmus.registered_by_nobody", federated)
    assert str(caught.value) == (
        "the job has an app, and the installed isthmus registers nothing in "
        "'isthmus.registered_by_nobody' that runs it; install isthmus again"
    )
