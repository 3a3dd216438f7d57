"""DP-SGD on two real ranks: the sum is right, the noise is right, and what cannot be is refused."""

import math

import pytest
import torch
from tests.privacy.dp_sgd.test_private_gradients import one_by_one

from isthmus.errors import JobError, UserError
from isthmus.job import Job, with_changes
from isthmus.task.scoring import build_model
from isthmus.wire import link_pb2

EXAMPLES, CLIP, RATE = 50, 0.3, 0.5
PRIVACY = {"epsilon": 1e6, "delta": 1e-4, "examples": EXAMPLES, "clip": CLIP}
SETTINGS = {"optimizer": "SGD", "options": {"lr": RATE}}


@pytest.fixture
def make_private(make_setup):
    """`make_private(noise=2.0)`: a job whose steps have all examples, with keys of its privacy."""

    def make(name="Table", settings=None, batch_size=25, **privacy):
        return make_setup(
            name,
            {**SETTINGS, **(settings or {})},
            zero_stage=0,
            batch_size=batch_size,
            privacy={**PRIVACY, **privacy},
        )

    return make


def test_two_ranks_sum_the_clipped_gradients_of_all_examples(make_private, warm_datacenter, decode):
    setup = make_private(noise=1e-9)
    warm_datacenter.open("private-exact", setup)
    trained, _ = warm_datacenter.train("private-exact", 0, 2)
    assert dict(trained.training) == {}  # a loss would say something without noise
    task, model = setup.task, build_model(setup.task, setup.job.seed)
    data = task.local_data(None)
    for _ in range(2):
        total = one_by_one(task, model, data, CLIP)
        flat = torch.nn.utils.parameters_to_vector(model.parameters())
        torch.nn.utils.vector_to_parameters(flat - RATE * total / EXAMPLES, model.parameters())
    result = decode(warm_datacenter.export("private-exact", 2), setup.layout)
    torch.testing.assert_close(result, setup.layout.gather(model).detach(), rtol=1e-4, atol=1e-6)


def test_the_noise_is_added_once_and_never_repeats(make_private, warm_datacenter, decode):
    """The noise has no seed: 7 standard errors of a mean and 8 of a variance, once in 10^9 runs.

    Noise that is added twice has a variance of 2.
    """
    noise = 1e4  # so much that the gradients do not matter
    setup = make_private(noise=noise)
    warm_datacenter.open("private-noise", setup)
    start = setup.layout.gather(build_model(setup.task, setup.job.seed)).detach()
    unit = RATE * noise * CLIP / EXAMPLES
    model = bytes(setup.layout.encode(start.clone()))
    releases = []
    for _ in range(2):  # the same command again, as after a crash of the server
        _, blob = warm_datacenter.train("private-noise", 0, 1, model, hand_back=True)
        releases.append((decode(blob, setup.layout) - start) / unit)
    size = len(start)
    for release in releases:
        assert abs(float(release.var()) - 1) < 8 * math.sqrt(2 / size) < 0.8
        assert abs(float(release.mean())) < 7 / math.sqrt(size)
    assert abs(float((releases[0] * releases[1]).mean())) < 7 / math.sqrt(size)


def test_a_step_without_examples_has_noise_only(make_private, warm_datacenter, decode):
    setup = make_private(noise=1.0, examples=EXAMPLES, batch_size=1)
    warm_datacenter.open("private-rare", setup)
    trained, _ = warm_datacenter.train("private-rare", 0, 20)  # 10 of these ranks' draws are empty
    assert trained.steps == 20
    assert trained.examples == 40  # the expected number, whatever was drawn
    assert decode(warm_datacenter.export("private-rare", 20), setup.layout).isfinite().all()


@pytest.mark.parametrize(
    ("task", "privacy", "reason"),
    [
        ("Normalised", {}, r"layer '1' \(BatchNorm1d\).*use nn.GroupNorm"),
        ("ByBatch", {}, r"training_step\(\) gives the loss of a batch.*define loss\(\)"),
        ("Centred", {"clipping": "ghost"}, r"changes with the other examples of its batch"),
        ("Shifted", {}, r"is another one when it is read again after others"),
        ("Levelled", {}, r"reading an example changes 'model.mean'"),
        ("Tempered", {}, r"trains a parameter that is none of the model"),
        ("Table", {"examples": 60}, r"local_data\(\) has 50 examples.*set it to 50"),
        ("Table", {"noise": None}, r"does not say the noise"),
    ],
)
def test_what_cannot_be_bounded_is_refused(make_private, warm_datacenter, task, privacy, reason):
    setup = make_private(task, **{"noise": 1.0, **privacy})
    with pytest.raises(UserError, match=reason):
        warm_datacenter.open("private-refused", setup)


@pytest.mark.parametrize("clipping", ["per_example", "ghost"])
def test_what_is_kept_between_batches_is_refused(make_private, warm_datacenter, clipping):
    setup = make_private("Centred", {"later": True}, noise=1.0, clipping=clipping)
    with pytest.raises(UserError, match=r"changes 'task.last'"):
        warm_datacenter.open("private-kept", setup)


def test_gradients_without_noise_are_refused(make_private, warm_datacenter):
    setup = make_private(noise=1.0)
    warm_datacenter.open("private-gradient", setup)
    model = bytes(setup.layout.encode(setup.layout.gather(build_model(setup.task, 1))))
    for statistics, what in ((False, "a mean gradient"), (True, "running statistics")):
        work = link_pb2.MeanGradient(
            run_id="private-gradient", from_step=0, until_step=1, statistics=statistics
        )
        with pytest.raises(UserError, match=rf"protects .* and {what} would get no noise"):
            warm_datacenter.ask(model, mean_gradient=work)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"datacenter.zero_stage": 2}, r"zero_stage=2 .* fully_shard .* set zero_stage = 0"),
        (
            {"datacenter.layout": "auto", "datacenter.zero_stage": 2},
            r'layout=\'auto\'.* set layout = "given"',
        ),
        ({"datacenter.tensor_parallel": 2}, r"tensor_parallel=2 .*the whole gradient"),
        ({"datacenter.pipeline_parallel": 2}, r"pipeline_parallel=2 .*the whole gradient"),
        ({"datacenter.precision": "fp16"}, r"precision='fp16'"),
        ({"datacenter.accumulate": 5}, r"accumulate=5 .* already taken in parts"),
        ({"datacenter.compile": True}, r"compile=True .* set compile = false"),
        ({"datacenter.checkpoint_activations": True}, r"checkpoint_activations=True"),
        ({"datacenter.clip_norm": 1.0}, r"clip_norm=1.0 .* remove clip_norm"),
        ({"datacenter.readers": 2}, r"readers=2 .* the size of a step is random"),
        ({"datacenter.profile_steps": [1, 2]}, r"a trace has .* remove profile_steps"),
        ({"datacenter.ranks": 0}, r"set datacenter.data_parallel"),
        ({"datacenter.batch_size": 40}, r"a step of 80 examples .* lower batch_size"),
        ({"datacenter.privacy.delta": 0.02}, r"delta=0.02 is not below 1 / 50 .* use 0.002"),
        ({"strategy.merge": "transfer"}, r"merge='transfer' .* without noise"),
        ({"exchange.buffers": "recompute"}, r"buffers='recompute' .* without noise"),
        (
            {
                "privacy.mechanism": "gaussian",
                "privacy.epsilon": 1.0,
                "privacy.delta": 1e-6,
                "privacy.population": "datacenter",
            },
            r"population='datacenter' is that of the devices",
        ),
    ],
)
def test_jobs_in_which_it_cannot_hold_are_refused(make_private, changes, reason):
    with pytest.raises(JobError, match=reason):
        with_changes(make_private().job, changes)


def test_jobs_without_it_are_as_before():
    job = Job.model_validate({"name": "x", "task": {"source": "a.py:B"}})
    assert job.datacenter.privacy is None
