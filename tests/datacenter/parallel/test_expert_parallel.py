"""Replicas divide the experts of mixtures; what they cannot divide is refused with the reason.

That they train like one process is told by test_parallelize.py, of real mixtures by tests/parity.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.datacenter.conftest import HERE
from tests.datacenter.task_models import Decoder, MixtureBlock

from isthmus.errors import TaskError
from isthmus_datacenter.checks import check
from isthmus_datacenter.parallel.expert_parallel import find_experts, refuse_undividable

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
