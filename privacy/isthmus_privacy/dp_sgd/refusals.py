"""Refuse tasks in which an example's share of a step cannot be bounded, before anything trains."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils.data import Dataset, IterableDataset

from isthmus.errors import TaskError
from isthmus.task import Task
from isthmus.task.definition import defines


def check_task(task: Task, dataset: Dataset[object], table: str) -> None:
    """Refuse tasks that decide themselves what is in a batch, or score it as a whole.

    `table` is the one of the job, for the sentence.

    Raises:
        TaskError: with what to change.
    """
    if isinstance(dataset, IterableDataset):
        raise TaskError(
            f"local_data() is an iterable dataset, and differential privacy ({table}) chooses the "
            "examples of a step at random among all; return one with a length and indices"
        )
    if defines(task, "training_step"):
        raise TaskError(
            "training_step() gives the loss of a batch as a whole, and differential privacy "
            f"({table}) bounds the gradient of each example; define loss() instead"
        )
    if defines(task, "order"):
        raise TaskError(
            f"order() chooses the examples of a batch, and differential privacy ({table}) has to "
            "choose them at random; remove it"
        )


def check_trained(
    optimizers: Iterable[torch.optim.Optimizer], parameters: Iterable[torch.Tensor], table: str
) -> None:
    """Refuse optimizers that train what gets no gradient, as it is no parameter of the model.

    Args:
        optimizers: of the task.
        parameters: of the model.
        table: of the job, for the sentence.

    Raises:
        TaskError: one has another parameter.
    """
    known = {id(each) for each in parameters}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if any(each.requires_grad and id(each) not in known for each in group["params"]):
                raise TaskError(
                    "optimizer() trains a parameter that is none of the model, and differential "
                    f"privacy ({table}) computes no gradient of it; make it a parameter of the "
                    "model in model(), or leave it out of the optimizer"
                )


def check_layers(model: nn.Module, table: str) -> None:
    """Refuse layers whose output for an example depends on other examples, or that get no noise.

    Args:
        model: in training.
        table: of the job, for the sentence.

    Raises:
        TaskError: with the layer and what replaces it.
    """
    for name, module in model.named_modules():
        tracks = isinstance(module, _InstanceNorm) and module.track_running_stats
        if module.training and (tracks or isinstance(module, _BatchNorm)):
            remedy = "track_running_stats=False" if tracks else "nn.GroupNorm or nn.LayerNorm"
            raise TaskError(
                f"layer {name!r} ({type(module).__name__}) keeps statistics over the examples of "
                f"a batch, which differential privacy ({table}) does not bound; use {remedy}, or "
                "exchange.buffers = 'frozen'"
            )
        for attribute, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and parameter.is_complex():
                raise TaskError(
                    f"parameter {attribute!r} of layer {name!r} ({type(module).__name__}) has "
                    f"complex numbers, to which differential privacy ({table}) adds no noise; use "
                    "real ones, such as torch.view_as_real() of them"
                )
