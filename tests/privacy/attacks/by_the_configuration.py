"""A server that asks a client for something else than was agreed."""

from parties import (
    make_client,
    make_config,
)

from attacks.registry import ALICE, meets
from isthmus_privacy.secagg import (
    ClientRequirements,
    History,
    Slot,
)

# -- the client, of the configuration ------------------------------------------------------------


def client_of(policy=None, **changes):
    return make_client(make_config(**changes), ALICE, policy=policy)


@meets("config-malformed")
def a_ring_of_31_bits():
    client_of(bits=31, levels=4)


@meets("config-malformed")
def a_clip_that_is_not_a_number():
    client_of(clip=float("nan"))


@meets("config-malformed")
def a_sum_of_one():
    client_of(clients_min=1, policy=ClientRequirements(clients_min=0))


@meets("config-malformed")
def the_same_slot_twice():
    client_of(slots=(Slot(name="n", maximum=1.0), Slot(name="n", maximum=2.0)))


@meets("config-malformed")
def a_count_of_halves():
    client_of(slots=(Slot(name="n", maximum=0.5, exact=True),))


@meets("config-margins")
def two_quorums_at_once():
    client_of(dropout_permille=450, corrupt_permille=100)


@meets("config-values-wrap")
def values_that_wrap():
    client_of(levels=2**28, clients_max=16)


@meets("config-slots-wrap")
def weights_that_wrap():
    client_of(weight_max=2**32 // 6 + 1)


@meets("config-slots-wrap")
def counts_that_wrap():
    client_of(slots=(Slot(name="hits", maximum=2.0**30, exact=True),))


@meets("config-weighted-noise")
def noise_for_a_weight_of_one_on_a_weight_of_ten():
    client_of(noise=b"gaussian", weight_max=10)


@meets("config-model-differs")
def a_model_of_ones_own():
    make_client(make_config(), ALICE, model_hash=bytes(32))


@meets("config-below-floor")
def a_cohort_below_the_device_s_floor():
    client_of(policy=ClientRequirements(clients_min=4))


@meets("config-too-trusting")
def a_server_that_promises_nobody_is_corrupt():
    client_of(corrupt_permille=0)


@meets("config-too-lossy")
def a_server_that_plans_to_lose_most():
    client_of(policy=ClientRequirements(dropout_permille=300))


@meets("config-noise-missing")
def no_noise_for_a_device_that_wants_it():
    client_of(policy=ClientRequirements(noise=True))


@meets("config-replayed")
def the_same_attempt_twice():
    history = History()
    for _ in range(2):
        make_client(make_config(), ALICE, history=history)


@meets("config-replayed")
def an_earlier_round_after_a_restart():
    history = History()
    make_client(make_config(), ALICE, history=history)
    make_client(make_config(round=2, attempt=9), ALICE, history=History(history.state()))


@meets("config-replayed")
def a_run_that_was_forgotten_over_others():
    history = History()
    for run in ("first", *"abcdefgh"):
        make_client(make_config(run_id=run), ALICE, history=history)
    make_client(make_config(run_id="first", round=2), ALICE, history=History(history.state()))


@meets("participation-spent")
def one_round_too_many():
    history, policy = History(), ClientRequirements(participations=2)
    for round_ in range(3):
        make_client(make_config(round=round_), ALICE, history=history, policy=policy)
