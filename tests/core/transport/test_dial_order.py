"""Where a participant with several addresses dials next."""

import pytest

from isthmus.transport import dial_order
from isthmus.transport.dial_order import DialOrder


@pytest.fixture
def clock(monkeypatch):
    times = [0.0]
    monkeypatch.setattr(dial_order.time, "monotonic", lambda: times[-1])
    return times


def refused_by_all(order, clock, at, tries, **more):
    """Dial aggregators without a link at some times; returns which were dialled."""
    dialled = []
    for number, time in enumerate(at):
        clock.append(time)
        order.choose(tries=tries + number, was_open=False, is_unlinked=True, **more)
        dialled.append(order.now)
    return dialled


def test_aggregators_without_a_link_are_tried_for_a_while_before_the_server(clock):
    order = DialOrder(3)
    order.choose(tries=1, was_open=True, is_unlinked=True)
    assert refused_by_all(order, clock, (0, 5, 19, 21, 22), tries=2) == [1, 0, 1, 2, 0]


def test_a_device_with_a_request_tries_them_for_less_long(clock):
    order = DialOrder(2)
    assert refused_by_all(order, clock, (0, 4, 6), tries=1, works=True, patience=5) == [0, 0, 1]


def test_an_aggregator_whose_link_comes_and_goes_keeps_nobody_for_longer(clock):
    order = DialOrder(2)
    order.choose(tries=1, was_open=False, is_unlinked=True)
    clock.append(15)
    order.choose(tries=2, was_open=True, is_unlinked=True)
    assert order.now == 0
    clock.append(25)
    order.choose(tries=3, was_open=True, is_unlinked=True)
    assert order.now == 1


def test_an_aggregator_that_has_stopped_is_waited_for_no_longer(clock):
    order = DialOrder(3)
    assert refused_by_all(order, clock, (0, 1, 2), tries=1) == [1, 0, 1]
    order.choose(tries=4, was_open=False)  # the first one may be linked in a moment
    assert order.now == 0
    order.choose(tries=5, was_open=False)
    order.choose(tries=6, was_open=False)
    assert order.now == 2


def test_one_address_and_addresses_that_are_silent_are_as_without(clock):
    alone = DialOrder(1)
    alone.choose(tries=1, was_open=False, is_unlinked=True)
    assert alone.now == 0
    order = DialOrder(2)
    order.choose(tries=1, was_open=False)
    assert order.now == 1


def test_earlier_addresses_are_asked_less_often_until_the_first_one_holds(monkeypatch):
    monkeypatch.setattr(dial_order.random, "uniform", lambda low, high: high)
    order = DialOrder(2)
    order.choose(tries=1, was_open=False)
    assert [order.pause(0.0) for _ in range(7)] == [30, 60, 120, 240, 480, 600, 600]
    order.now = 0
    order.choose(tries=2, was_open=True)  # its stream has not held
    assert order.pause(0.0) == 600
    order.now = 0
    order.choose(tries=1, was_open=True)
    assert order.pause(0.0) == 30
    assert order.pause(400.0) == 800  # no more than the server can take at a time


def test_an_address_that_has_no_room_for_work_is_asked_less_often_too(monkeypatch):
    monkeypatch.setattr(dial_order.random, "uniform", lambda low, high: high)
    order = DialOrder(2)
    pauses = []
    for _ in range(4):  # its stream holds until it is to take a model, for which its disk is full
        order.choose(tries=1, was_open=True, goes_on=True, works=True)
        assert order.now == 1
        pauses.append(order.pause(0.0))
        order.now = 0
    assert pauses == [30, 60, 120, 240]
