"""A secure attempt whose devices are simulated in the server's process: the same sum, no masks.

Simulated devices encode their updates as for a masked sum: clipped, rounded, with their noise. The
masks of the protocol cancel in the sum, so it is the same without them, and costs one addition for
each device. Only a link without a network has such devices (`Enrolments.simulated`); a real device
answers with the keys of its masks, whatever it is asked.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from isthmus.errors import AggregationAborted, UpdateError
from isthmus.transport.blobs import into
from isthmus.wire import link_pb2
from isthmus_privacy.secagg.server import RingSum, too_few
from isthmus_server.regimes.call import NotUsed, call
from isthmus_server.regimes.round_times import TrainingTime
from isthmus_server.regimes.secure_sums.attempt import (
    ENOUGH,
    TRAINING_SHARE,
    SecureAggregationAttempt,
    SecureSum,
)
from isthmus_server.regimes.secure_sums.round_configs import BeforeUnmasking, as_before

if TYPE_CHECKING:
    from isthmus_server.regimes.context import FederatedContext


class UnmaskedAttempt(SecureAggregationAttempt):
    """One attempt of a cohort of simulated devices.

    A lost device leaves the sum before its vector is added; there is no later step.
    """

    def __init__(self, context: FederatedContext, wanted: SecureSum) -> None:
        """Prepare; see `SecureAggregationAttempt`."""
        super().__init__(context, wanted)
        self._total = wanted.config.new_vector()
        self._vector = bytearray(wanted.config.payload_bytes)
        """Memory of the vector that is being added."""
        self._summed: list[str] = []

    @property
    def _received(self) -> int:
        return len(self._summed)

    async def _sum(
        self, trained_by: float, deadline: float, before_unmasking: BeforeUnmasking | None
    ) -> RingSum:
        await self._step(
            "training", self._receipts.names, self._add, trained_by, self._config.clients_max
        )
        self._check_complete()
        # With masks the server's session refuses this.
        if self._received < self._needed:
            raise AggregationAborted(too_few(self._received, self._needed))
        await self._unmaskings.note_before(self._summed, before_unmasking)
        return RingSum(self._total, tuple(sorted(self._summed)))

    async def _add(self, name: str) -> None:
        """Have a device compute its vector, and add it."""
        request = self._first_request(self._encoded)
        self._context.sums.tell(name, request)
        if request.HasField("agree"):
            # No training keeps the devices apart, and the vector of each takes memory.
            async with self._places.place(name):
                await self._ask(name, request)
        else:
            await self._ask(name, request)

    async def _ask(self, name: str, request: link_pb2.Request) -> None:
        link = self._context.link
        spent = TrainingTime(link, name, self._context.job.time.least_rate)
        async with call(link, name, request, "trained", self._receipts) as reply:
            seconds = spent.seconds
            if self._trains:
                self._trained[name] = seconds / TRAINING_SHARE
                self._context.round_times.took(name, self._trained[name])
            result = reply.trained.result
            if result.size != self._config.payload_bytes:
                raise UpdateError(
                    f"its vector has {result.size} bytes where this configuration takes "
                    f"{self._config.payload_bytes}"
                )
            if self._received >= self._config.clients_max:
                raise NotUsed(ENOUGH)
            await link.fetch(name, result, into(self._vector))
            self._total.add(self._vector)
            self._summed.append(name)
            self._receipts.remember(name, seconds=seconds)


def secure_attempt(context: FederatedContext, wanted: SecureSum) -> SecureAggregationAttempt:
    """The attempt for the participants of a run's link.

    One that is repeated exactly has the encoding of before. Simulated devices remember nothing.
    """
    if context.link.enrolments.simulated:
        return UnmaskedAttempt(context, dataclasses.replace(wanted, before=None))
    if wanted.exact:
        config = as_before(context.unmaskings, wanted.config, wanted.cohort)
        wanted = dataclasses.replace(wanted, config=config)
    return SecureAggregationAttempt(context, wanted)
