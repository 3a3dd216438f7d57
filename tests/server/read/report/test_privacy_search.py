"""What a budget and a wanted noise leave open is found, and planning with it gives the noise."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.errors import JobError
from isthmus.job import parse_job, with_changes
from isthmus_privacy.dp.calibration import NoisePlan, SampledNoisePlan
from isthmus_server.read.report.privacy.search import DevicesTarget, find_for_examples, found_in
from isthmus_server.read.report.privacy.update_noise import noise_to_signal

SIZE = 1000
MECHANISMS = ["distributed", "gaussian", "correlated"]
budgets = st.fixed_dictionaries(
    {"epsilon": st.floats(0.5, 50), "delta": st.floats(1e-9, 1e-4)},
)


def job_of(mechanism="gaussian", *changes, epsilon=8.0, delta=1e-5, rounds=20):
    budget = (f"privacy.epsilon={epsilon}", f"privacy.delta={delta}", f"rounds={rounds}")
    text = 'name = "table"\n[task]\nsource = "task.py:Learn"'
    return parse_job(text, [f"privacy.mechanism={mechanism}", *budget, *changes])


def needed(job):
    """The noise multiplier of the budget, whatever noise the job has."""
    privacy = job.privacy.model_copy(update={"noise": None})
    return NoisePlan.of(privacy, job.rounds).multiplier


def signal(job):
    plan = NoisePlan.of(job.privacy, job.rounds)
    return 1 / noise_to_signal(job, plan, SIZE, job.federated.cohort)


@settings(max_examples=8)
@given(
    mechanism=st.sampled_from(["distributed", "gaussian"]),
    sought=st.sampled_from(["rounds", "participations"]),
    budget=budgets,
    noise=st.floats(0.01, 100),
)
def test_one_more_round_would_need_more_noise(mechanism, sought, budget, noise):
    job, target = job_of(mechanism, **budget), DevicesTarget(noise=noise)
    if needed(with_changes(job, {"rounds": 1})) > noise:
        with pytest.raises(JobError, match=r"^not even one round .* noise of"):
            target.find(sought, job, SIZE)
        return
    found = target.find(sought, job, SIZE).changes
    assert needed(with_changes(job, found)) <= noise
    key = "rounds" if sought == "rounds" else "privacy.participations"
    assert needed(with_changes(job, {**found, key: found[key] + 1})) > noise
    planned = with_changes(job, found)
    assert planned.privacy.noise == noise
    if mechanism == "distributed":  # of Gaussian noise it takes seconds
        plan = NoisePlan.of(planned.privacy, planned.rounds)
        assert plan.epsilon(found[key]) <= budget["epsilon"]


@settings(max_examples=8)
@given(mechanism=st.sampled_from(["distributed", "gaussian"]), rounds=st.integers(1, 2000))
def test_the_noise_of_some_rounds_gives_these_rounds(mechanism, rounds):
    job = job_of(mechanism, rounds=rounds)
    found = DevicesTarget(noise=needed(job)).find("rounds", job_of(mechanism), SIZE)
    assert found.changes["rounds"] == rounds


@settings(max_examples=8)
@given(mechanism=st.sampled_from(MECHANISMS), noise=st.floats(5, 50), rounds=st.integers(1, 100))
def test_a_smaller_epsilon_would_need_more_noise(mechanism, noise, rounds):
    job = job_of(mechanism, rounds=rounds)
    found = DevicesTarget(noise=noise).find("epsilon", job, SIZE).changes
    assert needed(with_changes(job, found)) <= noise
    less = found["privacy.epsilon"] * 0.998
    assert needed(with_changes(job, {"privacy.epsilon": less})) > noise


@settings(max_examples=8)
@given(
    mechanism=st.sampled_from(MECHANISMS),
    sought=st.sampled_from(["rounds", "participations", "cohort", "epsilon"]),
    ratio=st.floats(0.3, 1.5),
)
def test_the_plan_of_the_found_job_has_the_wanted_signal(mechanism, sought, ratio):
    job = job_of(mechanism, "federated.cohort=100")
    found = DevicesTarget(signal_to_noise=ratio).find(sought, job, SIZE).changes
    assert signal(with_changes(job, found)) >= ratio


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_what_is_found_is_monotone(mechanism):
    job = job_of(mechanism, "federated.cohort=200")

    def found(sought, ratio):
        (value,) = DevicesTarget(signal_to_noise=ratio).find(sought, job, SIZE).changes.values()
        return value

    ratios = [1.0, 2.0, 5.0]
    for sought, order in (("cohort", 1), ("epsilon", 1), ("rounds", -1), ("participations", -1)):
        values = [found(sought, ratio) for ratio in ratios]
        assert values == sorted(values)[::order]
        assert values[0] != values[-1]


def test_a_cohort_is_found_for_given_noise():
    """Then epsilon decides nothing: twice the ratio needs twice the devices."""
    cohorts = [
        DevicesTarget(noise=3.0, signal_to_noise=ratio).find("cohort", job_of(), SIZE).changes
        for ratio in (0.5, 1.0)
    ]
    assert [each["federated.cohort"] for each in cohorts] == [48, 95]
    assert all(each["privacy.noise"] == 3.0 for each in cohorts)


@pytest.mark.parametrize(
    ("mechanism", "changes", "options", "sought", "sentence"),
    [
        ("gaussian", [], {}, "rounds", "needs --noise or --signal-to-noise"),
        ("gaussian", [], {"noise": 3.0}, "cohort", "needs --signal-to-noise: the noise"),
        ("gaussian", [], {"noise": 3.0, "signal_to_noise": 1.0}, "rounds", "leave only the cohort"),
        (
            "gaussian",
            ["privacy.noise=3"],
            {"signal_to_noise": 1.0},
            "epsilon",
            "leave only the cohort to be found, not epsilon",
        ),
        ("gaussian", [], {"signal_to_noise": float("nan")}, "cohort", "nan is not above 0"),
        ("gaussian", [], {"noise": float("nan")}, "rounds", "privacy.noise=nan"),
        (
            "gaussian",
            ["privacy.participations=3"],
            {"noise": 3.0},
            "rounds",
            "any number of rounds has the same",
        ),
        ("correlated", [], {"noise": 3.0}, "rounds", "does not depend on rounds"),
        ("correlated", [], {"noise": 3.0}, "participations", "does not depend on participations"),
        ("distributed", [], {"signal_to_noise": 1e3}, "cohort", "no cohort that a job may have"),
        ("gaussian", [], {"noise": 0.001}, "epsilon", "no epsilon up to 100 is enough"),
        (
            "gaussian",
            ["federated.clients=9"],
            {"signal_to_noise": 1.0},
            "cohort",
            "federated.clients=9 starts fewer",
        ),
    ],
)
def test_what_has_no_answer_is_said_in_one_sentence(mechanism, changes, options, sought, sentence):
    with pytest.raises(JobError) as refused:
        DevicesTarget(**options).find(sought, job_of(mechanism, *changes), SIZE)
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


def test_nothing_is_found_for_the_examples_of_devices(tmp_path):
    text = 'name = "table"\nrounds = 20\n[task]\nsource = "task.py:Learn"'
    changes = ("federated.privacy.epsilon=8", "federated.privacy.delta=1e-3")
    with pytest.raises(JobError, match=r"for .federated.privacy., whose devices find their own"):
        found_in(parse_job(text, changes), tmp_path, "epsilon", 2.0, None, None)


EXAMPLES = (
    "privacy.epsilon=3",
    "privacy.delta=1e-5",
    "privacy.examples=1000",
    "data_parallel=2",
    "batch_size=5",
    "steps=10",
    "zero_stage=0",
)


def datacenter_job(*changes):
    text = 'name = "table"\nrounds = 20\n[task]\nsource = "task.py:Learn"'
    return parse_job(text, [*(f"datacenter.{each}" for each in EXAMPLES), *changes])


def test_the_rounds_of_a_datacenter_are_found_for_noise():
    job = datacenter_job()
    found = find_for_examples("rounds", job, 1.0).changes
    planned = with_changes(job, found)
    plan = SampledNoisePlan.of(planned)
    assert plan.multiplier == 1.0
    assert plan.epsilon(planned.rounds * 10) <= 3 < plan.epsilon((planned.rounds + 1) * 10)


def test_the_epsilon_of_a_datacenter_is_found_for_noise():
    found = find_for_examples("epsilon", datacenter_job("datacenter.privacy.noise=1"), None).changes
    plan = SampledNoisePlan.of(with_changes(datacenter_job(), found))
    epsilon = found["datacenter.privacy.epsilon"]
    assert 0.998 * epsilon <= plan.epsilon(200) <= epsilon


@pytest.mark.parametrize(
    ("sought", "noise", "sentence"),
    [
        ("cohort", 1.0, "is about devices"),
        ("rounds", None, "needs --noise for"),
        ("rounds", 0.2, "a single step has an epsilon of"),
        ("rounds", 0.52, "not even one round of 10 steps"),
        ("epsilon", 0.12, "ask for more noise"),
    ],
)
def test_what_a_datacenter_has_no_answer_for(sought, noise, sentence):
    with pytest.raises(JobError) as refused:
        find_for_examples(sought, datacenter_job(), noise)
    assert sentence in str(refused.value)
