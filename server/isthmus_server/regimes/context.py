"""What all federated attempts and model comparisons of a run share."""

from __future__ import annotations

import functools
from pathlib import Path

from isthmus.job import Job
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.transport.requests import fingerprint_of
from isthmus.wire import link_pb2
from isthmus_privacy.compression.single_updates import UpdateMessages
from isthmus_privacy.purpose import RunPurpose
from isthmus_privacy.secagg.config import RoundConfig
from isthmus_privacy.secagg.identity import Directory
from isthmus_privacy.secagg.messages import Roster
from isthmus_server.budgets.budget import PrivacyBudget
from isthmus_server.model.fixed_point_sum import SUM_BYTES, WeightedSum
from isthmus_server.model.mmap_buffer import MmapBuffer
from isthmus_server.regimes.committed_sums import CommittedSums
from isthmus_server.regimes.round_times import RoundTimes
from isthmus_server.storage.range_log import RangeLog
from isthmus_server.storage.signed_sums import SignedSum, SignedSums
from isthmus_server.storage.unmasking_log import UnmaskingLog
from isthmus_server.transport.link import Link


class FederatedContext:
    """The link, the job, the model's layout and the memory of update sums of one run."""

    def __init__(
        self,
        link: Link,
        job: Job,
        opening: link_pb2.OpenRun,
        layout: TensorLayout,
        spool: Path,
        unmaskings: UnmaskingLog | None = None,
        privacy: PrivacyBudget | None = None,
        sums: CommittedSums | None = None,
        ranges: RangeLog | None = None,
        signed_sums: SignedSums | None = None,
        round_times: RoundTimes | None = None,
    ) -> None:
        """Collect what attempts need.

        Args:
            link: of the run's participants.
            job: of the run.
            opening: what devices open the run with; with secure aggregation, it contains the digest
                of the task's code.
            layout: of the model.
            spool: directory for updates too large to keep in memory while they arrive.
            unmaskings: where secure sums are noted before they are unmasked; None for memory only.
            privacy: of a job with `[privacy]`.
            sums: the committed sums of the run so far; None for none.
            ranges: where the ranges of updates are stored; None for memory only.
            signed_sums: where it is kept what devices sign; None for nowhere.
            round_times: what devices took before; None if nothing is known.

        Raises:
            UserError: the job's codec cannot be used.
        """
        self.link = link
        self.job = job
        self.run_id = opening.run_id
        self._opening = opening
        self.layout = layout
        self.spool = spool
        self.directory = Directory(link.enrolments.authority, revoked=link.enrolments.revoked)
        self.unmaskings = unmaskings or UnmaskingLog()
        self.privacy = privacy
        self.sums = sums or CommittedSums()
        self.ranges = ranges or RangeLog()
        self.signed_sums = signed_sums or SignedSums()
        self.round_times = round_times or RoundTimes(job.time)
        self.messages = UpdateMessages.of(job, layout)
        """Encoded updates of plaintext rounds; None if they are sent as they are."""
        self._sum: MmapBuffer | None = None

    @property
    def certified(self) -> bool:
        """Whether devices have certificates: those without are processes on this machine."""
        return self.link.enrolments.certified

    @functools.cached_property
    def purpose(self) -> RunPurpose:
        """What the sums of this run are for, as its devices compute it; with secure aggregation."""
        opening = self._opening
        return RunPurpose.of(
            job=opening.job,
            task=opening.task_digest,
            layout=opening.layout,
            frozen=fingerprint_of(opening.frozen),
        )

    def keep_signed(
        self,
        config: RoundConfig,
        roster: Roster,
        survivors: bytes,
        signatures: bytes,
        set_up: bytes = b"",
    ) -> None:
        """Keep what the devices of a sum of updates have signed.

        The sums of evaluations, comparisons and ranges have names of their own, and are not kept.

        Args:
            config: of the sum.
            roster: of its devices.
            survivors: these of them.
            signatures: of the survivors.
            set_up: the configuration that the devices have signed with their keys, if it is that of
                the sum before.

        Raises:
            OSError: it cannot be stored.
        """
        if config.run_id != self.run_id:
            return
        authority = self.link.enrolments.authority
        signed = SignedSum(
            authority, config.to_bytes(), roster.to_bytes(), survivors, signatures, set_up=set_up
        )
        self.signed_sums.add(signed, config.purpose, self._opening.job)

    def weighted_sum(self, declared_weight: int, size: int) -> WeightedSum:
        """An empty sum that reuses the memory of the previous one, since fresh pages cost time."""
        if self._sum is None or len(self._sum.view) != SUM_BYTES * size:
            self._sum = None  # frees its memory first
            self._sum = MmapBuffer(SUM_BYTES * size)
        clip = None if self.privacy is None else self.privacy.clip
        return WeightedSum(size, declared_weight, self._sum, clip)
