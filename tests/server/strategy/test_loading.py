import pytest
from tests.server.strategy.observations import observe, past_round

from isthmus.errors import JobError, UserError
from isthmus.job import StrategySection
from isthmus_server.strategy import Plan, Wait, load_policy
from isthmus_server.strategy.answer_checks import checked_answer


def plans(strategy, rounds, **changes):
    """The answers of a policy in consecutive rounds; its state passes through JSON."""
    policy, state = load_policy(strategy), {}
    for round_ in range(1, rounds + 1):
        plan = checked_answer(policy, strategy.policy, observe(round_, state=state, **changes))
        state = plan.state
        yield plan


def regimes(strategy, rounds):
    return [plan.regime for plan in plans(strategy, rounds)]


@pytest.mark.parametrize("regime", ["datacenter", "federated", "hybrid"])
def test_a_fixed_policy_keeps_its_regime(regime):
    assert regimes(StrategySection(policy=regime), 4) == [regime] * 4


def test_alternate_begins_in_the_datacenter():
    assert regimes(StrategySection(), 4) == ["datacenter", "federated"] * 2


def test_a_schedule_runs_its_phases_and_stays_in_the_last():
    strategy = StrategySection(
        policy="schedule",
        schedule=[
            {"regime": "datacenter", "rounds": 2},
            {"regime": "hybrid", "rounds": 1},
            {"regime": "federated", "rounds": 1},
        ],
    )
    assert regimes(strategy, 7) == ["datacenter"] * 2 + ["hybrid"] + ["federated"] * 4
    reasons = [plan.reason for plan in plans(strategy, 7)]
    assert reasons[1] == "phase 1 of 3 is datacenter, its round 2 of 2"
    assert reasons[2] == "phase 2 of 3 is hybrid, its round 1 of 1"
    assert reasons[6] == "phase 3 of 3 is federated, to the end"


def test_a_phase_with_hours_is_used_only_in_them():
    night = {"opens": "22:00", "closes": "06:00"}
    strategy = StrategySection(
        policy="schedule",
        schedule=[
            {"regime": "datacenter", "rounds": 1},
            {"regime": "federated", "rounds": 2, "hours": [night]},
            {"regime": "datacenter"},
        ],
    )

    def at(hour):
        return [plan.regime[0] for plan in plans(strategy, 5, now=hour * 3600.0)]

    assert at(12) == ["d"] * 5
    assert at(23) == ["d", "f", "f", "d", "d"]
    (_, plan, *_) = plans(strategy, 2, now=0.0)
    assert plan.reason == "phase 2 of 3 is federated, its round 1 of 2 from 22:00 to 06:00 UTC"


def test_a_schedule_waits_outside_the_hours_of_all_phases():
    strategy = StrategySection(
        policy="schedule",
        schedule=[{"regime": "federated", "hours": [{"opens": "22:00", "closes": "06:00"}]}],
    )
    answer = load_policy(strategy).plan(observe(now=20 * 3600.0))
    assert answer == Wait(7200.0, "no phase of the schedule has its hours now")


def test_a_schedule_with_a_phase_that_is_never_reached_is_refused():
    with pytest.raises(ValueError, match=r"phase 1 of strategy\.schedule never ends, and others"):
        StrategySection(
            policy="schedule", schedule=[{"regime": "federated"}, {"regime": "datacenter"}]
        )


def test_the_gain_of_a_regime_is_of_its_last_evaluated_round():
    history = [
        past_round(1, "datacenter", loss=2.0),
        past_round(2, "federated", loss=1.5),
        past_round(3, "datacenter"),
        past_round(4, "datacenter", loss=1.25),
        past_round(5, "federated", accuracy=0.5),
    ]
    seen = observe(6, history)
    assert seen.last_gain("federated") == 0.5
    assert seen.last_gain("datacenter") == 0.25
    assert seen.last_gain("hybrid") == 0.0
    assert observe().last_gain("federated") == 0.0
    assert observe(2, history[:1]).last_gain("datacenter") == 0.0


# -- a policy of one's own -----------------------------------------------------------------------


@pytest.fixture
def write_policy(tmp_path, monkeypatch):
    """Put a module with a policy on the path; returns its name for a job."""
    monkeypatch.syspath_prepend(tmp_path)
    written = []

    def write(body, init="pass"):
        module = f"policy_{tmp_path.name}_{len(written)}"
        written.append(module)
        (tmp_path / f"{module}.py").write_text(
            "from isthmus_server.strategy import Plan\n"
            "class Mine:\n"
            f"    def __init__(self, strategy):\n        self.strategy = strategy; {init}\n"
            f"    def plan(self, observation):\n        {body}\n"
        )
        return f"{module}:Mine"

    return write


def test_a_user_s_policy_is_loaded_by_name(write_policy):
    name = write_policy(
        "return Plan('hybrid', 'I like it', {'turns': observation.state.get('turns', 0) + 1})"
    )
    strategy = StrategySection(policy=name)
    policy = load_policy(strategy)
    assert policy.strategy is strategy
    plan = checked_answer(policy, name, observe(state={"turns": 2}))
    assert plan == Plan("hybrid", "I like it", {"turns": 3})


def test_a_package_provides_a_policy_by_entry_point(write_policy, tmp_path):
    value = write_policy("return Plan('hybrid', 'the package said so')")
    metadata = tmp_path / "greedy-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: greedy\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[isthmus.policies]\ngreedy = {value}\n")
    policy = load_policy(StrategySection(policy="greedy"))
    assert policy.plan(observe()).reason == "the package said so"
    with pytest.raises(JobError, match=r"choose one of .*, greedy, hybrid, .*module:Name"):
        load_policy(StrategySection(policy="gredy"))


def test_a_policy_of_two_packages_is_refused(write_policy, tmp_path):
    for package in ("greedy", "greedier"):
        metadata = tmp_path / f"{package}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n")
        entry = write_policy("return Plan('hybrid', 'x')")
        (metadata / "entry_points.txt").write_text(f"[isthmus.policies]\ngreedy = {entry}\n")
    sentence = r"policy='greedy' is provided by several installed packages \(.*; uninstall all but"
    with pytest.raises(UserError, match=sentence):
        load_policy(StrategySection(policy="greedy"))


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "adaptve",
            r"strategy\.policy='adaptve' is unknown; choose one of adaptive, .*module:Name",
        ),
        (
            "no_such_module:Mine",
            r"='no_such_module:Mine' cannot be constructed: ModuleNotFoundError: No mod",
        ),
        ("json:Mine", r"='json:Mine' cannot be constructed: AttributeError: module 'json' has no"),
        ("json:", r"strategy\.policy='json:' cannot be constructed: "),
        (":Mine", r"strategy\.policy=':Mine' cannot be constructed: "),
        ("sys:exit", r"strategy\.policy='sys:exit' cannot be constructed: SystemExit: "),
        ("builtins:repr", r"strategy\.policy='builtins:repr' is not a policy: it has no plan\(\)"),
    ],
)
def test_an_unknown_policy_is_reported_in_one_sentence(name, sentence):
    with pytest.raises(JobError, match=sentence):
        load_policy(StrategySection(policy=name))


def test_a_policy_that_cannot_be_constructed_is_reported(write_policy, tmp_path):
    name = write_policy("pass", init="raise KeyError('greed')")
    with pytest.raises(JobError, match=r"cannot be constructed: KeyError: 'greed'"):
        load_policy(StrategySection(policy=name))
    (tmp_path / "policy_that_raises.py").write_text("1 / 0")
    with pytest.raises(JobError, match=r"'policy_that_raises:Mine' .*division by zero"):
        load_policy(StrategySection(policy="policy_that_raises:Mine"))


def test_a_policy_gets_its_state_as_after_a_resume(write_policy):
    name = write_policy("return Plan('hybrid', 'x', {'seen': (1, 2), 3: None})")
    plan = checked_answer(load_policy(StrategySection(policy=name)), name, observe())
    assert plan.state == {"seen": [1, 2], "3": None}


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("1 / 0", r"failed in round 3: ZeroDivisionError: division by zero"),
        ("return None", r"answered None in round 3, which is not a Plan"),
        ("return 'federated'", r"answered 'federated' in round 3"),
        ("return Plan('edge', 'why')", r"whose regime is none of datacenter, federated, hybrid"),
        ("return Plan('hybrid', '')", r"which has no reason in words"),
        (
            "return Plan('hybrid', 'x', {'a': {1, 2}})",
            r"the state .* in round 3, which is not a JSON object",
        ),
        ("return Plan('hybrid', 'x', [1])", r"the state .* in round 3, which is not a JSON object"),
        ("return Plan(['hybrid'], 'x')", r"whose regime is none of"),
        ("return Plan('hybrid', 'x', start='warm')", r"from a model that is none of current"),
    ],
)
def test_a_policy_that_breaks_its_contract_is_named(write_policy, body, sentence):
    name = write_policy(body)
    policy = load_policy(StrategySection(policy=name))
    with pytest.raises(JobError, match=sentence) as caught:
        checked_answer(policy, name, observe(3))
    assert f"the policy {name!r}" in str(caught.value)


def test_a_sentence_that_a_policy_raises_is_shown_as_it_is(write_policy):
    name = write_policy("import isthmus.errors as e\n        raise e.UserError('give it a level')")
    with pytest.raises(JobError, match=r"failed in round 3: give it a level$"):
        checked_answer(load_policy(StrategySection(policy=name)), name, observe(3))
