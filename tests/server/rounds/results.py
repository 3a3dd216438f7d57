"""What tests read from the directory, the report and the datacenter of a run."""

from isthmus.task import load_task
from isthmus.task.scoring import build_model
from isthmus.tensors.exchange_set import TensorLayout

LAYOUT = TensorLayout.from_shapes({"bias": (3,), "weight": (3, 4)})
"""Of the model of the task that tests write."""


def read_model(path):
    """The vector of a stored model, float32 (N)."""
    return LAYOUT.decode(bytearray(path.read_bytes()))


def stored_models(store):
    """Every model on disk by file name, without the states of optimizers."""
    return {
        path.name: read_model(path)
        for path in (store.directory / "checkpoints").glob("*.safetensors")
        if not path.name.startswith("optimizer")
    }


def initial_model(folder):
    """The vector of the model that the task in a folder starts from."""
    return LAYOUT.gather(build_model(load_task("task.py:Learn", {}, base=folder), 0))


def invited_devices(report):
    """The devices of each federated round of a report."""
    return [
        [receipt["participant"] for receipt in row["receipts"]]
        for row in report["rounds"]
        if row["regime"] == "federated"
    ]


def training_requests(datacenter):
    """The requests to train that a datacenter received."""
    return [
        request.train_steps for request in datacenter.requests if request.HasField("train_steps")
    ]


def gradient_requests(datacenter):
    """The requests for a gradient that a datacenter received."""
    return [
        request.mean_gradient
        for request in datacenter.requests
        if request.HasField("mean_gradient")
    ]
