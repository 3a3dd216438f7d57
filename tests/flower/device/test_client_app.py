"""ClientApps on a device: where they import from, what they have functions for, `client_fn`."""

import numpy as np
import pytest

from isthmus.errors import TaskError
from isthmus.task import Participant
from isthmus.wire import link_pb2
from isthmus_flower.device.client_app import FlowerRun
from isthmus_flower.messages import (
    ArrayRecord,
    ConfigRecord,
    ErrorCode,
    MetricRecord,
    RecordDict,
)
from isthmus_flower.records import decode, encode

NUMPY_CLIENT = """
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp


class Client(NumPyClient):
    def __init__(self, name):
        self.name = name

    def fit(self, parameters, config):
        weight, bias = parameters
        if config["lr"] < 0:
            return [weight], 7, {}
        return [weight + config["lr"], bias], 7, {"shift": config["lr"], "name": self.name}

    def evaluate(self, parameters, config):
        return float(parameters[0].sum()), 7, {"accuracy": 0.5}


def client_fn(context):
    return Client(context.node_config["name"]).to_client()


app = ClientApp(client_fn=client_fn)
"""
PACKAGED = """
from pkg.shared import UNIT
from .shared import UNIT as same
from flwr.clientapp import ClientApp

import beside_the_package

app = ClientApp()
assert UNIT is same
"""
FLOWER = 'federated.flower.app="{}"'


def opened(make_job, base, source, *overrides, tasks=None):
    job = make_job(FLOWER.format(source), *overrides)
    work = link_pb2.OpenRun(run_id="run", job=job.model_dump_json(), base=str(base))
    return FlowerRun(work, Participant(name="a", regime="federated"), None, tasks)


def ask(run, kind, lr=0.5):
    arrays = ArrayRecord({"weight": messages_array([1.0, 2.0]), "bias": messages_array([3.0])})
    records = encode(RecordDict({"arrays": arrays, "config": ConfigRecord({"lr": lr})}))
    reply, answered = run.answer(link_pb2.AppMessage(id="1", kind=kind, node=2), records)
    return reply, None if answered is None else decode(answered)


def messages_array(values):
    from isthmus_flower.messages import Array

    return Array(np.array(values, dtype=np.float32))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_numpy_client_trains_and_evaluates(make_job, tmp_path):
    (tmp_path / "app.py").write_text(NUMPY_CLIENT)
    run = opened(
        make_job,
        tmp_path,
        "app.py:app",
        'federated.flower.strategy={name="FedAvg", options={fraction_evaluate=1.0}}',
    )
    _, trained = ask(run, "train")
    assert {name: array.numpy().tolist() for name, array in trained["arrays"].items()} == {
        "weight": [1.5, 2.5],
        "bias": [3.0],
    }
    assert trained["metrics"] == MetricRecord({"num-examples": 7, "shift": 0.5})
    assert trained["config"] == ConfigRecord({"name": "a"})
    _, evaluated = ask(run, "evaluate")
    expected = MetricRecord({"num-examples": 7, "loss": 3.0, "accuracy": 0.5})
    assert evaluated == RecordDict({"metrics": expected})

    for kind, lr, says in (
        ("train", -1.0, "fit() returned 1 arrays, and 2 were sent"),
        ("query", 0.5, "the app is made from a client_fn, which has no function for 'query' mes"),
    ):
        reply, _ = ask(run, kind, lr)
        assert reply.error_code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION
        assert reply.error.startswith(says)


@pytest.mark.parametrize("installed", [False, True])
def test_an_app_imports_from_the_root_of_its_project(installed, make_job, tmp_path):
    folder = tmp_path / "project" if installed else tmp_path
    (folder / "pkg").mkdir(parents=True)
    (folder / "pkg" / "__init__.py").touch()
    (folder / "pkg" / "shared.py").write_text("UNIT = object()\n")
    (folder / "pkg" / "client_app.py").write_text(PACKAGED)
    (folder / "beside_the_package.py").touch()
    if installed:
        run = opened(make_job, "/nowhere", "project/pkg/client_app.py:app", tasks=tmp_path)
        assert run.app is not None
        return
    by_path = opened(make_job, tmp_path, "pkg/client_app.py:app")
    by_module = opened(make_job, tmp_path, "pkg.client_app:app")
    assert by_path.app is by_module.app


def test_an_evaluation_that_an_app_does_not_have_is_declined(make_job, tmp_path):
    (tmp_path / "app.py").write_text("from flwr.clientapp import ClientApp\napp = ClientApp()\n")
    strategy = 'federated.flower.strategy={name="FedAvg", options={fraction_evaluate=0.5}}'
    with pytest.raises(TaskError, match=r"^fraction_evaluate asks for .*@app.evaluate\(\), or rem"):
        opened(make_job, tmp_path, "app.py:app", strategy)
    reply, _ = ask(opened(make_job, tmp_path, "app.py:app"), "train")
    assert reply.error == (
        "the app has no function under @app.train() for 'train' messages; it has functions for none"
    )
