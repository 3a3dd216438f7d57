"""Tasks whose code sees parameters, batches or devices: trained in stacks as alone, or refused."""

import re

import pytest
import torch
from tests.simulation.devices.stacks import RAGGED, updates

from isthmus.errors import TaskError
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.wire import link_pb2
from isthmus_clients.training.local_run import DeviceRun
from isthmus_simulation.devices.device import devices_of
from isthmus_simulation.devices.fleet import VirtualFleet

TWO_LAYERS = """
def model(self):
    first, second = nn.Linear(4, 5), nn.Linear(5, 3)
    first.requires_grad_({trained})
    return nn.Sequential(first, nn.ReLU(), second)
"""
EMBEDDED = """
def local_data(self, participant):
    draw = torch.Generator().manual_seed(int(participant.name[-1]))
    count = 5 + 4 * int(participant.name[-1])
    numbers = torch.randint(0, 4, (count, 6), generator=draw)
    return torch.utils.data.TensorDataset(numbers, torch.randint(0, 3, (count,), generator=draw))
def model(self):
    return nn.Sequential(nn.Embedding(4, 5, padding_idx=0), nn.Flatten(), nn.Linear(30, 3))
"""


def optimizer(text):
    return f"def optimizer(self, parameters, participant):\n    return {text}\n"


def forward(text, more=""):
    """A model with a parameter `k` (3 x 4) whose forward pass is given."""
    return f"""
def model(self):
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.k, self.scale = nn.Linear(4, 3), nn.Parameter(torch.ones(()))
            {more}
        def forward(self, x):
            return {text}
    return Own()
"""


SETTINGS = "federated.local_steps=7", "federated.clip_norm=0.5"

SAME = {
    "weight decay by dimensions": optimizer(
        "torch.optim.AdamW([{'params': [p for p in parameters if p.ndim > 1]},"
        " {'params': [p for p in parameters if p.ndim < 2], 'weight_decay': 0.0}],"
        " lr=0.1, weight_decay=0.5)"
    ),
    "groups by place": optimizer(
        "torch.optim.SGD([{'params': parameters[:1]}, {'params': parameters[1:], 'lr': 0.5}], 0.1)"
    ),
    "some of the parameters": optimizer("torch.optim.SGD(parameters[:1], lr=0.1)"),
    "names of frozen ones": TWO_LAYERS.format(trained=False)
    + optimizer("torch.optim.SGD([parameters.named['2.bias'], *parameters[:2]], lr=0.1)"),
    "a state from the start": optimizer("torch.optim.Adagrad(parameters, 0.1, 0, 0, 0.5)"),
    "a scheduler of momentum": optimizer(
        "(s := torch.optim.SGD(parameters, 0.1, 0.0), torch.optim.lr_scheduler.CyclicLR("
        "s, 0.1, 0.3, 7, base_momentum=0.0, max_momentum=0.9))"
    ),
    "the name of the device without effect": "def optimizer(self, parameters, participant):\n"
    "    self.last = len(participant.name)\n"
    "    made = torch.optim.SGD(parameters, lr=0.1)\n"
    "    return made, torch.optim.lr_scheduler.LambdaLR(made, lambda step: 0.9**step)\n",
    "an index that is padding": EMBEDDED,
    "an order without a broken example": """
def local_data(self, participant):
    data = rows(6 + 4 * int(participant.name[-1]), seed=int(participant.name[-1]))
    data.tensors[0][0] = float("nan")
    return data
def order(self, dataset, batch_size, generator):
    return 1 + torch.randperm(len(dataset) - 1, generator=generator)
""",
    "1, 1.0 and True": forward(
        "self.k((((x > 0) + 1).float())) + self.k(((x > 0) + True).float()) * self.scale"
    ),
    "constants in another order": forward("self.k(x) * torch.ones_like(x.t()).t().view(-1)[0]"),
    "a number as a parameter": forward("self.k(x) * self.scale"),
    "a number with a state": forward("self.k(x) * self.scale")
    + optimizer("torch.optim.Adagrad(parameters, 0.1)"),
    "decay without a gradient": forward("self.k(x)", "self.unused = nn.Linear(9, 9)")
    + optimizer("torch.optim.AdamW(parameters, weight_decay=0.9)"),
}


@pytest.mark.parametrize("methods", SAME.values(), ids=SAME)
async def test_an_update_in_a_stack_is_that_of_a_single_device(opening, methods):
    ragged = "" if "local_data" in methods else RAGGED
    work = opening(*SETTINGS, methods=ragged + methods)
    devices = devices_of(VirtualFleet(6))
    real = [DeviceRun(work, device.participant, None) for device in devices]
    start = real[0].layout.gather(real[0].model)
    await assert_trained_alike(devices, real, work, start)


async def assert_trained_alike(devices, real, work, start, round_=1):
    """Returns the mean of the devices' models."""
    layout, ends = real[0].layout, []
    updated = await updates(devices, work, start, layout, round_)
    for run, (update, _) in zip(real, updated, strict=True):
        memory = memoryview(bytearray(layout.encode(start)))
        request = link_pb2.TrainLocal(run_id="run", round=round_, attempt=1)
        request.position.CopyFrom(link_pb2.RoundPosition(start=1, steps=7, cohort=3))
        run.train(request, memory, lambda progress: None, lambda: False, result=memory)
        torch.testing.assert_close(update, layout.decode(memory), rtol=1e-4, atol=1e-6)
        ends.append(start - update)
    return torch.stack(ends).mean(0)


LOSS = """
def loss(self, output, target):
    return nn.functional.cross_entropy(output, target, reduction="none") + {more}
"""
BY_ROUND = {
    "a part of the loss": LOSS.format(more="self.part * output.square().mean(-1)")
    + "def optimizer(self, parameters, participant):\n"
    "    self.part = participant.round - 1.0\n"
    "    return torch.optim.SGD(parameters, lr=0.1)\n",
    "the distance from the round's model": LOSS.format(
        more="sum((a - b).square().sum() for a, b in zip(self.own.parameters(), self.first))"
    )
    + "first = ()\n"
    "def model(self):\n"
    "    self.own = nn.Linear(4, 3)\n"
    "    return self.own\n"
    "def optimizer(self, parameters, participant):\n"
    "    self.first = [each.detach().clone() for each in parameters]\n"
    "    return torch.optim.SGD(parameters, lr=0.1)\n",
    "rates by the norms of the weights": optimizer(
        "torch.optim.SGD([{'params': [p], 'lr': 0.1 * float(p.detach().norm())}"
        " for p in parameters], lr=0.1)"
    ),
}


@pytest.mark.parametrize("methods", BY_ROUND.values(), ids=BY_ROUND)
async def test_what_changes_with_the_round_changes_in_stacks_too(opening, methods):
    """A recorded step would go on with what it was in the first round."""
    work = opening("federated.local_steps=7", methods=RAGGED + methods)
    devices = devices_of(VirtualFleet(3))
    real = [DeviceRun(work, device.participant, None) for device in devices]
    model = real[0].layout.gather(real[0].model)
    for round_ in (1, 2, 3):
        model = await assert_trained_alike(devices, real, work, model, round_)


async def test_devices_with_other_optimizers_than_a_stack_before_are_noticed(opening):
    """In each of the first two rounds all of the cohort have the same."""
    own = optimizer("torch.optim.SGD(parameters, lr=0.1 * (1 + int(participant.name[-1]) // 2))")
    work = opening("federated.local_steps=7", methods=own)
    layout = TensorLayout.from_header(work.layout)
    devices = devices_of(VirtualFleet(4))
    await updates(devices[:2], work, torch.zeros(15), layout)
    with pytest.raises(TaskError, match="another one for client-2 than for client-0"):
        await updates(devices[2:], work, torch.zeros(15), layout, 2)


async def test_a_device_with_an_optimizer_of_its_own_ends_training_in_stacks(opening):
    """It is none of those that were compared at first."""
    own = optimizer("torch.optim.SGD(parameters, lr=0.5 if participant.name[-1] == '3' else 0.1)")
    work = opening("federated.local_steps=7", methods=RAGGED + own)
    fleet = VirtualFleet(9, mode="auto")
    devices = devices_of(fleet)
    compared, joined = [*devices[:3], devices[4]], devices[2:4]
    start = torch.zeros(15)
    layout = TensorLayout.from_header(work.layout)
    await updates(compared, work, start, layout)
    fleet.run.mode = "stacked"  # whatever the times were
    fleet.run._has_chosen = True
    real = [DeviceRun(work, device.participant, None) for device in joined]
    await assert_trained_alike(joined, real, work, start, 2)
    assert fleet.run.mode == "one-by-one"
    assert "optimizer() makes another one for client-3 than for client-0" in fleet.run.in_words
    with pytest.raises(TaskError, match="optimizer\\(\\) makes another one for client-3"):
        await updates(devices_of(VirtualFleet(4)), work, start, layout)


LATER = {
    "a rate": optimizer(
        "torch.optim.SGD(parameters, 0.1 * max(1, participant.round - 1)"
        " ** int(participant.name[-1]))"
    ),
    "a schedule": optimizer(
        "(s := torch.optim.SGD(parameters, 0.1), torch.optim.lr_scheduler.StepLR("
        "s, 9, 0.5 ** int(participant.name[-1])))"
    ),
    "a function of the step": optimizer(
        "(s := torch.optim.SGD(parameters, 0.1), torch.optim.lr_scheduler.LambdaLR("
        "s, lambda step: 1.0 if step < 5 else 0.5 ** int(participant.name[-1])))"
    ),
    "a part of the loss": LOSS.format(more="self.part * output.square().mean(-1)")
    + "def optimizer(self, parameters, participant):\n"
    "    self.part = float(participant.round > 2 and participant.name[-1] == '2')\n"
    "    return torch.optim.SGD(parameters, lr=0.1)\n",
}


@pytest.mark.parametrize("methods", LATER.values(), ids=LATER)
async def test_devices_that_are_told_apart_in_later_rounds_are_noticed(opening, methods):
    work = opening("federated.local_steps=7", methods=methods)
    layout = TensorLayout.from_header(work.layout)
    devices = devices_of(VirtualFleet(3))
    told = ""
    for round_ in (1, 2, 3):
        results = await updates(
            devices, work, torch.zeros(15), layout, round_, return_exceptions=True
        )
        told = told or " ".join(str(each) for each in results if isinstance(each, TaskError))
    assert re.search(r"optimizer\(\) (makes another one for client-|asks in its steps which)", told)


async def test_what_changes_with_the_round_is_noticed_if_the_first_device_diverges(opening):
    broken = """
def local_data(self, participant):
    data = rows(8, seed=sum(participant.name.encode()))
    if participant.name == "client-0":
        data.tensors[0].fill_(float("inf"))
    return data
"""
    work = opening("federated.local_steps=7", methods=broken + BY_ROUND["a part of the loss"])
    layout = TensorLayout.from_header(work.layout)
    start = torch.linspace(-1, 1, layout.size)
    both = devices_of(VirtualFleet(2)), devices_of(VirtualFleet(2))
    for round_ in (1, 2, 3):
        together = await updates(both[0], work, start, layout, round_, return_exceptions=True)
        ((alone, _),) = await updates(both[1][1:], work, start, layout, round_)
        assert isinstance(together[0], TaskError)
        torch.testing.assert_close(together[1][0], alone)


async def test_short_batches_of_later_rounds_are_compared_too(opening):
    """Whole batches of the first round have the same mean in a stack as alone."""
    sizes = """
def local_data(self, participant):
    return rows(8 if int(participant.name[-1]) < 2 else 6, seed=sum(participant.name.encode()))
"""
    work = opening("federated.local_epochs=1", methods=sizes + forward("self.k(x - x.mean(0))"))
    layout = TensorLayout.from_header(work.layout)
    start = torch.linspace(-1, 1, layout.size)
    devices = devices_of(VirtualFleet(4))
    await updates(devices[:2], work, start, layout)
    with pytest.raises(TaskError, match="the gradient of stacked models differs by"):
        await updates(devices, work, start, layout, 2)


OTHER = {
    "a mean over the batch": (forward("self.k(x - x.mean(0))"), "differs by"),
    "the device's own rate": (
        optimizer("torch.optim.SGD(parameters, lr=0.1 * (1 + int(participant.name[-1])))"),
        "makes another one for client-",
    ),
    "a hook of the gradient": (
        forward("self.k(x)", "self.scale = None; self.k.weight.register_hook(lambda g: -g)"),
        "cannot use hooks of the gradient",
    ),
    "a mean over the batch, with dropout": (
        forward("self.k(nn.functional.dropout(x, 0.1, self.training) - x.mean(0))"),
        "differs by",
    ),
    "other examples of the batch, drawn in an order": (
        forward("self.k(x + x[torch.randperm(len(x))])"),
        "differs by",
    ),
    "other examples of the batch, drawn by number": (
        forward("self.k(x + x[torch.randint(0, len(x), (len(x),))])"),
        "differs by",
    ),
    "a number of calls": (
        forward("self.k(x) * (self.calls.append(1) or 1 + len(self.calls) / 500)", "self.calls=[]"),
        "computes another loss when it is called again",
    ),
    "coins of Python": (
        forward("self.k(x) if __import__('random').random() < 0.5 else self.k(-x)"),
        "cannot draw numbers from Python's random or NumPy",
    ),
    "coins of NumPy": (
        forward("self.k(x) if __import__('numpy').random.rand() < 0.5 else self.k(-x)"),
        "cannot draw numbers from Python's random or NumPy",
    ),
    "a norm of the whole": (
        optimizer("type('Lars', (torch.optim.SGD,), {})(parameters, lr=0.1)"),
        "cannot use Lars",
    ),
    "a hook of the step": (
        "def optimizer(self, parameters, participant):\n"
        "    made = torch.optim.SGD(parameters, lr=0.1)\n"
        "    made.register_step_pre_hook(lambda *given: None)\n"
        "    return made\n",
        "cannot use hooks",
    ),
    "a loss by time": (
        "def loss(self, output, target):\n"
        "    return nn.functional.cross_entropy(output, target, reduction='none').repeat(2, 1).T"
        ".reshape(2, -1)\n",
        "a loss for each of the 4 examples",
    ),
    "examples of two shapes": (
        "def local_data(self, participant):\n"
        "    n = 4 + int(participant.name[-1]) % 2\n"
        "    return torch.utils.data.TensorDataset(torch.ones(8, 2, n), torch.zeros(8).long())\n"
        "def model(self):\n    return nn.Sequential(nn.AdaptiveAvgPool1d(4), nn.Flatten(),"
        " nn.Linear(8, 3))\n",
        "need examples of one shape",
    ),
}


@pytest.mark.parametrize(("methods", "reason"), OTHER.values(), ids=OTHER)
async def test_what_stacked_models_train_otherwise_is_refused_or_trained_alone(
    opening, methods, reason
):
    ragged = "" if "local_data" in methods else RAGGED
    work = opening("federated.local_epochs=1", methods=ragged + methods)
    layout = TensorLayout.from_header(work.layout)
    start = 0.1 * torch.arange(layout.size)
    with pytest.raises(TaskError, match=reason):
        await updates(devices_of(VirtualFleet(6)), work, start, layout)
    fleet = VirtualFleet(6, mode="auto")
    await updates(devices_of(fleet), work, start, layout)
    assert fleet.run.mode == "one-by-one"
    assert reason in fleet.run.in_words


async def test_stacked_models_say_that_they_draw_other_random_numbers(opening):
    dropout = "def model(self):\n    return nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3))\n"
    work = opening("federated.local_steps=2", methods=RAGGED + dropout)
    layout = TensorLayout.from_header(work.layout)
    fleet = VirtualFleet(3)
    await updates(devices_of(fleet), work, torch.zeros(layout.size), layout)
    assert fleet.run.in_words.endswith("as on real devices up to rounding and random numbers")
