"""The model of a job without its values: what is exchanged, and what a device holds."""

from __future__ import annotations

import dataclasses
from typing import Self

from isthmus.job import Job
from isthmus.task import Task
from isthmus.task.scoring import build_model
from isthmus.task.scoring.building import build_without_memory
from isthmus.task.scoring.frozen_form import ParameterMemory, check_types, smaller_types
from isthmus.tensors.division import Division, divide


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelParts:
    """What a plan needs of a model."""

    division: Division
    parameters: int
    """Bytes that a device holds of parameters and buffers."""
    gradients: int
    """Bytes of the gradients of what a device trains."""

    @classmethod
    def of(cls, job: Job, task: Task) -> Self:
        """Build the model, without memory for its parameters if its code allows that.

        Raises:
            UserError: it cannot be built, or its tensors cannot be divided as the job says.
        """
        built = build_without_memory(task, job.seed)
        model = build_model(task, job.seed) if built is None else built
        division = divide(model, job.exchange, on_device=True, unfilled=built is not None)
        choice = job.federated.frozen_dtype
        if choice != "float32":
            check_types(smaller_types(model, choice), choice)
        memory = ParameterMemory.of(model, division.exchanged, division.personal)
        buffers = sum(each.nbytes for each in model.buffers())
        gradients = sum(each.nbytes for each in model.parameters() if each.requires_grad)
        parameters = buffers + memory.frozen[choice] + memory.trained
        return cls(division=division, parameters=parameters, gradients=gradients)
