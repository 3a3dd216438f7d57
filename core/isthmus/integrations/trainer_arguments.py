"""Which arguments of a Hugging Face `Trainer`, and methods, a run of Isthmus replaces."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from isthmus.errors import TaskError
from isthmus.integrations.carrying import refuse

_CARRIED = frozenset(
    {
        *("adam_beta1", "adam_beta2", "adam_epsilon", "dataloader_drop_last", "label_names"),
        *("learning_rate", "lr_scheduler_kwargs", "lr_scheduler_type", "max_steps", "optim"),
        *("optim_args", "remove_unused_columns", "use_cache", "warmup_steps", "weight_decay"),
    }
)
"""Arguments that a task made of them follows."""

_UNUSED_BEGINNINGS = ("dataloader_", "ddp_", "eval_", "hub_", "logging_", "log_", "save_")

_UNUSED = frozenset(
    {
        *("activation_checkpointing", "activation_checkpointing_kwargs", "batch_eval_metrics"),
        *("data_seed", "debug", "disable_tqdm", "do_eval", "do_predict", "do_train"),
        *("enable_jit_checkpoint", "fsdp", "fsdp_config", "full_determinism"),
        *("gradient_checkpointing", "gradient_checkpointing_kwargs", "greater_is_better"),
        *("ignore_data_skip", "include_for_metrics", "include_num_input_tokens_seen"),
        *("length_column_name", "local_rank", "metric_for_best_model", "num_train_epochs"),
        *("output_dir", "per_device_eval_batch_size", "per_device_train_batch_size"),
        *("prediction_loss_only", "project", "push_to_hub", "report_to"),
        *("restore_callback_states_from_checkpoint", "resume_from_checkpoint", "run_name"),
        *("seed", "skip_memory_metrics", "torch_compile", "torch_compile_backend"),
        *("torch_compile_mode", "torch_empty_cache_steps", "trackio_bucket_id"),
        *("trackio_space_id", "trackio_static_space_id", "use_cpu"),
    }
)
"""Arguments that say how long, where and how observed: a job has keys of its own for these."""

_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "accelerator_config": (),
    "max_grad_norm": (None, 0, 0.0),
    "train_sampling_strategy": ("random", "sequential"),
}
"""Values with which an argument changes nothing, where these are not its default."""

_REMEDIES: Mapping[str, str] = {
    "bf16": "set federated.precision and datacenter.precision of the job",
    "deepspeed": "set what it says in [datacenter] of the job, and the rest as arguments",
    "fp16": "set federated.precision and datacenter.precision of the job",
    "gradient_accumulation_steps": "set batch_size and accumulate in [federated] and [datacenter]",
    "label_smoothing_factor": "do it in compute_loss()",
    "max_grad_norm": "set it to 0, and clip_norm in [federated] and [datacenter] of the job",
    "train_sampling_strategy": "choose 'random' or 'sequential', or override order()",
}

_PIECES: Mapping[str, str] = {
    "callbacks": "a run has no callbacks",
    "optimizers": "override create_optimizer() of the Trainer",
}
"""Arguments of `Trainer` itself that may change what is trained."""

_UNUSED_PIECES = ("compute_metrics", "preprocess_logits_for_metrics")

_CARRIED_METHODS = frozenset(
    {
        *("compute_loss", "create_optimizer", "create_scheduler", "get_decay_parameter_names"),
        *("get_optimizer_cls_and_kwargs",),
    }
)

_UNUSED_METHODS = frozenset(
    {
        *("create_model_card", "evaluate", "evaluation_loop", "get_eval_dataloader"),
        *("get_test_dataloader", "is_local_process_zero", "is_world_process_zero", "log"),
        *("log_metrics", "metrics_format", "predict", "prediction_step", "push_to_hub"),
        *("save_metrics", "save_model", "save_state", "store_flos"),
    }
)


def check_arguments(args: Any, ignore: Collection[str]) -> list[str]:
    """Refuse `TrainingArguments` that may change what is trained.

    Returns:
        Those that are left out, in words.

    Raises:
        TaskError: there are some, or they are none.
    """
    if not dataclasses.is_dataclass(args) or not hasattr(args, "lr_scheduler_type"):
        raise TaskError(
            f"args is a {type(args).__name__}, and not a transformers.TrainingArguments"
        )
    given: Any = args
    refused = {}
    unused = []
    for field in dataclasses.fields(args):
        name = field.name
        value = getattr(given, name)
        if name in _CARRIED or _is_plain(field, value):
            continue
        if name in _UNUSED or name.startswith(_UNUSED_BEGINNINGS):
            unused.append(f"TrainingArguments({name}=...)")
            continue
        refused[name] = _REMEDIES.get(name, "a job has no such key")
        if name in ignore:
            unused.append(f"TrainingArguments({name}=...)")
    if given.lr_scheduler_type != "constant" and given.max_steps <= 0:
        raise TaskError(
            f"lr_scheduler_type={str(given.lr_scheduler_type.value)!r} of TrainingArguments "
            "follows the steps of num_train_epochs, which differ between participants; set "
            "max_steps to the optimizer steps of the run, or lr_scheduler_type='constant' and the "
            "job's table [learning_rate]"
        )
    refuse("TrainingArguments", refused, ignore)
    return unused


def _is_plain(field: dataclasses.Field[Any], value: Any) -> bool:
    """Whether an argument changes nothing."""
    name = field.name
    if name in _PLAIN:
        plain = _PLAIN[name]
        return not plain or any(value == each for each in plain)
    if not value and name != "average_tokens_across_devices":
        return True
    if field.default_factory is not dataclasses.MISSING:
        return bool(value == field.default_factory())
    return bool(value == field.default)


def check_pieces(others: Mapping[str, Any], ignore: Collection[str]) -> list[str]:
    """Refuse further arguments of a `Trainer`; returns those that are left out, in words.

    Raises:
        TaskError: one may change what is trained, or is none of its arguments.
    """
    unknown = [each for each in others if each not in (*_PIECES, *_UNUSED_PIECES, "model")]
    if unknown:
        raise TaskError(f"trainer_task() has no argument {unknown[0]!r}, nor has a Trainer")
    given = [name for name, value in others.items() if not _is_nothing(value)]
    refuse("the Trainer", {name: _PIECES[name] for name in given if name in _PIECES}, ignore)
    return [f"Trainer({name}=...)" for name in given]


def _is_nothing(value: object) -> bool:
    """Whether a piece was left out: None, or a list or a pair of nothing else."""
    return value is None or (
        isinstance(value, (list, tuple)) and all(each is None for each in value)
    )


def check_methods(trainer: type, base: type, ignore: Collection[str]) -> list[str]:
    """Refuse methods of a derived `Trainer` that are not called; returns those left out, in words.

    Raises:
        TaskError: one may change what is trained.
    """
    derived = trainer.__mro__[: trainer.__mro__.index(base)]
    own = {
        name
        for each in derived
        for name in vars(each)
        if hasattr(base, name) and not name.startswith("__")
    }
    unused = sorted(own & _UNUSED_METHODS)
    refused = sorted(own - _UNUSED_METHODS - _CARRIED_METHODS)
    found = dict.fromkeys(refused, "a run trains instead of it")
    if any("__init__" in vars(each) for each in derived if not _is_of(each, base)):
        found["__init__"] = "a run makes no Trainer; set what it sets as attributes of the class"
    refuse(trainer.__name__, found, ignore)
    return [f"{name}()" for name in [*unused, *found]]


def _is_of(cls: type, base: type) -> bool:
    """Whether a class is of the library of another one."""
    return cls.__module__.partition(".")[0] == base.__module__.partition(".")[0]
