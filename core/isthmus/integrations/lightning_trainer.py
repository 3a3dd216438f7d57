"""Which hooks of a `LightningModule`, and arguments of its `Trainer`, a run of Isthmus replaces."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from isthmus.integrations.carrying import refuse

_IN_STEP = "do it in training_step()"
_CALLS = "a run calls the optimizer itself"

REFUSED_HOOKS: Mapping[str, str] = {
    "backward": _CALLS,
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
    "on_fit_start": "do it in setup()",
    "on_train_batch_end": _IN_STEP,
    "on_train_batch_start": _IN_STEP,
    "on_train_epoch_end": "a run has rounds and no epochs",
    "on_train_epoch_start": "a run has rounds and no epochs",
    "on_train_start": "do it in setup()",
    "optimizer_step": _CALLS,
    "optimizer_zero_grad": _CALLS,
    "transfer_batch_to_device": _IN_STEP,
}
"""Hooks that may change what is trained, with what to do instead."""

UNUSED_HOOKS = (
    "on_fit_end",
    "on_load_checkpoint",
    "on_predict_batch_end",
    "on_predict_end",
    "on_save_checkpoint",
    "on_test_batch_end",
    "on_test_end",
    "on_test_epoch_end",
    "on_train_end",
    "on_validation_batch_end",
    "on_validation_batch_start",
    "on_validation_end",
    "on_validation_epoch_end",
    "on_validation_epoch_start",
    "on_validation_start",
    "predict_step",
    "teardown",
    "test_step",
)
"""Hooks that are not called, and change nothing of what is trained."""

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
    refused = {}
    unused = []
    for name, value in trainer.items():
        if value is None or any(value == plain for plain in _PLAIN.get(name, ())):
            continue
        if name == "gradient_clip_algorithm" and value == "norm":
            continue
        if name not in _NOTED:
            refused[f"{name}"] = _REMEDIES.get(name, "a job has no such key")
        if name in _NOTED or name in ignore:
            unused.append(f"Trainer({name}=...)")
    refuse("the Trainer", refused, ignore)
    return unused
