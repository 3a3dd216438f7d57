"""Rounds that start from one model again, on devices that give one vector for each model."""

import pytest

from isthmus.errors import CannotContinue
from isthmus_server.read.report.report import read_report
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.run_parts import RunParts

SCHEDULE = (
    "learning_rate.schedule=inverse_sqrt",
    "learning_rate.warmup_steps=4",
    "federated.local_steps=2",
    "task.settings.lr=1000",
    "time.join_seconds=3",
    "attempts=2",
)


@pytest.fixture
def from_initial(deployment, planned):
    """Run rounds that all start from the first model, with the same devices."""

    async def run(name, *overrides):
        plans = planned([{}, {"start": "initial"}, {"start": "initial"}])
        store = deployment.create_run(name, *plans, *SCHEDULE, *overrides)
        await Coordinator(RunParts.of(store, deployment.link)).run()
        return store

    return run


async def test_the_same_devices_give_the_same_sum_in_each_round(deployment, from_initial):
    """With the range, the position in the schedule and the examples of the first one."""
    await deployment.start(names=tuple("abc"))
    report = read_report(await from_initial("run"))
    figures = [each.training["federated"] for each in report.rounds]
    assert figures[0]["range"] > 4
    assert figures[0] == figures[1] == figures[2]
    assert len({each.model_sha256 for each in report.rounds}) == 1
    assert [each.attempt for each in report.rounds] == [1, 1, 1]


async def test_devices_that_keep_a_state_are_asked_for_no_second_vector(deployment, from_initial):
    """They could not give the same one; others would be asked, and there are none."""
    await deployment.start(names=tuple("abc"))
    with pytest.raises(CannotContinue, match="have not unmasked a secure sum of this model"):
        await from_initial("run", "exchange.personal=['bias']")
