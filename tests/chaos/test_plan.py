"""A plan of faults depends only on the seed, the duration and the participants."""

from isthmus_chaos.plan import SERVER, make_plan, summary_of


def test_the_same_seed_gives_the_same_plan_and_another_seed_another():
    plan = make_plan(1, 10, 8, 1, 2)
    assert make_plan(1, 10, 8, 1, 2) == plan
    for other in [(2, 10, 8, 1, 2), (1, 9, 8, 1, 2), (1, 10, 7, 1, 2), (1, 10, 8, 2, 2)]:
        assert make_plan(*other) != plan


def test_a_plan_has_every_kind_on_every_role_and_ends_in_time():
    plan = make_plan(3, 10, 4, 2, 2)
    assert all(summary_of(plan).values())
    clusters = ["cluster-0", "cluster-1", "cluster-0/rank", "cluster-1/rank"]
    expected = {SERVER, *clusters, *[f"phone-{index}" for index in range(4)]}
    assert {fault.target for fault in plan} == expected
    assert all(0 <= fault.at <= fault.at + fault.seconds <= 600 for fault in plan)
    assert [fault.at for fault in plan] == sorted(fault.at for fault in plan)


def test_one_part_of_a_target_has_one_fault_at_a_time():
    ends = {}
    for fault in make_plan(4, 30, 3, 1, 1):
        assert fault.at > ends.get(fault.part, -1)
        ends[fault.part] = fault.at + fault.seconds
