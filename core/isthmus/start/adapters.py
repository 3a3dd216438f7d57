"""Adapters of PEFT (LoRA): what they add to the weights of the model under them."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from isthmus.errors import UserError
from isthmus.start.files import ADAPTER_CONFIG, StartFiles
from isthmus.start.names import match

if TYPE_CHECKING:
    import torch
    from torch import nn

_ROOT = "base_model.model."
"""What PEFT puts in front of the names of the model under an adapter."""
_PLAIN = frozenset({"fan_in_fan_out", "lora_alpha", "peft_type", "r", "use_rslora"})
"""Settings of an adapter that is the product of two matrices for each weight."""
_OF_TRAINING = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "bias",
        "corda_config",
        "eva_config",
        "exclude_modules",
        "inference_mode",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "target_modules",
        "task_type",
    }
)
"""Settings of how an adapter began and was trained, and of what it adapts, which the names of its
tensors say too."""
_NAMED = frozenset({"modules_to_save", "trainable_token_indices"})
"""Settings of further tensors, which have names of their own."""

_UNCHANGED_BASE = (None, True, False, "gaussian", "orthogonal", "eva")
"""Ways to begin an adapter that leave the weights under it as they are."""
_FROM_BASE = (".lora_magnitude_vector.", ".trainable_tokens_delta.")
"""Parts of names of tensors of adapters that PEFT computes from the weights under them: lengths of
DoRA, and rows of an embedding."""
_FACTORS = (".lora_A.", ".lora_embedding_A.")
_UNDER = ".base_layer.weight"


@dataclasses.dataclass(frozen=True)
class LoraFactors:
    """Two matrices whose product is added to a weight."""

    source: str
    """The stored name of the weight."""
    a: torch.Tensor
    """(r, in)."""
    b: torch.Tensor
    """(out, r)."""
    scale: float
    transposed: bool
    """Whether the weight is (in, out)."""

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the product, as it is added to the weight."""
        sizes = (self.b.shape[0], self.a.shape[1])
        return (sizes[1], sizes[0]) if self.transposed else sizes

    def change(self) -> torch.Tensor:
        """What is added to the weight, float32, as PEFT computes it when it merges."""
        product = (self.b.float() @ self.a.float()) * self.scale
        return product.T if self.transposed else product


def read_adapter(adapter: StartFiles, under: StartFiles) -> list[LoraFactors]:
    """The factors of an adapter that is merged into the model under it.

    Args:
        adapter: its files.
        under: those of the model under it.

    Raises:
        UserError: the adapter is of another kind, or not for this model.
    """
    config = adapter.config(ADAPTER_CONFIG) or {}
    _check_config(adapter, config)
    tensors = adapter.tensors
    pairs: dict[str, dict[str, str]] = {}
    for name in tensors:
        for kind in ("lora_A.weight", "lora_B.weight", "lora_embedding_A", "lora_embedding_B"):
            if name.endswith(f".{kind}"):
                side = "a" if "_A" in kind else "b"
                pairs.setdefault(name.removesuffix(f".{kind}"), {})[side] = name
                break
        else:
            raise UserError(
                f"{adapter.path} has {name!r}, which cannot be merged; have model() of the task "
                "build the model with its adapters (peft.get_peft_model)"
            )
    weights = [f"{path.removeprefix(_ROOT)}.weight" for path in pairs]
    sources = match(weights, list(under.tensors))
    factors = []
    for (path, sides), weight in zip(pairs.items(), weights, strict=True):
        if weight not in sources or len(sides) != 2:
            raise UserError(
                f"{adapter.path} adapts {path!r}, which {under.path} does not have; it is for "
                "another model, or not whole"
            )
        a = _read(adapter, sides["a"])
        b = _read(adapter, sides["b"])
        # Without rows there is nothing to add, and the scale would be a division by zero.
        if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1] or not a.shape[0]:
            raise UserError(
                f"{adapter.path} has factors of {path!r} that are not two matrices: "
                f"{tuple(a.shape)} and {tuple(b.shape)}; have model() build the adapters"
            )
        rank = a.shape[0]
        # https://arxiv.org/abs/2312.03732, section 3: the rank-stabilised scale.
        divisor = math.sqrt(rank) if config.get("use_rslora") else rank
        embedding = "lora_embedding" in sides["a"]
        transposed = embedding or bool(config.get("fan_in_fan_out"))
        factors.append(
            LoraFactors(sources[weight], a, b, config["lora_alpha"] / divisor, transposed)
        )
    return factors


def laid_out(
    factors: Sequence[LoraFactors], model: nn.Module, names: Mapping[str, Collection[str]]
) -> list[LoraFactors]:
    """Factors in the layout of the layers that they change, whatever their configuration says.

    It has one setting for all layers of an adapter, which PEFT corrects for each layer likewise. If
    a matrix is square, nothing else would show that it is the wrong one.

    Args:
        factors: see `read_adapter`.
        model: as the task has built it.
        names: the names of its tensors by their stored name.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    found = []
    for each in factors:
        of = [modules[name.rpartition(".")[0]] for name in names.get(each.source, ())]
        layouts = set(map(_is_transposed, of))
        [layout] = layouts if len(layouts) == 1 else [None]
        found.append(each if layout is None else dataclasses.replace(each, transposed=layout))
    return found


def _is_transposed(layer: nn.Module) -> bool | None:
    """Whether a layer's weight is (in, out); None if it is of a kind that does not say so."""
    from torch import nn

    library: Any = sys.modules.get("transformers.pytorch_utils")
    if library is not None and isinstance(layer, library.Conv1D):
        return True
    return False if isinstance(layer, nn.Linear) else None


def check_beginnings(
    model: nn.Module, fresh: Collection[str], adapter: StartFiles | None, filled: Collection[str]
) -> None:
    """Refuse adapters that begin with what PEFT computes from the weights under them.

    When `model()` has made them, those were the values of the seed, and not of the files.

    Args:
        model: as the task has built it.
        fresh: names of its tensors that keep the values of the seed.
        adapter: files of an adapter that it gets; None for a model's only.
        filled: names of its tensors that get values of files.

    Raises:
        UserError: so they would.
    """
    over_files = {name.removesuffix(_UNDER) for name in filled if name.endswith(_UNDER)}
    made = set()
    for name in fresh:
        for part in (*_FROM_BASE, *_FACTORS):
            path, found, rest = name.partition(part)
            if not found or path not in over_files:
                continue
            if part in _FROM_BASE:
                raise UserError(
                    f"{name!r} begins with values of the weights under it, which are not those of "
                    "the files when model() makes it; make the adapter by PEFT over the files "
                    "(get_peft_model, save_pretrained), and start from its folder with model.base"
                )
            made.add(rest.partition(".")[0])
    ways = [
        getattr(built, "init_lora_weights", None)
        for module in model.modules()
        for name, built in getattr(module, "peft_config", {}).items()
        if name in made
    ]
    if adapter is not None:
        ways.append((adapter.config(ADAPTER_CONFIG) or {}).get("init_lora_weights"))
    for way in ways:
        if way not in _UNCHANGED_BASE:
            raise UserError(
                f"init_lora_weights={way!r} computes an adapter from the weights under it, which "
                "are not those of the files when model() makes it; use True, 'gaussian' or "
                "'orthogonal', or have PEFT convert the adapter to plain LoRA (save_pretrained, "
                "path_initial_model_for_weight_conversion)"
            )


def check_scales(model: nn.Module, adapter: StartFiles) -> None:
    """Compare the adapters that a model was built with, with those whose weights it gets.

    Raises:
        UserError: a setting differs, with which the same weights are another model.
    """
    config = adapter.config(ADAPTER_CONFIG) or {}
    for module in model.modules():
        for built in getattr(module, "peft_config", {}).values():
            # Settings of a later PEFT, which a file may have, are compared too.
            for key in sorted((_settings(built).keys() | config.keys()) - _OF_TRAINING - _NAMED):
                own = _settings(built).get(key)
                if (own or None) != (config.get(key) or None):
                    raise UserError(
                        f"{adapter.path / ADAPTER_CONFIG} has {key}={config.get(key)!r}, and the "
                        f"model is built with {own!r}; build it with what the adapter has"
                    )


def _check_config(adapter: StartFiles, config: dict[str, Any]) -> None:
    kind = str(config.get("peft_type"))
    # What a later PEFT adds may make the same two matrices another model.
    refused = [key for key in config if config[key] and key not in _PLAIN | _OF_TRAINING]
    if kind != "LORA":
        refused = [f"peft_type={kind}"]
    elif config.get("bias", "none") != "none":
        refused.append("bias")
    elif config.get("init_lora_weights") not in _UNCHANGED_BASE:
        refused.append(f"init_lora_weights={config['init_lora_weights']!r}")
    elif not _is_finite(config.get("lora_alpha")):
        refused.append("lora_alpha, which has to be a number")
    if refused:
        raise UserError(
            f"{adapter.path / ADAPTER_CONFIG} has {refused[0]}, and only plain LoRA is merged; "
            "have model() of the task build the model with its adapters (peft.get_peft_model), or "
            "merge it by PEFT (merge_and_unload)"
        )


def _settings(built: Any) -> dict[str, Any]:
    """Settings of a configuration of PEFT, as a file has them."""
    text = json.dumps(
        built.to_dict(), default=lambda each: sorted(each) if isinstance(each, set) else str(each)
    )
    return dict(json.loads(text))


def _is_finite(value: Any) -> bool:
    # JSON of Python has NaN and infinity, and whole numbers of any size.
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def _read(adapter: StartFiles, name: str) -> torch.Tensor:
    file, stored = adapter.tensors[name]
    return file.read(stored)
