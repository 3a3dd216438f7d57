"""A server that lies over a real link to real devices."""

import torch
from tests.server.regimes.secure_run import LAYOUT, NAMES

from isthmus.transport.blobs import describe
from isthmus.wire import link_pb2
from isthmus_server.regimes.base import AttemptFailed, AttemptSpec
from isthmus_server.regimes.context import FederatedContext
from isthmus_server.regimes.federated import FederatedRegime

VICTIM, OTHERS = NAMES[0], NAMES[1:]


class LyingServer:
    """A link with real devices that keep their history, and requests that differ between them."""

    def __init__(self, run):
        self.run = run
        self.link = run.network.link

    async def open(self, name, job, run_id="run"):
        opening = self.run.opening(job)
        opening.run_id = run_id
        await self.ask(name, open=opening)
        return opening

    async def ask(self, name, **work):
        return await self.link.ask(name, link_pb2.Request(id=self.link.new_id(), **work))

    def published(self, *vectors):
        payload = b"".join(LAYOUT.encode(vector) for vector in vectors)
        blob = describe(payload)
        self.link.publish(blob, payload)
        return blob

    async def attempt(self, opening, cohort, attempt=1):
        """An attempt of these devices; returns the receipts by name."""
        job = self.run.job
        spec = AttemptSpec(
            round=1,
            attempt=attempt,
            model=self.published(torch.linspace(-1, 1, LAYOUT.size)),
            cohort=dict.fromkeys(cohort, 20),
            settings=job.federated.for_cohort(len(cohort)),
        )
        context = FederatedContext(self.link, job, opening, LAYOUT, self.run.directory)
        try:
            receipts = (await FederatedRegime(context).train(spec)).receipts
        except AttemptFailed as failed:
            receipts = failed.receipts
        return {receipt.participant: receipt for receipt in receipts}
