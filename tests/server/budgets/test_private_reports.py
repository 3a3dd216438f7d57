"""What a report says of a private job: no exact figure that depends on the devices' data."""

import pytest

SECURE = "federated.secure_aggregation=true"
PLAIN = "federated.secure_aggregation=false"
OF_DEVICES = ("privacy.epsilon=1e12", "privacy.delta=0.01")
OF_EXAMPLES = (
    "federated.privacy.epsilon=8",
    "federated.privacy.delta=0.001",
    "federated.local_epochs=1",
    "federated.batch_size=4",
)
WAYS = [
    ("privacy.mechanism=distributed", *OF_DEVICES, SECURE),
    ("privacy.mechanism=gaussian", *OF_DEVICES, SECURE),
    ("privacy.mechanism=gaussian", *OF_DEVICES, "privacy.clip_quantile=0.5", SECURE),
    ("privacy.mechanism=gaussian", *OF_DEVICES, PLAIN),
    ("privacy.mechanism=correlated", *OF_DEVICES, SECURE),
    (*OF_EXAMPLES, SECURE),
]
"""How jobs are private. Where the server sees the update of each device in the clear, the examples
of a device are protected from those who have these, and that its task failed is not."""
NOISY = {"metrics", "norms", "model_sha256", "model_path", "clip", "clipped", "range", "weight_max"}
NOISY |= {"deviation"}  # of noise that is in proportion to the bound, which is noisy itself
CHANCE = {"seconds", "elapsed", "started_at", "run_id", "directory", "epsilon"}
MOVED = {"bytes_in", "bytes_out", "messages_in", "messages_out", "bytes_up", "bytes_down"}
FAILURES = ("none", "raises", "not finite", "large")
TASK = """
def local_data(self, participant):
    self.fails = self.settings["fails"] if participant.name == "b" else "none"
    return rows(20, seed=3)

def loss(self, output, target):
    fails = getattr(self, "fails", "none")
    if fails == "raises":
        raise ValueError("not today")
    scale = {"not finite": float("nan"), "large": 1e6}.get(fails, 1.0)
    return super().loss(output, target) * scale
"""


def exact(value):
    """The figures of a report that have no noise and are not of chance."""
    if isinstance(value, dict):
        left_out = NOISY | CHANCE | MOVED | {"device_bytes", "device_seconds"}
        return {key: exact(each) for key, each in value.items() if key not in left_out}
    if isinstance(value, list):
        return [exact(each) for each in value]
    return value


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way[0] + way[-1][-6:])
async def test_a_report_is_the_same_whatever_the_data_of_a_device_do(deployment, way):
    """One device trains, fails, has a loss that is not finite, and a very large one."""
    await deployment.start(TASK)
    told = {}
    for what in FAILURES:
        fails = f"task.settings.fails={what}"
        report, _ = await deployment.run(what.replace(" ", "-"), *way, fails, "rounds=2")
        (*_, last) = report["rounds"]
        assert [each["status"] for each in last["receipts"]] == ["accepted"] * 3
        assert all(each["seconds"] > 0 for each in last["receipts"])
        told[what] = exact({"rounds": report["rounds"], "failed": report["failed_attempts"]})
        figures = {name for each in report["rounds"] for name in each["training"]["federated"]}
        assert not figures & {"unusable", "over_range", "over_weight", "within_clip"}
        assert way[0].startswith("federated") or "clipped" not in figures  # of noisy updates
    expected = told.pop("none")
    for what, found in told.items():
        assert found == expected, what


UNEQUAL = """
def local_data(self, participant):
    return rows({"a": 20, "b": 33, "c": 45}[participant.name], seed=3)
"""


async def test_steps_tell_no_number_of_examples(deployment):
    """They are as many batches as the device has examples for, also where its update is seen."""
    await deployment.start(UNEQUAL)
    report, _ = await deployment.run("run", *OF_EXAMPLES, PLAIN, "rounds=1")
    receipts = report["rounds"][0]["receipts"]
    assert [(each["status"], each["steps"]) for each in receipts] == [("accepted", 0)] * 3
    open_report, _ = await deployment.run("open", PLAIN, "federated.batch_size=4", "rounds=1")
    assert len({each["steps"] for each in open_report["rounds"][0]["receipts"]}) == 3
