"""A task of the pieces of a `Trainer` of Hugging Face's transformers."""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from isthmus.errors import TaskError
from isthmus.integrations.carrying import CarriedTask, epoch_order, keep_only, library_class
from isthmus.integrations.trainer_arguments import check_arguments, check_methods, check_pieces
from isthmus.task.definition import Parameters, Participant, StepLoss


def trainer_task(
    trainer: type | None = None,
    *,
    args: Any,
    train_dataset: Any,
    model_init: Callable[[], nn.Module] | None = None,
    eval_dataset: Any = None,
    data_collator: Callable[[list[Any]], Any] | None = None,
    processing_class: Any = None,
    compute_loss_func: Callable[..., Any] | None = None,
    optimizer_cls_and_kwargs: tuple[type, dict[str, Any]] | None = None,
    ignore: Collection[str] = (),
    **others: Any,
) -> type[TrainerTask]:
    """The class of a task, from the arguments that a `Trainer` is made with.

    ``Reviews = trainer_task(model_init=build, args=arguments, train_dataset=rows)`` in a task's
    file.

    Args:
        trainer: a class derived from `transformers.Trainer`, whose `compute_loss`, optimizer and
            scheduler are used; None for `transformers.Trainer`.
        args: `TrainingArguments`.
        train_dataset: rows, or a function of the task and the participant that returns that
            participant's: ``lambda task, participant: load_from_disk(task.data)``.
        model_init: makes the model. A model itself is refused: each participant makes one, with
            the seed of the job.
        eval_dataset: held-out rows, or a function of the task.
        data_collator: as in `Trainer`.
        processing_class: as in `Trainer`, for its default of `data_collator`.
        compute_loss_func: as in `Trainer`.
        optimizer_cls_and_kwargs: as in `Trainer`.
        ignore: names of arguments and methods on which nothing of the result depends.
        others: further arguments of `Trainer`, which are refused if they may change what is
            trained.

    Raises:
        TaskError: something would be left out that may change what is trained.
    """
    cls: type = _library().Trainer if trainer is None else trainer
    base = library_class(cls, "Trainer", ["transformers"])
    if base is None:
        raise TaskError(f"{cls.__name__} is not derived from transformers.Trainer")
    if model_init is None or isinstance(model_init, nn.Module) or others.get("model") is not None:
        raise TaskError(
            "trainer_task() needs model_init, a function that makes the model, and no model: each "
            "participant makes its own, with the seed of the job"
        )
    if isinstance(eval_dataset, Mapping):
        raise TaskError(
            "eval_dataset has several data sets, and a run evaluates on one; choose one"
        )
    unused = [
        *check_pieces(others, ignore),
        *check_methods(cls, base, ignore),
        *check_arguments(args, ignore),
    ]
    if args.dataloader_drop_last and eval_dataset is not None:
        unused.append("TrainingArguments(dataloader_drop_last=...) of evaluations")
    pieces = SimpleNamespace(
        trainer=cls,
        args=args,
        model_init=model_init,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        data_collator=data_collator,
        processing_class=processing_class,
        compute_loss_func=compute_loss_func,
        optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
    )
    members = {
        "pieces": pieces,
        "not_carried_over": (*unused, "batch sizes and number of epochs of TrainingArguments"),
        "__module__": __name__,
    }
    return type("TrainerPieces", (TrainerTask,), members)


class TrainerTask(CarriedTask):
    """A task of the pieces of a `Trainer`; `trainer_task` makes one in a line.

    Whatever of `Task` a class derived from it defines is used instead.
    """

    pieces: Any
    """The arguments of the `Trainer`, by name."""

    def __init__(self, settings: Mapping[str, Any], data: Any = None) -> None:
        """See `Task`."""
        super().__init__(settings, data)
        self._trainer: Any = None
        self._collator: Callable[[list[Any]], Any] | None = None

    def model(self) -> nn.Module:
        """What `model_init` returns."""
        model = self.pieces.model_init()
        if not isinstance(model, nn.Module):
            raise TaskError(
                f"model_init() returned {type(model).__name__}, not a torch.nn.Module; it takes no "
                "trial of a search here"
            )
        config: Any = getattr(model, "config", None)
        if config is not None:
            config.use_cache = self.pieces.args.use_cache
        self._trainer = _stand_in(self.pieces, model)
        self._collator = _collator(self.pieces, self._trainer, model)
        return self._remember(model)

    def training_step(self, model: nn.Module, batch: Any) -> StepLoss:
        """`compute_loss` of the trainer; tokens count alike in all batches, as they do there."""
        items = self._trainer._get_num_items_in_batch([batch], _device_of(batch))
        loss = self._loss(model, batch, num_items_in_batch=items)
        return StepLoss(loss, weight=None if items is None else float(items))

    def evaluation_step(self, model: nn.Module, batch: Any) -> StepLoss:
        """`compute_loss` of the trainer; batches count by their examples, as they do there."""
        return StepLoss(self._loss(model, batch))

    def local_data(self, participant: Participant) -> Dataset[Any]:
        """`train_dataset`."""
        source = self.pieces.train_dataset
        rows: Dataset[Any] = source(self, participant) if inspect.isfunction(source) else source
        return rows

    def eval_data(self) -> Dataset[Any] | None:
        """`eval_dataset`."""
        source = self.pieces.eval_dataset
        rows: Dataset[Any] | None = source(self) if inspect.isfunction(source) else source
        return rows

    def collate(self, rows: list[Any]) -> Any:
        """`data_collator`, without columns that the model does not take."""
        if self._collator is None:
            self._known_model()
        assert self._collator is not None  # model() made it
        return self._collator(rows)

    def order(
        self, dataset: Dataset[Any], batch_size: int, generator: torch.Generator
    ) -> Sequence[int] | None:
        """The order that `train_sampling_strategy` and `dataloader_drop_last` say."""
        args = self.pieces.args
        return epoch_order(
            len(dataset),  # type: ignore[arg-type]  # map-style: streams have no order
            batch_size,
            generator,
            shuffled=args.train_sampling_strategy == "random",
            whole=args.dataloader_drop_last,
        )

    def optimizer(self, parameters: Parameters, participant: Participant) -> Any:
        """The trainer's own optimizer, and its scheduler unless the rate is constant."""
        args = self.pieces.args
        with self._model_of(parameters) as model:
            trainer = self._trainer
            trainer.model = model
            trainer.optimizer = None
            trainer.lr_scheduler = None
            try:
                optimizer = trainer.create_optimizer()
                keep_only(optimizer, parameters)
                if args.lr_scheduler_type == "constant":
                    return optimizer
                return optimizer, trainer.create_scheduler(args.max_steps, optimizer)
            finally:
                trainer.model = None
                trainer.optimizer = None
                trainer.lr_scheduler = None

    def _loss(self, model: nn.Module, batch: Any, **items: Any) -> torch.Tensor:
        trainer = self._trainer
        trainer.model = model
        try:
            # A copy: compute_loss() may take the labels out.
            loss: torch.Tensor = trainer.compute_loss(model, copy.copy(batch), **items)
        finally:
            trainer.model = None
        return loss


def _stand_in(pieces: Any, model: nn.Module) -> Any:
    """A trainer that computes losses and makes optimizers, and neither trains nor opens anything.

    `Trainer.__init__` would seed the process, place the model and begin reports; what follows is
    its part about the model, of transformers 5.
    """
    library = _library()
    args = copy.copy(pieces.args)
    vars(args)["_n_gpu"] = 1  # a rank and a device have one, whatever the machine has
    inner = library.unwrap_peft_model(model)
    if hasattr(inner, "accepts_loss_kwargs"):
        takes_items = inner.accepts_loss_kwargs
    else:
        taken = inspect.signature(inner.forward).parameters.values()
        takes_items = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in taken)
    loss = library.LOSS_MAPPING.get(getattr(inner, "loss_type", None))
    of_decoder = loss is library.ForCausalLMLoss
    two_parts = getattr(getattr(inner, "config", None), "is_encoder_decoder", False)
    trainer: Any = object.__new__(_without_training(pieces.trainer))
    vars(trainer).update(
        _loss_shifts_labels=of_decoder and not two_parts,
        _signature_columns=None,
        accelerator=SimpleNamespace(
            parallelism_config=None,
            num_processes=1,
            gather=lambda items: items,  # of all ranks: losses are averaged by their weights
            unwrap_model=lambda wrapped, **_: wrapped,
        ),
        args=args,
        is_deepspeed_enabled=False,
        is_fsdp_enabled=False,
        compute_loss_func=pieces.compute_loss_func,
        label_names=library.find_labels(type(inner))
        if args.label_names is None
        else args.label_names,
        label_smoother=None,
        lr_scheduler=None,
        model=None,
        model_accepts_loss_kwargs=takes_items,
        optimizer=None,
        optimizer_cls_and_kwargs=pieces.optimizer_cls_and_kwargs,
        processing_class=pieces.processing_class,
    )
    return trainer


def _library() -> Any:
    """The module of `Trainer`, which has what its `__init__` uses."""
    return importlib.import_module("transformers.trainer")


def _without_training(cls: type) -> type:
    """The class of a trainer without what only `train()` gives it."""

    def absent(_: object, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise TaskError(
            f"{cls.__name__} uses self.{name}, which a Trainer has when it was made or trains, and "
            "a run makes none; use the model, the batch and self.args"
        )

    return type(cls.__name__, (cls,), {"__getattr__": absent, "__module__": __name__})


def _collator(pieces: Any, trainer: Any, model: nn.Module) -> Callable[[list[Any]], Any]:
    """The trainer's collator for a model."""
    library = _library()
    collator = pieces.data_collator
    if collator is None:
        pads = (library.PreTrainedTokenizerBase, library.SequenceFeatureExtractor)
        words = pieces.processing_class
        collator = library.DataCollatorWithPadding(words) if isinstance(words, pads) else None
    trainer.model = model
    try:
        removing: Callable[[list[Any]], Any] = trainer._get_collator_with_removed_columns(
            library.default_data_collator if collator is None else collator
        )
    finally:
        trainer.model = None
    return removing


def _device_of(batch: Any) -> torch.device:
    """The device of a batch."""
    tensors = (each for each in dict(batch).values() if isinstance(each, torch.Tensor))
    return next((each.device for each in tensors), torch.device("cpu"))
