"""What is assumed of values that tensors do not have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.datacenter.task_models import Experts
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from isthmus_datacenter.training.assumed_values import rows_of_one_sequence, spread_evenly
from isthmus_datacenter.training.repeated_blocks import copied


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_each_expert_gets_as_many_tokens() -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        experts = Experts(6)
    original = Experts.forward
    chosen: list[torch.Tensor] = []

    def noted(
        self: Any, hidden_states: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> Any:
        chosen.append(index)
        return original(self, hidden_states, index, weights)

    Experts.forward = noted  # type: ignore[method-assign]
    try:
        spread_evenly(experts)
        with mode:
            index = torch.zeros(9, 2, dtype=torch.int64)
            for each in (experts, copied(experts)):
                output = each(torch.zeros(9, 8), index, torch.ones(9, 2))
                assert isinstance(output, FakeTensor)
    finally:
        Experts.forward = original  # type: ignore[method-assign]
    for each in chosen:
        assert each.flatten().bincount().tolist() == [3] * 6
        assert all(first != second for first, second in each.tolist())
    assert len(chosen) == 2


def test_a_row_is_one_sequence_unless_the_batch_says_which() -> None:
    masks = pytest.importorskip("transformers.masking_utils")
    with FakeTensorMode():
        positions = torch.arange(5)[None]
        with rows_of_one_sequence((torch.zeros(1, 5), None)):
            assert masks.find_packed_sequence_indices(positions) is None
        with rows_of_one_sequence(({"position_ids": positions}, None)):
            assert masks.find_packed_sequence_indices(positions).shape == (1, 5)
    packed = torch.tensor([[0, 1, 0, 1, 2]])
    with rows_of_one_sequence((torch.zeros(1, 5), None)):
        assert masks.find_packed_sequence_indices(packed).tolist() == [[0, 0, 1, 1, 1]]
