"""An Isthmus task as a Flower ClientApp, for SuperNodes of Flower's own runtime.

In the app's module::

    app = client_app(Path(__file__).with_name("job.toml"))

A SuperNode is a device: its node config may have a `name`, a shard as `partition-id` and
`num-partitions`, and the path of its `data`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from isthmus.task import Participant
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.wire import link_pb2
from isthmus_clients.training.local_run import DeviceRun
from isthmus_flower.hosted.job_limits import hosted_job
from isthmus_flower.messages import (
    ArrayRecord,
    ClientApp,
    Context,
    Message,
    MetricRecord,
    RecordDict,
    read_record,
    record_of,
)


def client_app(job_file: Path) -> ClientApp:
    """Create an app that trains the task of a job as an Isthmus device does."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        """Train the model in `arrays` locally for one round.

        Raises:
            UserError: the job or the task cannot be used here, or its code failed.
        """
        model = message.content["arrays"]
        assert isinstance(model, ArrayRecord)
        run = _open(job_file, model, context)
        payload = run.layout.encode(run.layout.gather(run.model))
        read_record(model, run.layout.parts(run.layout.decode(payload)))
        work = link_pb2.TrainLocal(round=_round_of(message))
        trained = run.train(work, payload, lambda progress: None, lambda: False)
        figures: dict[str, Any] = {"num-examples": trained.examples, **trained.training}
        if "loss" in trained.training:
            figures["train_loss"] = trained.training["loss"]
        arrays = record_of(run.layout.parts(run.layout.gather(run.model)))
        records = RecordDict({"arrays": arrays, "metrics": MetricRecord(figures)})
        return Message(records, reply_to=message)

    return app


def _open(job_file: Path, model: ArrayRecord, context: Context) -> DeviceRun:
    node: dict[str, Any] = dict(context.node_config)
    shard = None
    if {"partition-id", "num-partitions"} <= node.keys():
        shard = int(node["partition-id"]), int(node["num-partitions"])
    name = str(node.get("name", f"node-{context.node_id}"))
    return DeviceRun(
        link_pb2.OpenRun(
            run_id=str(context.run_id),
            job=hosted_job(job_file, context.run_config).model_dump_json(),
            base=str(job_file.parent),
            layout=TensorLayout.from_shapes(
                {key: array.shape for key, array in model.items()}
            ).header,
        ),
        Participant(name=name, regime="federated", shard=shard),
        Path(node["data"]) if "data" in node else None,
    )


def _round_of(message: Message) -> int:
    """Round number from the message's configuration; 1 if a strategy sends none."""
    for config in message.content.config_records.values():
        number = config.get("server-round")
        if isinstance(number, int):
            return number
    return 1
