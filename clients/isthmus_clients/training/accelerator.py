"""Where and in which precision a device trains: its accelerator, autocast and compilation.

The parameters, the gradients that are applied and the update stay float32. This module imports
PyTorch only where it is used, so that a device can check its settings while it is idle.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from typing import TYPE_CHECKING, cast

from isthmus.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from torch import nn

    from isthmus.job.federated import FederatedSection
    from isthmus.task.optimizers import TaskOptimizers

_CHOICE = re.compile(r"auto|cpu|mps|cuda(:\d{1,3})?")


def check_choice(choice: str) -> str:
    """The choice of an owner, if it can be one.

    >>> check_choice("cuda:1")
    'cuda:1'

    Raises:
        UserError: it has another form.
    """
    if not _CHOICE.fullmatch(choice):
        raise UserError(f"--device {choice!r} is not one of auto, cpu, mps, cuda and cuda:N")
    return choice


def may_be_nvidia(choice: str) -> bool:
    """Whether a task needs access to an Nvidia device for a choice."""
    return choice == "auto" or choice.startswith("cuda")


@dataclasses.dataclass(frozen=True)
class Accelerators:
    """The accelerators of this machine that PyTorch can use."""

    cuda: int = 0
    """Number of CUDA devices."""
    mps: bool = False
    """Whether there is a GPU of Apple."""

    @classmethod
    def present(cls) -> Accelerators:
        """The accelerators that PyTorch finds."""
        import torch

        return cls(torch.cuda.device_count(), torch.backends.mps.is_available())

    def choose(self, choice: str) -> str:
        """The device for an owner's choice.

        >>> Accelerators(cuda=2).choose("auto"), Accelerators().choose("auto")
        ('cuda', 'cpu')

        Raises:
            UserError: there is no such device.
        """
        if choice == "auto":
            return "cuda" if self.cuda else "mps" if self.mps else "cpu"
        name, _, number = choice.partition(":")
        if name == "cuda" and int(number or 0) >= self.cuda:
            found = f"{self.cuda} CUDA devices" if self.cuda else "no CUDA device"
            raise UserError(
                f"{choice} was chosen (--device, or federated.device of a job), and PyTorch finds "
                f"{found} here; install a driver and PyTorch with CUDA, or choose auto or cpu"
            )
        if name == "mps" and not self.mps:
            raise UserError(
                "mps was chosen (--device, or federated.device of a job), and PyTorch finds no "
                "GPU of Apple here; choose auto or cpu"
            )
        return choice


class Arithmetic:
    """How the steps of a run are computed on a device."""

    def __init__(self, choice: str, settings: FederatedSection) -> None:
        """`choice` is the owner's device.

        Raises:
            UserError: there is no such device.
        """
        import torch

        self.device = torch.device(
            choice if choice == "cpu" else Accelerators.present().choose(choice)
        )
        self._settings = settings
        self._dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[
            settings.precision
        ]
        self._scaler: torch.amp.GradScaler | None = None

    def placed(self, model: nn.Module) -> nn.Module:
        """Move a model to the device, in place; returns what runs its steps.

        Raises:
            UserError: steps are to be compiled, and this machine has nothing that compiles.
        """
        import torch

        model.to(self.device)
        if not self._settings.compile:
            return model
        self._check_compiler()
        return cast("nn.Module", torch.compile(model))

    def _check_compiler(self) -> None:
        """Compile something small, so that a device without a compiler opens no run.

        It would fail in each round, and a server could have it give zeros.
        """
        import torch

        try:
            torch.compile(torch.neg)(torch.zeros(2, device=self.device))
        except Exception as error:  # whatever a compiler or its caller raises
            raise UserError(
                "federated.compile needs a compiler, and that of this device failed "
                f"({type(error).__name__}); install one, such as g++, or set "
                "federated.compile=false"
            ) from error

    def seed(self, number: int) -> None:
        """Seed the generators of the processor and of the device.

        Those of absent accelerators are left out: PyTorch takes a millisecond to note their seeds.
        """
        import torch

        if self.device.type == "cpu":
            torch.default_generator.manual_seed(number)
        else:
            torch.manual_seed(number)

    def begin(self) -> None:
        """Begin the steps of a round, with nothing of an earlier one."""
        import torch

        # Anew in each round: a scale that was left of an earlier one would make the update depend
        # on it.
        if self._settings.precision == "fp16":
            self._scaler = torch.amp.GradScaler(self.device.type)

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """The context of a forward pass."""
        import torch

        if self._dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self._dtype)

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of a loss, which in fp16 is scaled until `unscale`."""
        import torch

        torch.autograd.backward(loss if self._scaler is None else self._scaler.scale(loss))

    def unscale(self, optimizers: TaskOptimizers, name: str) -> None:
        """Scale the gradients of an optimizer back; nothing but in fp16."""
        if self._scaler is not None:
            self._scaler.unscale_(optimizers.named[name])

    def clip(self, parameters: Iterable[nn.Parameter]) -> None:
        """Clip the gradients of all `parameters` together, which `unscale` has scaled back."""
        import torch

        if self._settings.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, self._settings.clip_norm)

    def step(self, optimizers: TaskOptimizers, name: str) -> None:
        """Apply the gradients of an optimizer; in fp16, only if they did not overflow."""
        if self._scaler is None:
            optimizers.step(only=name)
            return
        # By way of the scaler, which leaves out a step whose gradients overflowed.
        optimizers.step(self._scaler.step, only=name)
        self._scaler.update()
