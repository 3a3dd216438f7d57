"""The owner's limits on CPU and memory."""

import os
import subprocess
import sys
import time

import pytest
import torch

from isthmus.task import Participant
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.wire import link_pb2
from isthmus_clients.device.agent import Agent
from isthmus_clients.device.owner_limits import LimitsGuard, OwnerLimits, PrivacyLimits
from isthmus_clients.device.resource_limits import CpuThrottle

LAYOUT = TensorLayout.from_shapes({"bias": (3,), "weight": (3, 4)})


class SimulatedProcess:
    """A process that uses some cores fully, except while it sleeps."""

    def __init__(self, cores):
        self.cores = cores
        self.time = self.cpu = 0.0

    def work(self, seconds):
        self.time += seconds
        self.cpu += seconds * self.cores

    def sleep(self, seconds):
        self.time += seconds

    def throttle(self, percent):
        return CpuThrottle(percent, used=lambda: self.cpu, now=lambda: self.time, sleep=self.sleep)


@pytest.mark.parametrize(
    ("percent", "cores", "takes"), [(50, 1, 20.0), (50, 2, 40.0), (150, 2, 13.3), (100, 1, 10.0)]
)
def test_pauses_keep_the_average_cpu_use_within_the_limit(percent, cores, takes):
    process = SimulatedProcess(cores)
    throttle = process.throttle(percent)
    for _ in range(10):
        process.work(1.0)
        throttle.pause()
    assert process.time == pytest.approx(takes, rel=0.01)
    process.time += 1000.0  # idle time is not credited
    throttle.begin()
    began = process.time
    process.work(1.0)
    throttle.pause()
    assert process.time - began == pytest.approx(max(takes / 10, 1.0), rel=0.01)


async def test_training_stays_within_the_cpu_limit(write_task, make_job, tmp_path):
    write_task()
    limits = OwnerLimits(cpu_percent=60, privacy=PrivacyLimits(secure_aggregation=False))
    guard = LimitsGuard(limits, tmp_path / "usage.json")
    agent = Agent(Participant(name="a", regime="federated"), None, guard=guard)
    job = make_job("federated.local_steps=20").model_dump_json()
    work = link_pb2.OpenRun(run_id="run", job=job, base=str(tmp_path), layout=LAYOUT.header)
    await agent.work(link_pb2.Request(open=work), None, lambda progress: None)
    request = link_pb2.Request(train_local=link_pb2.TrainLocal(run_id="run"))
    began, used = time.monotonic(), time.process_time()
    model = bytearray(LAYOUT.encode(torch.zeros(LAYOUT.size)))
    await agent.work(request, model, lambda progress: None)
    took, used = time.monotonic() - began, time.process_time() - used
    assert used < 0.7 * took  # including the CPU time of this test itself


def test_the_kernel_enforces_the_memory_limit(tmp_path):
    """In a separate process, since the limit cannot be removed."""
    code = """
import os
from isthmus_clients.device import resource_limits
from isthmus_clients.device.owner_limits import OwnerLimits
resource_limits.apply_limits(OwnerLimits(cpu_percent=50, memory_mb=256))
print(os.nice(0))
try:
    bytearray(300 << 20)
except MemoryError:
    print("refused")
bytearray(100 << 20)
"""
    output = subprocess.check_output([sys.executable, "-c", code], text=True)
    niceness = max(10, os.nice(0))  # niceness cannot be lowered again
    assert output == f"{niceness}\nrefused\n"
