"""In a run that has begun only what leaves a step as it is may change."""

import pytest

from isthmus.errors import JobError
from isthmus.job import parse_job
from isthmus.job.layout_changes import layout_changes, with_layout

JOB = """
name = "digits"
[task]
source = "task.py:Digits"
[datacenter]
ranks = 2
batch_size = 16
"""


@pytest.mark.parametrize(
    "changes",
    [
        ["datacenter.ranks=4", "datacenter.tensor_parallel=2"],
        ["datacenter.expert_parallel=2"],
        ["datacenter.ranks=4", "datacenter.batch_size=8"],
        ["datacenter.ranks=1", "datacenter.global_batch=32"],
        ["datacenter.zero_stage=3", "datacenter.checkpoint_activations=true"],
        ["datacenter.ranks=4", "datacenter.pipeline_parallel=2", "datacenter.microbatches=4"],
    ],
)
def test_a_layout_with_the_same_steps_is_accepted(changes):
    job = parse_job(JOB)
    changed = with_layout(job, layout_changes(changes)).datacenter
    assert changed != job.datacenter
    assert changed.replicas(changed.ranks) * changed.batch_size == 32 or changed.global_batch == 32


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (["datacenter.ranks=4"], r"64 examples in place of 32.* --set datacenter.global_batch=32$"),
        (["datacenter.ranks=0"], r"^datacenter.ranks=0 would leave the run"),
        (["datacenter.precision=bf16"], r"^--set datacenter.precision cannot be combined with"),
        (["rounds=7"], r"^--set rounds cannot be combined with --resume: a run keeps its job"),
        (["datacenter.tensor_parallel=3"], r"needs 3 ranks or a multiple, and there are 2"),
        (["datacenter.shard_groups=2", "datacenter.zero_stage=0"], r"here nothing is sharded"),
        (["datacenter.zero_stage=7"], r"datacenter.zero_stage"),
        (["datacenter.layout=auto"], r"can only change if its job has datacenter.global_batch"),
        (["datacenter.privacy.delta=1"], r"^--set datacenter.privacy.delta cannot"),
        (["datacenter.ranks"], r"not of the form key.sub=value"),
    ],
)
def test_any_other_change_is_refused(changes, sentence):
    with pytest.raises(JobError, match=sentence):
        with_layout(parse_job(JOB), layout_changes(changes))


def test_a_run_without_a_datacenter_gets_none():
    job = parse_job(JOB.replace("ranks = 2", "ranks = 0"))
    with pytest.raises(JobError, match="the job of this run starts no datacenter"):
        with_layout(job, {"datacenter.ranks": 2})
