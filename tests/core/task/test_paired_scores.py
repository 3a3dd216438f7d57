import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isthmus.task.paired_scores import (
    centred,
    centred_norm,
    check,
    comparison,
    restored,
    score_vector,
    vector_size,
)

device_scores = st.lists(st.floats(0, 1), min_size=3, max_size=3)


@given(st.lists(device_scores, min_size=2, max_size=12))
def test_the_mean_of_the_devices_vectors_is_a_paired_comparison(devices):
    vectors = [score_vector(scores) for scores in devices]
    assert {len(vector) for vector in vectors} == {vector_size(3)}
    assert all(vector.abs().max() <= 1 for vector in vectors)
    mean = torch.stack(vectors).mean(0).tolist()
    check(mean)
    means, differences, errors = comparison(mean, devices=len(devices))
    for model in range(3):
        differences_to_first = [scores[model] - scores[0] for scores in devices]
        error = statistics.stdev(differences_to_first) / len(devices) ** 0.5
        assert means[model] == pytest.approx(statistics.mean(scores[model] for scores in devices))
        assert differences[model] == pytest.approx(statistics.mean(differences_to_first), abs=1e-12)
        assert errors[model] == pytest.approx(error, abs=1e-7)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_a_centred_vector_has_a_bounded_norm_and_is_restored(scores):
    vector = score_vector(scores)
    assert float(centred(vector).norm()) <= centred_norm(len(scores)) + 1e-12
    assert restored(centred(vector)).tolist() == pytest.approx(vector.tolist())


@given(st.lists(device_scores, min_size=2, max_size=12), st.floats(1e-3, 1))
def test_noise_makes_the_error_of_a_difference_larger(devices, noise):
    mean = torch.stack([score_vector(scores) for scores in devices]).mean(0).tolist()
    *_, without = comparison(mean, devices=len(devices))
    *_, errors = comparison(mean, devices=len(devices), noise=noise)
    assert errors[0] == without[0] == 0
    assert all(one >= max(other, noise) for one, other in zip(errors[1:], without[1:], strict=True))


@pytest.mark.parametrize(
    ("mean", "why"),
    [
        ([1.1, 0.5, -0.6, 0.36], "a score is 1.1"),
        ([-0.1, 0.5, 0.6, 0.36], "a score is -0.1"),
        ([0.5, 0.5, 0.1, 0.1], "a difference is 0.1, and that of the scores 0"),
        ([0.5, 0.4, -0.1, 0.005], "the mean square of a difference is 0.005"),
        ([0.5, 0.4, -0.1, 1.1], "the mean square of a difference is 1.1"),
    ],
)
def test_a_mean_that_no_devices_have_is_refused(mean, why):
    with pytest.raises(ValueError, match=why):
        check(mean)
