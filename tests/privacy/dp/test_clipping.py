"""No device changes a sum by more than the clipping bound."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isthmus_privacy.dp.clipping import clip_to_norm

NUMBERS = st.floats(-(2.0**100), 2.0**100, width=32)


@given(st.lists(NUMBERS, max_size=20), st.floats(1e-6, 1e6))
def test_the_norm_is_at_most_the_bound_and_the_direction_stays(values, bound):
    vector = torch.tensor(values, dtype=torch.float32)
    before = vector.clone().double()
    clipped = clip_to_norm(vector, bound)
    assert float(vector.double().norm()) <= bound
    assert clipped == bool(before.norm() > bound)
    if not clipped:
        torch.testing.assert_close(vector.double(), before, rtol=1e-5, atol=0)
    else:
        cosine = torch.cosine_similarity(vector.double(), before / before.norm(), dim=0)
        assert cosine > 0.999 or bound < 1e-30


def test_a_vector_of_several_parts_is_clipped_as_a_whole():
    vector = torch.ones(3_000_000)
    assert clip_to_norm(vector, 2.0)
    assert 1.999 < float(vector.double().norm()) <= 2.0


@pytest.mark.parametrize(
    ("size", "value", "bound"), [(10, 3e38, 7e-7), (100_000, 3e38, 1e-4), (100_000, 3e38, 1.0)]
)
def test_a_diverged_update_is_clipped_although_the_factor_is_no_normal_float(size, value, bound):
    vector = torch.full((size,), value)
    assert clip_to_norm(vector, bound)
    assert 0.999 * bound < float(vector.double().norm()) <= bound
