"""The open run of a device as the server's request describes it, without the task's code."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING

from isthmus.errors import JobError, TaskError, UpdateError
from isthmus.job import Job, read_job
from isthmus.job.flower import MAX_BYTES
from isthmus.job.weights import Weights
from isthmus.task import check_installed, check_named
from isthmus.task.code_digest import code_digest
from isthmus.task.measurements.metrics import MAX_COUNTS
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.transport.blobs import Buffer
from isthmus.transport.requests import fingerprint_of
from isthmus.wire import link_pb2
from isthmus_privacy.crypto import refusal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from isthmus.job.privacy import PrivacySection
    from isthmus_clients.training.examples_account import ExamplesAccount, RunAccount
    from isthmus_privacy.compression.changes import ChangesCodec
    from isthmus_privacy.compression.single_updates import UpdateMessages
    from isthmus_privacy.purpose import RunPurpose
    from isthmus_privacy.random_groups import RandomGroup
    from isthmus_privacy.secagg.config import RoundConfig
    from isthmus_privacy.slots import Slot

log = logging.getLogger(__name__)

MAX_MODELS = 8
"""Maximum number of models of one comparison."""


_NOTHING = TensorLayout(())

_ROUNDED = 1 - 1e-6
"""The server has computed the noise of the job with another processor."""


@dataclasses.dataclass(frozen=True)
class ActiveRun:
    """What the agent checks requests against, before and after the task works on them."""

    run_id: str
    job: Job
    layout: TensorLayout
    """Layout of the server's model, which the task's must equal; empty with an app."""
    purpose: RunPurpose | None = None
    """What the device's sums are for, as far as all requests have it in common; None for a run
    without secure aggregation."""
    group: str = ""
    """The group that the device has declared; empty for none."""
    personal: TensorLayout = _NOTHING
    """Layout of what stays on the device, which the task's must equal."""
    owners_weights: Weights = "exact"
    """The most exact kind of weights that the device's owner gives, see `isthmus.job.weights`."""
    weight: int = 0
    """What the device's updates count, from when its data were opened until the run is closed."""
    account: RunAccount | None = None
    """Account of this device's examples, for a job that protects them."""
    unfit: bool = False
    """Whether the job cannot protect so few or so many examples: then nothing is trained, and this
    device takes part without effect."""
    messages: UpdateMessages | None = None
    """Encodes single updates, for a job with `federated.codec`."""
    changes: ChangesCodec | None = None
    """Decodes the model's changes, for a job with `federated.download_bits` or another codec."""

    @classmethod
    def of(cls, work: link_pb2.OpenRun, tasks: Path | None = None) -> ActiveRun:
        """Read the request that opens a run.

        Args:
            work: the request.
            tasks: directory of the device's own tasks; None for those at the path in the request.

        Raises:
            JobError: the job cannot be read.
            TaskError: with secure aggregation, the task's code is missing here, or it differs from
                the server's.
            UpdateError: the layout is not valid.
            UserError: a codec of the job is not installed here, or its settings cannot be used.
        """
        job = read_job(work.job)
        if job.federated.app is not None:
            return cls(work.run_id, job, _NOTHING)
        layout = TensorLayout.from_header(work.layout)
        personal = TensorLayout.from_header(work.personal) if work.personal else _NOTHING
        changes = _changes(job, layout)
        if not job.federated.secure_aggregation:
            messages = _messages(job, layout)
            return cls(
                work.run_id, job, layout, personal=personal, messages=messages, changes=changes
            )
        _check_sum_codec(job, layout)
        from isthmus_privacy.purpose import RunPurpose

        base = Path(work.base) if tasks is None else tasks
        if tasks is not None:
            check_installed(job.task.source, tasks)
        check_named(job.task.source, "task.source", base=base)
        digest = code_digest(job.task.source, base)
        if work.task_digest and work.task_digest != digest:
            raise TaskError(
                f"the code of task.source={job.task.source!r} on this device differs from the "
                "server's, so that their updates cannot be summed; install the server's version in "
                "the directory of tasks"
            )
        purpose = RunPurpose.of(
            job=work.job, task=digest, layout=work.layout, frozen=fingerprint_of(work.frozen)
        )
        return cls(work.run_id, job, layout, purpose, personal=personal, changes=changes)

    @property
    def kept(self) -> TensorLayout:
        """Layout of what stays on the device between rounds; empty for nothing."""
        controlled = self.job.federated.control_variates is not None
        return self.layout if controlled else self.personal

    @property
    def has_app(self) -> bool:
        """Whether an app runs instead of the task."""
        return self.job.federated.app is not None

    def check_size(self, request: link_pb2.Request, size: int) -> None:
        """Check the announced size of the payload of a request with models or for an app.

        Raises:
            UpdateError: it is not that of its models, or above the job's limit.
        """
        kind = request.WhichOneof("work")
        if kind == "app":
            max_bytes = self.job.federated.app_max_bytes
            if size > max_bytes:
                raise UpdateError(
                    f"a message of {size} bytes was announced where {MAX_BYTES}={max_bytes}"
                )
            return
        count = 2 if request.train_local.with_gradient else 1
        if kind == "score":
            candidates = request.score.candidates
            if not candidates:
                raise UpdateError("a comparison of no models was requested")
            count = 1 + max((number for mean in candidates for number in mean.of), default=0)
            if count > MAX_MODELS:
                raise UpdateError(
                    f"{count} models are to be scored, and the maximum is {MAX_MODELS}"
                )
        if size != count * self.layout.nbytes:
            raise UpdateError(
                f"{count} models in {size} bytes were announced; a model of this run has "
                f"{self.layout.nbytes}"
            )

    def room_for(self, request: link_pb2.Request) -> int:
        """Bytes of its result in front of the payload of a request, see `TaskHost.buffer`."""
        return self.layout.gradient_room if request.train_local.gradient_scale else 0

    @property
    def secure_purpose(self) -> RunPurpose:
        """The purpose of a run with secure aggregation.

        Raises:
            UpdateError: the run was opened without.
        """
        if self.purpose is None:
            raise UpdateError(
                f"{self.job.name!r} was opened without federated.secure_aggregation, and this "
                "request is for a secure sum"
            )
        return self.purpose

    @functools.cached_property
    def vector_purpose(self) -> RunPurpose:
        """What this device's vectors depend on, of what the run was opened with.

        Raises:
            UpdateError: the run was opened without secure aggregation.
        """
        from isthmus.job.vector_settings import vector_settings

        return self.secure_purpose.of_vector(vector_settings(self.job))

    @property
    def statistics_purpose(self) -> RunPurpose:
        """What statistics of this device's data depend on, and not a model.

        Raises:
            UpdateError: the run was opened without secure aggregation.
        """
        from isthmus.job.vector_settings import statistics_settings

        purpose = self.secure_purpose.of_vector(statistics_settings(self.job))
        return dataclasses.replace(purpose, layout=bytes(32), frozen=bytes(32))

    def check_uses_models(self) -> None:
        """Refuse to train, or to score models, in a run that collects statistics.

        Its settings are those of counts of data, and the device may have no other data open.

        Raises:
            UpdateError: the run does.
        """
        if self.job.statistics.collect:
            raise UpdateError(
                f"{self.job.name!r} was opened with statistics.collect, and this request is for "
                "training or for scores of models"
            )

    @property
    def training_slots(self) -> Sequence[Slot]:
        """The figures that this device gives with an update; no loss if a server adds noise."""
        from isthmus_privacy import slots

        if self.job.federated.compression is not None:
            return slots.COMPRESSED_SLOTS
        privacy = self.job.privacy
        if privacy is None and self.job.federated.privacy is not None:
            return slots.PRIVATE_SLOTS
        if privacy is None or privacy.mechanism == "distributed":
            return slots.TRAINING_SLOTS
        return slots.PRIVATE_SLOTS if privacy.clip_quantile is None else slots.CLIPPING_SLOTS

    def update_slots(self, work: link_pb2.TrainLocal) -> Sequence[Slot]:
        """The figures of an update, or of a gradient and an update."""
        from isthmus_privacy.slots import MEASURING_SLOTS

        return MEASURING_SLOTS if work.gradient_scale else self.training_slots

    @property
    def measuring_slots(self) -> Sequence[Slot]:
        """The figures that this device gives with scores and counts."""
        from isthmus_privacy import slots

        return slots.SCORING_SLOTS if self.job.privacy is None else slots.PRIVATE_SLOTS

    @property
    def range_slots(self) -> Sequence[Slot]:
        """The figures that this device gives with the ranges of an update."""
        from isthmus_privacy import slots

        protected = self.job.federated.privacy is not None
        return slots.PRIVATE_SLOTS if protected else slots.SCORING_SLOTS

    def check_privacy(self, config: RoundConfig, rho: float) -> None:
        """Refuse a sum of updates without the clipping and the noise that the job promises.

        Args:
            config: of the sum.
            rho: of the noise of all sums of this run, this one included; see `Begun.rho`.

        Raises:
            PeerMisbehaved: the configuration differs from the job, or the budget of the job is used
                up: a server may have announced fewer rounds than it asks for.
        """
        from isthmus_privacy.dp.calibration import NoisePlan

        privacy = self.job.privacy
        if privacy is None:
            return
        if config.size != self.layout.size:
            refusal.refuse(
                "private-sum-of-another-vector",
                f"{self.job.name!r} was opened with [privacy], and this request is for more than "
                "the update, whose norm is not clipped",
            )
        if privacy.mechanism == "distributed":
            self._check_noise(
                config, NoisePlan.of_job(self.job).multiplier, privacy.clip, privacy, rho
            )

    def check_measured(self) -> None:
        """Refuse to send scores or counts in a run that promises differential privacy without them.

        Raises:
            PeerMisbehaved: it does, and they would have no noise.
        """
        privacy = self.job.privacy
        if self.job.federated.privacy is not None:
            reason = "[federated.privacy]"
        elif privacy is not None and not self.job.most_measurements:
            reason = "[privacy] and no measurements"
        else:
            return
        refusal.refuse(
            "measurement-without-noise",
            f"{self.job.name!r} was opened with {reason}, and this request is for figures of this "
            "device's data, which get no noise",
        )

    def check_measuring_noise(self, config: RoundConfig, norm: float, rho: float) -> None:
        """Refuse a sum of scores or metrics without the noise or the precision of the job.

        Args:
            config: of the sum.
            norm: bound on the 2-norm of what a device sends.
            rho: see `check_privacy`.

        Raises:
            PeerMisbehaved: see `check_privacy` and `check_encoding`.
        """
        from isthmus_privacy.dp.calibration import NoisePlan

        privacy = self.job.privacy
        if privacy is not None and privacy.mechanism == "distributed":
            promised = NoisePlan.of_job(self.job).measuring_multiplier
            self._check_noise(config, promised, norm, privacy, rho)
        elif not config.whole:
            bound = 1.0 if privacy is None else norm
            said = f"measures numbers of up to {bound:g} in {self.job.name!r}"
            self._check_fine(config, said, in_range=config.clip == bound, weights=(1,))

    def _check_noise(
        self,
        config: RoundConfig,
        promised: float,
        clip: float,
        privacy: PrivacySection,
        rho: float,
    ) -> None:
        from isthmus_privacy.dp.accounting import epsilon_of_rho

        noise = config.noise
        if noise is None or noise.clip != clip or noise.multiplier < promised * _ROUNDED:
            refusal.refuse(
                "noise-below-the-jobs",
                f"{self.job.name!r} was opened with noise of {promised:.6g} times a clipping bound "
                f"of {clip:g} ([privacy]), and this sum has "
                + ("none" if noise is None else f"{noise.multiplier:.6g} times {noise.clip:g}"),
            )
        if (epsilon := epsilon_of_rho(rho, privacy.delta)) * _ROUNDED > privacy.epsilon:
            refusal.refuse(
                "sums-beyond-the-jobs-budget",
                f"{self.job.name!r} was opened with an epsilon of {privacy.epsilon:g} ([privacy]), "
                f"and with this sum its sums on this device would have one of {epsilon:.4g}",
            )

    def check_codec(self, config: RoundConfig) -> None:
        """Refuse a sum of updates that are compressed in another way than the job says.

        Raises:
            PeerMisbehaved: other elements are wanted, or coarser ones; finer ones are wanted before
                the magnitude of updates is known.
        """
        from isthmus_privacy.compression.sum_codecs import sum_codec

        compression = self.job.federated.compression
        codec = config.codec
        if codec is None:
            return
        own = None if compression is None else sum_codec(self.job, self.layout, codec.bits)
        if (
            compression is None
            or codec != own
            or codec.bits < compression.bits
            or config.size != self.layout.size
        ):
            refusal.refuse(
                "codec-differs",
                f"{self.job.name!r} was opened with seed={self.job.seed} and federated.compression="
                f"{compression}, with which this device has {own}, and this sum has {codec}"
                f"{codec.more}, and {config.size} elements in all",
            )

    def result_layout(self, work: link_pb2.TrainLocal) -> TensorLayout:
        """The layout of what a training results in."""
        return self.layout.gradient_and_update if work.gradient_scale else self.layout

    def check_ranges_wanted(self) -> None:
        """Refuse a sum of ranges in a run whose job says how updates are encoded.

        Raises:
            PeerMisbehaved: it does.
        """
        if not self.job.finds_ranges:
            refusal.refuse(
                "ranges-not-of-job",
                f"{self.job.name!r} was opened with federated.clip={self.job.federated.clip}, "
                f"federated.max_examples={self.job.federated.max_examples} and [privacy] that say "
                "how updates are encoded, and this request is for their ranges",
            )

    def check_encoding(self, config: RoundConfig) -> None:
        """Refuse a sum of updates in another range than the job, or ranges that were summed, give.

        Raises:
            PeerMisbehaved: the range is not that of the job, nor a power of two; or the largest
                weight is not that of the job, nor on the ladder of `secagg.ranges`; or the elements
                are rounded more coarsely than the ring needs.
        """
        from isthmus_privacy.secagg.ranges import LADDER

        if self.job.devices_add_noise:
            return  # see `check_privacy`
        federated = self.job.federated
        privacy = self.job.privacy
        clip = federated.clip
        weight_max = federated.largest_weight
        if privacy is not None:
            clip = privacy.clip
            weight_max = 1
        # A bound that follows the norms of updates bounds each element as well: none is clipped.
        follows = privacy is not None and privacy.clip_quantile is not None
        if config.codec is not None or follows:
            in_range = True
        elif clip is not None:
            in_range = config.clip == clip
        else:
            in_range = math.frexp(config.clip)[0] == 0.5
        weights = LADDER if weight_max is None else (weight_max,)
        given = f"federated.clip={clip} and federated.max_examples={federated.max_examples}"
        if privacy is not None:
            given = f"privacy.clip={clip}"
        said = f"was opened for {self.job.name!r} with {given}"
        self._check_fine(config, said, in_range=in_range, weights=weights)

    def _check_fine(
        self, config: RoundConfig, said: str, *, in_range: bool, weights: Sequence[int]
    ) -> None:
        """Refuse a sum in another range or with another largest weight, or with fewer levels.

        With few levels a vector would be a comparison of each element with a bound of the server's
        choice, and so it would be in a range far below most elements.
        """
        from isthmus_privacy.secagg.config import WIDE_LEVELS, finest_levels

        finest = WIDE_LEVELS if config.bits == 64 else finest_levels(config.clients_max, 32)
        is_fine = config.codec is not None or config.levels == finest
        if not (in_range and is_fine) or config.weight_max not in weights:
            refusal.refuse(
                "encoding-not-of-job",
                f"this device {said}, and this sum has a range of {config.clip:g}, "
                f"{config.levels} levels and a largest weight of {config.weight_max}",
            )

    def weighing(self, examples: int) -> ActiveRun:
        """A copy of the run with the weight of a device that has so many examples."""
        weight = self.job.federated.weight(examples, self.owners_weights)
        return dataclasses.replace(self, weight=weight)

    @property
    def gives_other_weight(self) -> bool:
        """Whether updates weigh something else than the number of examples, by the owner's choice.

        Not where all devices of the job count the same, or as it asks.
        """
        federated = self.job.federated
        tables = (self.job.privacy, federated.privacy, federated.control_variates)
        weighs = federated.weights is None and all(table is None for table in tables)
        return weighs and self.owners_weights != "exact"

    def with_account(
        self, account: ExamplesAccount, examples: int, *, withheld: bool = False
    ) -> ActiveRun:
        """A copy of the run with the account of the device's examples, if the job protects them.

        Args:
            account: of the device.
            examples: their number.
            withheld: whether the server is not to know whether their number fits.

        Raises:
            JobError: the job's budget does not fit so many examples, and that is not withheld.
        """
        from isthmus_clients.training.examples_account import RunAccount
        from isthmus_privacy.dp_sgd.device_examples import DeviceExamplesPlan

        if self.job.federated.privacy is None:
            return self
        try:
            # Otherwise the server would choose how often each device trains until it gives zeros.
            plan = DeviceExamplesPlan.of(
                self.job.federated, self.job.rounds, examples, whole=withheld
            )
        except JobError as error:
            if not withheld:
                raise
            log.error("this device takes part in %s without effect: %s", self.run_id, error)
            return dataclasses.replace(self, unfit=True)
        return dataclasses.replace(self, account=RunAccount(account, plan, self.run_id, withheld))

    def charge(self, work: link_pb2.TrainLocal) -> bool:
        """Charge the examples of this device for a training that is about to begin.

        Returns:
            Whether it may begin. If not, the device takes part without effect.

        Raises:
            PeerMisbehaved: a budget does not allow it, or more is wanted than an update.
            UpdateError: the charge cannot be recorded.
        """
        if self.job.federated.privacy is None:
            return True
        if work.gradient_scale:
            self.check_measured()
        if self.unfit:
            return True  # which its task refuses
        assert self.account is not None
        return self.account.charge(work.round, work.attempt)

    @property
    def reports(self) -> bool:
        """Whether losses and progress of the training may be sent: they have no noise."""
        return self.job.privacy is None and self.job.federated.privacy is None

    def protect(self, trained: link_pb2.Trained, update: Buffer) -> None:
        """Take from a plain result what the job's privacy does not let the server know."""
        from isthmus_privacy.dp.clipping import clip_to_norm

        if not self.reports:
            trained.training.clear()
            trained.steps = 0  # which follow from the number of examples
        if self.job.privacy is not None:
            clip_to_norm(self.layout.decode(update), self.job.privacy.clip)

    def encoded(self, work: link_pb2.TrainLocal, update: Buffer) -> Buffer:
        """What is sent of an update: its bytes, or those of the job's codec.

        Raises:
            UpdateError: the codec failed, or more is wanted than an update.
        """
        if self.messages is None:
            return update
        if work.gradient_scale:
            raise UpdateError("federated.codec encodes an update, and a gradient is asked for too")
        return bytearray(self.messages.encode(self.layout.decode(update), work.round))

    def check_group(self, group: str, clients_min: int, *, of_updates: bool = True) -> None:
        """Refuse a sum of a group, unless it is the device's own or a random one, and large enough.

        Updates of a job with robust sums are summed in random groups only, and nothing else is.

        Raises:
            PeerMisbehaved: see `isthmus_privacy.purpose.check_group` and `check_random_group`.
        """
        from isthmus_privacy.purpose import check_group, check_random_group

        federated = self.job.federated
        if federated.robust is not None and of_updates:
            check_random_group(
                group,
                clients_min=clients_min,
                minimum=federated.robust_minimum,
                most=federated.robust_groups,
            )
            return
        groups = federated.groups
        minimum = None if groups is None else groups.minimum
        check_group(group, own=self.group, clients_min=clients_min, minimum=minimum)

    def random_group(self, group: str) -> RandomGroup | None:
        """The random group of a request whose group was checked; None in a job without them."""
        from isthmus_privacy.random_groups import RandomGroup

        return None if self.job.federated.robust is None else RandomGroup.parse(group)

    def check_counts(self, size: int) -> None:
        """Refuse a sum of more counts than a task can have, before memory is allocated.

        Raises:
            UpdateError: the size is above the limit.
        """
        if size > MAX_COUNTS:
            raise UpdateError(f"{size} counts are to be sent, and the maximum is {MAX_COUNTS}")

    def check_buffered(self) -> None:
        """Refuse a request of the mode `buffered` in a run of another mode.

        Raises:
            PeerMisbehaved: the job says mode = "rounds", whose devices start from one model.
        """
        if self.job.federated.mode != "buffered":
            refusal.refuse(
                "buffered-mode-differs",
                f"{self.job.name!r} was opened with federated.mode={self.job.federated.mode!r}, "
                "and this request is for a buffer of updates to different models",
            )

    def check_plain_allowed(self) -> None:
        """Refuse to send figures in plaintext if the opened job promises secure aggregation.

        Raises:
            UpdateError: it does.
        """
        if self.job.federated.secure_aggregation:
            raise UpdateError(
                f"{self.job.name!r} was opened with federated.secure_aggregation, and this request "
                "would send this device's own figures in plaintext"
            )


def _changes(job: Job, layout: TensorLayout) -> ChangesCodec | None:
    """The codec of the model's changes; None if whole models are sent."""
    if not job.federated.sends_changes:
        return None
    from isthmus_privacy.compression.changes import changes_codec

    return changes_codec(job, layout)


def _check_sum_codec(job: Job, layout: TensorLayout) -> None:
    """Refuse a job whose codec of secure sums is not installed here.

    Raises:
        UserError: so it is, or its settings cannot be used.
    """
    if (compression := job.federated.compression) is None:
        return
    from isthmus_privacy.compression.sum_codecs import sum_codec

    sum_codec(job, layout, compression.bits)


def _messages(job: Job, layout: TensorLayout) -> UpdateMessages | None:
    """The messages of a job's codec; None if updates are sent as they are."""
    if job.federated.codec is None:
        return None
    from isthmus_privacy.compression.single_updates import UpdateMessages

    return UpdateMessages.of(job, layout)
