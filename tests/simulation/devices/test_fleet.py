"""Virtual devices compared with real ones."""

import pytest
import torch
from tests.simulation.devices.stacks import POSITION, RAGGED, updates

from isthmus.errors import JobError, TaskError
from isthmus.task import Participant
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.wire import link_pb2
from isthmus_clients.training.local_run import DeviceRun
from isthmus_simulation.devices.device import VirtualDevice, devices_of
from isthmus_simulation.devices.fleet import VirtualFleet
from isthmus_simulation.devices.stacks.training import DeviceTraining


@pytest.mark.parametrize(
    "overrides",
    [
        ("federated.local_steps=7",),
        ("federated.local_epochs=2",),
        ("federated.local_epochs=1", "federated.proximal=0.5"),
        ("federated.local_epochs=2", "federated.normalized_steps=3"),
        ("federated.local_steps=7", "learning_rate.schedule=step", "learning_rate.step_size=2"),
        ("federated.local_steps=0",),
        (
            "federated.local_steps=7",
            "federated.clip_norm=0.3",
            "learning_rate.schedule=step",
            "learning_rate.step_size=2",
        ),
    ],
)
@pytest.mark.parametrize(
    "optimizer",
    [
        "SGD(parameters, lr=0.3)",
        "SGD(parameters, lr=1)",
        "SGD(parameters, lr=0.3, momentum=0.9)",
        "AdamW(parameters)",
    ],
)
@pytest.mark.parametrize(("with_gradient_sent", "scale"), [(False, 0.0), (True, 4.0)])
async def test_a_virtual_device_trains_as_a_real_one_does(
    opening, overrides, optimizer, with_gradient_sent, scale
):
    """Also with shards of different sizes, so different numbers of steps and short last batches.

    A stack has four devices, so that the last one has empty places.
    """
    methods = (
        RAGGED
        + f"def optimizer(self, parameters, participant):\n    return torch.optim.{optimizer}"
    )
    work = opening(*overrides, methods=methods)
    devices = devices_of(VirtualFleet(6))
    real = [DeviceRun(work, device.participant, None) for device in devices]
    layout = real[0].layout
    start = layout.gather(real[0].model)
    gradient = 0.1 * torch.linspace(-1, 1, layout.size) if with_gradient_sent else None
    virtual = await updates(devices, work, start, layout, gradient=gradient, scale=scale)
    sent = layout.gradient_and_update if scale else layout
    along = [] if gradient is None else [layout.encode(gradient)]
    for run, (update, trained) in zip(real, virtual, strict=True):
        room = layout.gradient_room if scale else 0
        memory = memoryview(bytearray(room) + layout.encode(start))
        request = link_pb2.TrainLocal(run_id="run", round=1, attempt=1, gradient_scale=scale)
        request.position.CopyFrom(POSITION)
        result = memory[: sent.nbytes]
        expected = run.train(
            request, memory[room:], lambda progress: None, lambda: False, *along, result=result
        )
        torch.testing.assert_close(update, sent.decode(result), rtol=1e-4, atol=1e-6)
        assert (trained.examples, trained.steps) == (expected.examples, expected.steps)
        assert dict(trained.training) == pytest.approx(dict(expected.training), rel=1e-5)


async def test_a_factor_of_gradients_that_overflows_does_not_make_an_update_unusable(opening):
    work = opening("federated.local_steps=2")
    devices = devices_of(VirtualFleet(2))
    layout = TensorLayout.from_header(work.layout)
    start = torch.zeros(layout.size)
    for sent, trained in await updates(devices, work, start, layout, scale=1e300):
        assert trained.steps == 2
        assert sent.isfinite().all()
        assert sent[: layout.size].abs().max() > 1e37


async def test_a_virtual_device_scores_as_a_real_one_does(opening):
    work = opening(methods=RAGGED)
    layout = TensorLayout.from_header(work.layout)
    draw = torch.Generator().manual_seed(0)
    models = [torch.randn(layout.size, generator=draw) for _ in range(2)]
    payload = b"".join(layout.encode(model) for model in models)
    candidates = [[0], [1], [1, 0]]
    asked = link_pb2.Score(
        run_id="run", candidates=[link_pb2.Candidate(of=numbers) for numbers in candidates]
    )
    for device in devices_of(VirtualFleet(2)):
        await device.work(link_pb2.Request(id="o", open=work), None, None)
        request = link_pb2.Request(id="s", score=asked)
        reply, _ = await device.work(request, bytearray(payload), None)
        real = DeviceRun(work, device.participant, None)
        assert list(reply.scored.scores) == real.score(bytearray(payload), candidates)


async def test_an_update_does_not_depend_on_the_other_devices(opening):
    work = opening("federated.local_steps=3")
    layout = TensorLayout.from_header(work.layout)
    start = torch.zeros(layout.size)
    alone, together = devices_of(VirtualFleet(4))[2:3], devices_of(VirtualFleet(4))
    ((one, _),) = await updates(alone, work, start, layout)
    everyone = await updates(together, work, start, layout)
    torch.testing.assert_close(one, everyone[2][0])
    assert not torch.equal(everyone[1][0], everyone[2][0])


async def test_a_device_that_diverges_does_not_affect_the_others(opening):
    work = opening(
        "federated.local_steps=3",
        methods="""
        def local_data(self, participant):
            data = rows(8, seed=sum(participant.name.encode()))
            if participant.name == "client-1":
                data.tensors[0].fill_(float("inf"))
            return data
        """,
    )
    layout = TensorLayout.from_header(work.layout)
    start = torch.zeros(layout.size)
    alone, together = devices_of(VirtualFleet(3)), devices_of(VirtualFleet(3))
    del alone[1]
    expected = await updates(alone, work, start, layout)
    first, failed, last = await updates(together, work, start, layout, return_exceptions=True)
    assert str(failed).startswith("the update of client-1 is not finite")
    for (update, trained), (same, as_before) in zip((first, last), expected, strict=True):
        torch.testing.assert_close(update, same)
        assert trained.training["loss"] == pytest.approx(as_before.training["loss"])


async def test_an_optimizer_that_would_mix_devices_is_refused(opening):
    work = opening(methods="def optimizer(self, p, who):\n    return torch.optim.LBFGS(p)")
    layout = TensorLayout.from_header(work.layout)
    with pytest.raises(TaskError, match="stacked models cannot use LBFGS"):
        await updates(devices_of(VirtualFleet(2)), work, torch.zeros(layout.size), layout)


def test_a_device_has_its_shard():
    assert VirtualDevice(VirtualFleet(4), 2).participant == Participant(
        name="client-2", regime="federated", shard=(2, 4)
    )


async def test_updates_that_were_taken_stay_when_the_others_cannot_be_stacked(opening, monkeypatch):
    """The server reads them where they are, while other processes still train."""
    device = VirtualDevice(VirtualFleet(3), 0)
    run = VirtualFleet(3, mode="auto").open(opening(), device.participant)
    run.mode, run._is_checked, run._has_chosen = "stacked", True, True
    batch = [DeviceTraining(run.shared, bytearray(b"model"), 0) for _ in range(3)]
    trained, found = [], {}

    async def train(work, devices, take):
        begun = [bytes(each.memory) for each in devices]
        trained.append(begun)
        for number, each in enumerate(devices):
            each.memory[:] = b"moved"
            if run.mode == "stacked" and number:
                raise TaskError("the second one is another one")
            take(number, f"{run.mode} {number}")

    monkeypatch.setattr(run, "_train", train)
    await run.train(link_pb2.TrainLocal(), batch, found.__setitem__)
    assert trained == [[b"model"] * 3, [b"model"] * 2]
    assert found == {0: "stacked 0", 1: "one-by-one 0", 2: "one-by-one 1"}
    assert [bytes(each.memory) for each in batch] == [b"moved"] * 3
    assert "the second one is another one" in run.in_words


def test_private_devices_are_not_stacked(opening):
    keys = ("federated.privacy.epsilon=5", "federated.privacy.delta=1e-3")
    request = opening(*keys, "federated.local_steps=2")
    with pytest.raises(JobError, match=r"federated.privacy bounds the gradient of each example"):
        VirtualFleet(3, mode="stacked").open(request, VirtualDevice(VirtualFleet(3), 0).participant)
    run = VirtualFleet(3, mode="auto").open(request, VirtualDevice(VirtualFleet(3), 0).participant)
    assert run.mode == "one-by-one"
    assert "federated.privacy" in run.in_words
