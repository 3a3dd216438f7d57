"""SCAFFOLD on a device (Karimireddy et al. 2020, algorithm 1 with option II).

Shape legend: N = float32 elements of the exchange set.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from isthmus.errors import TaskError
from isthmus.task.optimizers import TaskOptimizers
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.transport.blobs import Buffer
from isthmus.wire import link_pb2


class ControlVariate:
    """The control variate of a device in one round: an estimate of its own mean gradient."""

    def __init__(self, layout: TensorLayout, server: torch.Tensor, own: Buffer) -> None:
        """Begin a round.

        Args:
            layout: of the exchange set.
            server: (N) the server's control variate, whose memory is used for the correction.
            own: the device's control variate, encoded, which `advance` changes; zeros at first.
        """
        view = memoryview(own)
        view[: len(layout.header)] = layout.header
        self._layout = layout
        self._own = layout.decode(view)
        self.correction = server.sub_(self._own)
        """(N) What is added to the gradient of each step: the server's minus the device's."""
        self._rates: Mapping[str, float] = {}

    def use(self, optimizers: TaskOptimizers, trained: Mapping[str, nn.Parameter]) -> None:
        """Note the learning rates of the round's optimizers, for parameters by name.

        Raises:
            TaskError: a step is not the gradient times a constant rate.
        """
        if optimizers.needs_position:
            raise TaskError(
                "federated.control_variates needs a constant learning rate, and optimizer() "
                "returned an LRScheduler; return the optimizer alone"
            )
        names = {id(parameter): name for name, parameter in trained.items()}
        rates: dict[str, float] = {}
        for optimizer in optimizers.named.values():
            for group in optimizer.param_groups:
                # Another class may do anything with a gradient, one derived from SGD too.
                plain = type(optimizer) is torch.optim.SGD
                plain = plain and not group["momentum"] and not group["maximize"]
                if not plain or not float(group["lr"]) > 0:
                    raise TaskError(
                        "federated.control_variates computes gradients from the way of the "
                        "model, for which optimizer() has to return torch.optim.SGD with a "
                        "learning rate above 0 and without momentum or maximize, and it returned "
                        f"{_described(optimizer, group)}"
                    )
                # A task may train something else besides, such as weights of its loss.
                own = [each for each in group["params"] if id(each) in names]
                rates |= {names[id(each)]: float(group["lr"]) for each in own}
        self._rates = rates

    def advance(self, update: torch.Tensor, steps: int, change: torch.Tensor) -> None:
        """Compute the next control variate from a finished training.

        Args:
            update: (N) start minus end.
            steps: that were made; after none the control variate stays.
            change: (N) where the difference to the control variate before is written.
        """
        change.zero_()
        if not steps:
            return
        parts = zip(
            self._layout.parts(update),
            self._layout.parts(change),
            self._layout.parts(self.correction),
            self._layout.parts(self._own),
            strict=True,
        )
        for (name, moved), (_, changed), (_, correction), (_, own) in parts:
            # Running statistics have no gradient, nor has a parameter that no optimizer trains.
            if name in self._rates:
                torch.div(moved, steps * self._rates[name], out=changed)
                changed.sub_(correction).sub_(own)
                # What the server adds, so that its sum stays that of the devices' vectors.
                own.add_(changed)


def check_sent(work: link_pb2.TrainLocal) -> None:
    """Check that a request is for training with control variates.

    Raises:
        TaskError: the server's is missing, or the change of the device's is not wanted as it is.
    """
    if not work.with_gradient or work.gradient_scale != 1:
        raise TaskError(
            "the job has federated.control_variates, and the server's request has no control "
            "variate or asks for no change of the device's; install the same version on both"
        )


def _described(optimizer: torch.optim.Optimizer, group: Mapping[str, object]) -> str:
    options = ("lr", "momentum", "maximize")
    shown = ", ".join(f"{name}={group[name]}" for name in options if name in group)
    return f"{type(optimizer).__name__}({shown})"
