"""A model of transformers as a folder of Hugging Face: configuration, weights, tokenizer."""

from __future__ import annotations

import contextlib
import importlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from isthmus.errors import UserError
from isthmus.job import Job
from isthmus.start.converted import transformers_model
from isthmus.start.files import ADAPTER_CONFIG, CONFIG, INDEX, StartFiles
from isthmus.start.plan import is_of_adapter, state_of
from isthmus.tensors.exchange_set import matches
from isthmus_server.read.export.stored_types import restore_types

_ALONG = (".json", ".jinja", ".model", ".tiktoken", ".txt")
"""Ends of the names of what belongs to a model besides its weights, such as its tokenizer."""
_NOT_ALONG = (CONFIG, INDEX, ADAPTER_CONFIG, "report.json", "job.json")
_LICENCES = ("LICENSE", "NOTICE", "USE_POLICY")
_TEMPLATES = "additional_chat_templates"
"""A folder that tokenizers of transformers may have."""
_SHARD = "5GB"
"""Largest file; a tensor that is larger has one of its own."""


@torch.no_grad()
def export_folder(job: Job, base: Path, model: nn.Module, folder: Path, *, merged: bool) -> None:
    """Write a model as a folder, which `from_pretrained` loads as the same model.

    A model with an adapter of PEFT is written as the adapter, or merged. What was not trained keeps
    the type that it has in the start's files, and these files' tokenizer is copied. The folder is
    loaded again and compared before this returns.

    Args:
        job: of the run.
        base: directory of the job's relative paths.
        model: the task's, with the weights of the run; it is changed if adapters are merged.
        folder: an empty folder.
        merged: whether an adapter is merged into the model under it.

    Raises:
        UserError: the model, or a part of it, is not of transformers; or what is asked for cannot
            be written, or is another model when it is loaded.
    """
    adapted = _peft_model(model)
    outer = adapted if adapted is not None else transformers_model(model)
    if outer is None:
        raise UserError(
            "the model has no part that is of transformers; use --format safetensors, whose names "
            "are those of the model's state_dict()"
        )
    _check_nothing_outside(model, outer)
    if merged and adapted is None:
        raise UserError("the model has no adapter of PEFT to merge; use --format huggingface")
    start = _start_files(job, base)
    importlib.import_module("transformers.utils.logging").disable_progress_bar()
    if adapted is not None and not merged:
        _write_adapter(job, base, adapted, folder)
        return
    if adapted is not None:
        _check_untied(adapted)
        if not hasattr(adapted, "merge_and_unload"):  # such as tokens before a prompt
            raise UserError(
                "the adapter changes no weights, so that there is nothing to merge it into; use "
                "--format safetensors"
            )
        with _errors_of_the_library("merge the adapter"):
            outer = adapted.merge_and_unload()
    with _errors_of_the_library("write the model"):
        outer.save_pretrained(folder, max_shard_size=_SHARD)
    if start is not None:
        restore_types(folder, start)
        _copy_along(start.path, folder)
    with _errors_of_the_library("load what it has written"), torch.random.fork_rng(devices=[]):
        loaded, report = type(outer).from_pretrained(
            folder, local_files_only=True, output_loading_info=True
        )
    _check_same(outer, loaded, report)


def _peft_model(model: nn.Module) -> Any | None:
    """The outermost model of PEFT in a model, or None."""
    library: Any = sys.modules.get("peft")
    if library is None:  # then no model can be of it
        return None
    return next((each for each in model.modules() if isinstance(each, library.PeftModel)), None)


def _start_files(job: Job, base: Path) -> StartFiles | None:
    """The files of the model that the job starts from, without an adapter's; None without any."""
    section = job.model
    if section.start is None:
        return None
    under = None if section.base is None else base / section.base
    return StartFiles.find_all(base / section.start, under)[0]


def _check_nothing_outside(model: nn.Module, outer: nn.Module) -> None:
    inside = {each.tensor.data_ptr() for each in state_of(outer)}
    for each in state_of(model):
        if each.tensor.numel() and each.tensor.data_ptr() not in inside:
            raise UserError(
                f"{each.name!r} is not a part of the model's {type(outer).__name__}, whose folder "
                "would not have it; use --format safetensors"
            )


def _check_untied(adapted: Any) -> None:
    """Refuse to merge into a weight that another layer has too, which would be changed as well."""
    for each in state_of(adapted):
        if len(each.names) > 1 and any(".base_layer." in name for name in each.names):
            raise UserError(
                f"{' and '.join(map(repr, each.names))} are one tensor, and the adapter of one "
                "would be merged into both; use --format huggingface"
            )


def _write_adapter(job: Job, base: Path, adapted: Any, folder: Path) -> None:
    """Write an adapter in PEFT's format, and load it over the model under it."""
    under = job.model.base or job.model.start
    if under is None:
        raise UserError(
            "the model under the adapter has the values of the seed, which no file has; use "
            "--format merged"
        )
    if not (base / under / CONFIG).is_file():
        raise UserError(
            f"{under} is no folder of Hugging Face, from which PEFT could load the model under the "
            "adapter; use --format merged"
        )
    for name, parameter in adapted.named_parameters():
        fresh = matches(name, job.model.fresh)
        if (parameter.requires_grad or fresh) and not _is_in_adapter(name):
            raise UserError(
                f"{name!r} is not a part of the adapter, and has other values than in {under}; use "
                "--format merged"
            )
    if len(adapted.peft_config) != 1:
        raise UserError(
            f"the model has {len(adapted.peft_config)} adapters, and a folder has one; use one"
        )
    [(name, config)] = adapted.peft_config.items()
    config.base_model_name_or_path = under
    with _errors_of_the_library("write the adapter"):
        # The weights of an adapted embedding are those of the model under the adapter.
        adapted.save_pretrained(folder, save_embedding_layers=False)
    if (folder / name).is_dir():  # where PEFT writes one that is not called default
        for path in (folder / name).iterdir():
            path.rename(folder / path.name)
        (folder / name).rmdir()
    (folder / "README.md").unlink(missing_ok=True)  # a model card without contents
    kind = type(adapted.get_base_model())
    with _errors_of_the_library("load what it has written"), torch.random.fork_rng(devices=[]):
        original = kind.from_pretrained(base / under, dtype=torch.float32, local_files_only=True)
        loaded = type(adapted).from_pretrained(original, folder, adapter_name=name)
    _check_same(adapted, loaded, {})
    _check_scales(adapted, loaded)


def _check_scales(written: nn.Module, loaded: nn.Module) -> None:
    """Refuse an adapter with scales that are in no file, as code may have changed them."""
    found = dict(loaded.named_modules())
    for path, module in written.named_modules():
        own = getattr(module, "scaling", None)
        if isinstance(own, dict) and own != found[path].scaling:
            raise UserError(
                f"the adapter of {path!r} has the scale {own}, and by its configuration "
                f"{found[path].scaling}; set lora_alpha to what the model has, or use --format "
                "merged"
            )


def _is_in_adapter(name: str) -> bool:
    return is_of_adapter(name) or ".modules_to_save." in name


def _copy_along(start: Path, folder: Path) -> None:
    """Copy what belongs to a model and was not trained: its tokenizer, and licences."""
    if not (start / CONFIG).is_file():  # no folder of Hugging Face
        return
    for path in sorted(start.iterdir()):
        along = path.suffix in _ALONG and path.name not in _NOT_ALONG
        licence = path.name.startswith(_LICENCES)
        if path.is_file() and (along or licence) and not (folder / path.name).exists():
            shutil.copyfile(path, folder / path.name)
    if (start / _TEMPLATES).is_dir():
        shutil.copytree(start / _TEMPLATES, folder / _TEMPLATES)


def _check_same(written: nn.Module, loaded: nn.Module, report: dict[str, Any]) -> None:
    """Compare a model with what was loaded from its folder.

    Raises:
        UserError: it is another one.
    """
    wrong = [name for key in ("missing_keys", "unexpected_keys") for name in report.get(key, ())]
    expected = written.state_dict()
    found = loaded.state_dict()
    wrong += expected.keys() ^ found.keys()
    wrong += [
        name
        for name, each in expected.items()
        if name in found and not torch.equal(each, found[name].to(each.dtype))
    ]
    if wrong:
        raise UserError(
            f"transformers loads another model from the folder that it has written: {wrong[0]!r} "
            "differs; use --format safetensors"
        )


@contextlib.contextmanager
def _errors_of_the_library(doing: str) -> Iterator[None]:
    # What its files are written and read with has an error of its own, also for a full disk.
    of_files = importlib.import_module("safetensors").SafetensorError
    try:
        yield
    except (OSError, RuntimeError, ValueError, of_files) as error:
        first = " ".join(str(error).split())[:300]
        raise UserError(
            f"transformers cannot {doing}: {first}; use --format safetensors"
        ) from error
