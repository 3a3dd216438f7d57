"""A task's process that fails for what a server can cause: the device gives no zeros for it."""

import pytest

from isthmus.wire import link_pb2
from isthmus_clients.device.agent import Agent
from isthmus_clients.training.withholding import DetailsWithheld

from .test_process_host import START, WHO, Device, opening, received

BUFFERED = ("federated.secure_aggregation=true", "federated.mode=buffered")
GREEDY = """
    def forward(self, model, inputs):
        import torch
        torch.empty(1 << 40)
"""
FAILING = """
    def forward(self, model, inputs):
        raise ValueError("the patient is Ann")
"""


async def trained(device, request_id="train"):
    """What a device keeps of a training for a later sum; None for zeros."""
    work = link_pb2.TrainLocal(run_id="run", round=1, attempt=1, keep=True)
    request = link_pb2.Request(id=request_id, train_local=work)
    payload = received(device.host, START)
    await device.work(request, payload, lambda progress: None)
    return device._secure._kept.result


async def opened(device):
    agent = Agent(WHO, None, tasks=device.tasks, host=device.host)
    await agent.work(link_pb2.Request(id="open", open=opening(*BUFFERED)), None, None)
    return agent


@pytest.fixture
def make_device(tmp_path):
    made = []

    def make(methods="    pass\n"):
        made.append(Device(tmp_path, methods))
        return made[-1]

    yield make
    for device in made:
        device.close()


async def test_a_training_that_lacks_memory_is_no_vector_of_zeros(make_device, caplog):
    """The server chooses how large the batches are, and other devices may have more memory."""
    agent = await opened(make_device(GREEDY))
    with pytest.raises(DetailsWithheld):
        await trained(agent)
    assert "can't allocate memory" in caplog.text
    assert agent._secure._kept is None


SORTING = """
    def forward(self, model, inputs):
        import resource, torch
        scores = torch.rand(6_000_000)
        with open("/proc/self/status") as file:
            (used,) = [int(line.split()[1]) << 10 for line in file if line.startswith("VmData")]
        limits = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (used + (8 << 20), limits[1]))
        try:
            torch.topk(scores, 5)  # PyTorch says `std::bad_alloc`
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, limits)
"""


async def test_nor_is_one_that_lacks_memory_for_what_pytorch_keeps_in_c(make_device, caplog):
    agent = await opened(make_device(SORTING))
    with pytest.raises(DetailsWithheld):
        await trained(agent)
    assert "std::bad_alloc" in caplog.text


async def test_a_process_that_cannot_open_its_run_again_is_no_vector_of_zeros(make_device, caplog):
    """Whether it has to follows from what the server has cancelled before."""
    device = make_device()
    agent = await opened(device)
    assert await trained(agent) is not None
    device.host.process.kill("for the test")
    device.host.process.wait()
    (device.tasks / "task.py").unlink()
    with pytest.raises(DetailsWithheld):
        await trained(agent, "again")
    assert "the run could not be opened again" in caplog.text


async def test_a_cancelled_id_that_is_used_again_is_no_vector_of_zeros(make_device):
    device = make_device()
    agent = await opened(device)
    device.host.cancel("again")
    with pytest.raises(DetailsWithheld):
        await trained(agent, "again")


BREAKING = """
    def forward(self, model, inputs):
        raise RuntimeError("CUDA error: device-side assert triggered")
"""


async def test_a_process_whose_accelerator_is_broken_computes_nothing_else(make_device):
    """Later trainings would fail by what a device was asked before."""
    device = make_device(BREAKING)
    agent = await opened(device)
    process = device.host.process
    assert await trained(agent) is None
    process.wait()
    assert await trained(agent, "again") is None
    assert device.host.process is not process


async def test_a_failure_of_the_task_is_a_vector_of_zeros(make_device):
    assert await trained(await opened(make_device(FAILING))) is None
