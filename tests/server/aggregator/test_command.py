"""The process of `isthmus server aggregator start`."""

import contextlib
import gc
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from isthmus_server.aggregator import process
from isthmus_server.cli import aggregator, run
from isthmus_server.cli.server import server


@pytest.fixture
def settings():
    """Restores what a process sets for itself."""
    threshold = gc.get_threshold()
    threads = torch.get_num_threads()
    yield
    gc.unfreeze()
    gc.set_threshold(*threshold)
    torch.set_num_threads(threads)


def test_it_is_set_up_as_a_server_is(monkeypatch, tmp_path, settings):
    """It adds vectors on the thread of the link: others would wait for work on cores of its own."""
    torch.set_num_threads(2)
    found = []

    class Process:
        def __init__(self, member, folder):
            pass

        async def run(self, host, port, *, server, ready):
            found.append((gc.get_threshold(), torch.get_num_threads(), gc.get_freeze_count() > 0))

    member = SimpleNamespace(name="127.0.0.1", server="", locked=contextlib.nullcontext)
    monkeypatch.setattr(run, "return_freed_memory", lambda: found.append("memory"))
    monkeypatch.setattr(process, "AggregatorProcess", Process)
    monkeypatch.setattr(aggregator, "Membership", lambda state: member)
    ended = CliRunner().invoke(server, ["aggregator", "start", str(tmp_path)])
    assert ended.exit_code == 0, ended.output
    assert found == ["memory", ((50_000, 10, 10), 1, True)]
