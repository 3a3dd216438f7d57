"""What stacked models cannot train."""

from __future__ import annotations

import torch

from isthmus.errors import JobError, TaskError
from isthmus.job.federated import FederatedSection
from isthmus.task.definition import defines
from isthmus_clients.training.local_run import DeviceRun


def check_run(run: DeviceRun) -> None:
    """Refuse a task and a division of its model that stacked models cannot have.

    Raises:
        TaskError: there is a loss of a batch as a whole, a personal parameter, a matrix that is
            changed by factors, a running statistic, a parameter that is not float32, or an endless
            data set.
    """
    if run.personal.size:
        raise TaskError(
            f"stacked models cannot keep {run.personal.entries[0].name!r} apart; remove "
            "exchange.personal and exchange.buffers = 'local', or train one by one"
        )
    if run.job.exchange.low_rank is not None:
        raise TaskError(
            "stacked models train whole matrices, and exchange.low_rank has factors, of a rank of "
            "each device; remove it, or train one by one"
        )
    if statistics := run.layout.statistics:
        raise TaskError(
            f"stacked models cannot keep running statistics ({statistics[0]!r}); "
            "set exchange.buffers = 'frozen', use GroupNorm, or train one by one"
        )
    for name, parameter in run.model.named_parameters():
        if parameter.dtype != torch.float32:
            raise TaskError(
                f"stacked models have float32 parameters, and {name!r} has {parameter.dtype}; "
                "train one by one"
            )
    if defines(run.task, "training_step"):
        raise TaskError(
            "stacked models compute the losses of all examples together, and training_step() is "
            "the loss of one device's batch; train one by one"
        )
    if run.data.is_stream:
        raise TaskError(
            "stacked models are trained on data sets with a length, and local_data() is an "
            "iterable one; train one by one"
        )


def check_settings(settings: FederatedSection) -> None:
    """Refuse settings of a device's training that stacked models cannot have.

    Raises:
        JobError: there is one.
    """
    if settings.privacy is not None:
        raise JobError(
            "stacked models train on batches, and federated.privacy bounds the gradient of each "
            "example of each device; train one by one"
        )
    if settings.compression is not None and settings.compression.step_ahead:
        raise JobError(
            "stacked models begin at one model, and with federated.compression each device begins "
            "at its own, with a part of what it has not sent; set its key step_ahead = 0, or train "
            "one by one"
        )
    if settings.frozen_dtype != "float32":
        raise JobError(
            "stacked models train together in float32, without federated.frozen_dtype; remove it, "
            "or train one by one"
        )
    if settings.checkpoint_activations:
        raise JobError(
            "stacked models keep the activations of their step, and "
            "federated.checkpoint_activations computes them again; remove it, or train one by one"
        )
    if settings.precision != "fp32" or settings.compile:
        raise JobError(
            "stacked models train together in float32, without federated.precision and "
            "federated.compile; remove these, or train one by one"
        )
