import inspect

from hypothesis import given
from hypothesis import strategies as st

from isthmus.transport.backoff import STABLE_SECONDS, Backoff
from isthmus.transport.uplink import Uplink


@given(st.integers(1, 100_000), st.floats(0.1, 60.0))
def test_pauses_grow_to_the_longest_and_no_further(tries, longest):
    backoff = Backoff(longest)
    backoff.tries = tries
    pause = backoff.pause()
    assert 0.02 < pause <= longest
    if tries > 15:
        assert pause >= longest / 2


def test_a_connection_that_lasted_resets_the_backoff():
    backoff = Backoff(60.0)
    assert sum(backoff.broke(open_seconds=0.0) for _ in range(1000)) == 10
    assert backoff.pause() >= 30.0
    assert backoff.broke(open_seconds=STABLE_SECONDS + 1)  # logged at once
    assert backoff.pause() <= 0.05


def test_attempts_at_a_server_that_drops_connections_become_rare():
    backoff = Backoff(inspect.signature(Uplink).parameters["longest_pause"].default)
    at, tries = 0.0, [0.0]
    while at < 3600.0:
        backoff.broke(open_seconds=0.0)
        pause = backoff.pause()
        assert pause <= 1.2 * at + 0.05  # a short interruption is followed by a short pause
        at += pause
        tries.append(at)
    assert sum(each < 60.0 for each in tries) <= 20
    assert sum(each >= 300.0 for each in tries) <= 2 * 55  # twice a minute at most, 4/3 on average
