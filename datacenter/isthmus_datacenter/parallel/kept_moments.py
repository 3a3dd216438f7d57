"""Keep an optimizer's moments in less of a device's memory between its steps.

They are rounded to bfloat16, or are in the host's memory, or both. The optimizer itself works as it
always does: for its step some parameters at a time get their moments back, in float32 on their
device, and give them up after it. So only optimizers can be used that treat each element by itself.

Rounded to the nearest, a moment would stop moving: with `beta2 = 0.999` a second moment changes by
at most a thousandth of itself in a step, and bfloat16 has no numbers that near to each other. So it
is rounded up or down with probabilities that make the mean right (stochastic rounding). What is
drawn follows from the parameter's name and the number of the step: it is the same on all ranks that
have a part, and in a repetition.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from isthmus.errors import TaskError
from isthmus_datacenter.parallel.model_shard import local
from isthmus_datacenter.parallel.optimizer_check import ELEMENTWISE

_STEPS = "rounded_steps"
"""Option of a parameter group: steps so far. Checkpoints keep the options."""
_NUMBERS = ("step", "mu_product", "eta", "mu")
"""What states have besides: numbers, also of the shape of a parameter that has no dimension."""
_BUCKET_BYTES = 1 << 26
"""Parameters that step at a time: their moments are on the device together."""
_DROPPED_BITS = 16
"""Bits of a float32 that a bfloat16 does not have."""


class KeptMoments:
    """Steps optimizers whose moments are kept elsewhere in between."""

    def __init__(self, names: Mapping[int, str], *, rounded: bool, on_host: bool) -> None:
        """Keep them from now on.

        Args:
            names: of the parameters, by `id`.
            rounded: keep them in bfloat16.
            on_host: keep them in the host's memory.
        """
        self._names = names
        self._rounded = rounded
        self._on_host = on_host

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse an optimizer that may not treat each element by itself.

        Raises:
            TaskError: it is none of those that are known to, or has hooks of its steps.
        """
        key = 'optimizer_states = "bf16"' if self._rounded else 'offload = "optimizer"'
        if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
            raise TaskError(
                f"optimizer() returned {type(optimizer).__name__} with a hook of its steps, which "
                f"would be called for some parameters at a time; datacenter.{key} works without "
                "hooks: remove one of the two"
            )
        if type(optimizer) in ELEMENTWISE:
            return
        *names, last = (kind.__name__ for kind in ELEMENTWISE)
        raise TaskError(
            f"optimizer() returned {type(optimizer).__name__}, which may need all of its states at "
            f"once; datacenter.{key} works with {', '.join(names)} and {last}: choose one of "
            "them, or remove it"
        )

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Apply the gradients, some parameters at a time."""
        groups = optimizer.param_groups
        try:
            for group in groups:
                trained = [each for each in group["params"] if each.grad is not None]
                for bucket in _buckets(trained):
                    for parameter in bucket:
                        self._fetch(optimizer, parameter)
                    optimizer.param_groups = [{**group, "params": bucket}]
                    optimizer.step()
                    for parameter in bucket:
                        self._keep(optimizer, parameter, group.get(_STEPS, 0))
        finally:
            optimizer.param_groups = groups
        if self._rounded:
            for group in groups:
                group[_STEPS] = group.get(_STEPS, 0) + 1

    @torch.no_grad()
    def keep_all(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep all moments that there are; those that had been rounded stay as they are."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._keep(optimizer, parameter, group.get(_STEPS, 0))

    def _fetch(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
        state = optimizer.state[parameter]
        for key, value in moments_of(state, parameter).items():
            full = torch.empty_like(parameter)
            local(full).copy_(local(value), non_blocking=True)
            state[key] = full

    def _keep(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor, step: int) -> None:
        state = optimizer.state.get(parameter, {})
        for key, value in moments_of(state, parameter).items():
            kept = value
            if self._rounded and value.dtype == torch.float32:
                kept = torch.empty_like(value, dtype=torch.bfloat16)
                drawn_by = f"{self._names[id(parameter)]} {key} {step}"
                local(kept).copy_(round_stochastically(local(value), drawn_by))
            state[key] = _in_host_memory(kept) if self._on_host else kept


def moments_of(state: Mapping[str, Any], parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a state has for each element of a parameter, by its key."""
    return {
        key: value
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
        and key not in _NUMBERS
        and value.is_floating_point()
        and value.shape == parameter.shape
    }


def _in_host_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in the host's memory, from which a device reads without another copy."""
    part = local(tensor)
    host = torch.empty(part.shape, dtype=part.dtype, pin_memory=part.device.type == "cuda")
    host.copy_(part)
    if not isinstance(tensor, DTensor):
        return host
    # As `fully_shard` makes parameters that it offloads: `from_local` would move it to the device.
    made: Any = DTensor
    kept: torch.Tensor = made(host, tensor._spec, requires_grad=False)
    return kept


def _buckets(parameters: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Consecutive parameters with so many bytes on this rank; a larger one is alone."""
    bucket: list[torch.Tensor] = []
    nbytes = 0
    for each in parameters:
        if bucket and nbytes + local(each).nbytes > _BUCKET_BYTES:
            yield bucket
            bucket = []
            nbytes = 0
        bucket.append(each)
        nbytes += local(each).nbytes
    if bucket:
        yield bucket


def round_stochastically(values: torch.Tensor, drawn_by: str) -> torch.Tensor:
    """Round float32 to one of the two nearest bfloat16, so that the mean is the value.

    Numbers that bfloat16 has, and infinities, stay as they are.

    Args:
        values: of any shape.
        drawn_by: what is drawn follows from it.
    """
    digest = hashlib.sha256(drawn_by.encode()).digest()
    generator = torch.Generator(values.device).manual_seed(int.from_bytes(digest[:7], "big"))
    limit = 1 << _DROPPED_BITS
    bits = torch.randint(
        limit, values.shape, dtype=torch.int32, device=values.device, generator=generator
    )
    # Added to the magnitude, of which the dropped bits are then cut off.
    bits += values.contiguous().view(torch.int32)
    bits &= -limit
    return bits.view(torch.float32).to(torch.bfloat16)
