"""Which matrices may change by products of factors."""

import pytest
from torch import nn

from isthmus.errors import JobError
from isthmus.job import parse_job
from isthmus.job.exchange import ExchangeSection
from isthmus.tensors.division import divide

JOB = 'name = "table"\n[task]\nsource = "task.py:Learn"\n'


def model():
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


def adapted(low_rank, **keys):
    return divide(model(), ExchangeSection(low_rank=low_rank, **keys)).adapted


def test_the_matrices_are_those_that_match():
    assert adapted(None) == ()
    assert adapted({"include": ["2.w*", "[02].weight"], "rank": 3}) == ("0.weight", "2.weight")
    assert adapted({"include": ["*.weight"], "rank": 3}, exclude=["1.*"]) == (
        "0.weight",
        "2.weight",
    )


@pytest.mark.parametrize(
    ("low_rank", "keys", "sentence"),
    [
        ({"include": ["head.*"]}, {}, r"low_rank\.include: 'head\.\*' matches no exchanged param"),
        ({"include": ["1.running_*"]}, {}, "matches no exchanged parameter of the model; these"),
        ({"include": ["2.*"]}, {"personal": ["2.*"]}, "'2.*' matches no exchanged parameter"),
        ({"include": ["2.*"], "rank": 1}, {}, r"matches '2.bias' of shape \(3,\), which is not"),
        ({"include": ["*.weight"], "rank": 4}, {}, r"matches '1.weight' of shape \(5,\)"),
        ({"include": ["2.weight"], "rank": 4}, {}, "low_rank.rank=4 is above 3, the smaller side"),
    ],
)
def test_other_patterns_and_ranks_are_a_sentence(low_rank, keys, sentence):
    with pytest.raises(JobError, match=sentence):
        adapted(low_rank, **keys)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ("{include=[]}", "exchange.low_rank.include=[]: tuple should have at least 1 item"),
        ("{rank=2}", "exchange.low_rank.include is missing"),
        ("{include=['a'],rank=0}", "rank=0: input should be greater than or equal to 1"),
        ("{include=['a'],alpha=0}", "alpha=0: input should be greater than 0"),
        ("{include=['a'],alpha=inf}", "alpha=inf: input should be a finite number"),
        ("{include=['a'],ranks=1}", "unknown key exchange.low_rank.ranks"),
    ],
)
def test_other_values_are_a_sentence(values, sentence):
    with pytest.raises(JobError, match=r"job: ") as caught:
        parse_job(JOB, [f"exchange.low_rank={values}"])
    assert sentence in str(caught.value)


def test_an_app_of_flower_has_no_such_matrices():
    with pytest.raises(JobError, match=r"\[exchange\] divides the model of a task"):
        parse_job(
            JOB,
            [
                "federated.flower.app=app:app",
                "federated.secure_aggregation=false",
                "exchange.low_rank={include=['a'],rank=2}",
            ],
        )
