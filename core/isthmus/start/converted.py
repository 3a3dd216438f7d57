"""Tensors of a folder under the names that transformers has for them in memory.

For some architectures these are not those of the files: experts of a mixture are joined into one
tensor, and layers were renamed between versions. Only transformers knows how, so it loads them.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import sys
from typing import TYPE_CHECKING, Any

from isthmus.errors import UserError
from isthmus.start.files import StartFiles

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclasses.dataclass(frozen=True)
class Converted:
    """What transformers has loaded."""

    tensors: dict[str, torch.Tensor]
    """By the names in memory, float32 where they are of a floating type."""
    unexpected: tuple[str, ...]
    """Names in the files that it has no place for."""
    digest: str
    """Digest of the files, see `StartFiles.digest`."""


def transformers_model(model: nn.Module) -> Any | None:
    """The outermost model of transformers in a model, or None."""
    library: Any = sys.modules.get("transformers")
    if library is None:  # then no model can be of it
        return None
    found = (each for each in model.modules() if isinstance(each, library.PreTrainedModel))
    return next(found, None)


def convert(model: nn.Module, files: StartFiles) -> Converted | None:
    """Have transformers load the files of a folder, if a part of the model is of transformers.

    It is loaded into a second model of the same class and configuration, in float32, which holds
    every value of the narrower types.

    Raises:
        UserError: transformers cannot load it, or the files change meanwhile.
    """
    inner = transformers_model(model)
    if inner is None or files.config() is None:
        return None
    for name, (_, stored) in files.tensors.items():
        if stored.dtype == "F64":
            raise UserError(
                f"{files.path} has {name!r} in F64 and under a name that transformers converts, in "
                "float32; convert the file to float32"
            )
    digest = files.digest()
    importlib.import_module("transformers.utils.logging").disable_progress_bar()
    import torch

    try:
        with torch.random.fork_rng(devices=[]):  # what is missing is drawn, and then left out
            loaded, report = type(inner).from_pretrained(
                files.path,
                config=copy.deepcopy(inner.config),  # it is changed, and the model's must not be
                dtype=torch.float32,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
    except (OSError, RuntimeError, ValueError) as error:
        first = " ".join(str(error).split())[:300]
        raise UserError(f"transformers cannot load {files.path}: {first}") from None
    files.check_unchanged()
    missing = set(report["missing_keys"])
    tensors = {name: each for name, each in loaded.state_dict().items() if name not in missing}
    return Converted(tensors, tuple(sorted(report["unexpected_keys"])), digest)
