import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isthmus.task.paired_scores import comparison, score_vector, vector_size

device_scores = st.lists(st.floats(0, 1), min_size=3, max_size=3)


@given(st.lists(device_scores, min_size=2, max_size=12))
def test_the_mean_of_the_devices_vectors_is_a_paired_comparison(devices):
    vectors = [score_vector(scores) for scores in devices]
    assert {len(vector) for vector in vectors} == {vector_size(3)}
    assert all(vector.abs().max() <= 1 for vector in vectors)
    means, differences, errors = comparison(
        torch.stack(vectors).mean(0).tolist(), devices=len(devices)
    )
    for model in range(3):
        differences_to_first = [scores[model] - scores[0] for scores in devices]
        error = statistics.stdev(differences_to_first) / len(devices) ** 0.5
        assert means[model] == pytest.approx(statistics.mean(scores[model] for scores in devices))
        assert differences[model] == pytest.approx(statistics.mean(differences_to_first), abs=1e-12)
        assert errors[model] == pytest.approx(error, abs=1e-7)
