"""A task of a `LightningModule` and a `LightningDataModule` of Lightning 2."""

from __future__ import annotations

import contextlib
import inspect
import numbers
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.utils.data import Dataset

from isthmus.errors import TaskError
from isthmus.integrations.carrying import (
    CarriedTask,
    Made,
    keep_only,
    library_class,
    made,
    overridden,
    refuse,
)
from isthmus.integrations.lightning_trainer import (
    UNUSED_HOOKS,
    check_arguments,
    refused_hooks,
    refused_of_data,
)
from isthmus.integrations.loader_rows import LoaderRows, collated
from isthmus.task.definition import Parameters, Participant, StepLoss

_PACKAGES = ("lightning", "pytorch_lightning")
_INDEX = "Lightning's index of the batch in an epoch"


def lightning_task(
    module: Made,
    data: Made,
    *,
    trainer: Mapping[str, Any] | None = None,
    ignore: Collection[str] = (),
) -> type[LightningTask]:
    """The class of a task of a module and its data module.

    In a task's file: ``Digits = lightning_task(LitDigits, DigitsData)``.

    Args:
        module: a class derived from `LightningModule`, which is called without arguments, or a
            function of the task: ``lambda task: LitDigits(task.settings["lr"])``.
        data: a class derived from `LightningDataModule`, likewise, or a function of the task and
            the participant, which is None for the held-out data of the run:
            ``lambda task, participant: DigitsData(task.data)``.
        trainer: arguments of the `Trainer` that this replaces, so that those which a job has to
            say are named.
        ignore: names of hooks, and of arguments of the `Trainer`, on which nothing of the result
            depends.

    Raises:
        TaskError: something would be left out that may change what is trained.
    """
    for each in (module, data):
        if not callable(each) or isinstance(each, nn.Module):
            raise TaskError(
                f"lightning_task() needs classes or functions, and got a {type(each).__name__}; "
                "each participant makes its own, with the seed of the job"
            )
    unused = check_arguments(trainer or {}, ignore)
    members = {
        "lightning_module": lambda self: made(module, self),
        "lightning_data": lambda self, participant: made(data, self, participant),
        "ignore": frozenset(ignore),
        "unused_arguments": tuple(unused),
        "__module__": __name__,
    }
    name = getattr(module, "__name__", "")
    return type(name if name.isidentifier() else "Lightning", (LightningTask,), members)


class LightningTask(CarriedTask):
    """A task of Lightning's objects; `lightning_task` makes one in a line.

    Whatever of `Task` a class derived from it defines is used instead.
    """

    ignore: Collection[str] = ()
    """Names of hooks on which nothing of the result depends."""
    unused_arguments: Sequence[str] = ()
    """Arguments of the `Trainer` that are left out."""
    _evaluating: Sequence[str] = ()
    """Names of the model's modules that are in evaluation mode also while it is trained."""

    def lightning_module(self) -> Any:
        """A new `LightningModule`."""
        raise NotImplementedError

    def lightning_data(self, participant: Participant | None) -> Any:
        """A new `LightningDataModule`; without a participant for the run's held-out data."""
        raise NotImplementedError

    @property
    def not_carried_over(self) -> Sequence[str]:
        """See `Task`."""
        model = self._known_model()
        base = library_class(type(model), "LightningModule", _PACKAGES)
        assert base is not None  # model() has checked it
        hooks = [f"{name}()" for name in overridden(type(model), base, UNUSED_HOOKS)]
        ignored = [f"{name}()" for name in refused_hooks(type(model), base, _PACKAGES)]
        return (*hooks, *ignored, *self.unused_arguments, "batch sizes and workers of the loaders")

    def model(self) -> nn.Module:
        """The `LightningModule`, after its `setup("fit")` and `configure_model()`.

        Raises:
            TaskError: it is none, or does what a run does not.
        """
        module = self.lightning_module()
        base = library_class(type(module), "LightningModule", _PACKAGES)
        name = type(module).__name__
        if base is None:
            raise TaskError(f"{name} is not derived from lightning.LightningModule")
        refuse(name, refused_hooks(type(module), base, _PACKAGES), self.ignore)
        with _attached(module, training=True):
            module.prepare_data()
            module.setup("fit")
            module.configure_model()
        if not module.automatic_optimization:
            raise TaskError(
                f"{name} has automatic_optimization=False, and a run calls the optimizer itself; "
                "write the task with training_step(model, batch, optimizer=name)"
            )
        self._evaluating = tuple(path for path, each in module.named_modules() if not each.training)
        return self._remember(module)

    def training_step(self, model: nn.Module, batch: Any) -> StepLoss:
        """The module's own, with what it logs as parts.

        Modules that were in evaluation mode when the model was made stay in it, as in Lightning.
        """
        _keep_evaluating(model, self._evaluating)
        output, logged = _step(model, "training_step", batch)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, torch.Tensor):
            raise TaskError(
                "training_step() returned no loss, with which Lightning leaves a batch out, and a "
                "run does not; return a tensor"
            )
        return StepLoss(_number(loss), parts=_parts(logged, loss))

    def evaluation_step(self, model: nn.Module, batch: Any) -> StepLoss:
        """The module's `validation_step`, with what it logs as parts."""
        output, logged = _step(model, "validation_step", batch)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if loss is None:
            loss = logged.get("val_loss")
        if not isinstance(loss, torch.Tensor):
            raise TaskError(
                "validation_step() returns no loss and logs none as 'val_loss', which held-out "
                "data are scored by; return it, or override eval_data() to return None"
            )
        return StepLoss(_number(loss), parts=_parts(logged, loss))

    def local_data(self, participant: Participant) -> Dataset[Any]:
        """The rows of `train_dataloader()`, in its order."""
        data = self._prepared(participant)
        return LoaderRows(data.train_dataloader(), "train_dataloader()")

    def eval_data(self) -> Dataset[Any] | None:
        """The rows of `val_dataloader()`; None if there is none."""
        data = self._prepared(None)
        base = library_class(type(data), "LightningDataModule", _PACKAGES)
        assert base is not None  # _prepared has checked it
        own = "val_dataloader" in vars(data) or overridden(type(data), base, ["val_dataloader"])
        if not own:
            return None
        rows = LoaderRows(data.val_dataloader(), "val_dataloader()")
        rows.check_all_are_drawn()
        return rows

    def collate(self, rows: list[Any]) -> Any:
        """A batch, as the loader makes it that the rows come from."""
        return collated(rows)

    def order(
        self, dataset: Dataset[Any], batch_size: int, generator: torch.Generator
    ) -> Sequence[int] | None:
        """The order of the loader: shuffled or in sequence, with its last batch or without."""
        return dataset.order(batch_size, generator) if isinstance(dataset, LoaderRows) else None

    def optimizer(self, parameters: Parameters, participant: Participant) -> Any:
        """What `configure_optimizers()` returns, for the given parameters."""
        with self._model_of(parameters) as model, _attached(model, training=True):
            returned = cast("Any", model).configure_optimizers()
        optimizer, scheduler = _single(returned)
        keep_only(optimizer, parameters)
        return optimizer if scheduler is None else (optimizer, scheduler)

    def _prepared(self, participant: Participant | None) -> Any:
        data = self.lightning_data(participant)
        name = type(data).__name__
        base = library_class(type(data), "LightningDataModule", _PACKAGES)
        if base is None:
            raise TaskError(f"{name} is not derived from lightning.LightningDataModule")
        refuse(name, refused_of_data(type(data), base, _PACKAGES), self.ignore)
        data.trainer = _NoTrainerOfData(training=True)
        data.prepare_data()
        data.setup("fit")
        return data


# -- calling a module -----------------------------------------------------------------------------


def _keep_evaluating(model: nn.Module, names: Sequence[str]) -> None:
    """Put modules into evaluation mode, in which they were before the model's was changed."""
    module: Any = getattr(model, "_orig_mod", model)
    for name in names:
        try:
            module.get_submodule(name).training = False
        except AttributeError:
            raise TaskError(
                f"{name!r} was in evaluation mode when the model was made, and is no module of it "
                "now; call eval() on it in training_step()"
            ) from None


def _step(model: nn.Module, name: str, batch: Any) -> tuple[Any, dict[str, Any]]:
    """What a step of the module returns, and what it logs, by name."""
    module: Any = getattr(model, "_orig_mod", model)  # torch.compile wraps forward() only
    parameters = list(inspect.signature(getattr(type(module), name)).parameters)[1:]
    if "dataloader_iter" in parameters:
        raise TaskError(f"{name}() takes dataloader_iter, and a run gives it batches; take batch")
    if isinstance(module, FSDPModule) and name not in vars(module):
        # Its parameters are gathered for forward() only, unless PyTorch is told of other methods.
        register_fsdp_forward_method(cast("nn.Module", module), name)
    arguments = (batch, _NoIndex()) if len(parameters) > 1 else (batch,)
    with _attached(module, training=name == "training_step") as logged:
        return getattr(module, name)(*arguments), logged


@contextlib.contextmanager
def _attached(module: nn.Module, *, training: bool) -> Iterator[dict[str, Any]]:
    """Within it the module has no trainer, says so when it asks, and logs into a dictionary.

    Without this a module that asks for its epoch or step is told 0.
    """
    logged: dict[str, Any] = {}

    def log(name: str, value: Any, *_: Any, **__: Any) -> None:
        logged[name] = value

    def log_dict(values: Mapping[str, Any], *_: Any, **__: Any) -> None:
        logged.update(values)

    replaced: dict[str, Any] = {
        "_trainer": _NoTrainer(training),
        "log": log,
        "log_dict": log_dict,
        "print": lambda *_, **__: None,
    }
    with contextlib.ExitStack() as stack:
        for each in module.modules():
            if library_class(type(each), "LightningModule", _PACKAGES) is None:
                continue
            own = vars(each)
            for name, value in replaced.items():
                if name in own:
                    stack.callback(own.__setitem__, name, own[name])
                else:
                    stack.callback(own.pop, name)
                own[name] = value
        yield logged


class _NoTrainer:
    """In the place of a module's trainer."""

    sanity_checking = False
    _asking = "LightningModule"

    def __init__(self, training: bool) -> None:
        self.training = training
        self.validating = not training

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise TaskError(
            f"the {self._asking} asks its Trainer for {name!r}, and a run has no Trainer; use "
            "what the batch and the module have, or the task's settings"
        )


class _NoTrainerOfData(_NoTrainer):
    """In the place of a data module's trainer: who trains divides the rows among ranks."""

    _asking = "LightningDataModule"
    world_size = num_nodes = num_devices = 1
    global_rank = local_rank = node_rank = 0


class _NoIndex:
    """In the place of `batch_idx`: it may be passed on, but no result may depend on it."""


def _refuse_index(*_: object) -> Any:
    raise TaskError(
        f"the step uses batch_idx, {_INDEX}, which a run does not have, because participants share "
        "it; remove it"
    )


for _name in (
    *("__bool__", "__index__", "__int__", "__float__", "__eq__", "__ne__", "__hash__"),
    *("__lt__", "__le__", "__gt__", "__ge__", "__format__", "__str__", "__repr__"),
    *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__mod__"),
    *("__truediv__", "__rtruediv__", "__floordiv__", "__rfloordiv__", "__rmod__", "__pow__"),
):
    setattr(_NoIndex, _name, _refuse_index)


def _number(value: torch.Tensor) -> torch.Tensor:
    """A loss as Lightning takes it: also of one element with dimensions."""
    return value.reshape(()) if value.numel() == 1 else value


def _parts(logged: Mapping[str, Any], loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """Numbers that were logged; objects of torchmetrics, which keep sums of batches, are not."""
    parts = {}
    for name, value in logged.items():
        if isinstance(value, numbers.Number):
            value = torch.tensor(float(cast("float", value)), device=loss.device)
        if isinstance(value, torch.Tensor) and value.numel() == 1 and name != "loss":
            parts[name] = value.detach().reshape(()).float()
    return parts


# -- optimizers -----------------------------------------------------------------------------------


def _single(returned: Any) -> tuple[torch.optim.Optimizer, Any]:
    """The optimizer, and the scheduler or None, of what `configure_optimizers()` returned.

    Raises:
        TaskError: there is not one optimizer, or its scheduler does not step with it.
    """
    what = "configure_optimizers()"
    optimizers, schedulers = _listed(returned)
    if len(optimizers) != 1 or len(schedulers) > 1:
        raise TaskError(
            f"{what} returned {len(optimizers)} optimizers and {len(schedulers)} schedulers, and "
            "one optimizer with at most one scheduler can be carried over; override optimizer()"
        )
    (optimizer,) = optimizers
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TaskError(f"{what} returned {type(optimizer).__name__}, not a torch.optim.Optimizer")
    if not schedulers:
        return optimizer, None
    config = schedulers[0]
    if not isinstance(config, Mapping):
        config = {"scheduler": config}
    interval = config.get("interval", "epoch")
    if interval != "step" or config.get("frequency", 1) != 1:
        raise TaskError(
            f"{what} returned a scheduler with interval={interval!r} and "
            f"frequency={config.get('frequency', 1)}, and a run counts optimizer steps and no "
            'epochs; return {"scheduler": ..., "interval": "step"}, or write the job\'s table '
            "[learning_rate] instead"
        )
    return optimizer, config["scheduler"]


def _listed(returned: Any) -> tuple[list[Any], list[Any]]:
    """Optimizers and schedulers, in one of the forms that Lightning takes."""
    if returned is None:
        return [], []
    if isinstance(returned, Mapping):
        scheduler = returned.get("lr_scheduler")
        return [returned["optimizer"]], [] if scheduler is None else [scheduler]
    if not isinstance(returned, (list, tuple)):
        return [returned], []
    if len(returned) == 2 and isinstance(returned[0], (list, tuple)):
        schedulers = returned[1]
        return list(returned[0]), (
            list(schedulers) if isinstance(schedulers, (list, tuple)) else [schedulers]
        )
    pairs = [_listed(each) for each in returned]
    return [one for each, _ in pairs for one in each], [one for _, each in pairs for one in each]
