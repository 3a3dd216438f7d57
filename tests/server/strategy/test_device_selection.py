"""Selection of a round's devices: uniform samples and guided selection."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.job.federated import FederatedSection, Utility
from isthmus_server.strategy.attendance import ParticipationRecord
from isthmus_server.strategy.device_selection import select_devices, utilities

NAMES = [f"client-{i}" for i in range(20)]


# -- uniform ---------------------------------------------------------------------------------------


@given(
    st.sets(st.text(max_size=4), max_size=12),
    st.integers(1, 9),
    st.integers(1, 5),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_the_same_names_seed_and_round_give_the_same_selection(
    eligible, count, round_, guided, rng
):
    records = {
        name: ParticipationRecord(
            invited=[(1, 0.0)], seconds=rng.random(), examples=5, loss=rng.random()
        )
        for name in sorted(eligible)
        if rng.random() < 0.5
    }
    settings = {"records": records, "guided": Utility() if guided else None}
    names = list(eligible)
    selected = select_devices(names, count=count, seed=1, round_=round_, **settings)
    rng.shuffle(names)
    again = select_devices(names, count=count, seed=1, round_=round_, **settings)
    assert selected == again == sorted(set(selected))
    assert set(selected) <= eligible
    assert len(selected) == min(count, len(eligible))


def test_every_device_is_invited_about_as_often():
    counts = Counter()
    for round_ in range(2000):
        counts.update(select_devices(NAMES, count=5, seed=3, round_=round_))
    # Binomial(2000, 1/4): mean 500, deviation 19.4; five of them contain it with p > 0.9999.
    assert set(counts) == set(NAMES)
    assert all(abs(count - 500) < 97 for count in counts.values())


def test_every_round_and_seed_gives_another_sample():
    one, round_, seed = (
        select_devices(NAMES, count=5, seed=s, round_=r) for s, r in ((0, 1), (0, 2), (1, 1))
    )
    assert len({tuple(one), tuple(round_), tuple(seed)}) == 3


def test_over_selection_rounds_up():
    assert FederatedSection(cohort=5, quorum=5, over_selection=1.1).invited == 6


# -- by utility ------------------------------------------------------------------------------------


def known_records(**changes):
    return {
        name: ParticipationRecord(invited=[(3, 0.0)], seconds=1.0, examples=10, loss=1.0, **changes)
        for name in NAMES
    }


def test_utility_grows_with_losses_and_examples_and_falls_with_duration():
    known = known_records()
    known["client-1"].loss = 0.2
    known["client-2"].examples = 1
    known["client-3"].seconds = 4.0
    known["client-4"].invited = [(1, 0.0)]
    known["client-5"].loss = 1e9  # clipped to the others' quantile
    utility = utilities(known, NAMES, Utility(), round_=4)
    typical = utility["client-0"]
    assert utility["client-1"] < typical
    assert utility["client-2"] < typical
    assert utility["client-3"] == pytest.approx(typical / 16)
    assert utility["client-4"] > typical
    assert utility["client-5"] == pytest.approx(typical)


def test_without_visible_losses_speed_and_bonus_decide():
    known = known_records()
    for record in known.values():
        record.loss, record.examples = None, 0
    known["client-3"].seconds = 4.0
    utility = utilities(known, NAMES, Utility(uncertainty=0.0), round_=4)
    assert utility["client-0"] == 1.0
    assert utility["client-3"] == pytest.approx(1 / 16)


def test_new_devices_are_explored_first_and_the_best_are_selected_later():
    known = {name: record for name, record in known_records().items() if name not in NAMES[10:]}
    for name in ("client-0", "client-1"):
        known[name].loss = 5.0
    early = select_devices(NAMES, count=10, seed=1, round_=1, records=known, guided=Utility())
    assert sum(name not in known for name in early) == 9
    late = select_devices(NAMES, count=10, seed=1, round_=200, records=known, guided=Utility())
    assert sum(name not in known for name in late) == 2
    assert {"client-0", "client-1"} <= set(late)


def test_without_exploration_the_most_useful_are_selected():
    known = known_records()
    best = {"client-3", "client-7", "client-11"}
    for name in known.keys() - best:
        known[name].loss = 0.1
    settings = Utility(exploration=0.0, min_exploration=0.0)
    for round_ in range(4, 20):
        assert (
            set(
                select_devices(
                    NAMES, count=3, seed=1, round_=round_, records=known, guided=settings
                )
            )
            == best
        )
