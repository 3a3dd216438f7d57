"""Who finds a place in the queue of jobs when others fill it."""

import contextlib
import re

import pytest

from isthmus.errors import AdmissionRefused
from isthmus_server.runs.jobs.queue import MAX_WAITING, JobQueue


@pytest.fixture
def fill(make_job, tmp_path):
    """Submit jobs of a project until one is refused; returns how many there are, and the reason."""
    job = make_job()
    with contextlib.closing(JobQueue(tmp_path)) as queue:

        def fill(project):
            for number in range(MAX_WAITING + 1):
                try:
                    queue.submit(job, f"ada-{project}", str(number), project=project)
                except AdmissionRefused as refused:
                    return number, str(refused)
            raise AssertionError("the queue has no end")

        yield fill


def test_no_project_takes_the_places_of_those_that_come_later(fill):
    sizes = []
    for project in ("first", "second", "third", "fourth"):
        size, reason = fill(project)
        assert re.match(f"{size} jobs of the project '{project}' are queued already, and", reason)
        sizes.append(size)
    assert sizes == [50, 25, 13, 6]
    # Operators of no project have all rights, also to the rest of the places.
    assert fill("") == (6, "100 jobs are queued already; cancel some, or try again later")
    assert fill("fifth") == (0, "100 jobs are queued already; cancel some, or try again later")


def test_a_server_without_projects_has_all_places(fill):
    assert fill("")[0] == MAX_WAITING


def test_a_place_is_free_again_when_a_job_is_cancelled(make_job, tmp_path):
    job = make_job()
    with contextlib.closing(JobQueue(tmp_path)) as queue:
        first = queue.submit(job, "ada", "0", project="one")
        for number in range(1, 50):
            queue.submit(job, "ada", str(number), project="one")
        # The same job again, as after an answer that was lost, is none more.
        assert queue.submit(job, "ada", "0", project="one") == first
        with pytest.raises(AdmissionRefused, match="50 jobs of the project 'one'"):
            queue.submit(job, "ada", "50", project="one")
        queue.mark(first, "cancelled")
        queue.submit(job, "ada", "50", project="one")


def test_a_failed_job_that_is_resumed_needs_a_place(make_job, tmp_path):
    job = make_job()
    with contextlib.closing(JobQueue(tmp_path)) as queue:
        failed = queue.submit(job, "ada", "failed", project="first")
        queue.mark(failed, "failed")
        paused = queue.pause(queue.submit(job, "ada", "0", project="first"), "", progressed=False)
        for number in range(1, 50):
            queue.submit(job, "ada", str(number), project="first")
        with pytest.raises(AdmissionRefused, match="50 jobs of the project 'first' are queued"):
            queue.resume(queue.get(failed.id))
        queue.resume(queue.get(paused.id))  # which has its place
        queue.mark(paused, "cancelled")
        queue.resume(queue.get(failed.id))
        assert queue.get(failed.id).state == "paused"
