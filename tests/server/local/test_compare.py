"""What a comparison makes of its runs, which are not trained here."""

import asyncio
import contextlib
import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from isthmus_server.local.compare import JobComparison
from isthmus_server.storage.records import FinalModel
from isthmus_server.storage.store import Store


class Runs:
    """Runs that end at once, with given metrics; an error in their place is raised."""

    def __init__(self, *ends):
        self.ends, self.trained = list(ends), []

    def needs(self, job):
        return ""

    @contextlib.asynccontextmanager
    async def participants(self, job):
        yield

    def create(self, directory, job, base):
        return Store.create(directory, job, base)

    async def train(self, store):
        self.trained.append(store.directory.name)
        with contextlib.closing(store):
            end = self.ends.pop(0) if self.ends else {"accuracy": 0.5}
        if isinstance(end, Exception):
            raise end
        state = SimpleNamespace(round=3, spent=2.0)
        return state, FinalModel(metrics=end, model_sha256="", model_path="", round=3)

    def leave(self):
        raise AssertionError


@pytest.fixture
def compare(make_job, tmp_path):
    """Compare variants of a job; returns the results and what was printed."""

    def run(variants, runs, seeds=(1,), job=None, base=tmp_path, width=300):
        comparison = JobComparison(
            job or make_job(), base, tmp_path / "sweep", variants, seeds, runs
        )
        console = Console(record=True, width=width, file=io.StringIO())
        found = asyncio.run(comparison.run(console))
        return found, console.export_text()

    return run


def test_a_metric_of_the_task_does_not_replace_the_cost(compare):
    found, printed = compare([{"rounds": 2}], Runs({"cost": 7.0, "rounds": 9.0}))
    assert found["variants"][0]["runs"] == [
        {"seed": 1, "rounds": 3, "cost": 2.0, "metric cost": 7.0, "metric rounds": 9.0}
    ]
    assert "metric cost 7 metric rounds 9" in printed
