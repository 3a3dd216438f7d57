"""What most tests start from: a small task on disk and a job that names it."""

import ctypes
import gc
import logging
import sys
from collections import Counter
from pathlib import Path
from textwrap import dedent, indent

import pytest
import torch
from hypothesis import HealthCheck, settings
from pytest_timeout import get_env_settings

from isthmus.job import parse_job
from isthmus.task import loading
from tests.forked_commands import ForkedCommands

# A busy machine is slow, not wrong.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")

_LIBC = ctypes.CDLL(None)
_PR_SET_DUMPABLE = 4

EXAMPLES = Path(__file__).parents[1] / "examples"

SLOWEST_FIRST = (
    "docs",
    "end_to_end",
    "datacenter/parallel/test_parallelize",
    "datacenter",
    "examples",
    "privacy",
    "benchmarks",
    "server/control_plane",
)
"""Files and folders that take long: begun last, one of them would have to be waited for."""


def pytest_collection_modifyitems(items):
    def place(item):
        found = (
            i for i, name in enumerate(SLOWEST_FIRST) if item.nodeid.startswith(f"tests/{name}")
        )
        return next(found, len(SLOWEST_FIRST))

    items.sort(key=place)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection():
    """Look for no garbage among a million objects, of which none is."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish():
    """Modules and tests stay: the garbage of one test is found without looking at all of them.

    Some tests have it collected often: Flower does for every update, simulations for every run. So
    nothing may call `gc.unfreeze`.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter):
    """End with one line that says what to install or set, so that nothing is skipped."""
    yield
    remedies = Counter(
        remedy
        for report in terminalreporter.stats.get("skipped", [])
        for _, found, remedy in [report.longrepr[2].partition("; ")]
        if found
    )
    if remedies:
        named = "; ".join(f"{remedy} ({count})" for remedy, count in sorted(remedies.items()))
        terminalreporter.write_line(f"skipped tests run if you: {named}")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item):
    return (yield from within_the_limit(item))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item):
    return (yield from within_the_limit(item))


def within_the_limit(item):
    """Limit the fixtures as pytest-timeout with `timeout_func_only` limits the test's function.

    Its alarm raises an exception wherever the main thread is. Armed for a test as a whole, that may
    be between two phases, where pytest expects none and xdist ends the whole session.
    """
    hook = item.config.hook
    hook.pytest_timeout_set_timer(item=item, settings=get_env_settings(item.config))
    try:
        return (yield)
    finally:
        hook.pytest_timeout_cancel_timer(item=item)


TABLE = '''
import torch
from torch import nn
from torch.utils.data import TensorDataset

import isthmus


class Table(isthmus.Task):
    """Which of four numbers is the largest: three classes, for the last two count as one."""

    def model(self):
        return nn.Linear(4, 3)

    def loss(self, output, target):
        return nn.functional.cross_entropy(output, target, reduction="none")

    def metrics(self, output, target):
        return {"accuracy": (output.argmax(-1) == target).float()}

    def local_data(self, participant):
        return rows(20, seed=sum(participant.name.encode()))

    def eval_data(self):
        return rows(30, seed=0)

    def optimizer(self, parameters, participant):
        return torch.optim.SGD(parameters, lr=self.settings.get("lr", 0.1))


def rows(count, seed):
    inputs = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, inputs.argmax(1).clamp(max=2))


class Learn(Table):
'''


@pytest.fixture(autouse=True)
def _tasks_of_one_test(tmp_path_factory):
    """Loading a task extends Python's path; the next test must not import a file of this one."""
    path, folders, modules = sys.path.copy(), loading._task_folders.copy(), set(sys.modules)
    yield
    sys.path[:], loading._task_folders[:] = path, folders
    places = (str(tmp_path_factory.getbasetemp()), str(EXAMPLES))
    for name in sys.modules.keys() - modules:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(places):
            del sys.modules[name]


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """The models of tests are so small that a second thread only waits, on a processor."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def forked_commands():
    """The program `isthmus` for shells that does not import PyTorch anew for each command."""
    with ForkedCommands() as commands:
        yield commands


@pytest.fixture(autouse=True)
def log_levels():
    """A command that a test runs in this process sets them for the whole process."""
    loggers = [logging.getLogger(name) for name in ("isthmus", "isthmus_clients", "isthmus_server")]
    levels = [each.level for each in loggers]
    yield
    for each, level in zip(loggers, levels, strict=True):
        each.setLevel(level)


@pytest.fixture(scope="module")
def forked_python():
    """A Python for `-c CODE` and `-m isthmus` that does not import PyTorch anew."""
    with ForkedCommands("python") as commands:
        yield commands.folder / "python"


@pytest.fixture
def forked_tasks():
    """The processes of tasks of this process's devices do not import PyTorch anew."""
    from tests.forked_tasks import forked_from_tests  # imports all that devices have

    with forked_from_tests():
        yield


@pytest.fixture
def write_task(tmp_path):
    """Write `task.py` into `tmp_path`: its class `Learn` is a table task with methods replaced."""

    def write(methods="pass"):
        path = tmp_path / "task.py"
        path.write_text(TABLE + indent(dedent(methods).strip(), "    ") + "\n")
        return path

    return write


@pytest.fixture
def make_job():
    """A job of that task, with some keys changed; updates in plain unless it says otherwise."""

    def make(*overrides):
        plain = "federated.secure_aggregation=false"
        return parse_job('name = "table"\n[task]\nsource = "task.py:Learn"', [plain, *overrides])

    return make


@pytest.fixture(autouse=True)
def _readable_memory():
    """A device hides its memory from its user's other processes; other tests share theirs."""
    yield
    _LIBC.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
