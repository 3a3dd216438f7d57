"""Learning curves: what rounds do to a metric, learnt from rounds, and how sure that is."""

import math

import numpy as np
import pytest

from isthmus_server.strategy.learning_curves import UNSEEN, Inertia, LearningCurves, RunPiece


def approach(start, ends, kinds, noise=0.0, seed=0, speed=0.2):
    """Values that move by a part of their distance to the end of each round's kind."""
    draw = np.random.default_rng(seed)
    values = []
    value = start
    for kind in kinds:
        value += speed * (ends[kind] - value)
        values.append(value + noise * draw.standard_normal())
    return values


ENDS = {"federated": 0.9, "datacenter": 0.5}


def test_a_regime_is_forecast_by_its_own_rounds():
    kinds = ["datacenter"] * 5 + ["federated"] * 15
    curves = LearningCurves([RunPiece(kinds, approach(0.1, ENDS, kinds, 0.005))], bounded=True)
    other = ["federated"] * 20
    found = curves.interval(curves.after(other)[:, -1])
    assert found.low <= approach(0.1, ENDS, other)[-1] <= found.high
    assert found.high - found.low < 0.2
    worse = curves.interval(curves.after(["datacenter"] * 20)[:, -1])
    assert worse.low <= approach(0.1, ENDS, ["datacenter"] * 20)[-1] <= worse.high
    assert worse.high < found.low


def test_intervals_grow_with_the_rounds_that_nobody_saw():
    kinds = ["federated"] * 6
    curves = LearningCurves([RunPiece(kinds, approach(0.1, ENDS, kinds, 0.01))], bounded=True)
    near = curves.interval(curves.after(["federated"] * 7)[:, -1])
    far = curves.interval(curves.after(["federated"] * 60)[:, -1])
    assert far.high - far.low > 1.5 * (near.high - near.low)
    assert 0 <= far.low <= far.high <= 1


def logistic(end, middle, slowness, rounds=20):
    """Values that rise slowly, then quickly, then slowly again to their end."""
    return [end / (1 + math.exp((middle - each) / slowness)) for each in range(1, rounds + 1)]


def test_a_slow_run_that_has_just_begun_may_end_far_from_where_it_is():
    draw = np.random.default_rng(5)
    held = []
    for end in (0.5, 0.7, 0.9):
        for middle, slowness in ((3, 3), (5, 3), (7, 3), (6, 5)):
            values = logistic(end, middle, slowness)
            pieces = [
                RunPiece(["federated"] * 5, [each + 0.01 * draw.standard_normal() for each in run])
                for run in (values[:5], values[:5])
            ]
            curves = LearningCurves(pieces, bounded=True)
            kinds = ["federated"] * len(values)
            found = curves.interval(curves.after(kinds)[:, -1], curves.doubt(kinds))
            held.append(found.low <= values[-1] <= found.high)
    assert sum(held) >= 0.85 * len(held)


def test_a_run_that_stands_still_is_not_expected_to_go_far():
    kinds = ["datacenter"] * 8
    curves = LearningCurves([RunPiece(kinds, approach(0.1, ENDS, kinds, speed=0.8))], bounded=True)
    longer = ["datacenter"] * 20
    found = curves.interval(curves.after(longer)[:, -1], curves.doubt(longer))
    assert found.low <= 0.5 <= found.high
    assert found.high - found.low < 0.15


def test_doubt_begins_after_the_rounds_that_there_were():
    kinds = ["datacenter"] * 3 + ["federated"] * 6
    curves = LearningCurves([RunPiece(kinds, approach(0.1, ENDS, kinds, 0.01))], bounded=True)
    assert not curves.doubt(kinds).any()
    assert not curves.doubt(["federated"] * 6).any()
    more = ["federated"] * 12
    moved = curves.after(more)[:, -1] - curves.after(more)[:, 5]
    assert curves.doubt(more) == pytest.approx(UNSEEN * np.abs(moved))


def test_rounds_that_were_not_evaluated_count_as_rounds():
    kinds = ["federated"] * 30
    values = approach(3.0, {"federated": 0.5}, kinds, 0.01)
    seldom = [value if place % 3 == 2 else math.nan for place, value in enumerate(values)]
    curves = LearningCurves([RunPiece(kinds, seldom)], bounded=False)
    found = curves.interval(curves.after(["federated"] * 40)[:, -1])
    assert found.low <= approach(3.0, {"federated": 0.5}, ["federated"] * 40)[-1] <= found.high


def test_rounds_one_by_one_are_those_of_the_whole_run():
    kinds = ["datacenter"] * 3 + ["federated"] * 6
    piece = RunPiece(kinds, approach(0.1, ENDS, kinds, 0.01))
    curves = LearningCurves([piece], bounded=True, inertia=Inertia(0.8, 0.9))
    path = curves.after(kinds)
    run = curves.followed(5)
    assert [run.next(kind) for kind in kinds] == pytest.approx(list(path[5]))


def test_momentum_makes_the_first_steps_of_the_server_short():
    kinds = ["federated"] * 12
    values = []
    value = 0.1
    for step in range(1, 13):
        value += 0.4 * (1 - 0.9**step) * (0.9 - value)
        values.append(value)
    known = values[:8]
    inertia = Inertia(momentum=0.9)
    with_it = LearningCurves([RunPiece(kinds[:8], known)], bounded=True, inertia=inertia)
    without = LearningCurves([RunPiece(kinds[:8], known)], bounded=True)
    found = with_it.interval(with_it.after(kinds)[:, -1])
    assert found.low <= values[-1] <= found.high
    other = without.interval(without.after(kinds)[:, -1])
    assert abs(found.median - values[-1]) < abs(other.median - values[-1])


def test_an_average_of_models_of_two_kinds_says_little():
    kinds = ["datacenter"] * 8 + ["federated"] * 16
    piece = RunPiece(kinds, approach(0.1, ENDS, kinds, 0.005))
    curves = LearningCurves([piece], bounded=True, inertia=Inertia(average=0.85))
    assert not curves.doubt(kinds[:8]).any()
    first, later, last = (curves.doubt(kinds[:count])[0] for count in (9, 14, 24))
    assert first > 3 * later > 3 * last > 0
    plain = LearningCurves([piece], bounded=True)
    assert not plain.doubt(kinds[:9]).any()


def test_the_same_rounds_give_the_same_sample():
    piece = RunPiece(["federated"] * 6, approach(0.1, ENDS, ["federated"] * 6, 0.01))
    first = LearningCurves([piece], bounded=True).after(["federated"] * 9)
    again = LearningCurves([piece], bounded=True).after(["federated"] * 9)
    assert np.array_equal(first, again)


def test_a_later_piece_begins_at_its_own_value():
    kinds = ["federated"] * 8
    whole = approach(0.1, ENDS, kinds)
    pieces = [RunPiece(kinds[:4], whole[:4]), RunPiece(kinds[5:], whole[5:], whole[4])]
    curves = LearningCurves(pieces, bounded=True)
    found = curves.interval(curves.after(kinds)[:, -1])
    assert found.low <= whole[-1] <= found.high


def test_nothing_is_learnt_from_nothing():
    with pytest.raises(ValueError, match="no round was evaluated"):
        LearningCurves([RunPiece(["federated"], [math.nan])], bounded=True)


def test_many_kinds_at_the_end_of_a_share_have_a_sample():
    kinds = [f"datacenter of {steps} steps" for steps in range(16)] * 3
    curves = LearningCurves([RunPiece(kinds, [1.0] * len(kinds))], bounded=True)
    assert 0.9 <= curves.interval(curves.after(kinds)[:, -1]).low <= 1.0


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", [1e308, -1e308, 1e160])
def test_values_of_a_run_that_diverged_are_not_forecast(value):
    pieces = [RunPiece(["federated"] * 4, [value, 2.0, -value, 1.0])]
    with pytest.raises(ValueError, match="the metric 'loss' cannot be forecast: its values are"):
        LearningCurves.of_metric("loss", pieces, Inertia())
    large = [RunPiece(["federated"] * 4, [9e99, 2.0, -9e99, 1.0])]
    curves = LearningCurves.of_metric("loss", large, Inertia())
    assert np.isfinite(curves.after(["federated"] * 5)).all()
