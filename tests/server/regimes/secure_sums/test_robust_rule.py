"""What a robust rule over groups withstands, whatever the groups of liars send."""

import hypothesis
import torch
from hypothesis import strategies as st

from isthmus.job.federated import FederatedSection
from isthmus_server.regimes.secure_sums.robust_rule import LONGEST, RobustRule, shortest, tolerated

SIZE = 6
RULES = {"median": {}, "trimmed-mean": {"share": 0.34}, "norm-bound": {"norm": 1.0}}


def rule_of(name, groups=12, trained=None):
    federated = FederatedSection(
        cohort=10 * groups,
        robust=name,
        robust_settings=RULES[name],
        robust_groups=groups,
        robust_minimum=8,
    )
    return RobustRule(federated, trained)


def named(vectors):
    return {f"random-{at}-of-{len(vectors)}": (vector, 10) for at, vector in enumerate(vectors, 1)}


numbers = st.floats(-1, 1, width=32)
lies = st.lists(
    st.one_of(st.just(0.0), numbers, st.floats(-1e6, 1e6, width=32)), min_size=SIZE, max_size=SIZE
)


@st.composite
def rounds(draw):
    """A rule, honest means of which none is 3 times as long as another, and as many liars' means
    as the rule withstands."""
    name = draw(st.sampled_from(["median", "trimmed-mean"]))
    groups = draw(st.integers(3, 32))
    rule = rule_of(name, groups)
    bad = tolerated(rule._rule, groups)
    seed = draw(st.integers(0, 2**16))
    generator = torch.Generator().manual_seed(seed)
    honest = torch.randn(groups - bad, SIZE, generator=generator)
    lengths = torch.empty(groups - bad, 1).uniform_(1, 0.99 * LONGEST, generator=generator)
    honest = honest / honest.norm(dim=1, keepdim=True) * lengths
    liars = [torch.tensor(draw(lies)) for _ in range(bad)]
    return rule, list(honest), liars


@hypothesis.given(rounds())
@hypothesis.settings(max_examples=200, deadline=None)
def test_no_lies_in_as_many_groups_as_it_withstands_move_an_element_beyond_the_others(given):
    rule, honest, liars = given
    combined = rule.combine(1, named(honest + liars))
    assert not combined.left_out.keys() & list(named(honest + liars))[: len(honest)]
    stacked = torch.stack(honest)
    assert (combined.vector >= stacked.amin(0) - 1e-5).all()
    assert (combined.vector <= stacked.amax(0) + 1e-5).all()


def test_short_groups_of_liars_do_not_have_the_others_left_out():
    """A large weight and an update of zeros are enough to make a group as short as one wants."""
    honest = [torch.ones(SIZE) for _ in range(10)]
    liars = [torch.full((SIZE,), -0.01) for _ in range(2)]
    for name in RULES.keys() - {"norm-bound"}:
        combined = rule_of(name).combine(1, named(honest + liars))
        assert not combined.left_out
        torch.testing.assert_close(combined.vector, torch.ones(SIZE))


def test_what_is_said_to_be_left_out_is_what_is_left_out():
    for name in RULES:
        rule = rule_of(name)
        most = 12 - shortest(12, tolerated(rule._rule, 12))
        assert f"up to {most} groups are left out" in rule.in_words
        honest = [torch.ones(SIZE) for _ in range(12 - most)]
        combined = rule.combine(1, named(honest + [torch.full((SIZE,), -4.0)] * most))
        assert len(combined.left_out) == most
        assert (combined.vector > 0).all()


def test_long_parameters_are_noticed_among_longer_running_statistics():
    statistics = torch.full((3,), 1000.0)
    honest = [torch.cat([torch.ones(3), statistics]) for _ in range(11)]
    for liar in (
        torch.cat([torch.full((3,), -50.0), statistics]),
        torch.cat([torch.ones(3), -50 * statistics]),
    ):
        combined = rule_of("median", trained=3).combine(1, named([*honest, liar]))
        assert list(combined.left_out) == ["random-12-of-12"]


def test_running_statistics_that_nobody_changes_leave_nobody_out():
    honest = [torch.cat([torch.ones(3), torch.zeros(3)]) for _ in range(12)]
    assert not rule_of("median", trained=3).combine(1, named(honest)).left_out
