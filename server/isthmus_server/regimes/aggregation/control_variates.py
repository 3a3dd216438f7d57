"""SCAFFOLD on the server (Karimireddy et al. 2020, algorithm 1): keeps the control variate.

It is the mean of the devices' own, which stay on these: each sends how its own has changed.

Shape legend: N = float32 elements of the exchange set.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from isthmus.errors import JobError
from isthmus.tensors.exchange_set import TensorLayout
from isthmus_server.regimes.base import AttemptSpec, FederatedAttempt, FederatedResult
from isthmus_server.regimes.plaintext import PlaintextAttempt, WeightedMeanAggregator
from isthmus_server.storage.records import Receipt
from isthmus_server.transport.bundle import published

if TYPE_CHECKING:
    from isthmus_server.regimes.context import FederatedContext

_NAME = "control_variate"


class ControlVariates:
    """The server's control variate, as a `FederatedExtension`.

    Guarantees:
      * it is committed with the round, or not at all.
    """

    def __init__(self, devices: int, layout: TensorLayout) -> None:
        """Begin at zero, for a run of so many devices."""
        self._devices = devices
        self._vector = torch.zeros(layout.size)

    def attempt(self, context: FederatedContext, spec: AttemptSpec) -> FederatedAttempt:
        """An attempt whose devices get the control variate and send the changes of theirs.

        Raises:
            JobError: more devices take part in the run than the job says.
        """
        # Each of them would weigh too much in what should be the mean of all.
        present = context.sums.participants_with(spec.cohort)
        if present > self._devices:
            raise JobError(
                f"federated.control_variates={self._devices} is the number of all devices of the "
                f"run, and {present} have taken part by round {spec.round}; begin a run with a "
                "larger number"
            )
        return ControlledAttempt(context, spec, self._vector, self._devices)

    def commit(self, state: Any) -> None:
        """Make the control variate after an attempt the current one."""
        self._vector = state

    def reset(self) -> None:
        """Return to zero."""
        self._vector = torch.zeros_like(self._vector)

    def export_state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """The control variate."""
        return {_NAME: self._vector}, {}

    def import_state(self, tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any]) -> None:
        """Restore what `export_state` returned."""
        if _NAME in tensors:
            self._vector = tensors[_NAME]


class ControlledAttempt:
    """One attempt with control variates; the changes of devices are in the sum of their updates."""

    def __init__(
        self, context: FederatedContext, spec: AttemptSpec, vector: torch.Tensor, devices: int
    ) -> None:
        self._context = context
        self._spec = spec
        self._vector = vector
        """(N), the control variate that devices get."""
        self._devices = devices
        self._attempt: PlaintextAttempt | None = None

    async def run(self) -> FederatedResult:
        """See `FederatedAttempt.run`; the state of the result is the next control variate (N)."""
        context = self._context
        start = self._spec.start
        assert start is not None
        vectors = (start, self._vector)
        async with published(context.link, context.layout, context.spool, vectors, 2) as blob:
            spec = dataclasses.replace(
                self._spec,
                model=blob,
                first_model=self._spec.model.sha256,
                with_gradient=True,
                # The devices' changes are where gradients are otherwise, and as they are.
                gradient_scale=1.0,
            )
            self._attempt = PlaintextAttempt(context, spec, WeightedMeanAggregator(context, spec))
            result = await self._attempt.run()
        size = context.layout.size
        change = result.pseudo_gradient[:size]
        used = sum(receipt.status == "accepted" for receipt in result.receipts)
        return dataclasses.replace(
            result,
            pseudo_gradient=result.pseudo_gradient[size:],
            # A new vector: a round that is not committed continues from the one before.
            extension_state=torch.add(self._vector, change, alpha=used / self._devices),
        )

    def cancelled(self, reason: str) -> Sequence[Receipt]:
        """See `FederatedAttempt.cancelled`."""
        return () if self._attempt is None else self._attempt.cancelled(reason)
