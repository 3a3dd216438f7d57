import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isthmus.task.paired_scores import figures, length, results

scores = st.lists(st.floats(0, 1), min_size=3, max_size=3)


@given(st.lists(scores, min_size=2, max_size=12))
def test_the_mean_of_the_devices_vectors_is_a_paired_comparison(devices):
    vectors = [figures(one) for one in devices]
    assert {len(vector) for vector in vectors} == {length(3)}
    assert all(vector.abs().max() <= 1 for vector in vectors)
    means, differences, errors = results(
        torch.stack(vectors).mean(0).tolist(), devices=len(devices)
    )
    for model in range(3):
        apart = [one[model] - one[0] for one in devices]
        error = statistics.stdev(apart) / len(devices) ** 0.5
        assert means[model] == pytest.approx(statistics.mean(one[model] for one in devices))
        assert differences[model] == pytest.approx(statistics.mean(apart), abs=1e-12)
        assert errors[model] == pytest.approx(error, abs=1e-7)
