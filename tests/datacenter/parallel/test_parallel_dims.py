"""Degrees of parallelism that do not fit together are refused with the arithmetic."""

from __future__ import annotations

import re
from typing import Any

import pytest

from isthmus.job.datacenter import DatacenterSection
from isthmus_datacenter.parallel.auto_layout import choose_layout
from isthmus_datacenter.parallel.parallel_dims import LayoutError


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        (
            {"ranks": 6, "tensor_parallel": 4},
            "tensor_parallel=4 x pipeline_parallel=1 needs 4 ranks or a multiple, and there are 6",
        ),
        (
            {"ranks": 4, "shard_groups": 3},
            "shard_groups=3 cannot divide 4 data-parallel replicas into equal groups",
        ),
        (
            {"checkpoint_activations": "operators", "compile": True},
            "does not see the operators of compiled blocks; set compile = false",
        ),
        (
            {"checkpoint_activations": "operators", "schedule": "zero_bubble"},
            "schedule='zero_bubble' has two; set checkpoint_activations = true",
        ),
        (
            {"context_parallel": 2, "tensor_parallel": 2},
            "context_parallel=2 needs tensor_parallel = 1",
        ),
        ({"context_parallel": 2, "compile": True}, "context_parallel=2 needs compile = false"),
        ({"ranks": 3, "context_parallel": 2}, "context_parallel=2 x pipeline_parallel=1 needs 2"),
        (
            {"expert_parallel": 2, "tensor_parallel": 2},
            "expert_parallel=2 needs tensor_parallel = 1; remove one of the two",
        ),
        ({"expert_parallel": 2, "context_parallel": 2}, "needs context_parallel = 1"),
        ({"expert_parallel": 2, "compile": True}, "expert_parallel=2 needs compile = false"),
        ({"expert_parallel": 2, "layout": "auto"}, 'expert_parallel=2 needs layout = "given"'),
        (
            {"expert_parallel": 2, "schedule": "zero_bubble"},
            "expert_parallel=2 does not work with schedule='zero_bubble'",
        ),
        (
            {"ranks": 6, "expert_parallel": 4},
            "expert_parallel=4 cannot divide the 6 data-parallel replicas into equal groups",
        ),
        (
            {"ranks": 4, "expert_parallel": 4, "shard_groups": 2},
            "expert_parallel=4 cannot divide the 2 data-parallel replicas of each of "
            "shard_groups=2 into",
        ),
        (
            {"offload": "parameters", "tensor_parallel": 2},
            'offload="parameters" needs tensor_parallel = 1',
        ),
        ({"sequence_parallel": True}, "needs tensor_parallel above 1; set that, or"),
        (
            {"sequence_parallel": True, "tensor_parallel": 2, "compile": True},
            "sequence_parallel needs compile = false",
        ),
        ({"checkpoint_every": 2}, "checkpoint_every=2 has no effect without"),
        ({"shard_groups": 2, "zero_stage": 0}, "is for zero_stage 1 to 3: here nothing is sharded"),
        (
            {"sequence_parallel": True, "tensor_parallel": 2, "layout": "auto"},
            "choose the layout and ignore tensor_parallel, sequence_parallel; remove that",
        ),
        *(
            ({name: 2, "layout": "auto"}, f"choose the layout and ignore {name}; remove that")
            for name in (
                *("data_parallel", "shard_groups", "tensor_parallel", "context_parallel"),
                "pipeline_parallel",
            )
        ),
        *(
            ({"zero_stage": stage, "layout": "auto"}, "choose the layout and ignore zero_stage;")
            for stage in (0, 1, 3)
        ),
        ({"batch_size": 10, "accumulate": 4}, "batch_size=10 cannot be divided into 4 equal parts"),
        (
            {"pipeline_parallel": 2, "schedule": "zero_bubble", "zero_stage": 3},
            "schedule='zero_bubble' with zero_stage=3 loses gradients in PyTorch",
        ),
    ],
)
def test_an_impossible_section_is_refused_with_the_job(
    section: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        DatacenterSection.model_validate(section)


def test_a_model_that_no_layout_fits_is_refused_with_what_to_set() -> None:
    sentence = r"at least .* GiB a rank on 2 ranks.* or layout='given' with pipeline_parallel"
    with pytest.raises(LayoutError, match=sentence):
        choose_layout(ranks=2, parameters=10**10, memory=1 << 30, per_machine=2)
