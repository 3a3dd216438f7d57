"""Build a task's model, equal on all participants."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from isthmus.errors import TaskError
from isthmus.task.definition import Task
from isthmus.task.loading import user_code
from isthmus.tensors.division import Division, divide
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.tensors.fingerprint import explain_difference

if TYPE_CHECKING:
    from isthmus.job import Job


def build_model(task: Task, seed: int) -> nn.Module:
    """The task's model, initialised equally on all participants with the same seed.

    Raises:
        TaskError: `model()` raised or did not return a module.
    """
    with _seeded(seed), user_code("model()"):
        model = task.model()
    if not isinstance(model, nn.Module):
        raise TaskError(f"model() returned {type(model).__name__}, not a torch.nn.Module")
    return model


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed all random generators that a task may use, and restore their states afterwards."""
    arrays = sys.modules.get("numpy")  # only if it was imported
    states = random.getstate(), None if arrays is None else arrays.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random.seed(seed)
        if arrays is not None:
            arrays.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(states[0])
            if arrays is not None:
                arrays.random.set_state(states[1])


def build_same_model(
    task: Task,
    job: Job,
    header: bytes,
    frozen: Mapping[str, Sequence[float]],
    owner: str,
    *,
    on_device: bool = False,
) -> tuple[nn.Module, Division]:
    """Build the task's model, divided as the job says, and check that it equals the server's.

    Args:
        task: of this participant.
        job: gives the seed, and what is exchanged.
        header: `TensorLayout.header` of the server's model.
        frozen: the fingerprint of its frozen parameters.
        owner: owner of the model for the error message, e.g. "this device".
        on_device: whether personal parameters are trained.

    Raises:
        TaskError: `model()` failed, or the exchange sets or the frozen parameters differ.
        JobError: see `isthmus.tensors.division.divide`.
    """
    model = build_model(task, job.seed)
    expected = TensorLayout.from_header(header)
    division = divide(model, job.exchange, on_device=on_device)
    difference = division.exchanged.explain_difference(expected)
    difference = difference or explain_difference(model, frozen)
    if difference is not None:
        raise TaskError(f"{owner}'s model is not the server's: {difference}")
    return model, division
