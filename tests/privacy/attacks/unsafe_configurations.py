"""The server proposes an unsafe configuration to a client, or repeats one."""

import dataclasses

from tests.privacy.attacks.registry import ALICE, DRAW, expect_refusal
from tests.privacy.protocol import (
    AUTHORITY,
    FAR_FUTURE,
    identity,
    make_client,
    make_config,
)

from isthmus_privacy.compression.update_codec import UpdateCodec
from isthmus_privacy.dp.distributed import DistributedNoise
from isthmus_privacy.random_groups import RandomGroup
from isthmus_privacy.secagg.config import BIN_LEVELS, COUNT_LEVELS, ClientRequirements
from isthmus_privacy.secagg.history import History, essential
from isthmus_privacy.secagg.identity import Directory
from isthmus_privacy.slots import (
    COMPRESSED_SLOTS,
    MEASURING_SLOTS,
    SCORING_SLOTS,
    TRAINING_SLOTS,
    Slot,
)

SMALL = {"honest_min": 2, "corrupt_permille": 0}
"""Requirements that a cohort of six meets."""


def client_with(**changes):
    requirements = changes.pop("requirements", ClientRequirements(**SMALL))
    return make_client(make_config(**changes), ALICE, requirements=requirements)


@expect_refusal("config-malformed")
def a_cohort_whose_graph_takes_hours_to_find():
    client_with(clients_max=2049, levels=1000, complete_up_to=0)


@expect_refusal("config-malformed")
def a_ring_of_31_bits():
    client_with(bits=31, levels=4)


@expect_refusal("config-malformed")
def a_clipping_bound_that_is_nan():
    client_with(clip=float("nan"))


@expect_refusal("config-malformed")
def a_sum_of_one_client():
    client_with(clients_min=1, requirements=ClientRequirements(corrupt_permille=0, honest_min=0))


@expect_refusal("config-malformed")
def a_slot_twice():
    client_with(slots=(Slot(name="n", maximum=1.0), Slot(name="n", maximum=2.0)))


@expect_refusal("config-malformed")
def a_count_with_a_fractional_maximum():
    client_with(slots=(Slot(name="n", maximum=0.5, exact=True),))


@expect_refusal("config-margins")
def margins_that_allow_two_quorums():
    client_with(dropout_permille=450, corrupt_permille=100)


@expect_refusal("config-values-wrap")
def values_that_wrap():
    client_with(levels=2**28 - 1, clients_max=17)


@expect_refusal("config-slots-wrap")
def weights_that_wrap():
    client_with(weight_max=2**32 // 6 + 1)


@expect_refusal("config-slots-wrap")
def counts_that_wrap():
    client_with(slots=(Slot(name="hits", maximum=2.0**30, exact=True),))


@expect_refusal("config-slots-differ")
def a_loss_that_must_be_a_whole_number():
    exact = tuple(dataclasses.replace(slot, exact=True) for slot in TRAINING_SLOTS)
    make_config(slots=exact).check_form(TRAINING_SLOTS, whole=0)


@expect_refusal("config-slots-differ")
def a_count_that_the_client_does_not_give():
    slots = (*TRAINING_SLOTS, Slot(name="visits", maximum=1.0))
    make_config(slots=slots).check_form(TRAINING_SLOTS, whole=0)


@expect_refusal("config-size-differs")
def a_vector_that_takes_all_memory():
    make_config(size=1 << 30).check_size(4)


@expect_refusal("config-elements-differ")
def an_update_in_place_of_counts():
    make_config(slots=SCORING_SLOTS).check_form(SCORING_SLOTS, whole=COUNT_LEVELS)


@expect_refusal("config-elements-differ")
def bins_in_place_of_counts():
    """A device could not encode its counts, and would count as one that failed."""
    config = make_config(slots=SCORING_SLOTS, whole=True, bits=16, levels=BIN_LEVELS)
    config.check_form(SCORING_SLOTS, whole=COUNT_LEVELS)


@expect_refusal("config-elements-differ")
def counts_in_place_of_bins():
    make_config(whole=True, bits=64).check_form((), whole=BIN_LEVELS)


@expect_refusal("config-values-wrap")
def counts_in_a_ring_for_bins():
    client_with(whole=True, bits=16)


@expect_refusal("config-malformed")
def a_cohort_whose_bins_would_wrap():
    """Such a cohort is refused in every ring."""
    make_config(whole=True, bits=16, levels=BIN_LEVELS, clients_max=1 << 15).check()


@expect_refusal("config-malformed")
def counts_with_fewer_levels_than_a_device_may_need():
    client_with(whole=True, bits=64, levels=1 << 20)


NOISE = DistributedNoise.fit(clip=1.0, multiplier=1.0, honest=3, clients=6, size=4, bits=32)


def client_with_noise(requirements=None, *, noise=None, **changes):
    changes = {"clients_min": 3, "weight_max": 1, **changes}
    noise = NOISE if noise is None else dataclasses.replace(NOISE, **noise)
    client_with(noise=noise, requirements=requirements or ClientRequirements(**SMALL), **changes)


@expect_refusal("noise-malformed")
def noise_of_a_multiplier_that_is_nan():
    client_with_noise(noise={"multiplier": float("nan")})


@expect_refusal("noise-malformed")
def noise_of_no_device():
    client_with_noise(noise={"honest": 0})


@expect_refusal("noise-malformed")
def noise_too_small_for_the_guarantees_on_its_sum():
    client_with_noise(noise={"multiplier": 1e-6})


@expect_refusal("noise-malformed")
def noise_of_a_vector_without_elements():
    client_with_noise(size=0)


@expect_refusal("noise-malformed")
def a_scale_whose_squares_are_not_exact():
    client_with_noise(noise={"scale": 2.0**27})


@expect_refusal("noise-with-figures")
def noise_with_figures_that_it_does_not_cover():
    client_with_noise(slots=TRAINING_SLOTS)


@expect_refusal("noise-with-figures")
def noise_with_weights():
    client_with_noise(weight_max=2)


@expect_refusal("noise-with-figures")
def noise_with_whole_numbers():
    client_with_noise(whole=True, bits=64)


@expect_refusal("noise-counts-on-too-many")
def noise_that_counts_on_devices_that_may_drop_out():
    client_with_noise(noise={"honest": 4})


@expect_refusal("noise-counts-on-too-many")
def noise_that_counts_on_devices_that_may_collude():
    client_with_noise(corrupt_permille=100, dropout_permille=300, clients_min=3)


@expect_refusal("noise-may-wrap")
def noise_in_a_ring_that_is_too_small():
    client_with_noise(noise={"scale": 32 * NOISE.scale}, bits=16)


def config_with_codec(**changes):
    codec = UpdateCodec(one_in=2, bits=3)
    return make_config(**{"codec": codec, "bits": 6, "levels": 6, **changes})


@expect_refusal("config-values-wrap")
def compressed_values_that_wrap():
    config_with_codec(bits=5).check()


@expect_refusal("config-slots-wrap")
def weights_of_a_compressed_update_that_wrap():
    config_with_codec(weight_max=2**32 // 6 + 1).check()


@expect_refusal("config-malformed")
def levels_that_are_not_those_of_the_codec():
    config_with_codec(levels=5).check()


@expect_refusal("codec-for-other-vector")
def a_codec_for_scores():
    config_with_codec(slots=SCORING_SLOTS).check_form(SCORING_SLOTS, whole=0)


@expect_refusal("config-malformed")
def a_bound_of_which_a_level_is_zero():
    config_with_codec(clip=2.0**-1074).check()


@expect_refusal("codec-missing")
def all_elements_in_a_job_with_a_codec():
    make_config(slots=COMPRESSED_SLOTS).check_form(COMPRESSED_SLOTS, whole=0)


@expect_refusal("codec-for-other-vector")
def a_codec_in_a_job_without():
    config_with_codec(slots=TRAINING_SLOTS).check_form(TRAINING_SLOTS, whole=0)


@expect_refusal("noise-for-other-vector")
def noise_on_a_gradient_and_an_update():
    make_config(noise=NOISE, weight_max=1).check_form(MEASURING_SLOTS, whole=0)


@expect_refusal("noise-for-other-vector")
def noise_on_scores():
    make_config(noise=NOISE, weight_max=1).check_form(SCORING_SLOTS, whole=0)


@expect_refusal("config-noise-below-floor")
def less_noise_than_the_device_requires():
    client_with_noise(ClientRequirements(**SMALL, noise=1.01))


@expect_refusal("config-noise-below-floor")
def a_sum_without_noise():
    client_with(requirements=ClientRequirements(**SMALL, noise=0.1))


@expect_refusal("config-model-differs")
def a_model_for_one_client():
    make_client(make_config(), ALICE, model_hash=bytes(32))


@expect_refusal("config-honest-below-floor")
def a_cohort_below_the_floor_of_the_device():
    client_with(requirements=ClientRequirements(corrupt_permille=0, honest_min=5))


@expect_refusal("config-honest-below-floor")
def nine_devices_one_of_which_colludes():
    client_with(
        corrupt_permille=100,
        clients_max=9,
        clients_min=9,
        requirements=ClientRequirements(honest_min=9),
    )


@expect_refusal("config-corruption-below-floor")
def a_server_that_assumes_no_corrupt_client():
    client_with(corrupt_permille=0, requirements=ClientRequirements(honest_min=2))


@expect_refusal("config-dropout-above-ceiling")
def a_server_that_tolerates_too_many_dropouts():
    client_with(requirements=ClientRequirements(**SMALL, dropout_permille=300))


@expect_refusal("config-replayed")
def an_attempt_twice():
    history = History()
    for _ in range(2):
        make_client(make_config(), ALICE, history=history)


@expect_refusal("config-replayed")
def an_earlier_round_after_a_restart():
    entries = []
    make_client(make_config(), ALICE, history=History(record=entries.append))
    make_client(make_config(round=2, attempt=9), ALICE, history=History(entries))


@expect_refusal("config-replayed")
def an_earlier_run_after_many_others():
    entries = []
    for run in ("first", *"abcdefgh"):
        make_client(make_config(run_id=run), ALICE, history=History(entries, record=entries.append))
    make_client(make_config(run_id="first", round=2), ALICE, history=History(essential(entries)))


def client_at(draw, history=None, *, now=DRAW, population=1, group=None, **changes):
    """A client that requires a verifiable selection, at a time by its clock."""
    enrolment = AUTHORITY.enrol(
        ALICE, identity(ALICE).public, not_after=FAR_FUTURE, population=population
    )
    return make_client(
        make_config(draw=draw, **changes),
        ALICE,
        enrolment=enrolment,
        directory=Directory(AUTHORITY.public, now=lambda: now),
        history=History() if history is None else history,
        requirements=ClientRequirements(**SMALL, selection_slack=10, group=group),
    )


@expect_refusal("draw-not-now")
def a_draw_of_two_days_ago():
    client_at(DRAW - 2 * 86_400)


@expect_refusal("draw-not-now")
def a_draw_of_next_week():
    client_at(DRAW + 7 * 86_400)


@expect_refusal("draw-before-last")
def a_better_draw_of_an_hour_ago():
    entries = []
    client_at(DRAW, History(record=entries.append))
    client_at(DRAW - 3600, History(entries), round=4)


@expect_refusal("selection-too-wide")
def a_choice_among_all_devices_of_a_large_fleet():
    client_at(DRAW, population=1000)


@expect_refusal("selection-too-wide")
def a_wide_choice_for_a_cohort_that_is_large_only_in_the_configuration():
    client_at(DRAW, population=1000, clients_max=1000, selected_ppm=30_001)


@expect_refusal("selection-too-wide")
def a_wide_choice_for_one_of_a_few_random_groups():
    """A third of the devices in it are in the group; the share may be three times as wide."""
    client_at(DRAW, group=RandomGroup(1, 3), population=1000, selected_ppm=90_000)
    client_at(DRAW, group=RandomGroup(1, 3), population=1000, selected_ppm=90_001)


@expect_refusal("participation-limit")
def more_rounds_of_all_runs_than_the_limit():
    history, requirements = History(), ClientRequirements(participations=2, **SMALL)
    for run in ("a", "b", "c"):
        make_client(make_config(run_id=run), ALICE, history=history, requirements=requirements)


@expect_refusal("epsilon-limit")
def more_sums_with_noise_than_the_limit():
    history, requirements = History(), ClientRequirements(epsilon=8.0, delta=1e-5, **SMALL)
    for run in ("a", "b", "c", "d"):
        config = make_config(run_id=run, slots=(), noise=NOISE, weight_max=1)
        make_client(config, ALICE, history=history, requirements=requirements)


@expect_refusal("epsilon-limit")
def a_sum_without_noise_for_an_owner_with_a_limit():
    client_with(requirements=ClientRequirements(epsilon=1e6, **SMALL))


@expect_refusal("participation-limit-of-run")
def more_rounds_of_a_run_than_the_limit():
    history, requirements = History(), ClientRequirements(participations_per_run=2, **SMALL)
    for round_ in range(3):
        make_client(make_config(round=round_), ALICE, history=history, requirements=requirements)
