"""The level of protection of a job, in one place for all that show it."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from isthmus.job.commands import job as job_commands
from isthmus.job.promises import CURIOUS, LYING, NOTHING, level_of, needs_of, weakest

DISTRIBUTED = (
    "federated.secure_aggregation=true",
    'privacy={mechanism="distributed", epsilon=8.0, delta=1e-5}',
)
GAUSSIAN = (
    "federated.secure_aggregation=true",
    'privacy={mechanism="gaussian", epsilon=8.0, delta=1e-5}',
)
EXAMPLES = ("federated.privacy={epsilon=8.0, delta=1e-5}",)
SECURE = ("federated.secure_aggregation=true",)
PLAIN = ("federated.secure_aggregation=false",)


@pytest.mark.parametrize(
    ("overrides", "unknown", "separate", "one"),
    [
        (SECURE, CURIOUS, CURIOUS, CURIOUS),
        (DISTRIBUTED, LYING, LYING, CURIOUS),
        (GAUSSIAN, CURIOUS, CURIOUS, CURIOUS),
        ((*EXAMPLES, *SECURE), LYING, LYING, LYING),
        ((*EXAMPLES, *PLAIN), LYING, LYING, LYING),
        (PLAIN, NOTHING, NOTHING, NOTHING),
    ],
)
def test_the_level_follows_from_the_job_and_the_deployment(
    make_job, overrides, unknown, separate, one
):
    job = make_job(*overrides)
    found = [level_of(job, each).name for each in (None, "separate", "one", "local")]
    assert found == [unknown, separate, one, NOTHING]


def test_a_condition_that_is_not_known_is_in_the_sentence(make_job):
    job = make_job(*DISTRIBUTED)
    assert "`isthmus authority`" in level_of(job).claim
    assert "`isthmus authority`" not in level_of(job, "separate").claim
    assert "enrols devices itself" in level_of(job, "one").claim


def test_the_smallest_sum_is_in_the_sentence(make_job):
    job = make_job(*SECURE, "federated.cohort=20", "federated.quorum=15")
    assert "sums of at least 15 devices' updates" in level_of(job).claim


@pytest.mark.parametrize(
    "groups", ["federated.groups.minimum=4", "federated.robust_groups=3"], ids=["groups", "robust"]
)
def test_sums_of_groups_are_the_smallest(make_job, groups):
    robust = ("federated.robust=median", "federated.robust_minimum=4") if "robust" in groups else ()
    job = make_job(*SECURE, "federated.cohort=20", "federated.quorum=15", groups, *robust)
    assert "sums of at least 4 devices' updates" in level_of(job).claim


def test_a_job_without_devices_has_no_level(make_job):
    assert level_of(make_job("strategy.policy=datacenter", *SECURE)) is None
    evaluates = ("evaluation.devices=8", "strategy.policy=datacenter", *SECURE)
    assert level_of(make_job(*evaluates)).name == CURIOUS


def test_the_weakest_deployment_of_a_run_counts():
    assert weakest([]) is None
    assert weakest(["one", "separate"]) == "one"
    assert weakest(["separate", "local", "one"]) == "local"


@pytest.mark.parametrize(
    ("overrides", "needs"),
    [
        (SECURE, []),
        (PLAIN, ["secure_aggregation = false"]),
        (("federated.mode=buffered", *SECURE), ["buffered = true"]),
        (("federated.compression.bits=3", *SECURE), ["personal_mb"]),
        (('federated.weights="exact"', *SECURE), ['weights = "exact"']),
        (('federated.weights="coarse"', *SECURE), ['weights = "exact" or "coarse"']),
        (('federated.weights="equal"', *SECURE), []),
        (("evaluation.devices=8", *SECURE), ['counts = "exact"']),
        (
            ("evaluation.devices=8", "evaluation.same_devices=true", *SECURE),
            ['counts = "exact" or "same-devices"'],
        ),
        (("evaluation.devices=8", *DISTRIBUTED), []),
        (("evaluation.devices=8", *GAUSSIAN), ['counts = "exact"']),
        (("statistics.collect=true", *SECURE), ['counts = "exact" or "same-devices"']),
    ],
)
def test_what_a_job_needs_of_owners(make_job, overrides, needs):
    here = "federated.clients=20"  # which have no certificates, and count nobody
    assert needs_of(make_job(here, *overrides)) == needs


@pytest.mark.parametrize(
    ("overrides", "fewest"),
    [
        (("federated.cohort=3",), 2),
        (("federated.cohort=4",), 2),
        (("federated.cohort=14", "federated.quorum=11"), 9),
        (("federated.cohort=15",), None),
        (("federated.cohort=15", "evaluation.devices=8", *DISTRIBUTED), 5),
        (("federated.cohort=15", "strategy.policy=datacenter"), None),
        (("federated.cohort=3", *PLAIN), None),
    ],
)
def test_a_job_of_few_devices_needs_owners_who_let_them_be_few(make_job, overrides, fewest):
    needs = [need for need in needs_of(make_job(*SECURE, *overrides)) if "clients_min" in need]
    assert needs == ([] if fewest is None else [f"clients_min = {fewest}"])


def test_job_check_shows_both():
    path = Path(__file__).parents[3] / "examples" / "digits" / "job.toml"
    settings = ["--set", 'federated.weights="exact"']
    result = CliRunner().invoke(job_commands, ["check", str(path), *settings])
    assert result.exit_code == 0, result.output
    lines = dict(line.split(maxsplit=1) for line in result.output.splitlines())
    assert lines["level"].startswith(f"{CURIOUS}: a server that follows the protocol learns sums")
    assert lines["owners"] == 'need in policy.toml: weights = "exact"'
