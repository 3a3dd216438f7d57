"""A plan of faults depends only on the seed, the duration and the participants."""

from isthmus_server.chaos.plan import DATACENTER, RANK, SERVER, make_plan, summary_of


def test_the_same_seed_gives_the_same_plan_and_another_seed_another():
    assert make_plan(1, 10, 8, 2) == make_plan(1, 10, 8, 2)
    others = [make_plan(2, 10, 8, 2), make_plan(1, 9, 8, 2), make_plan(1, 10, 7, 2)]
    assert all(other != make_plan(1, 10, 8, 2) for other in others)


def test_a_plan_has_every_kind_on_every_role_and_ends_in_time():
    plan = make_plan(3, 10, 4, 2)
    assert all(summary_of(plan).values())
    targets = {fault.target for fault in plan}
    assert targets == {SERVER, DATACENTER, RANK, *[f"phone-{index}" for index in range(4)]}
    assert all(0 <= fault.at <= fault.at + fault.seconds <= 600 for fault in plan)
    assert [fault.at for fault in plan] == sorted(fault.at for fault in plan)


def test_one_part_of_a_target_has_one_fault_at_a_time():
    ends = {}
    for fault in make_plan(4, 30, 3, 1):
        assert fault.at > ends.get(fault.part, -1)
        ends[fault.part] = fault.at + fault.seconds
