"""Selections of devices: those of Isthmus, and answers of others that are refused."""

import pytest
from tests.outside_package import OutsidePackage

from isthmus.errors import JobError, UserError
from isthmus.job import with_changes
from isthmus_server.runs.jobs.checks import check_job
from isthmus_server.strategy.device_selection import select_devices
from isthmus_server.strategy.selection import CheckedSelection, SelectionRequest

DEVICES = dict.fromkeys("abcdef", 10)

OUTSIDE = """
ANSWERS = {
    "stranger": lambda request: ["z"],
    "twice": lambda request: ["a", "a"],
    "many": lambda request: list(request.devices),
    "nothing": lambda request: None,
    "random": lambda request: request.random().sample(sorted(request.devices), request.count),
}


class Answering:
    def __init__(self, federated):
        self.select = ANSWERS[federated.selection_settings["answer"]]


def no_selection(federated):
    return 7
"""


@pytest.fixture
def outside(tmp_path, monkeypatch):
    group = "isthmus.device_selections"
    entries = {f"{group}/answering": "Answering", f"{group}/none": "no_selection"}
    with OutsidePackage(tmp_path, "outside_selections", OUTSIDE, entries).on_path(monkeypatch):
        yield


def request(count=3, round_=1):
    return SelectionRequest(round=round_, count=count, devices=DEVICES, records={}, seed=5)


def selecting(make_job, name, **settings):
    changes = {"federated.selection": name, "federated.selection_settings": settings}
    return CheckedSelection(with_changes(make_job(), changes).federated)


def test_the_present_ways_select_what_they_did(make_job):
    for round_ in (1, 2, 3):
        expected = select_devices(DEVICES, count=3, seed=5, round_=round_)
        assert selecting(make_job, "uniform").select(request(round_=round_)) == expected
        guided = make_job().federated.utility
        expected = select_devices(
            DEVICES, count=3, seed=5, round_=round_, records={}, guided=guided
        )
        assert selecting(make_job, "utility").select(request(round_=round_)) == expected


def test_random_numbers_are_those_of_the_seed_and_the_round(outside, make_job):
    selection = selecting(make_job, "answering", answer="random")
    first = selection.select(request())
    assert selection.select(request()) == first
    assert len({tuple(selection.select(request(round_=each))) for each in range(1, 9)}) > 1


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        ("stranger", r"'answering' in round 1 selected 'z', which is no available device"),
        ("twice", r"'answering' in round 1 selected a device twice"),
        ("many", r"'answering' in round 1 selected 6 devices of at most 3"),
        ("nothing", r"'answering' in round 1 failed: TypeError: 'NoneType' object is not iterable"),
    ],
)
def test_a_wrong_answer_is_one_sentence(outside, make_job, answer, sentence):
    with pytest.raises(JobError, match=sentence):
        selecting(make_job, "answering", answer=answer).select(request())


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("uniforn", r"federated\.selection='uniforn' is unknown; did you mean uniform\?"),
        ("none", r"federated\.selection='none' is not a selection of devices: it has no select"),
        ("answering", r"federated\.selection='answering' cannot be constructed: KeyError"),
    ],
)
def test_a_selection_that_cannot_be_used_is_reported(outside, make_job, name, sentence):
    with pytest.raises(UserError, match=sentence):
        selecting(make_job, name)


@pytest.mark.parametrize("name", ["utility", "answering"])
def test_a_server_with_a_lottery_refuses_a_selection_for_secure_sums(make_job, tmp_path, name):
    job = make_job("federated.secure_aggregation=true", f"federated.selection={name}")
    with pytest.raises(UserError, match=rf'selection="{name}" lets the server choose the devices'):
        check_job(job, tmp_path, 10.0)


def test_a_server_app_refuses_a_selection(make_job):
    app = "federated.flower={app='app.py:app', server_app='app.py:server'}"
    with pytest.raises(JobError, match=r"selection has no effect on flower\.server_app"):
        make_job("task.source=''", app, "federated.selection=answering")
