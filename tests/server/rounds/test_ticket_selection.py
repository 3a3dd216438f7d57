"""Selection by tickets: which draw and share a server states, and when it cannot."""

import hashlib
import random
import time

import pytest

from isthmus_privacy.random_groups import RandomGroup
from isthmus_privacy.secagg.identity import Authority
from isthmus_privacy.secagg.lottery import MILLION, is_selected, largest_share, ticket
from isthmus_server.rounds.ticket_selection import TicketLottery
from isthmus_server.transport.device_draws import DeviceDraws
from isthmus_server.transport.enrolment import Enrolments

NOW = 1_800_000_000.0
DAY = 86_400
NAMES = [f"phone-{number:03}" for number in range(200)]


class LargeFleet(Enrolments):
    """Enrolments of 200 devices, of a fleet of any size."""

    def __init__(self, size):
        super().__init__(Authority(bytes(32)))
        self.size = size
        for name in NAMES:
            self.enrol(name, hashlib.sha256(name.encode()).digest(), NOW + 1e6)

    def population(self):
        return self.size


def select(lottery, round_=1, available=NAMES, now=NOW, count=10, needed=8):
    return lottery.select(round_, available, count=count, needed=needed, now=now)


def accepted(lottery, fleet, selection):
    """The devices of a selection are asked, and accept its draw."""
    lottery.note_asked(selection.names, selection.draw)
    for name in selection.names:
        fleet.draws.accept(name, selection.draw)
    return selection


def refused(lottery, fleet, selection):
    lottery.note_asked(selection.names, selection.draw)
    for name in selection.names:
        fleet.draws.refuse(name, selection.draw)


def test_the_lowest_tickets_are_selected_and_the_share_is_the_smallest():
    fleet = LargeFleet(200)
    selection = select(TicketLottery(fleet))
    lotteries = {name: fleet.current[name].lottery for name in NAMES}
    lowest = sorted(NAMES, key=lambda name: ticket(lotteries[name], selection.draw))[:10]
    assert selection.names == sorted(lowest)
    eligible = [
        name
        for name in NAMES
        if is_selected(lotteries[name], selection.draw, selection.selected_ppm)
    ]
    assert eligible == selection.names
    assert not any(
        is_selected(lotteries[lowest[-1]], selection.draw, share)
        for share in [selection.selected_ppm - 1]
    )


def test_all_attempts_at_a_round_have_one_draw_and_rounds_have_new_ones():
    fleet = LargeFleet(200)
    lottery = TicketLottery(fleet)
    first = accepted(lottery, fleet, select(lottery))
    assert select(lottery, now=NOW + 100) == first
    fewer = select(lottery, available=first.names[1:] + NAMES[:5], now=NOW + 100)
    assert fewer.draw == first.draw
    accepted(lottery, fleet, select(lottery, round_=2, now=NOW + 100))
    for back in (50, 3 * DAY):  # the clock was set back
        assert select(lottery, round_=3, now=NOW - back).draw == NOW + 100
    assert select(lottery, round_=3, now=NOW + 80_000).draw == NOW + 80_000  # too old by then


@pytest.mark.parametrize("ahead", [3 * DAY, 365 * DAY])
def test_a_draw_that_nobody_accepted_changes_no_later_one(ahead):
    fleet = LargeFleet(10)
    lottery = TicketLottery(fleet)
    accepted(lottery, fleet, select(lottery, round_=1))
    wrong = select(lottery, round_=2, now=NOW + ahead)
    assert wrong.draw == NOW + ahead
    refused(lottery, fleet, wrong)
    again = select(lottery, round_=2, now=NOW + 10)
    assert again.draw == NOW + 10
    assert lottery.repeat(2, wrong.names, wrong.draw, 8, now=NOW + 10).draw == NOW + 10


def test_a_draw_without_an_answer_counts_unless_no_right_clock_accepts_it():
    fleet = LargeFleet(200)
    lottery = TicketLottery(fleet)
    lottery.note_asked(NAMES, int(NOW + 3 * DAY))
    lottery.note_asked(NAMES, int(NOW + 500))
    lottery.note_asked(NAMES, int(NOW + 100))
    assert select(lottery, now=NOW + 200).draw == NOW + 500
    assert lottery.is_outdated(NAMES, int(NOW + 499), NOW)
    assert not lottery.is_outdated(NAMES, int(NOW + 500), NOW)


def test_a_few_devices_with_wrong_clocks_do_not_move_the_draw_of_all():
    fleet = LargeFleet(200)
    lottery = TicketLottery(fleet)
    accepted(lottery, fleet, select(lottery, now=NOW + 3 * DAY, available=NAMES[:20]))
    accepted(lottery, fleet, select(lottery, round_=2, available=NAMES[20:], count=60))
    assert select(lottery, round_=3, now=NOW + 10).draw == NOW + 10


def test_a_repeated_attempt_states_its_draw_and_share_again():
    fleet = LargeFleet(200)
    first = select(TicketLottery(fleet))
    after = TicketLottery(fleet)
    assert after.restate(first.names, first.draw, 8) == first
    fleet.size = 100_000
    for name in NAMES:  # their enrolments are renewed
        fleet.enrol(name, random.Random(name).randbytes(32), NOW + 1e6)
    assert after.restate(first.names, first.draw, 8) is None


def test_survivors_are_drawn_anew_after_a_restart_of_the_server():
    """Their devices may have seen later draws of other runs, of which the new process has none."""
    fleet = LargeFleet(10)
    before = TicketLottery(fleet)
    first = accepted(before, fleet, select(before, available=NAMES[:8]))
    again = before.repeat(1, first.names, first.draw, 8, now=NOW + 60)
    assert again.draw == first.draw
    fleet.draws = DeviceDraws()
    again = TicketLottery(fleet).repeat(1, first.names, first.draw, 8, now=NOW + 60)
    assert (again.names, again.draw) == (first.names, NOW + 60)


def test_a_share_that_holds_too_few_available_devices_is_explained():
    lottery = TicketLottery(LargeFleet(1_000_000))
    selection = select(lottery)
    assert len(selection.names) < 8
    assert selection.shortage == (
        f"of 200 available devices, {len(selection.names)} are eligible in draw {selection.draw}: "
        "with 1000000 enrolled devices, the devices accept a selection from 80 millionths of them "
        "for a sum over 8 ([privacy] selection_slack in their policy.toml)"
    )


def test_a_tenth_of_the_fleet_is_enough():
    """Draws of the next seconds are tried until the quorum is eligible."""
    fleet = LargeFleet(2000)
    lottery = TicketLottery(fleet)
    for round_ in range(1, 30):
        selection = select(lottery, round_)
        assert not selection.shortage
        assert selection.selected_ppm <= largest_share(10, 8, 2000) < MILLION
        accepted(lottery, fleet, selection)
        assert selection.draw < NOW + 600


def test_devices_without_an_enrolment_are_not_selected():
    selection = select(TicketLottery(LargeFleet(50)), available=["stranger", *NAMES[:9]])
    assert selection.names == NAMES[:9]


@pytest.mark.parametrize("devices", [1, 3])
def test_in_a_small_fleet_everyone_is_eligible(devices):
    fleet = LargeFleet(devices)
    selection = select(TicketLottery(fleet), available=NAMES[:devices], needed=devices)
    assert selection.names == NAMES[:devices]
    assert time.time() > NOW or selection.draw == NOW


def test_a_share_is_accepted_for_the_sum_of_a_group_only_if_it_holds_few_enough():
    lottery = TicketLottery(LargeFleet(10_000))
    allowed = largest_share(10, 20, 10_000)
    assert lottery.accepts(NAMES, allowed, 20)
    assert not lottery.accepts(NAMES, allowed + 1, 20)
    assert not lottery.accepts(NAMES, allowed, 19)


def select_groups(lottery, count=5, available=NAMES, needed=30):
    return lottery.select_groups(
        1, available, each=10, groups=count, least=6, smallest=6, needed=needed, now=NOW
    )


def test_random_groups_have_the_lowest_tickets_of_each_and_devices_accept_the_share():
    fleet = LargeFleet(1000)
    lottery = TicketLottery(fleet)
    drawn = select_groups(lottery)
    assert not drawn.shortage
    groups = lottery.groups_of(drawn.names, drawn.draw, 5)
    assert sum(map(len, groups.values())) == len(drawn.names)
    assert drawn.selected_ppm <= largest_share(10, 6 * 5, 1000)
    for name, devices in groups.items():
        group = RandomGroup.parse(name)
        tickets = {
            device: ticket(fleet.current[device].lottery, drawn.draw)
            for device in NAMES
            if group.has(fleet.current[device].lottery, drawn.draw)
        }
        eligible = [each for each in tickets if tickets[each] < 0.3]
        assert devices == sorted(sorted(eligible, key=tickets.get)[:10])


def test_too_few_devices_for_random_groups_are_explained():
    few = select_groups(TicketLottery(LargeFleet(1000)), available=NAMES[:20])
    assert "of 20 available devices, too few are eligible for 5 random groups" in few.shortage


def test_random_groups_are_repeated_in_their_own_draw_or_not_at_all():
    lottery = TicketLottery(LargeFleet(1000))
    drawn = select_groups(lottery)
    again = lottery.repeat(1, drawn.names, drawn.draw, 30, now=NOW, same_draw=True)
    assert again.draw == drawn.draw
    assert lottery.repeat(1, drawn.names, drawn.draw, 30, now=NOW + DAY, same_draw=True) is None
