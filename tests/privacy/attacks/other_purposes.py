"""The server has one client do other work than the rest: the sum would be its vector."""

import dataclasses
import math

from tests.privacy.attacks.registry import ALICE, expect_refusal
from tests.privacy.attacks.unsafe_configurations import NOISE
from tests.privacy.protocol import make_client, make_config

from isthmus.job import Job
from isthmus.job.federated import FederatedSection
from isthmus.job.privacy import FederatedPrivacy
from isthmus.tensors.exchange_set import TensorLayout
from isthmus_clients.device.active_run import ActiveRun
from isthmus_clients.training.examples_account import ExamplesAccount
from isthmus_privacy.compression.update_codec import UpdateCodec
from isthmus_privacy.dp_sgd.device_examples import DeviceExamplesPlan
from isthmus_privacy.purpose import (
    BufferedPurpose,
    ComparisonPurpose,
    RangePurpose,
    RunPurpose,
    TrainingPurpose,
    check_gradient_scale,
    check_group,
    check_random_group,
    check_ranges_before,
    ranged_model,
    ranges_run_id,
)
from isthmus_privacy.slots import COMPRESSED_SLOTS


def run_with(**changes):
    opened = {"job": "{}", "task": bytes(32), "layout": b"", "frozen": {"frozen": [0.5]}}
    return RunPurpose.of(**{**opened, **changes})


RUN = run_with()
TRAINING = TrainingPurpose(RUN)
START = (3, bytes(32), False, (0, 0, 0))


def sum_with(others, own=TRAINING):
    """The configuration is for what the others were asked to do, and Alice was asked for `own`."""
    make_client(make_config(purpose=others.hash), ALICE, purpose=own.hash)


@expect_refusal("config-purpose-differs")
def zero_steps_for_all_others():
    others = run_with(job='{"federated": {"local_steps": 0}}')
    sum_with(TrainingPurpose(others))


@expect_refusal("config-purpose-differs")
def other_code_for_all_others():
    sum_with(TrainingPurpose(run_with(task=bytes(31) + b"1")))


@expect_refusal("config-purpose-differs")
def other_tensors_for_all_others():
    sum_with(TrainingPurpose(run_with(layout=b"other")))


@expect_refusal("config-purpose-differs")
def other_frozen_parameters_for_all_others():
    others = run_with(frozen={"frozen": [0.25]})
    sum_with(TrainingPurpose(others))


@expect_refusal("config-purpose-differs")
def a_gradient_for_all_others():
    sum_with(TrainingPurpose(RUN, gradient=bytes([1]) * 32))


@expect_refusal("config-purpose-differs")
def gradients_of_all_others_times_another_factor():
    own = TrainingPurpose(RUN, gradient_scale=1.0)
    sum_with(TrainingPurpose(RUN, gradient_scale=2.0**-100), own=own)


@expect_refusal("config-purpose-differs")
def an_update_without_its_gradient_from_all_others():
    sum_with(TRAINING, own=TrainingPurpose(RUN, gradient_scale=1.0))


def set_up_by(**changes):
    """The set-up of a sum of ranges, for that of updates with something changed."""
    of_ranges = (ranges_run_id("run"), ranged_model(bytes(32)), RangePurpose(TRAINING.hash).hash)
    check_ranges_before(
        of_ranges, **{"run_id": "run", "name": bytes(32), "purpose": TRAINING.hash, **changes}
    )


@expect_refusal("set-up-of-other-updates")
def the_set_up_of_the_ranges_of_another_run():
    set_up_by(run_id="another")


@expect_refusal("set-up-of-other-updates")
def the_set_up_of_the_ranges_of_updates_to_another_model():
    set_up_by(name=bytes(31) + b"1")


@expect_refusal("set-up-of-other-updates")
def the_set_up_of_the_ranges_of_other_work():
    set_up_by(purpose=TrainingPurpose(RUN, gradient_scale=1.0).hash)


@expect_refusal("gradient-scale-invalid")
def a_gradient_times_infinity():
    check_gradient_scale(math.inf, kept=False)


@expect_refusal("gradient-scale-invalid")
def a_gradient_times_a_negative_number():
    check_gradient_scale(-1.0, kept=False)


@expect_refusal("gradient-scale-invalid")
def a_gradient_that_is_not_bound_with_a_kept_update():
    check_gradient_scale(1.0, kept=True)


@expect_refusal("config-purpose-differs")
def a_position_at_which_all_others_have_a_rate_of_zero():
    own = TrainingPurpose(RUN, position=(100, 10, 8))
    sum_with(TrainingPurpose(RUN, position=(10_000, 10, 8)), own=own)


@expect_refusal("config-purpose-differs")
def a_cohort_that_scales_the_rate_of_all_others_down():
    own = TrainingPurpose(RUN, position=(100, 10, 8))
    sum_with(TrainingPurpose(RUN, position=(100, 10, 1)), own=own)


@expect_refusal("config-purpose-differs")
def all_others_are_a_group():
    sum_with(TrainingPurpose(RUN, group="north"))


@expect_refusal("group-differs")
def the_sum_of_a_group_that_the_device_is_not_in():
    check_group("north", own="south", clients_min=20, minimum=10)


@expect_refusal("group-differs")
def the_sum_of_a_group_without_having_declared_one():
    check_group("north", own="", clients_min=20, minimum=10)


@expect_refusal("group-below-minimum")
def a_group_of_fewer_devices_than_the_job_says():
    check_group("north", own="north", clients_min=9, minimum=10)


@expect_refusal("random-group-unknown")
def the_group_of_an_owner_in_place_of_a_random_one():
    check_random_group("north", clients_min=20, minimum=10, most=12)


@expect_refusal("random-group-unknown")
def one_of_more_random_groups_than_the_job_says():
    check_random_group("random-1-of-13", clients_min=20, minimum=10, most=12)


@expect_refusal("random-group-unknown")
def one_of_two_random_groups():
    """One bad group of two is no minority."""
    check_random_group("random-1-of-2", clients_min=20, minimum=10, most=12)


@expect_refusal("random-group-unknown")
def a_sum_of_any_devices_in_a_job_with_random_groups():
    """Who is in it would follow from the server's choice."""
    check_random_group("", clients_min=20, minimum=10, most=12)


@expect_refusal("random-group-below-minimum")
def a_random_group_of_fewer_devices_than_the_job_says():
    check_random_group("random-1-of-12", clients_min=9, minimum=10, most=12)


@expect_refusal("group-below-minimum")
def a_group_in_a_job_without_groups():
    check_group("north", own="north", clients_min=20, minimum=None)


@expect_refusal("config-purpose-differs")
def all_others_compare_a_model_with_itself():
    others = ComparisonPurpose(RUN, ((0,), (0,)))
    sum_with(others, own=ComparisonPurpose(RUN, ((0,), (1,))))


@expect_refusal("config-purpose-differs")
def a_buffer_for_all_others():
    sum_with(BufferedPurpose(RUN, (START,)))


@expect_refusal("config-purpose-differs")
def other_start_models_for_all_others():
    earlier = (2, bytes(32), False, (0, 0, 0))
    sum_with(BufferedPurpose(RUN, (START,)), own=BufferedPurpose(RUN, (earlier, START)))


@expect_refusal("buffered-start-differs")
def a_kept_update_from_another_position():
    purpose = BufferedPurpose(RUN, ((3, bytes(32), False, (900, 10, 8)),))
    purpose.check_start(START, round_=4, max_staleness=2)


@expect_refusal("buffered-mode-differs")
def a_buffer_in_a_run_of_rounds():
    job = Job(name="demo", task={"source": "task.py:Table"})
    ActiveRun("run", job, TensorLayout(())).check_buffered()


def secure_run(**federated):
    federated = {"secure_aggregation": True, **federated}
    job = Job(name="demo", task={"source": "task.py:Table"}, federated=federated)
    return ActiveRun("run", job, TensorLayout.from_shapes({"weight": (4,)}))


@expect_refusal("ranges-not-of-job")
def ranges_where_the_job_has_them():
    secure_run(clip=4.0, max_examples=10).check_ranges_wanted()


@expect_refusal("encoding-not-of-job")
def another_range_than_that_of_the_job():
    secure_run(clip=4.0, max_examples=10).check_encoding(make_config(clip=2.0, weight_max=10))


@expect_refusal("encoding-not-of-job")
def another_largest_weight_than_that_of_the_job():
    secure_run(clip=4.0, max_examples=10).check_encoding(make_config(clip=4.0, weight_max=1))


@expect_refusal("encoding-not-of-job")
def a_range_that_no_counts_give():
    secure_run().check_encoding(make_config(clip=3.0, weight_max=1000))


@expect_refusal("encoding-not-of-job")
def a_largest_weight_that_no_counts_give():
    secure_run().check_encoding(make_config(clip=4.0, weight_max=999))


@expect_refusal("encoding-not-of-job")
def a_weight_where_all_devices_count_the_same():
    secure_run(privacy={"epsilon": 5, "delta": 1e-3}).check_encoding(
        make_config(clip=4.0, weight_max=1000)
    )


def private_run(mechanism="distributed", **more):
    privacy = {"mechanism": mechanism, "epsilon": 8, "delta": 1e-5, "noise": 1.0, **more}
    job = Job(name="demo", task={"source": "task.py:Table"}, privacy=privacy)
    return ActiveRun("run", job, TensorLayout.from_shapes({"weight": (4,)}))


@expect_refusal("encoding-not-of-job")
def a_range_below_the_bound_of_a_private_update():
    private_run("gaussian").check_encoding(make_config(clip=0.001, weight_max=1))


@expect_refusal("encoding-not-of-job")
def few_levels_of_a_private_update():
    private_run("gaussian").check_encoding(make_config(clip=1.0, weight_max=1, levels=3))


@expect_refusal("encoding-not-of-job")
def few_levels_of_a_private_update_whose_bound_follows_a_quantile():
    run = private_run("gaussian", noise=None, clip_quantile=0.5)
    run.check_encoding(make_config(clip=0.3, weight_max=1, levels=3))


@expect_refusal("encoding-not-of-job")
def a_range_below_the_scores_of_most_devices():
    secure_run().check_measuring_noise(make_config(clip=0.01, weight_max=1), 0.0, 0.0)


@expect_refusal("encoding-not-of-job")
def few_levels_of_scores():
    secure_run().check_measuring_noise(make_config(clip=1.0, weight_max=1, levels=3), 0.0, 0.0)


@expect_refusal("encoding-not-of-job")
def another_range_of_private_scores():
    private_run("gaussian").check_measuring_noise(make_config(clip=1.0, weight_max=1), 2.0, 0.0)


@expect_refusal("encoding-not-of-job")
def a_weight_of_a_private_update():
    private_run("correlated").check_encoding(make_config(clip=1.0, weight_max=1000))


@expect_refusal("noise-below-the-jobs")
def half_of_the_noise_that_the_job_promises():
    halved = dataclasses.replace(NOISE, multiplier=0.5)
    private_run().check_privacy(make_config(size=4, slots=(), noise=halved, weight_max=1), 0.5)


@expect_refusal("noise-below-the-jobs")
def twice_the_clipping_bound_that_the_job_promises():
    wider = dataclasses.replace(NOISE, clip=2.0)
    private_run().check_privacy(make_config(size=4, slots=(), noise=wider, weight_max=1), 0.5)


@expect_refusal("noise-below-the-jobs")
def no_noise_where_the_job_promises_it():
    private_run().check_privacy(make_config(size=4), 0.0)


@expect_refusal("sums-beyond-the-jobs-budget")
def more_rounds_than_the_noise_of_the_job_was_made_for():
    config = make_config(size=4, slots=(), noise=NOISE, weight_max=1)
    private_run().check_privacy(config, 100.0)


ENOUGH = dataclasses.replace(NOISE, multiplier=2.0)


def measure(*, noise=ENOUGH, rho=0.5, norm=1.0):
    """A measurement in a job whose devices may be asked for one."""
    privacy = {"measurements": 1, "measurement_share": 0.4}
    private_run(**privacy).check_measuring_noise(
        make_config(size=4, slots=(), noise=noise, weight_max=1), norm, rho
    )


@expect_refusal("noise-below-the-jobs")
def a_measurement_without_noise():
    measure(noise=None)


@expect_refusal("noise-below-the-jobs")
def half_of_the_noise_of_a_measurement():
    measure(noise=dataclasses.replace(NOISE, multiplier=0.5))


@expect_refusal("noise-below-the-jobs")
def noise_for_a_smaller_measurement_than_the_device_sends():
    measure(norm=2.0)


@expect_refusal("sums-beyond-the-jobs-budget")
def a_measurement_beyond_what_rounds_have_left():
    measure(rho=100.0)


@expect_refusal("private-sum-of-another-vector")
def a_gradient_next_to_a_private_update():
    private_run("gaussian").check_privacy(make_config(size=8), 0.0)


def plan_of(participations=1, **privacy):
    table = FederatedPrivacy(epsilon=5, delta=1e-3, participations=participations, **privacy)
    settings = FederatedSection(batch_size=16, local_steps=10, privacy=table)
    return DeviceExamplesPlan.of(settings, rounds=9, examples=64)


def train_twice(*plans, runs=("run", "run"), **owner):
    account = ExamplesAccount(None, **owner)
    for number, (plan, run) in enumerate(zip(plans, runs, strict=True)):
        account.charge(plan, run, number, 1)


@expect_refusal("examples-asked-too-often")
def more_training_than_the_noise_of_a_device_was_made_for():
    train_twice(plan_of(), plan_of())


@expect_refusal("examples-beyond-the-jobs-budget")
def more_training_than_noise_of_the_job_allows():
    plan = plan_of(2, noise=plan_of().multiplier)
    train_twice(plan, plan)


@expect_refusal("examples-of-another-job")
def a_run_that_is_opened_again_with_another_budget():
    train_twice(plan_of(2), plan_of(3))


@expect_refusal("examples-beyond-the-owners-limit")
def more_runs_than_the_owner_allows_the_examples():
    train_twice(plan_of(), plan_of(), runs=("a", "b"), epsilon=6.0, delta=1e-3)


@expect_refusal("codec-differs")
def coarser_updates_than_the_job_says():
    federated = {"compression": {"bits": 4, "one_in": 2}}
    job = Job(name="demo", task={"source": "task.py:Table"}, federated=federated)
    run = ActiveRun("run", job, TensorLayout.from_shapes({"weight": (4,)}))
    codec = UpdateCodec(one_in=2, bits=3)
    run.check_codec(make_config(codec=codec, size=4, bits=6, levels=6, slots=COMPRESSED_SLOTS))


@expect_refusal("codec-differs")
def other_elements_than_the_job_says():
    federated = {"compression": {"bits": 3, "one_in": 2, "one_in_of": {"bias": 1}}}
    job = Job(name="demo", task={"source": "task.py:Table"}, federated=federated)
    run = ActiveRun("run", job, TensorLayout.from_shapes({"bias": (2,), "weight": (4,)}))
    codec = UpdateCodec(one_in=2, bits=3, rates=((0, 2, 1), (3, 4, 1)))
    run.check_codec(make_config(codec=codec, size=6, bits=6, levels=6, slots=COMPRESSED_SLOTS))


@expect_refusal("codec-differs")
def more_elements_than_the_model_has():
    job = Job(name="demo", task={"source": "task.py:Table"}, federated={"compression": {}})
    run = ActiveRun("run", job, TensorLayout.from_shapes({"weight": (4,)}))
    codec = UpdateCodec(one_in=4, bits=3)
    fields = {"codec": codec, "bits": 6, "levels": 6, "slots": COMPRESSED_SLOTS}
    run.check_codec(make_config(size=4, **fields))
    run.check_codec(make_config(size=1 << 39, **fields))


@expect_refusal("measurement-without-noise")
def scores_of_a_private_run():
    private_run().check_measured()


@expect_refusal("buffered-starts-invalid")
def two_start_models_of_one_round():
    purpose = BufferedPurpose(RUN, (START, (3, bytes(31) + b"1", False, (0, 0, 0))))
    purpose.check_start(START, round_=3, max_staleness=20)


@expect_refusal("buffered-starts-invalid")
def an_update_that_is_too_old():
    BufferedPurpose(RUN, (START,)).check_start(START, round_=6, max_staleness=2)


@expect_refusal("buffered-starts-invalid")
def an_update_that_began_after_its_sum():
    BufferedPurpose(RUN, (START,)).check_start(START, round_=2, max_staleness=2)


@expect_refusal("buffered-start-differs")
def a_start_model_for_one_client():
    purpose = BufferedPurpose(RUN, (START,))
    purpose.check_start((3, bytes(31) + b"1", False, (0, 0, 0)), round_=4, max_staleness=2)
