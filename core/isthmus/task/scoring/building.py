"""Build a task's model, equal on all participants."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from isthmus.errors import JobError, TaskError, UserError
from isthmus.start.loading import ComparedStart, ModelStart
from isthmus.start.manifest import StartPlace
from isthmus.start.plan import Exceptions, state_of
from isthmus.start.slices import StartSlices
from isthmus.start.unfilled import parameters_without_memory
from isthmus.task.definition import Task
from isthmus.task.loading import user_code
from isthmus.task.scoring.frozen_form import (
    FrozenForm,
    can_be_moved,
    change_types,
    check_types,
    smaller_types,
)
from isthmus.task.scoring.host_generators import HostGenerators, seeded
from isthmus.tensors.division import Division, divide
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.tensors.fingerprint import (
    explain_difference,
    explain_other_values,
    fingerprint,
    fingerprint_of_rows,
)

if TYPE_CHECKING:
    from isthmus.job import Job


def build_model(task: Task, seed: int) -> nn.Module:
    """The task's model, initialised equally on all participants with the same seed.

    Raises:
        TaskError: `model()` raised or did not return a module.
    """
    with seeded(seed), user_code("model()"):
        model = task.model()
    if not isinstance(model, nn.Module):
        raise TaskError(f"model() returned {type(model).__name__}, not a torch.nn.Module")
    return model


def build_without_memory(task: Task, seed: int) -> nn.Module | None:
    """The task's model with parameters on the device `meta`, to be filled from files.

    None if that is not the same model: its code needs values of parameters, keeps them elsewhere
    than in their modules, or tensors that are computed from them, or draws random numbers for
    something else, which would be others than with the parameters before them.
    """
    try:
        with seeded(seed), user_code("model()"), parameters_without_memory() as originals:
            before = _generator_states()
            model = task.model()
            drew = _generator_states() != before
    except TaskError:  # building it with memory says why, or succeeds
        return None
    if drew or not isinstance(model, nn.Module):
        return None
    if _keeps_computed(model) or originals.are_missed():
        return None
    return model


def _keeps_computed(model: nn.Module) -> bool:
    """Whether modules have tensors without memory besides parameters, such as copies of them.

    Nothing would give them their values.
    """
    return any(
        isinstance(each, torch.Tensor) and each.is_meta and not isinstance(each, nn.Parameter)
        for module in model.modules()
        for each in tree_leaves([*vars(module).values()])
    )


def _generator_states() -> tuple[object, ...]:
    """The states of the generators that a task may draw from."""
    return tuple(torch.get_rng_state().tolist()), HostGenerators.now()


def build_start_model(task: Task, job: Job, base: Path) -> nn.Module:
    """The model that a run of a job begins with: the task's, filled from the job's `model.start`.

    Without a start it is that of `build_model`.

    Args:
        task: of the job.
        job: the job.
        base: directory of its relative paths.

    Raises:
        TaskError: see `build_model`, or `start_names()` failed.
        JobError: the files of the start cannot be used.
    """
    model = build_model(task, job.seed)
    fill_from_start(model, task, job, base)
    return model


def fill_from_start(
    model: nn.Module,
    task: Task,
    job: Job,
    base: Path,
    place: StartPlace | None = None,
    rounded: Collection[str] = (),
) -> None:
    """Copy the values of the job's `model.start` into a model, if the job has one.

    With a `place` they are read there; what is frozen is then mapped into memory if it can be, so
    that all processes of a machine have it once. Values of parameters with names in `rounded` are
    rounded to their type.

    Raises:
        TaskError: `start_names()` failed.
        JobError: the files of the start cannot be used.
    """
    start = start_of(_placed(job, place), base)
    if start is not None:
        mapped = place is not None and place.mapped
        start.fill(model, _start_names(task, model), mapped=mapped, rounded=rounded)


def _placed(job: Job, place: StartPlace | None) -> Job:
    """The job with the places where the files of its start are on this machine."""
    if place is None:
        return job
    base_there = None if place.base is None else str(place.base)
    there = {"start": str(place.start), "base": base_there}
    return job.model_copy(update={"model": job.model.model_copy(update=there)})


def start_without_memory(task: Task, job: Job, base: Path) -> tuple[nn.Module, StartSlices] | None:
    """The model that a run begins with, without memory, and the files with all of its values.

    None if the job has no start, or if values are not in its files or `model()` needs them.

    Args:
        task: of the job.
        job: the job.
        base: directory of its relative paths.

    Raises:
        JobError: the files of the start cannot be used.
    """
    if job.model.start is None:
        return None
    model = build_without_memory(task, job.seed)
    if model is None:
        return None
    try:
        compared = compare_with_start(model, task, job, base, converts=False)
    except UserError as error:
        raise JobError(f"model.start: {error}") from None
    if not StartSlices.are_enough(compared):
        return None
    return model, StartSlices(base / job.model.start, compared, job.model.sha256)


def compare_with_start(
    model: nn.Module, task: Task, job: Job, base: Path, *, converts: bool = True
) -> ComparedStart:
    """Compare a model with the files of the job's `model.start`, and copy nothing.

    `converts`: see `ModelStart.compare`.

    Raises:
        TaskError: `start_names()` failed.
        JobError: the job has no start.
        UserError: the files of the start cannot be used.
    """
    start = start_of(job, base)
    if start is None:
        raise JobError("the job has no model.start")
    return start.compare(model, _start_names(task, model), converts=converts)


def _start_names(task: Task, model: nn.Module) -> Mapping[str, str] | None:
    with user_code("start_names()"):
        return task.start_names([name for each in state_of(model) for name in each.names])


def start_of(job: Job, base: Path) -> ModelStart | None:
    """The files that the model of a job starts from; None for the values of the seed."""
    section = job.model
    if section.start is None:
        return None
    return ModelStart(
        base / section.start,
        section.sha256,
        None if section.base is None else base / section.base,
        Exceptions(section.fresh, section.unused),
    )


def is_all_exchanged(model: nn.Module, division: Division) -> bool:
    """Whether every tensor of a model's state comes with each round's model."""
    exchanged = set(division.exchanged.names)
    return all(exchanged.intersection(each.names) for each in state_of(model))


def build_same_model(
    task: Task,
    job: Job,
    header: bytes,
    frozen: Mapping[str, Sequence[float]],
    owner: str,
    *,
    base: Path,
    on_device: bool = False,
    place: StartPlace | None = None,
) -> tuple[nn.Module, Division]:
    """Build the task's model, divided as the job says, and check that it equals the server's.

    On a device the files of the job's `model.start` are only read if something of the model is not
    exchanged: the rest comes with each round's model.

    Args:
        task: of this participant.
        job: gives the seed, what the model starts from, and what is exchanged.
        header: `TensorLayout.header` of the server's model.
        frozen: the fingerprint of its frozen parameters.
        owner: owner of the model for the error message, e.g. "this device".
        base: directory of the job's relative paths on this machine.
        on_device: whether personal parameters are trained.
        place: where the files of the start are on this machine; None for where the job says.

    Raises:
        TaskError: `model()` failed, or the exchange sets or the frozen parameters differ.
        JobError: see `isthmus.tensors.division.divide`, and `fill_from_start`.
    """
    model = build_model(task, job.seed)
    expected = TensorLayout.from_header(header)
    division = divide(model, job.exchange, on_device=on_device)
    difference = division.exchanged.explain_difference(expected)
    if difference is None:
        if not on_device or not is_all_exchanged(model, division):
            fill_from_start(model, task, job, base, place)
        difference = explain_difference(model, frozen)
    if difference is not None:
        raise TaskError(f"{owner}'s model is not the server's: {difference}")
    return model, division


def build_rank_model(
    task: Task,
    job: Job,
    header: bytes,
    frozen: Mapping[str, Sequence[float]],
    owner: str,
    *,
    base: Path,
) -> tuple[nn.Module, Division]:
    """The model of `build_same_model` on a rank, as the job's `datacenter.frozen_dtype` says.

    Raises:
        TaskError: see `build_same_model` and `build_small_model`.
        JobError: likewise.
    """
    if job.datacenter.frozen_dtype == "float32":
        return build_same_model(task, job, header, frozen, owner, base=base)
    small = build_small_model(task, job, header, frozen, owner, base=base, on_device=False)
    return small[:2]


def build_small_model(
    task: Task,
    job: Job,
    header: bytes,
    frozen: Mapping[str, Sequence[float]],
    owner: str,
    *,
    base: Path,
    place: StartPlace | None = None,
    on_device: bool = True,
) -> tuple[nn.Module, Division, FrozenForm]:
    """The model of `build_same_model`, with frozen parameters as the job's `frozen_dtype` says.

    They are read in that type. On a device the model is built without memory if that is the same
    one, and else freed of theirs before anything is read; what is trained has its values there by
    each round's model, and no others. On a rank it has those of the initial model.

    Raises:
        TaskError: see `build_same_model`; or nothing is frozen that could have the type, or the
            model has the memory of a frozen parameter elsewhere, too.
        JobError: see `build_same_model`; or a frozen parameter is not in the files as it is.
    """
    choice = job.federated.frozen_dtype if on_device else job.datacenter.frozen_dtype
    # What is personal begins with the values of the seed, and what is trained on a rank.
    unmade = on_device and not job.exchange.personal
    model = build_without_memory(task, job.seed) if unmade else None
    if model is None or not can_be_moved(model):
        model = build_model(task, job.seed)
    division = divide(model, job.exchange, on_device=on_device, unfilled=True)
    difference = division.exchanged.explain_difference(TensorLayout.from_header(header))
    if difference is not None:
        raise TaskError(f"{owner}'s model is not the server's: {difference}")
    # On a rank nobody trains what is personal, and it keeps the values of the seed.
    personal = division.personal.names
    types = smaller_types(model, choice, personal)
    check_types(types, choice, "federated" if on_device else "datacenter")
    change_types(model, types)
    there = _placed(job, place)
    try:
        compared = compare_with_start(model, task, there, base, converts=False)
    except UserError as error:
        raise JobError(f"model.start: {error}") from None
    unchanging = [
        name
        for name, each in model.named_parameters()
        if not each.requires_grad and name not in personal
    ]
    form = FrozenForm(base / str(there.model.start), compared, types, unchanging)
    fill_from_start(model, task, job, base, place, rounded=types)
    in_int8 = form.of_type(torch.int8)
    # Those in int8 are compared as they are in the files, of which they are within half a scale.
    others = [name for name, _ in model.named_parameters() if name not in in_int8]
    found = fingerprint_of_rows(model, form.read, others) | fingerprint(model, in_int8)
    rounded = {name: dtype for name, dtype in types.items() if name not in in_int8}
    difference = explain_other_values(found, frozen, rounded)
    if difference is not None:
        raise TaskError(f"{owner}'s model is not the server's: {difference}")
    form.fill_int8(model)
    return model, division, form
