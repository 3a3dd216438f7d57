"""A run that computes statistics: sums of the devices' data, none of which is of one device."""

import itertools
import json

import pytest
import torch
from tests.server.waiting import wait_until

from isthmus import JobError
from isthmus.errors import CannotContinue
from isthmus.job import load_job
from isthmus.task import Participant, load_task
from isthmus.task.measurements.statistics import StatisticsVector
from isthmus_clients.training.history_files import EMPTY, write_head
from isthmus_server.rounds.measurements.statistics import STATISTICS, StatisticsRun
from isthmus_server.rounds.run_parts import RunParts

COUNTED = """
def statistics_columns(self):
    return {"age": isthmus.Column(0, 100, bins=20), "ill": isthmus.Category((0, 1))}

def statistics_data(self, participant):
    draw = torch.Generator().manual_seed(ord(participant.name))
    ages = torch.rand(40, generator=draw) * 100
    return {"age": ages, "ill": (ages > 50).int()}
"""
NAMES = tuple("abcd")
SETTINGS = (
    "statistics.collect=true",
    "statistics.devices=4",
    "statistics.quorum=4",
    "federated.cohort=4",
    "federated.quorum=4",
    "federated.clients=4",
    "time.join_seconds=100",  # a loaded machine has the same cohort
)


def vectors(folder):
    """The form of the vectors, and what each device counts, int64 (size) each."""
    task = load_task("task.py:Learn", {}, base=folder)
    vector = StatisticsVector(task)
    of = [Participant(name=name, regime="federated") for name in NAMES]
    return vector, [vector.measure(participant, []) for participant in of]


async def collected(deployment, name, *settings):
    """The directory of a run, and the statistics in it."""
    store = deployment.create_run(name, *SETTINGS, *settings)
    await StatisticsRun(RunParts.of(store, deployment.link)).run()
    return store.directory, json.loads((store.directory / STATISTICS).read_text())


async def test_the_statistics_are_those_of_all_devices_and_of_none_alone(
    deployment, network, tmp_path
):
    """Nothing that the server receives or stores is a device's own vector or count."""
    await deployment.start(COUNTED, ())
    proxy, port = await network.start_proxy()
    for name in NAMES:
        network.dial(deployment.device(name), name, port)
    await wait_until(lambda: set(NAMES) <= deployment.link.peers.keys())
    directory, statistics = await collected(deployment, "run")
    # Data are counted without a model: each device is sent the roster, and nothing else.
    (sent,) = {peer.sent.total for peer in deployment.link.peers.values()}
    assert 4 * 2500 < sent < 4 * 2800
    vector, each = vectors(tmp_path)
    total = sum(each)
    assert statistics == {
        "devices": 4,
        "minimum": 5,
        "columns": json.loads(json.dumps(vector.describe(total, 5))),
    }
    held = bytes(proxy.received)
    held += b"".join(path.read_bytes() for path in directory.rglob("*") if path.is_file())
    for counts in each:
        for value in counts[3:5].tolist():  # the sums of values, which are large numbers
            assert str(value).encode() not in held
            for shifted in (value, value + (1 << 50)):
                assert shifted.to_bytes(8, "little", signed=True) not in held


async def test_a_device_is_in_statistics_of_a_task_with_one_set_of_devices_only(
    deployment, network, tmp_path
):
    """In all runs, or the difference of two of them would be one device's data."""
    await deployment.start(COUNTED, ())
    for name in NAMES:
        device, history = deployment.device(name), tmp_path / f"{name}.log"
        device.agent._secure._history_file = history
        history.touch()
        write_head(history, EMPTY)
        network.dial(device, name)
    await wait_until(lambda: set(NAMES) <= deployment.link.peers.keys())
    _, first = await collected(deployment, "first")
    _, again = await collected(deployment, "again", "seed=9")
    assert again == first
    fewer = (
        "statistics.devices=3",
        "statistics.quorum=3",
        "seed=10",
        "attempts=1",
        "time.join_seconds=3",
    )
    with pytest.raises(CannotContinue, match="statistics of one version of a task only with one"):
        await collected(deployment, "fewer", *fewer)


async def test_a_task_whose_training_data_need_the_statistics_can_collect_them(deployment):
    normalises = """
def local_data(self, participant):
    return rows(20, seed=int(self.statistics["columns"]["age"]["mean"]))
"""
    await deployment.start(COUNTED + normalises, NAMES)
    _, statistics = await collected(deployment, "run")
    assert statistics["columns"]["age"]["count"] == 160


async def test_counts_that_no_data_have_are_in_no_statistics(deployment, monkeypatch):
    """One device sends -99 for every count, once: the ages of all would have a mean below 0."""
    measure = StatisticsVector.measure
    calls = itertools.count()

    def measured_by_liar(vector, *arguments):
        counts = measure(vector, *arguments)
        return torch.full_like(counts, -99) if next(calls) == 0 else counts

    monkeypatch.setattr(StatisticsVector, "measure", measured_by_liar)
    await deployment.start(COUNTED, NAMES)
    _, statistics = await collected(deployment, "run", "attempts=2")
    assert statistics["devices"] == 4
    assert statistics["columns"]["age"]["count"] == 160


async def test_groups_have_statistics_of_their_own(deployment):
    north, south = "abc", "def"
    deployment.groups = {**dict.fromkeys(north, "north"), **dict.fromkeys(south, "south")}
    await deployment.start(COUNTED, tuple(north + south))
    _, statistics = await collected(
        deployment,
        "run",
        "federated.groups={minimum=3}",
        "federated.cohort=6",
        "federated.quorum=5",
        "federated.clients=6",
        "statistics.devices=6",
        "statistics.quorum=6",
    )
    assert statistics["devices"] == 6
    assert {name: group["devices"] for name, group in statistics["groups"].items()} == {
        "north": 3,
        "south": 3,
    }


async def test_a_task_that_cannot_count_fails_the_run_with_a_sentence(deployment):
    await deployment.start("pass", NAMES)
    with pytest.raises(Exception, match="Learn declares no columns; return them from"):
        await collected(deployment, "run")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("federated.secure_aggregation=false", "statistics are computed by secure sums only"),
        ("statistics.quorum=5", "quorum=5 is above devices=4; lower it"),
        ("statistics.devices=1", "is above devices=1"),
    ],
)
async def test_a_job_that_could_show_one_device_is_refused(deployment, setting, message):
    await deployment.start(COUNTED, NAMES)
    with pytest.raises(JobError, match=message):
        deployment.create_run("run", *SETTINGS, setting)


JOB = 'name = "job"\n[task]\nsource = "task.py:Learn"\nstatistics = "figures.json"\n'


def test_a_task_reads_the_statistics_that_its_job_names(tmp_path):
    (tmp_path / "job.toml").write_text(JOB)
    with pytest.raises(
        JobError, match=r"figures\.json cannot be read: No such file .*; `isthmus stat"
    ):
        load_job(tmp_path / "job.toml")
    load_job(tmp_path / "job.toml", ["statistics.collect=true"])  # this computes them
    (tmp_path / "figures.json").write_text('{"columns": {"age": {"mean": 40.5}}}')
    job = load_job(tmp_path / "job.toml")
    assert job.task.settings["statistics"]["columns"]["age"]["mean"] == 40.5
    for contents, message in (("[1]", "has no JSON object"), (" " * (1 << 21), "is larger than")):
        (tmp_path / "figures.json").write_text(contents)
        with pytest.raises(JobError, match=message):
            load_job(tmp_path / "job.toml")
    (tmp_path / "figures.json").write_text("{}")
    with pytest.raises(JobError, match="are both set; remove one"):
        load_job(tmp_path / "job.toml", ["task.settings.statistics={}"])
