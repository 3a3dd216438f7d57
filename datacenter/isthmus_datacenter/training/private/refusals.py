"""Refuse tasks in which an example's share of a step cannot be bounded, before anything trains."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils.data import Dataset, IterableDataset

from isthmus.errors import TaskError
from isthmus.job.datacenter import DatacenterSection
from isthmus.task import Task
from isthmus.task.definition import defines


def check_task(task: Task, dataset: Dataset[object]) -> None:
    """Refuse tasks that decide themselves what is in a batch, or score it as a whole.

    Raises:
        TaskError: with what to change.
    """
    if isinstance(dataset, IterableDataset):
        raise TaskError(
            "local_data() is an iterable dataset, and differential privacy (datacenter.privacy) "
            "chooses the examples of a step at random among all; return one with a length and "
            "indices"
        )
    if defines(task, "training_step"):
        raise TaskError(
            "training_step() gives the loss of a batch as a whole, and differential privacy "
            "(datacenter.privacy) bounds the gradient of each example; define loss() instead"
        )
    if defines(task, "order"):
        raise TaskError(
            "order() chooses the examples of a batch, and differential privacy "
            "(datacenter.privacy) has to choose them at random; remove it"
        )


def check_numbers(section: DatacenterSection, examples: int, replicas: int) -> None:
    """Refuse data or ranks with which the sampling probability would be another.

    Raises:
        TaskError: with what to change.
    """
    assert section.privacy is not None
    if section.privacy.noise is None:
        raise TaskError(
            "the request to open the run does not say the noise of datacenter.privacy; the server "
            "may be older"
        )
    if examples != section.privacy.examples:
        raise TaskError(
            f"local_data() has {examples} examples, and the sampling probability follows from "
            f"datacenter.privacy.examples={section.privacy.examples}; set it to {examples}"
        )
    if section.batch_size * replicas != section.private_batch:
        raise TaskError(
            f"there are {replicas} ranks, and the sampling probability follows from "
            f"{section.private_batch // section.batch_size}; set datacenter.data_parallel to "
            f"{replicas}"
        )


def check_layers(model: nn.Module) -> None:
    """Refuse layers whose output for an example depends on other examples.

    Args:
        model: in training.

    Raises:
        TaskError: with the layer and what replaces it.
    """
    for name, module in model.named_modules():
        tracks = isinstance(module, _InstanceNorm) and module.track_running_stats
        if module.training and (tracks or isinstance(module, _BatchNorm)):
            remedy = "track_running_stats=False" if tracks else "nn.GroupNorm or nn.LayerNorm"
            raise TaskError(
                f"layer {name!r} ({type(module).__name__}) keeps statistics over the examples of "
                "a batch, which differential privacy (datacenter.privacy) does not bound; use "
                f"{remedy}, or exchange.buffers = 'frozen'"
            )
