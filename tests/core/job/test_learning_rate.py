"""The table [learning_rate] and what it takes from the rest of a job."""

import pytest

from isthmus.errors import JobError
from isthmus.job import parse_job


def job(*keys):
    return parse_job('name = "a"\n[task]\nsource = "a.py:A"\n', keys)


STEPS, COSINE = "federated.local_steps=6", "learning_rate.schedule=cosine"
PLAIN = "federated.secure_aggregation=false"
DATACENTER, APP = "strategy.policy=datacenter", "federated.flower.app=app.py:app"


@pytest.mark.parametrize(
    ("keys", "steps"),
    [
        ([STEPS, "strategy.policy=federated"], 60),
        ([STEPS, "strategy.policy=federated", "learning_rate.federated_round_steps=3"], 30),
        ([DATACENTER, "datacenter.steps=5"], 50),
        ([STEPS, "strategy.policy=hybrid", "datacenter.steps=5"], 50),
        ([STEPS, "strategy.policy=hybrid", "strategy.merge=transfer"], 60),
        ([STEPS, "datacenter.steps=6"], 60),
        ([STEPS, "datacenter.steps=5", "learning_rate.total_steps=99"], 99),
    ],
)
def test_a_schedule_ends_with_the_rounds_of_the_job(keys, steps):
    assert job(*keys, COSINE).schedule_steps == steps


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (
            [COSINE],
            "learning_rate.schedule='cosine' counts optimizer steps, and nothing says how many a "
            "federated round is; set federated.local_steps, or learning_rate.federated_round_steps",
        ),
        (
            [COSINE, STEPS],
            "learning_rate.schedule='cosine' ends at a step, which does not follow from rounds; "
            "set learning_rate.total_steps above learning_rate.warmup_steps",
        ),
        (
            [COSINE, DATACENTER, "learning_rate.warmup_steps=500"],
            "which is 500 by rounds; set learning_rate.total_steps above",
        ),
        (
            ["learning_rate.total_steps=5", "learning_rate.warmup_steps=5"],
            "total_steps=5 must be above warmup_steps=5",
        ),
        (["learning_rate.schedule=step"], "schedule='step' needs step_size"),
        (["learning_rate.scaling=sqrt"], "scaling='sqrt' needs reference_batch"),
        (
            ["learning_rate.scaling=sqrt", "learning_rate.reference_batch=3", APP, PLAIN],
            "learning_rate has no effect on federated.flower.app",
        ),
    ],
)
def test_a_schedule_that_cannot_be_followed_is_a_sentence(keys, sentence):
    with pytest.raises(JobError) as raised:
        job(*keys)
    assert sentence in str(raised.value)
