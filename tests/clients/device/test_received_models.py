"""What a device does with changes of its model, whatever a server announces or sends."""

import pytest
import torch
from tests.server.rounds.results import LAYOUT

from isthmus.errors import UpdateError
from isthmus.task import Participant
from isthmus.transport.blobs import describe
from isthmus.wire import link_pb2
from isthmus_clients.device.agent import Agent
from isthmus_privacy.compression.model_change import ChangeCodec

CODEC = ChangeCodec(LAYOUT.size, LAYOUT.size, 3)


def ignore(progress):
    pass


def request(model, *changes, id_="train"):
    work = link_pb2.TrainLocal(run_id="run", round=1, attempt=1, model=describe(model))
    for base, payload in changes:
        work.changes.append(link_pb2.ModelChange(base=base, blob=describe(payload)))
    return link_pb2.Request(id=id_, train_local=work)


@pytest.fixture
async def device(write_task, make_job, tmp_path):
    """An agent with an open run that has trained from a first model, and that model."""
    write_task("pass")
    agent = Agent(Participant(name="a", regime="federated"), None)
    job = make_job("federated.download_bits=3").model_dump_json()
    work = link_pb2.OpenRun(run_id="run", job=job, base=str(tmp_path), layout=LAYOUT.header)
    await agent.work(link_pb2.Request(open=work), None, ignore)
    first = LAYOUT.encode(torch.zeros(LAYOUT.size))
    await received(agent, request(first), first)
    return agent, first


async def received(agent, asked, payload):
    """Have the device receive a payload and train; returns the model it began from."""
    assert agent.models.wanted(asked).size == len(payload)
    buffer = agent.buffer(asked, len(payload))
    buffer[:] = payload
    began = []
    train = agent.host.train

    def spy(id_, work, model, progress):
        began.append(bytes(model))
        return train(id_, work, model, progress)

    agent.host.train = spy
    try:
        await agent.work(asked, buffer, ignore)
    finally:
        agent.host.train = train
    agent.acknowledged(asked, True, "")
    return began[0]


def changed(first):
    """A later model, and the change that leads to it."""
    later = bytearray(first)
    payload = CODEC.encode(LAYOUT.decode(later), torch.randn(LAYOUT.size))
    CODEC.apply(LAYOUT.decode(later), payload)
    return later, payload


async def test_a_device_trains_from_the_model_that_a_change_leads_to(device):
    agent, first = device
    second, change = changed(first)
    third, next_change = changed(second)
    base = describe(first).sha256
    assert await received(agent, request(second, (base, change)), change) == second
    # The third is reached from the second, which the device has computed itself.
    base = describe(second).sha256
    assert await received(agent, request(third, (base, next_change)), next_change) == third


async def test_only_a_change_of_the_model_that_is_here_is_wanted(device):
    agent, first = device
    second, change = changed(first)
    other = request(second, (b"x" * 32, change))
    assert agent.models.wanted(other) == describe(second)
    large = bytearray(len(second))
    assert agent.models.wanted(request(second, (describe(first).sha256, large))) == describe(second)
    await agent.work(link_pb2.Request(close=link_pb2.CloseRun(run_id="run")), None, ignore)
    asked = request(second, (describe(first).sha256, change))
    assert agent.models.wanted(asked) == describe(second)


@pytest.mark.parametrize("size", [16 * CODEC.nbytes + 1, 17 * CODEC.nbytes])
async def test_changes_of_a_larger_size_are_refused_before_memory_is_allocated(device, size):
    agent, first = device
    asked = request(changed(first)[0], (describe(first).sha256, bytes(size)))
    asked.train_local.model.size = 1 << 40
    with pytest.raises(UpdateError, match=f"a change of the model in {size} bytes was announced"):
        agent.buffer(asked, size)


async def test_a_change_that_is_cut_off_is_refused(device):
    agent, first = device
    second, change = changed(first)
    asked = request(second, (describe(first).sha256, change[:-1]))
    agent.models.wanted(asked)
    buffer = agent.buffer(asked, len(change) - 1)
    buffer[:] = change[:-1]
    with pytest.raises(UpdateError, match="the changes of its model cannot be used"):
        await agent.work(asked, buffer, ignore)


async def test_a_change_to_another_model_than_announced_is_refused(device):
    agent, first = device
    second, change = changed(first)
    change[-1] ^= 0x3F
    with pytest.raises(UpdateError, match="do not lead to the announced model"):
        await received(agent, request(second, (describe(first).sha256, change)), change)
    assert agent.models.wanted(request(second, (describe(first).sha256, change))).size == len(
        second
    )


async def test_a_change_whose_model_was_replaced_meanwhile_is_refused(device):
    agent, first = device
    second, change = changed(first)
    asked = request(second, (describe(first).sha256, change))
    buffer = agent.buffer(asked, len(change))
    buffer[:] = change
    third, _ = changed(second)
    await received(agent, request(third, id_="another"), third)
    with pytest.raises(UpdateError, match="is not here any more"):
        await agent.work(asked, buffer, ignore)
    assert await received(agent, request(second), second) == second
