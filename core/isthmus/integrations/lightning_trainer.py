"""Which hooks of Lightning's modules, and arguments of its `Trainer`, a run of Isthmus replaces."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from isthmus.errors import TaskError
from isthmus.integrations.carrying import refuse, replaced

_IN_STEP = "do it in training_step()"
_CALLS = "a run calls the optimizer itself"
_KEEPS = "a run keeps the model that its last step made"
_MODES = "a run sets the modes of modules itself"
_REMOVED = "Lightning 2 has no such hook"

CARRIED_HOOKS = frozenset(
    {
        *("configure_model", "configure_optimizers", "forward", "prepare_data", "setup"),
        *("training_step", "validation_step"),
        # A loader of the data module takes the place of the module's own.
        *("train_dataloader", "val_dataloader"),
        # Only the module's own code calls or reads these.
        *("CHECKPOINT_HYPER_PARAMS_KEY", "CHECKPOINT_HYPER_PARAMS_NAME"),
        *("CHECKPOINT_HYPER_PARAMS_TYPE", "all_gather", "automatic_optimization", "cpu", "cuda"),
        *("current_epoch", "device", "device_mesh", "double", "dtype", "example_input_array"),
        *("fabric", "float", "freeze", "global_rank", "global_step", "half", "hparams"),
        *("hparams_initial", "load_from_checkpoint", "local_rank", "logger", "loggers"),
        *("lr_schedulers", "on_gpu", "optimizers", "remove_ignored_hparams"),
        *("save_hyperparameters", "strict_loading", "to", "to_onnx", "to_tensorrt"),
        *("to_torchscript", "toggle_optimizer", "toggled_optimizer", "trainer", "type"),
        *("unfreeze", "untoggle_optimizer"),
    }
)
"""What a run calls, or what the module calls itself."""

REFUSED_HOOKS: Mapping[str, str] = {
    "backward": _CALLS,
    "clip_gradients": "set federated.clip_norm and datacenter.clip_norm of the job",
    "configure_callbacks": "a run has no callbacks",
    "configure_gradient_clipping": "set federated.clip_norm and datacenter.clip_norm of the job",
    "configure_sharded_model": "use configure_model()",
    "lr_scheduler_step": _CALLS,
    "on_after_backward": _CALLS,
    "on_after_batch_transfer": _IN_STEP,
    "on_before_backward": _IN_STEP,
    "on_before_batch_transfer": _IN_STEP,
    "on_before_optimizer_step": _CALLS,
    "on_before_zero_grad": _CALLS,
    "on_fit_end": _KEEPS,
    "on_fit_start": "do it in setup()",
    "on_train_batch_end": _IN_STEP,
    "on_train_batch_start": _IN_STEP,
    "on_train_end": _KEEPS,
    "on_train_epoch_end": "a run has rounds and no epochs",
    "on_train_epoch_start": "a run has rounds and no epochs",
    "on_train_start": "do it in setup()",
    "on_validation_model_eval": _MODES,
    "on_validation_model_train": _MODES,
    "on_validation_model_zero_grad": _CALLS,
    "optimizer_step": _CALLS,
    "optimizer_zero_grad": _CALLS,
    "training_epoch_end": _REMOVED,
    "training_step_end": _REMOVED,
    "transfer_batch_to_device": _IN_STEP,
    "validation_epoch_end": _REMOVED,
    "validation_step_end": _REMOVED,
}
"""Hooks that may change what is trained, with what to do instead."""

UNUSED_HOOKS = (
    "log",
    "log_dict",
    "on_load_checkpoint",
    "on_predict_batch_end",
    "on_predict_batch_start",
    "on_predict_end",
    "on_predict_epoch_end",
    "on_predict_epoch_start",
    "on_predict_model_eval",
    "on_predict_start",
    "on_save_checkpoint",
    "on_test_batch_end",
    "on_test_batch_start",
    "on_test_end",
    "on_test_epoch_end",
    "on_test_epoch_start",
    "on_test_model_eval",
    "on_test_model_train",
    "on_test_start",
    "on_validation_batch_end",
    "on_validation_batch_start",
    "on_validation_end",
    "on_validation_epoch_end",
    "on_validation_epoch_start",
    "on_validation_start",
    "predict_dataloader",
    "predict_step",
    "print",
    "teardown",
    "test_dataloader",
    "test_step",
)
"""Hooks that are not called, and change nothing of what is trained."""

CARRIED_BY_DATA = frozenset(
    {
        *("prepare_data", "setup", "train_dataloader", "val_dataloader"),
        *("CHECKPOINT_HYPER_PARAMS_KEY", "CHECKPOINT_HYPER_PARAMS_NAME"),
        *("CHECKPOINT_HYPER_PARAMS_TYPE", "name", "remove_ignored_hparams"),
        *("from_datasets", "hparams", "hparams_initial", "load_from_checkpoint"),
        *("save_hyperparameters", "trainer"),
    }
)
"""Like `CARRIED_HOOKS`, of a `LightningDataModule`."""

UNUSED_OF_DATA = frozenset(
    {
        *("load_state_dict", "on_exception", "predict_dataloader", "state_dict", "teardown"),
        *("test_dataloader",),
    }
)
"""Like `UNUSED_HOOKS`, of a `LightningDataModule`."""

_NOTED = frozenset(
    {
        *("accelerator", "barebones", "benchmark", "check_val_every_n_epoch", "default_root_dir"),
        *("detect_anomaly", "deterministic", "devices", "enable_checkpointing"),
        *("enable_model_summary", "enable_progress_bar", "inference_mode", "limit_predict_batches"),
        *("limit_test_batches", "limit_val_batches", "log_every_n_steps", "logger", "max_epochs"),
        *("max_steps", "max_time", "min_epochs", "min_steps", "model_registry", "num_nodes"),
        *("num_sanity_val_steps", "profiler", "strategy", "use_distributed_sampler"),
        *("val_check_interval", "enable_autolog_hparams"),
    }
)
"""Arguments that say how long, where and how observed: a job has keys of its own for these."""

_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "accumulate_grad_batches": (1,),
    "callbacks": ([], ()),
    "fast_dev_run": (False,),
    "gradient_clip_val": (0, 0.0),
    "limit_train_batches": (1.0,),
    "overfit_batches": (0, 0.0),
    "plugins": ([], ()),
    "precision": (32, "32", "32-true"),
    "reload_dataloaders_every_n_epochs": (0,),
    "sync_batchnorm": (False,),
}
"""Values other than None with which an argument that is not above changes nothing."""

_REMEDIES: Mapping[str, str] = {
    "accumulate_grad_batches": "set batch_size and accumulate in [federated] and [datacenter]",
    "callbacks": "a run has no callbacks",
    "gradient_clip_val": "set federated.clip_norm and datacenter.clip_norm of the job",
    "gradient_clip_algorithm": "clip_norm of a job clips by norm",
    "precision": "set federated.precision and datacenter.precision of the job",
}


def refused_hooks(module: type, base: type, packages: Collection[str]) -> dict[str, str]:
    """What a module defines and a run does not call, with what to do instead."""
    of_lightning_1 = {
        name for name in REFUSED_HOOKS if hasattr(module, name) and not hasattr(base, name)
    }
    found = of_lightning_1.union(replaced(module, base, packages))
    known = (*CARRIED_HOOKS, *UNUSED_HOOKS)
    return {
        name: REFUSED_HOOKS.get(name, "a run does not call it")
        for name in sorted(found)
        if name not in known
    }


def refused_of_data(data: type, base: type, packages: Collection[str]) -> dict[str, str]:
    """What a data module defines and a run does not call, with what to do instead."""
    return {
        name: "do it in the module's steps" if "batch" in name else "a run does not call it"
        for name in replaced(data, base, packages)
        if name not in CARRIED_BY_DATA and name not in UNUSED_OF_DATA
    }


def _same(value: object, plain: object) -> bool:
    """Whether two values are equal; 1 is a number of batches, and 1.0 all of them."""
    return bool(value == plain) and isinstance(value, float) == isinstance(plain, float)


def check_arguments(trainer: Mapping[str, Any], ignore: Collection[str]) -> list[str]:
    """Refuse arguments of a `Trainer` that may change what is trained.

    Args:
        trainer: the arguments by name.
        ignore: names that do not matter.

    Returns:
        The others that are left out, in words.

    Raises:
        TaskError: there are such arguments.
    """
    if not isinstance(trainer, Mapping):
        raise TaskError(
            f"trainer is a {type(trainer).__name__}, and not the arguments of a Trainer by name; "
            'say trainer={"max_epochs": 3}'
        )
    refused = {}
    unused = []
    for name, value in trainer.items():
        if value is None or any(_same(value, plain) for plain in _PLAIN.get(name, ())):
            continue
        if name == "gradient_clip_algorithm" and value == "norm":
            continue
        if name not in _NOTED:
            refused[f"{name}"] = _REMEDIES.get(name, "a job has no such key")
        if name in _NOTED or name in ignore:
            unused.append(f"Trainer({name}=...)")
    refuse("the Trainer", refused, ignore)
    return unused
