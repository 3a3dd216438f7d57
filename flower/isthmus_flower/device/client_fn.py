"""Run ClientApps that are made from a `client_fn` (`Client`, `NumPyClient`).

Flower's strategies send such an app records that it cannot read: its own adapter expects the names
of an older format (`fitins.parameters`), in which arrays have no names. The records are renamed on
the way in and out, so that the same strategies, ServerApps and checks work with both kinds of apps.
"""

from __future__ import annotations

from isthmus.errors import TaskError
from isthmus_flower.messages import (
    Array,
    ArrayRecord,
    ClientApp,
    ConfigRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)

_INPUTS = {"train": "fitins", "evaluate": "evaluateins"}
_OUTPUTS = {"train": "fitres", "evaluate": "evaluateres"}


def call_client_fn(app: ClientApp, message: Message, context: Context) -> Message:
    """Have `fit` or `evaluate` answer a message of the kind `train` or `evaluate`.

    The reply has the records `arrays`, with the names of the received ones, and `metrics`, with
    `num-examples`, the `loss` of an evaluation, and the client's own figures. Those that are not
    numbers are in the record `config`.

    Raises:
        TaskError: there is not exactly one record of arrays, the client returned another number
            of arrays, or its `Status` says that it failed.
    """
    kind = message.metadata.message_type
    received = list(message.content.array_records.values())
    if len(received) != 1:
        raise TaskError(f"a client_fn takes one record of arrays, and {len(received)} were sent")
    (arrays,) = received
    config = {
        key: value
        for each in message.content.config_records.values()
        for key, value in each.items()
    }
    message.content = RecordDict(
        {
            f"{_INPUTS[kind]}.parameters": arrays,
            f"{_INPUTS[kind]}.config": ConfigRecord(config),
        }
    )
    names = list(arrays)  # the client may take the record apart
    reply = app(message, context)
    if reply.has_content():
        reply.content = _current_format(reply.content, _OUTPUTS[kind], names)
    return reply


def _current_format(records: RecordDict, output: str, names: list[str]) -> RecordDict:
    status = records.config_records[f"{output}.status"]
    if status["code"]:  # Code.OK is 0
        raise TaskError(f"the client answered: {str(status['message']) or 'no reason'}")
    examples = records.metric_records[f"{output}.num_examples"]["num_examples"]
    metrics = MetricRecord({"num-examples": examples})
    other = ConfigRecord()
    if output == "evaluateres":
        metrics["loss"] = records.metric_records[f"{output}.loss"]["loss"]
    for name, value in records.config_records[f"{output}.metrics"].items():
        if isinstance(value, int | float):
            metrics[name] = value
        else:
            other[name] = value
    answer = RecordDict({"metrics": metrics})
    if output == "fitres":
        trained = records.array_records[f"{output}.parameters"]
        parts = [Array(part.numpy()) for part in trained.values() if part.data]
        if len(parts) != len(names):
            raise TaskError(f"fit() returned {len(parts)} arrays, and {len(names)} were sent")
        answer["arrays"] = ArrayRecord(dict(zip(names, parts, strict=True)))
    if other:
        answer["config"] = other
    return answer
