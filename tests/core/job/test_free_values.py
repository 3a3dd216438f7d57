"""Values of a job whose keys only the task, the policy or an app knows: JSON has to carry them."""

import pytest

from isthmus.errors import JobError
from isthmus.job import parse_job, read_job, with_changes, write_job

JOB = """
name = "digits"
[federated]
secure_aggregation = false
[task]
source = "task.py:Digits"
"""
OPTIONS = "federated.flower.strategy={name='FedAvg', options={a=%s}}"
NOT_FINITE = "is not finite, and a job is sent as JSON, which has no such number; use a finite one"


@pytest.mark.parametrize(
    ("override", "place"),
    [
        ("task.settings.odd=nan", "task.settings: odd=nan"),
        ("task.settings.deep=[1, {odd=-inf}]", "task.settings: deep.1.odd=-inf"),
        ("strategy.settings.odd=inf", "strategy.settings: odd=inf"),
        ("strategy.server_optimizer.options={lr=nan}", "strategy.server_optimizer.options: lr=nan"),
        (OPTIONS % "inf", "federated.flower.strategy.options: a=inf"),
        ("federated.flower.config.a=nan", "federated.flower.config: a=nan"),
    ],
)
def test_a_number_that_is_not_finite_is_refused(override, place):
    with pytest.raises(JobError) as refused:
        parse_job(JOB, [override])
    assert str(refused.value) == f"job: {place} {NOT_FINITE}"


@pytest.mark.parametrize(
    ("value", "kind", "shown"),
    [
        ("2024-01-01", "date", "2024-01-01"),
        ("10:00:00", "time", "10:00:00"),
        ("2024-01-01T10:00:00", "datetime", "2024-01-01 10:00:00"),
        ("[2024-01-01]", "date", "2024-01-01"),
    ],
)
def test_a_date_or_a_time_is_refused(value, kind, shown):
    with pytest.raises(JobError) as refused:
        parse_job(f"{JOB}[task.settings]\nd = {value}\n")
    key = "d.0" if value.startswith("[") else "d"
    assert str(refused.value) == (
        f"job: task.settings: {key}={shown} is a {kind}, and a job is sent as JSON, which has "
        "none; write it as text in quotes"
    )


def test_changes_and_jobs_of_others_are_checked_too():
    job = parse_job(JOB, ["task.settings.rate=0.5"])
    with pytest.raises(JobError, match=r"^task\.settings: rate=nan is not finite"):
        with_changes(job, {"task.settings.rate": float("nan")})
    with pytest.raises(JobError, match=r"task\.settings: rate=nan is not finite"):
        read_job(write_job(job).replace("0.5", "NaN"))


def test_other_values_arrive_as_they_are():
    settings = 'task.settings={a=[1, 2.5, true, "2024-01-01"], b={c="nan"}}'
    job = parse_job(JOB, [settings])
    assert read_job(write_job(job)) == job
    assert job.task.settings == {"a": [1, 2.5, True, "2024-01-01"], "b": {"c": "nan"}}
