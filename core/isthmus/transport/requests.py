"""Requests and replies of the link, beside what the messages themselves say."""

from __future__ import annotations

from isthmus.wire import link_pb2


def failure(reason: str) -> link_pb2.Reply:
    """The work could not be done; `reason` is a sentence for a person."""
    return link_pb2.Reply(failure=link_pb2.Failure(reason=reason))


def model_of(request: link_pb2.Request) -> link_pb2.Blob | None:
    """The content that a worker needs for a request, if any."""
    kind = request.WhichOneof("work")
    if kind == "open":
        return request.open.package.blob
    if kind == "train_local":
        return request.train_local.model
    if kind == "score":
        return request.score.models
    if kind == "mean_gradient":
        return request.mean_gradient.model
    if kind == "flower":
        return request.flower.records
    if kind == "train_steps" and request.train_steps.HasField("model"):
        return request.train_steps.model
    return None


def blob_of(reply: link_pb2.Reply) -> link_pb2.Blob:
    """The content that goes with a reply; empty without one."""
    kind = reply.WhichOneof("outcome")
    if kind == "trained":
        return reply.trained.result
    if kind == "secure_stepped":
        return reply.secure_stepped.masked
    if kind == "flower_replied":
        return reply.flower_replied.records
    return reply.exported.model if kind == "exported" else link_pb2.Blob()
