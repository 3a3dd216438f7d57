"""A secure attempt whose devices are simulated in the server's process: the same sum, no masks.

Simulated devices encode their updates as for a masked sum: clipped, rounded, with their noise. The
masks of the protocol cancel in the sum, so it is the same without them, and costs one addition for
each device. Only a link without a network has such devices (`Enrolments.simulated`); a real device
answers with the keys of its masks, whatever it is asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import TYPE_CHECKING

from isthmus.errors import AggregationAborted, UpdateError
from isthmus.transport.blobs import into
from isthmus.wire import link_pb2
from isthmus_privacy.random_groups import RandomGroup
from isthmus_privacy.secagg.config import RoundConfig
from isthmus_privacy.secagg.ranges import Ranges
from isthmus_privacy.secagg.server import RingSum, too_few
from isthmus_server.regimes.call import call
from isthmus_server.regimes.secure_sums.attempt import (
    ENOUGH,
    FirstRequest,
    SecureAggregationAttempt,
)
from isthmus_server.regimes.secure_sums.round_configs import BeforeUnmasking, as_before

if TYPE_CHECKING:
    from isthmus_server.regimes.context import FederatedContext


class UnmaskedAttempt(SecureAggregationAttempt):
    """One attempt of a cohort of simulated devices.

    A lost device leaves the sum before its vector is added; there is no later step.
    """

    def __init__(
        self,
        context: FederatedContext,
        config: RoundConfig,
        cohort: Collection[str],
        first_request: FirstRequest,
        *,
        exact: bool = False,
        alone: FirstRequest | None = None,
        ranges: Ranges | None = None,
        group: RandomGroup | None = None,
    ) -> None:
        """Prepare; see `SecureAggregationAttempt`."""
        super().__init__(
            context,
            config,
            cohort,
            first_request,
            exact=exact,
            alone=alone,
            ranges=ranges,
            group=group,
        )
        self._total = config.new_vector()
        self._vector = bytearray(config.payload_bytes)
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
            async with self._uploads:
                await self._ask(name, request)
        else:
            await self._ask(name, request)

    async def _ask(self, name: str, request: link_pb2.Request) -> None:
        loop = asyncio.get_running_loop()
        asked = loop.time()
        link = self._context.link
        async with call(link, name, request, "trained", self._receipts) as reply:
            result = reply.trained.result
            if result.size != self._config.payload_bytes:
                raise UpdateError(
                    f"its vector has {result.size} bytes where this configuration takes "
                    f"{self._config.payload_bytes}"
                )
            if self._received >= self._config.clients_max:
                raise UpdateError(ENOUGH)
            await link.fetch(name, result, into(self._vector))
            self._total.add(self._vector)
            self._summed.append(name)
            self._receipts.remember(name, seconds=loop.time() - asked)


def secure_attempt(
    context: FederatedContext,
    config: RoundConfig,
    cohort: Collection[str],
    first_request: FirstRequest,
    *,
    exact: bool = False,
    alone: FirstRequest | None = None,
    ranges: Ranges | None = None,
    group: RandomGroup | None = None,
) -> SecureAggregationAttempt:
    """The attempt for the participants of a link; for the arguments see its class.

    One that is repeated exactly has the encoding of before. Simulated devices remember nothing.
    """
    if context.link.enrolments.simulated:
        kind: type[SecureAggregationAttempt] = UnmaskedAttempt
    else:
        kind = SecureAggregationAttempt
        if exact:
            config = as_before(context.unmaskings, config, cohort)
    return kind(
        context,
        config,
        cohort,
        first_request,
        exact=exact,
        alone=alone,
        ranges=ranges,
        group=group,
    )
