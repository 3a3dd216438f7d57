"""Replicas divide the experts of mixtures; what they cannot divide is refused with the reason.

That they train like one process is told by test_parallelize.py, of real mixtures by tests/parity.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.datacenter.conftest import HERE
from tests.datacenter.task_models import Decoder, Experts, MixtureBlock
from tests.warm_ranks import Ranks
from torch import nn

from isthmus.errors import TaskError
from isthmus_datacenter.checks import check
from isthmus_datacenter.parallel.expert_parallel import (
    are_alike,
    find_experts,
    refuse_undividable,
)

DIVIDED = {"expert_parallel": 2, "zero_stage": 3}


def test_experts_are_found_by_their_form() -> None:
    model = Decoder(2, tied=True, kind=MixtureBlock)
    assert set(find_experts(model)) == {"blocks.0.experts", "blocks.1.experts"}


def test_a_number_of_experts_that_the_ranks_do_not_divide_is_refused() -> None:
    model = Decoder(2, tied=True, kind=MixtureBlock)
    refuse_undividable(model, 3)
    with pytest.raises(TaskError, match=r"the 6 experts of 'blocks\.0\.experts' into"):
        refuse_undividable(model, 4)


def test_the_check_of_a_job_refuses_experts_that_cannot_be_divided(make_setup: Any) -> None:
    prepared = make_setup("Mixture", ranks=4, expert_parallel=4)
    with pytest.raises(TaskError, match="expert_parallel=4 cannot divide the 6 experts"):
        check(prepared.job, prepared.task, HERE)
    prepared = make_setup("Mixture", ranks=2, **DIVIDED)
    assert check(prepared.job, prepared.task, HERE).startswith("one training batch")


REFUSED = {
    "none": (("Gpt", {}), "expert_parallel=2: the model has no experts, which are modules with"),
    "scaled": (
        ("OddExperts", {"experts": "scaled"}),
        "parameter 'blocks.1.experts.scale' is not stacked by expert",
    ),
    "tied": (
        ("OddExperts", {"experts": "tied"}),
        "parameter 'blocks.1.experts.up' is used in other modules too",
    ),
    "normalised": (
        ("OddExperts", {"experts": "normalised"}),
        "the experts 'blocks.1.experts' give other outputs divided than whole",
    ),
    "normalised in training": (
        ("OddExperts", {"experts": "normalised in training"}),
        "the experts 'blocks.1.experts' give other outputs divided than whole in training",
    ),
    "one of two alike": (
        ("OddExperts", {"experts": "one of two alike"}),
        "the experts 'blocks.1.experts' give other outputs divided than whole",
    ),
    "buffer per expert": (
        ("OddExperts", {"experts": "per expert"}),
        "the experts 'blocks.1.experts' have the buffer 'calls' of shape (6,)",
    ),
    "changing buffer": (
        ("OddExperts", {"experts": "in all"}),
        "the experts 'blocks.1.experts' change their buffer 'calls'",
    ),
    "failing on one rank": (
        ("OddExperts", {"experts": "lonely"}),
        "the experts 'blocks.1.experts' fail (a token is alone); set expert_parallel = 1",
    ),
    "failing": (
        ("OddExperts", {"experts": "failing"}),
        "the experts 'blocks.1.experts' fail (too few tokens); set expert_parallel = 1",
    ),
    "not called by every batch": (
        ("OddExperts", {"experts": "at times"}),
        "all of them call the experts 'blocks.1.experts', which not every batch does",
    ),
}


def test_what_would_train_differently_is_refused_on_all_ranks(
    make_setup: Any, on_ranks: Any, tmp_path: Path
) -> None:
    openings = [make_setup(*task, **DIVIDED).open_command() for task, _ in REFUSED.values()]
    by_rank = on_ranks(2, "refusals", openings, str(tmp_path / "state"))
    assert by_rank[0] == by_rank[1]
    for (_, sentence), message in zip(REFUSED.values(), by_rank[0], strict=True):
        assert sentence in message
        assert "\n" not in message


CALLS = {
    "sparing": "a token was given an expert that is none of 0 to 5",
    "sequences": "experts are called with tensors of the shapes (4, 6, 8), (4, 6, 2), (4, 6, 2)",
}


@pytest.mark.parametrize("kind", CALLS)
def test_calls_of_another_form_are_refused(
    kind: str, make_setup: Any, on_ranks: Any, tmp_path: Path
) -> None:
    """Their check, in which they are called in the right form, finds nothing."""
    prepared = make_setup("OddExperts", {"experts": kind}, **DIVIDED)
    command = {"op": "train_steps", "run_id": "run", "until_step": 1}
    operation = (prepared.open_command(), command, str(tmp_path / "state"))
    for sentence in on_ranks(2, "refused_training", operation):
        assert sentence.startswith("expert_parallel=2: ")
        assert CALLS[kind] in sentence
        assert "\n" not in sentence


def test_experts_are_alike_if_nothing_about_them_differs() -> None:
    first, second = (nn.Sequential(Experts(6), nn.Dropout(0.5)) for _ in range(2))
    assert are_alike(first, second)
    assert not are_alike(first, nn.Sequential(Experts(4), nn.Dropout(0.5)))
    assert not are_alike(first, nn.Sequential(Experts(6), nn.Dropout(0.1)))
    assert not are_alike(first, nn.Sequential(Experts(6)))
    for kept in (first[0], second[0]):
        kept.register_buffer("scale", torch.ones(2))
    assert are_alike(first, second)
    second[0].get_buffer("scale")[1] = 2.0
    assert not are_alike(first, second)


def test_a_micro_batch_that_leaves_out_experts_is_refused(make_setup: Any, tmp_path: Path) -> None:
    """In a pipeline other ranks would take its next tokens for those of these experts."""
    layout = {"data_parallel": 2, "pipeline_parallel": 2, "expert_parallel": 2}
    odd = {"batch_size": 6, "microbatches": 2}
    prepared = make_setup("OddExperts", {"experts": "at times"}, ranks=4, **layout, **odd)
    command = {"op": "train_steps", "run_id": "run", "until_step": 1}
    operation = (prepared.open_command(), command, str(tmp_path))
    last_stage = 2
    with Ranks(4) as ranks:
        said = ranks.run_until(last_stage, HERE / "ranks.py", "refused_training", operation)
    assert (
        "experts', which a batch does not call, or not in the order of others; ranks exch" in said
    )
