"""DP-SGD with ghost clipping on two sharded ranks: its steps, its noise, and a killed rank."""

import math
import re

import pytest
import torch
from tests.privacy.dp_sgd.test_private_gradients import one_by_one

from isthmus.errors import JobError, UserError
from isthmus.job import with_changes
from isthmus.task.scoring import build_model

EXAMPLES, CLIP, RATE = 50, 0.3, 0.5
SETTINGS = {"optimizer": "SGD", "options": {"lr": RATE}}
PRIVACY = {
    "epsilon": 1e6,
    "delta": 1e-4,
    "examples": EXAMPLES,
    "clip": CLIP,
    "clipping": "ghost",
}


@pytest.fixture
def make_private(make_setup):
    """`make_private(noise=2.0, zero_stage=3)`: a job whose steps have all examples."""

    def make(name="Table", settings=None, noise=1e-9, **section):
        return make_setup(
            name,
            {**SETTINGS, **(settings or {})},
            **{"zero_stage": 2, "batch_size": 25, **section},
            privacy={**PRIVACY, "noise": noise},
        )

    return make


@pytest.fixture
def parameters_after():
    """`parameters_after(setup, 3)`: those after some steps with all examples and no noise."""

    def train(setup, steps):
        task, model = setup.task, build_model(setup.task, setup.job.seed)
        data = task.local_data(None)
        for _ in range(steps):
            total = one_by_one(task, model, data, CLIP)
            flat = torch.nn.utils.parameters_to_vector(model.parameters())
            torch.nn.utils.vector_to_parameters(flat - RATE * total / EXAMPLES, model.parameters())
        return setup.layout.gather(model).detach()

    return train


@pytest.mark.parametrize("stage", [1, 3])
def test_steps_are_those_of_all_examples(
    stage, make_private, warm_datacenter, decode, parameters_after
):
    setup = make_private(zero_stage=stage)
    warm_datacenter.open(f"ghost-exact-{stage}", setup)
    trained, _ = warm_datacenter.train(f"ghost-exact-{stage}", 0, 2)
    assert dict(trained.training) == {}  # a loss would say something without noise
    result = decode(warm_datacenter.export(f"ghost-exact-{stage}", 2), setup.layout)
    torch.testing.assert_close(result, parameters_after(setup, 2), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("stage", [0, 2])
def test_every_element_has_its_noise_once(stage, make_private, warm_datacenter, decode):
    """Bounds are exceeded with a probability below 1e-6: 5 standard errors."""
    noise = 1e4  # so much that the gradients do not matter
    setup = make_private(noise=noise, zero_stage=stage)
    run_id = f"ghost-noise-{stage}"
    warm_datacenter.open(run_id, setup)
    start = setup.layout.gather(build_model(setup.task, setup.job.seed)).detach()
    unit = RATE * noise * CLIP / EXAMPLES
    model = bytes(setup.layout.encode(start.clone()))
    releases = []
    for _ in range(2):  # the same command again, as after a crash of the server
        _, blob = warm_datacenter.train(run_id, 0, 1, model, hand_back=True)
        releases.append((decode(blob, setup.layout) - start) / unit)
    size = len(start)
    for release in releases:
        assert abs(float(release.var()) - 1) < 5 * math.sqrt(2 / size)
        assert abs(float(release.mean())) < 5 / math.sqrt(size)
        pairs = (
            release[: size // 2] * release[size // 2 : size // 2 * 2]
        )  # about those of two ranks
        assert abs(float(pairs.mean())) < 5 / math.sqrt(size // 2)
        assert len(release.unique()) == size
    assert abs(float((releases[0] * releases[1]).mean())) < 5 / math.sqrt(size)


def test_dropout_and_steps_without_examples(make_private, warm_datacenter, decode):
    setup = make_private(settings={"dropout": 0.5}, noise=1.0, batch_size=1, zero_stage=3)
    warm_datacenter.open("ghost-rare", setup)
    trained, _ = warm_datacenter.train("ghost-rare", 0, 20)  # a third of a rank's draws are empty
    assert trained.steps == 20
    assert trained.examples == 40  # the expected number, whatever was drawn
    assert decode(warm_datacenter.export("ghost-rare", 20), setup.layout).isfinite().all()


def test_a_killed_rank_is_replaced_and_the_round_resumed(
    make_private, start_datacenter, decode, parameters_after, tmp_path
):
    fault = {"fault": "kill", "at": "step 4", "rank": "1", "once": str(tmp_path / "fault")}
    setup = make_private("Faulty", fault, zero_stage=3, checkpoint_steps=1)
    datacenter = start_datacenter()
    datacenter.open("ghost-killed", setup)
    trained, blob = datacenter.train("ghost-killed", 0, 6, hand_back=True)
    (event,) = trained.events
    assert re.search(r"resumed steps 0 to 6 after step [23]$", event)  # the newest may be missing
    expected = parameters_after(make_private(), 6)
    torch.testing.assert_close(decode(blob, setup.layout), expected, rtol=1e-4, atol=1e-6)


def test_models_that_cannot_be_clipped_are_refused(make_private, warm_datacenter):
    with pytest.raises(UserError, match=r"layer 'blocks.0.self_attn' \(MultiheadAttention\) has "):
        warm_datacenter.open("ghost-refused", make_private("Language"))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"datacenter.privacy.clipping": "per_example"}, r"or datacenter.privacy.clipping = \"gh"),
        ({"datacenter.tensor_parallel": 2}, r"tensor_parallel=2 .*the whole gradient"),
        ({"datacenter.pipeline_parallel": 2}, r"pipeline_parallel=2 .*the whole gradient"),
        ({"datacenter.precision": "bf16"}, r"precision='bf16' .* its rounding"),
        ({"datacenter.checkpoint_activations": True}, r"checkpoint_activations=True"),
        ({"datacenter.accumulate": 5}, r"accumulate=5 .* already taken in parts"),
    ],
)
def test_other_layouts_are_refused(make_private, changes, reason):
    with pytest.raises(JobError, match=reason):
        with_changes(make_private().job, changes)
