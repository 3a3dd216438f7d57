"""The policies in docs/own-policies.md work as the page says."""

import re
from pathlib import Path
from types import SimpleNamespace

from tests.server.strategy.observations import observe, past_round

from isthmus_server.strategy import Plan, Stop

ROOT = Path(__file__).resolve().parents[2]


def documented_policies():
    names = {}
    page = (ROOT / "docs/own-policies.md").read_text()
    for block in re.findall(r"```python(?: title=.*?)?\n(.*?)```", page, re.S):
        exec(block, names)
    return SimpleNamespace(**names)


def history(*losses):
    return [past_round(number, "federated", loss=loss) for number, loss in enumerate(losses, 1)]


def test_every_third_round_is_federated():
    policy = documented_policies().EveryThird(SimpleNamespace(settings={}))
    assert [policy.plan(observe(round_)).regime for round_ in (1, 2, 3, 4)] == [
        "datacenter",
        "datacenter",
        "federated",
        "datacenter",
    ]


def test_a_policy_can_return_to_a_model_that_it_kept_and_end_the_run():
    policy = documented_policies().CheckedDevices(None)
    assert policy.plan(observe(3)).keep == {"warm": "served"}
    assert policy.plan(observe(7, history(9, 9, 5, 4, 4, 4))) == Plan(
        "federated", "devices lower the loss"
    )
    back = policy.plan(observe(7, history(9, 9, 5, 4, 4, 6)))
    assert (back.start, back.reset_optimizer) == ("warm", True)
    again = policy.plan(observe(8, history(9, 9, 5, 4, 4, 6, 6), state=back.state))
    assert isinstance(again, Stop)
