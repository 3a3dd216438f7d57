"""The device's part in secure aggregation across requests: at most one attempt at a time.

PyTorch is imported with the first attempt, so that an idle device stays small.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from isthmus.errors import PeerMisbehaved, UpdateError
from isthmus.transport.blobs import Buffer, describe
from isthmus.transport.requests import gradient_name, position_of
from isthmus.wire import link_pb2
from isthmus_clients.device.active_run import ActiveRun
from isthmus_clients.device.seen_clocks import SeenClocks
from isthmus_clients.device.task_host import TaskHost, TrainingResult, train_silently
from isthmus_clients.device.update_tally import UpdateTally

if TYPE_CHECKING:
    import torch

    from isthmus.tensors.exchange_set import TensorLayout
    from isthmus_clients.device.owner_limits import PrivacyLimits
    from isthmus_clients.device.residuals import Residual, Residuals
    from isthmus_clients.training.personal_state import Work
    from isthmus_clients.training.secure import Credentials, SecureParticipation
    from isthmus_privacy.random_groups import RandomGroup
    from isthmus_privacy.secagg.config import RoundConfig
    from isthmus_privacy.secagg.history import StartModel
    from isthmus_privacy.secagg.spacing import Spacing
    from isthmus_privacy.slots import Slot

log = logging.getLogger(__name__)

_STEP_SECONDS = 60.0
_PAIR_SECONDS = 0.005
"""Time of a step of the protocol, and for each pair of devices, that a server may give at most."""
_STEPS = 4
"""Steps from a device's ranges to the request for its update, without that of the vectors."""
_LONGEST_SECONDS = 3600.0
"""Longest time that a server gives a round of a job that does not say how long it may take."""


@dataclasses.dataclass(frozen=True)
class Origin:
    """What an update is trained from, besides the settings of its run and its request."""

    model: bytes
    """Name of the model, see `model_name`."""
    state: str
    """Name of what the device keeps, see `state_name`."""
    round: int
    """The round whose random numbers the training has, see `SecureSessions.trained_round`."""


@dataclasses.dataclass(frozen=True)
class KeptUpdate:
    """An update that waits on this device for the sum that it is for."""

    request: link_pb2.Request
    """The request that the update was trained for."""
    run: ActiveRun
    """The run, as it was open when the update was trained."""
    result: TrainingResult | None
    """Figures and update of the training; None if it is unusable."""
    origin: Origin
    residual: Residual | None = None
    """What earlier compressed updates have left; None without compression."""
    exponents: torch.Tensor | None = None
    """Exponents of the received model's elements, int8 (N), see `SecureSessions.exponents`."""

    @property
    def about(self) -> tuple[str, int, int]:
        """Run, round and attempt of the request."""
        work = self.request.train_local
        return work.run_id, work.round, work.attempt


class SecureSessions:
    """Joins an attempt with an update or scores, keeps it between requests, answers its steps.

    Guarantees:
      * whatever the task does with this device's data, the server receives a masked vector; one
        without a usable update is zero, with weight 0;
      * nothing that the server does ends in such a zero vector: work that it cancels, or whose run
        it closes, fails. It could otherwise have all devices of a sum but one send zeros;
      * a vector that is given again for a model is the same: trained with the same random numbers,
        and rounded with the same ones, which a server on another machine cannot compute;
      * for such a server the elements of an update are hidden within the spacing of float32 numbers
        at the model, of which a sum would otherwise be a whole multiple.
    """

    _rounding_secret: bytes | None = None
    _masked: Buffer | None = None
    """See `take_masked`."""

    def __init__(
        self,
        name: str,
        signing_key: Ed25519PrivateKey | None,
        history_file: Path | None,
        privacy: PrivacyLimits | None,
        threads: int,
        residuals: Path | None = None,
        tally: UpdateTally | None = None,
    ) -> None:
        """Identify the device.

        Args:
            name: of the device.
            signing_key: the device's identity, which its secrets follow from; None generates a key
                for this process, whose rounding follows from the job's seed.
            history_file: persists which sums this device was in; None keeps it in memory for a run.
            privacy: what the owner requires; None for the defaults of the protocol, with any
                selection of devices.
            threads: CPU threads used for masking.
            residuals: directory for what compressed updates leave; None keeps it in memory.
            tally: counts the updates; None for one of this process.
        """
        self._name = name
        self._tally = tally or UpdateTally(None)
        if signing_key is not None:
            seed = signing_key.private_bytes_raw()
            self._rounding_secret = hashlib.sha256(b"isthmus/rounding-secret/" + seed).digest()
        self._signing_key = signing_key or Ed25519PrivateKey.generate()
        self._history_file = history_file
        self._privacy = privacy
        self._run_id = ""
        """The run that was opened last."""
        self._threads = threads
        self._residuals_directory = residuals
        self._residuals: Residuals | None = None
        self._welcome: link_pb2.Welcome | None = None
        self._clocks = SeenClocks()
        self._credentials: Credentials | None = None
        self._current: SecureParticipation | None = None
        self._kept: KeptUpdate | None = None
        """What waits for a buffered sum."""
        self._ranged: KeptUpdate | None = None
        """What waits for the range of a round's sum."""

    @property
    def identity(self) -> bytes:
        """The device's public key."""
        return self._signing_key.public_key().public_bytes_raw()

    def welcomed(self, welcome: link_pb2.Welcome) -> None:
        """Take the enrolment of this device's identity from the server's welcome."""
        self._welcome = welcome
        self._clocks.welcomed(welcome.clock)

    def keeps(self, request: link_pb2.Request) -> bool:
        """Whether the update of this request is kept, and its memory with it."""
        return any(
            kept is not None and kept.request is request for kept in (self._kept, self._ranged)
        )

    def run_opened(self, run_id: str) -> None:
        """Forget other runs if nothing persists them.

        A device without certificates is on the server's machine, which is not assumed to lie. Its
        runs may be repetitions of one job, which begin with the same model.
        """
        if self._history_file is None and run_id != self._run_id:
            self._credentials = None
            self._current = None
        self._run_id = run_id

    def forget_kept(self) -> None:
        """Forget the updates that are kept: their run is closed."""
        self._kept = None
        self._ranged = None

    def hold(self, host: TaskHost, kept: KeptUpdate) -> KeptUpdate:
        """What is kept of an update: here as it is, in the memory that `host` has trained it in.

        A simulation overrides this, whose whole cohort waits in one process: it moves large updates
        to files, and releases the memory of `host`.
        """
        return kept

    def drop_ranged(self, host: TaskHost, request: link_pb2.Request | None = None) -> None:
        """Free the update that waits for a range, if there is one and it is of that request."""
        kept = self._ranged
        if kept is not None and (request is None or request is kept.request):
            self._ranged = None
            host.release(kept.request.id)

    def seconds_kept(self, request: link_pb2.Request) -> float | None:
        """Time after which the sum that an update waits for is over; None if it does not wait."""
        kept = self._ranged
        if kept is None or kept.request is not request:
            return None
        limits = kept.run.job.time
        pairs = self.read_config(request.train_local.ranges).clients_max ** 2
        step = limits.secure_step_seconds or _STEP_SECONDS + _PAIR_SECONDS * pairs
        upload = limits.secure_upload_seconds or step
        moving = 2 * kept.run.layout.nbytes / limits.least_rate
        given = min(request.train_local.seconds, _LONGEST_SECONDS)
        return 2 * max(limits.first_round_seconds, given) + _STEPS * step + upload + moving

    def forget_ranged(self, request: link_pb2.Request) -> None:
        """Forget the update of a request, if it waits for the range of a round's sum."""
        if self._ranged is not None and self._ranged.request is request:
            self._ranged = None

    def train(
        self,
        host: TaskHost,
        run: ActiveRun,
        request: link_pb2.Request,
        payload: Buffer,
        wanted: Callable[[], bool],
    ) -> link_pb2.Reply:
        """Train, and join the sum of the updates or of their ranges, if it is still `wanted` then.

        After the ranges the update is kept for `agree`.

        Raises:
            PeerMisbehaved: the configuration is refused, or a budget, before anything is trained.
            UpdateError: this device is not enrolled, cannot record the attempt, or the server has
                cancelled it.
        """
        self.drop_ranged(host)  # of an attempt that has failed
        work = request.train_local
        # Before compression steps ahead, which changes the received model.
        model = self.name_model(run, work, payload)
        # What the device keeps is read before it answers: another state makes another vector.
        residual = self.step_ahead(run, work, payload) if _is_compressed(run, work) else None
        state = state_name(host, run, work, residual)
        origin = Origin(model, state, self.trained_round(model, work, state))
        if work.ranges:
            attempt = self._propose_ranges(run, work, origin)
        else:
            attempt = self._propose_update(run, work, work.secure, origin)
        charged = run.charge(work)
        exponents = self.exponents(run, work, payload)
        result = None
        if charged:
            result = train_silently(host, _in_round(request, origin.round), payload)
        check_wanted(wanted)
        kept = KeptUpdate(request, run, result, origin, residual, exponents)
        if work.ranges:
            layout = run.result_layout(work)
            reply, result = self._join_with_ranges(attempt, run, layout, result)
            self._ranged = self.hold(host, dataclasses.replace(kept, result=result))
            return reply
        return self._join_in_round(attempt, kept)

    def exponents(
        self, run: ActiveRun, work: link_pb2.TrainLocal, payload: Buffer
    ) -> torch.Tensor | None:
        """Exponents of a received model's elements, int8 (N), before training overwrites these.

        None where the spacing of an update's elements needs not be hidden: from a server on this
        machine, or where the device adds noise. It is hidden where all weights are 1, because a
        device whose update is longer than the bound of its norm has a factor that others have not;
        and with compression, because the first sum has many levels.
        """
        from isthmus_privacy.secagg.spacing import exponents_of

        if self._rounding_secret is None or run.job.devices_add_noise:
            return None
        return exponents_of(run.layout.decode(memoryview(payload)[: run.layout.nbytes]))

    def name_model(self, run: ActiveRun, work: link_pb2.TrainLocal, payload: Buffer) -> bytes:
        """The name of the model of a training, see `model_name`."""
        return model_name(run, work, payload)

    def trained_round(self, model: bytes, work: link_pb2.TrainLocal, state: str) -> int:
        """The round whose random numbers a training from a `model` of that name has.

        Once a sum with this device's vector for a model was unmasked, it gives that vector again,
        also in a later round: two trainings with other examples differ by what a server could
        subtract. What depends on a `state` of the device cannot be repeated in another round.
        """
        from isthmus_privacy.purpose import ranged_model

        if state:
            return work.round
        own = self.repeated_round(ranged_model(model), work.round)
        return self.repeated_round(model, own)

    def repeated_round(self, name: bytes, round_: int) -> int:
        """The round whose random numbers the vector for a model had, else `round_`."""
        known = self._enrolled().history.trained_round(name)
        return round_ if known is None else known

    def _propose_update(
        self, run: ActiveRun, work: link_pb2.TrainLocal, config: bytes, origin: Origin
    ) -> SecureParticipation:
        """Check the configuration of a sum of a round's updates."""
        run.check_group(work.group, self.read_config(config).clients_min)
        attempt = self.propose_update_sum(run, work, config, origin)
        try:
            run.check_privacy(attempt.config, self.rho(work.run_id))
            run.check_codec(attempt.config)
            run.check_encoding(attempt.config)
        except BaseException:
            attempt.close()  # it may have the secrets that were kept for this sum
            raise
        return attempt

    def propose_update_sum(
        self, run: ActiveRun, work: link_pb2.TrainLocal, config: bytes, origin: Origin
    ) -> SecureParticipation:
        """`propose` a sum of a round's updates."""
        return self.propose(
            (work.run_id, work.round, work.attempt),
            config,
            origin.model,
            _purpose(run, work),
            run.update_slots(work),
            size=run.result_layout(work).size,
            start=_start(run, work, origin),
            group=run.random_group(work.group),
        )

    def _propose_ranges(
        self, run: ActiveRun, work: link_pb2.TrainLocal, origin: Origin
    ) -> SecureParticipation:
        """Check the configuration of a sum of the ranges of a round's updates."""
        run.check_group(work.group, self.read_config(work.ranges).clients_min)
        return self.propose_range_sum(run, work, origin)

    def propose_range_sum(
        self, run: ActiveRun, work: link_pb2.TrainLocal, origin: Origin
    ) -> SecureParticipation:
        """`propose` a sum of the ranges of a round's updates."""
        about = (work.run_id, work.round, work.attempt)
        purpose = _purpose(run, work)
        start = _start(run, work, origin)
        group = run.random_group(work.group)
        return self._propose_ranges_of(
            run, about, work.ranges, origin.model, purpose, start, group=group
        )

    def _propose_ranges_of(
        self,
        run: ActiveRun,
        about: tuple[str, int, int],
        config: bytes,
        name: bytes,
        purpose: bytes,
        start: StartModel,
        *,
        selected: bool = True,
        group: RandomGroup | None = None,
    ) -> SecureParticipation:
        """`name`, `purpose` and `start` are those of the updates."""
        from isthmus_privacy.purpose import RangePurpose, ranged_model, ranges_run_id
        from isthmus_privacy.secagg.config import BIN_LEVELS
        from isthmus_privacy.secagg.ranges import SIZE

        run.check_ranges_wanted()
        ranged = dataclasses.replace(
            start,
            model_hash=ranged_model(start.model_hash),
            vector=RangePurpose(start.vector).hash,
            work=RangePurpose(start.work).hash,
        )
        return self.propose(
            (ranges_run_id(about[0]), *about[1:]),
            config,
            ranged_model(name),
            RangePurpose(purpose).hash,
            run.range_slots,
            size=SIZE,
            start=ranged,
            selected=selected,
            whole=BIN_LEVELS,
            group=group,
        )

    def _join_in_round(self, attempt: SecureParticipation, kept: KeptUpdate) -> link_pb2.Reply:
        """Join a sum of a round's updates, and store what compression leaves of this one."""
        work = kept.request.train_local
        residual = kept.residual
        reply = self._join_with_update(
            attempt,
            kept.run,
            kept.run.result_layout(work),
            kept.result,
            residual=residual,
            exponents=kept.exponents,
        )
        if residual is not None:
            residual.save((work.round, work.attempt), attempt.sent)
        return reply

    def step_ahead(self, run: ActiveRun, work: link_pb2.TrainLocal, payload: Buffer) -> Residual:
        """What the last committed sum left to be sent; the job may apply it to the model."""
        from isthmus_clients.device.residuals import Residuals

        if self._residuals is None:
            self._residuals = Residuals(self._residuals_directory)
        committed = (work.summed_round, work.summed_attempt)
        residual = self._residuals.open(work.run_id, self._name, committed, run.layout.size)
        if (compression := run.job.federated.compression) and compression.step_ahead:
            model = run.layout.decode(memoryview(payload)[: run.layout.nbytes])
            residual.step_ahead(model, run.layout.trained_size, compression.step_ahead)
        return residual

    def keep(
        self,
        host: TaskHost,
        run: ActiveRun,
        request: link_pb2.Request,
        payload: Buffer,
        wanted: Callable[[], bool],
    ) -> None:
        """Train, and keep the update until `agree`, if it is still `wanted` then.

        Raises:
            UpdateError: the server has cancelled it.
        """
        work = request.train_local
        charged = run.charge(work)
        model = self.name_model(run, work, payload)
        state = state_name(host, run, work)
        origin = Origin(model, state, self.trained_round(model, work, state))
        exponents = self.exponents(run, work, payload)
        result = None
        if charged:
            result = train_silently(host, _in_round(request, origin.round), payload)
        check_wanted(wanted)
        self._kept = KeptUpdate(request, run, result, origin, exponents=exponents)

    def agree(self, host: TaskHost, work: link_pb2.Agree) -> link_pb2.Reply:
        """Join the sum of a round's updates with the kept one, or those of a buffer.

        Raises:
            PeerMisbehaved: the configuration is refused.
            UpdateError: no update of the run is kept, or see `train`.
        """
        if self._kept is not None and self._kept.request.train_local.run_id == work.run_id:
            return self._agree_in_buffer(host, work, self._kept)
        kept = self._ranged
        about = (work.run_id, work.round, work.attempt)
        if kept is None or kept.about != about or work.ranges:
            raise UpdateError("this device keeps no update of that run")
        trained = kept.request.train_local
        attempt = self._propose_update(kept.run, trained, work.secure, kept.origin)
        self._ranged = None
        reply = self._join_in_round(attempt, kept)
        host.release(kept.request.id)
        return reply

    def _agree_in_buffer(
        self, host: TaskHost, work: link_pb2.Agree, kept: KeptUpdate
    ) -> link_pb2.Reply:
        """Join the sums of a buffer: of the ranges, and of the updates, discounted by their age."""
        from isthmus_privacy.purpose import BufferedPurpose, buffer_name

        # The run as it was when the update was trained: the server may have opened it again since,
        # with another job.
        run = kept.run
        run.check_buffered()
        start = kept.request.train_local
        starts = tuple(
            (s.round, s.model, s.with_gradient, position_of(s.position)) for s in work.starts
        )
        purpose = BufferedPurpose(run.secure_purpose, starts)
        own = (start.round, start.model.sha256, start.with_gradient, position_of(start.position))
        buffer = run.job.federated.buffer
        staleness = purpose.check_start(own, work.round, buffer.max_staleness)
        about = (work.run_id, work.round, work.attempt)
        name = buffer_name(work.run_id, work.round)
        scale = buffer.discount(staleness)
        own_start = _start(run, start, kept.origin, scale=scale, shared=len(starts) == 1)
        if work.ranges:
            attempt = self._propose_ranges_of(
                run, about, work.ranges, name, purpose.hash, own_start, selected=False
            )
            reply, result = self._join_with_ranges(attempt, run, run.layout, kept.result)
            self._kept = dataclasses.replace(kept, result=result)
            return reply
        attempt = self.propose(
            about,
            work.secure,
            name,
            purpose.hash,
            run.training_slots,
            size=run.layout.size,
            start=own_start,
            selected=False,
        )
        try:
            run.check_encoding(attempt.config)
        except BaseException:
            attempt.close()  # as in a round
            raise
        self._kept = None
        reply = self._join_with_update(
            attempt, run, run.layout, kept.result, scale, exponents=kept.exponents
        )
        host.release(kept.request.id)
        return reply

    def read_config(self, config: bytes) -> RoundConfig:
        """Read the configuration of a sum, unchecked.

        Raises:
            PeerMisbehaved: it cannot be read.
        """
        from isthmus_privacy.secagg.config import RoundConfig

        return RoundConfig.from_bytes(config)

    def propose(
        self,
        about: tuple[str, int, int],
        config: bytes,
        name: bytes,
        purpose: bytes,
        slots: Sequence[Slot],
        *,
        size: int,
        start: StartModel,
        selected: bool = True,
        whole: int = 0,
        group: RandomGroup | None = None,
    ) -> SecureParticipation:
        """Check the configuration that the server proposes, before any work is done for it.

        One whose set-up is that of the sum before is of the device's last sum.

        Args:
            about: run, round and attempt of the request.
            config: the encoded configuration.
            name: of the model that came with it, or of what takes its place.
            purpose: hash of the requested work, see `isthmus_privacy.purpose`.
            slots: the figures that this device gives for such a request.
            size: number of elements of the vector that this device gives for it.
            start: model and vector of the device, which remembers them.
            selected: False for a full buffer, whose devices are those that finished first.
            whole: levels of the whole numbers that this device sends in place of an update, see
                `RoundConfig.check_form`; 0 for an update.
            group: the random group that is summed; None for any devices.

        Raises:
            PeerMisbehaved: the configuration is refused.
            UpdateError: this device is not enrolled, or cannot record the attempt.
        """
        import torch

        from isthmus_clients.training.secure import SecureParticipation
        from isthmus_privacy.purpose import check_ranges_before
        from isthmus_privacy.secagg.config import SetUpBefore

        proposed = self.read_config(config)
        proposed.check_size(size)
        torch.set_num_threads(self._threads)
        last = self._current
        before = last if isinstance(proposed.set_up, SetUpBefore) else None
        if before is not None:
            first = before.config
            sum_before = (first.run_id, first.model_hash, first.purpose)
            check_ranges_before(sum_before, run_id=about[0], name=name, purpose=purpose)
        self._current = None
        try:
            return SecureParticipation(
                about,
                config,
                name,
                purpose,
                slots,
                self._enrolled(),
                selected=selected,
                start=start,
                whole=whole,
                group=group,
                before=before,
            )
        except PeerMisbehaved as refused:
            if refused.code == "draw-not-now":
                refused.args = (f"{refused}; {self._clocks.doubt()}",)
            raise
        finally:
            if last is not None:
                last.close()  # what it has kept for this sum is taken, or of no use any more

    def _join_with_ranges(
        self,
        attempt: SecureParticipation,
        run: ActiveRun,
        layout: TensorLayout,
        result: TrainingResult | None,
    ) -> tuple[link_pb2.Reply, TrainingResult | None]:
        """Join with the ranges of an update, or without effect if there is no usable one.

        Returns:
            The reply, and the result, None if it cannot be used.
        """
        import torch

        from isthmus.tensors.finite import is_finite
        from isthmus_privacy.secagg.ranges import counts_of

        figures = dict.fromkeys((slot.name for slot in attempt.config.slots), 0.0)
        counts = None
        if result is not None:
            _, update = result
            vector = layout.decode(update)
            if is_finite(vector):
                parts = (part for _, part in layout.parts(vector))
                # Where a gradient goes with the update, its parameters are not in one piece.
                alone = len(vector) == run.layout.size
                parameters = run.layout.parameters_of_update(vector) if alone else None
                counts = counts_of(vector, parts, run.weight, parameters)
            else:
                log.error("the update has elements that are not finite; it does not count")
                result = None
        if counts is None and run.job.federated.privacy is not None:
            # An update of zeros, as it is in the sum of updates: without its counts, the number of
            # devices in the histograms would say how many have no update.
            counts = counts_of(torch.zeros(1), (), 1)
        # Whole numbers need no seed, which is that of rounding.
        return self.join(attempt, counts, 1, figures, b""), result

    def _join_with_update(
        self,
        attempt: SecureParticipation,
        run: ActiveRun,
        layout: TensorLayout,
        result: TrainingResult | None,
        scale: float = 1.0,
        residual: Residual | None = None,
        exponents: torch.Tensor | None = None,
    ) -> link_pb2.Reply:
        """Join with an update, or without effect if there is no usable one.

        With `TensorLayout.gradient_and_update` as its layout, it contains a gradient too.
        """
        from isthmus_clients.training.secure import hide_repeatably
        from isthmus_privacy.dp.clipping import clip_to_norm
        from isthmus_privacy.secagg.encoding import lost_in_clipping
        from isthmus_privacy.slots import (
            GRADIENT_LOST,
            LOSS,
            MAGNITUDE,
            OTHER_WEIGHT,
            OVER_RANGE,
            OVER_WEIGHT,
            WITHIN_CLIP,
        )

        config = attempt.config
        privacy = run.job.privacy
        seed = self.seed(run, attempt.trained, attempt)
        figures = dict.fromkeys((slot.name for slot in config.slots), 0.0)
        if result is None:
            return self.join(attempt, None, 0, figures, seed, self._tally.note)
        trained, update = result
        vector = layout.decode(update).mul_(scale)
        if exponents is not None:
            attempt.spacing = _spacing(run, layout, exponents, trained.steps, scale)
            if privacy is not None or residual is not None:
                # Before its norm is bounded, and before what is not sent of it is kept.
                hide_repeatably(vector, attempt.spacing, seed)
                attempt.spacing = None
        if privacy is not None:
            if config.noise is None:  # else it is clipped where the noise is added
                moves = WITHIN_CLIP.name in figures
                longer = clip_to_norm(vector, config.clip if moves else privacy.clip)
                if moves:
                    figures[WITHIN_CLIP.name] = float(not longer)
            return self.join(attempt, vector, 1, figures, seed, self._tally.note)
        if LOSS.name in figures:
            loss = trained.training.get("loss", 0.0)
            figures[LOSS.name] = loss
            figures[OVER_RANGE.name] = float(abs(loss) > LOSS.maximum)
            chosen = run.job.federated.max_examples is None
            figures[OVER_WEIGHT.name] = float(chosen and run.weight > config.weight_max)
            figures[OTHER_WEIGHT.name] = float(run.gives_other_weight)
        if residual is not None:
            vector, magnitude = residual.add_to(vector, run.weight, config)
            figures[MAGNITUDE.name] = magnitude
        if GRADIENT_LOST.name in figures:
            gradient = vector[: run.layout.size]
            figures[GRADIENT_LOST.name] = lost_in_clipping(gradient, config.clip)
        return self.join(attempt, vector, run.weight, figures, seed, self._tally.note)

    def rho(self, run_id: str) -> float:
        """See `History.rho`, of all sums of a run: of updates, evaluations and comparisons."""
        from isthmus.job.measurements import evaluations_run_id
        from isthmus.task.paired_scores import comparisons_run_id

        history = self._enrolled().history
        names = (run_id, evaluations_run_id(run_id), comparisons_run_id(run_id))
        return sum(map(history.rho, names))

    def seed(self, run: ActiveRun, round_: int, attempt: SecureParticipation) -> bytes:
        """Seed of the rounding of this device's vector, equal whenever it gives the same one.

        On a machine of its own a device has a secret: who knows the rounding of a vector with few
        levels knows on which side of a bound each element is. A process of `isthmus run` or
        `isthmus simulate` is on the server's machine, and follows the job's seed.
        """
        from isthmus_clients.training.example_order import local_seed

        if self._rounding_secret is not None:
            return hmac.digest(self._rounding_secret, attempt.rounding, "sha256")
        return local_seed(run.job.seed, round_, self._name)

    def join(
        self,
        attempt: SecureParticipation,
        vector: torch.Tensor | None,
        examples: int,
        figures: Mapping[str, float],
        seed: bytes,
        note: Callable[[bool], None] = lambda usable: None,
    ) -> link_pb2.Reply:
        """Encode a vector and begin the attempt; one that cannot be encoded has no effect.

        None is a vector that is not usable. `note` learns whether it has any weight. The reply has
        only keys, or in a next sum a masked vector, see `take_masked`: not even how long the device
        took, which depends on its data.
        """
        usable = False
        if vector is not None:
            try:
                attempt.encode(vector, examples=examples, figures=figures, seed=seed)
                usable = True
            except UpdateError:
                log.exception("a vector cannot be encoded; this device takes part without effect")
        if not usable:
            zeros, weight, figures = without_effect(attempt.config, vector)
            attempt.spacing = None
            attempt.encode(zeros, examples=weight, figures=figures, seed=seed)
            attempt.sent = None  # of the vector, see `Residual.save`
            examples = 0
        message, self._masked = attempt.begin()
        note(examples > 0)
        self._current = attempt
        reply = link_pb2.Reply(trained=link_pb2.Trained(secure=message))
        if self._masked is not None:
            reply.trained.result.CopyFrom(describe(self._masked))
        return reply

    def take_masked(self) -> Buffer | None:
        """The masked vector that goes with the last reply of `join`; None if there is none."""
        masked = self._masked
        self._masked = None
        return masked

    def check_roster(self, message: link_pb2.SecureStep, size: int) -> None:
        """Check the size of the roster of the current attempt, before there is memory for it.

        Raises:
            UpdateError: it is of another attempt, or larger than a roster of its devices can be.
        """
        most = self._attempt_of(message).most_roster_bytes
        if size > most:
            raise UpdateError(
                f"a roster of {size} bytes was announced; one of the invited devices has at most "
                f"{most}"
            )

    def step(
        self, message: link_pb2.SecureStep, roster: Buffer | None
    ) -> tuple[link_pb2.SecureStepped, Buffer | None]:
        """Answer the next message of the current attempt.

        Args:
            message: the message.
            roster: the roster, if the message names it.

        Raises:
            PeerMisbehaved: the message is refused, which ends the attempt for this device.
            UpdateError: it is of another attempt.
        """
        return self._attempt_of(message).step(message, roster)

    def _attempt_of(self, message: link_pb2.SecureStep) -> SecureParticipation:
        about = (message.run_id, message.round, message.attempt)
        if self._current is None or self._current.about != about:
            raise UpdateError("this device is not in that attempt of secure aggregation")
        return self._current

    def _enrolled(self) -> Credentials:
        from isthmus_clients.training.secure import Credentials
        from isthmus_privacy.secagg.config import ClientRequirements

        if self._credentials is None:
            # Without an owner's limits the server is on this machine, and no device is assumed to
            # collude with it, so that small cohorts tolerate that devices are lost.
            requirements = ClientRequirements(honest_min=2, corrupt_permille=0)
            if self._privacy is not None:
                requirements = ClientRequirements(
                    honest_min=self._privacy.clients_min,
                    selection_slack=self._privacy.selection_slack,
                    participations_per_run=self._privacy.participations_per_run,
                    participations=self._privacy.participations,
                    noise=self._privacy.noise,
                    epsilon=self._privacy.epsilon,
                    delta=self._privacy.delta,
                )
            self._credentials = Credentials(
                self._signing_key.private_bytes_raw(), self._history_file, requirements
            )
        if self._welcome is not None:
            self._credentials.welcomed(self._welcome.authority, self._welcome.enrolment)
        return self._credentials


def _purpose(run: ActiveRun, work: link_pb2.TrainLocal) -> bytes:
    """Hash of the purpose of a sum of a round's updates."""
    from isthmus_privacy.purpose import TrainingPurpose

    position = position_of(work.position)
    return TrainingPurpose(
        run.secure_purpose, gradient_name(work), work.gradient_scale, work.group, position
    ).hash


def model_name(run: ActiveRun, work: link_pb2.TrainLocal, payload: Buffer) -> bytes:
    """What sums call the model of a training: the SHA-256 of it alone, 32 bytes.

    Computed here where a gradient follows it in the blob, and not taken from the server: otherwise
    it could have the same model trained under as many names as there are gradients, each with
    another set of devices.
    """
    if not work.with_gradient:
        return work.model.sha256  # which the received bytes have
    return hashlib.sha256(memoryview(payload)[: run.layout.nbytes]).digest()


def _start(
    run: ActiveRun,
    work: link_pb2.TrainLocal,
    origin: Origin,
    *,
    scale: float = 1.0,
    shared: bool = True,
) -> StartModel:
    """The model and the vector of a training.

    Args:
        run: as it was open then.
        work: the training.
        origin: what it is trained from.
        scale: factor of an update that was kept.
        shared: whether all updates of the sum start from this model.
    """
    from isthmus_privacy.purpose import TrainingPurpose, device_vector
    from isthmus_privacy.secagg.history import StartModel

    position = position_of(work.position)
    if not run.job.learning_rate.is_used:
        # The task may have a schedule of its own, which only its code knows. The cohort scales
        # nothing but the rates of a job.
        position = position._replace(cohort=0)
    purpose = TrainingPurpose(
        run.vector_purpose, gradient_name(work), work.gradient_scale, position=position
    ).hash
    state = f"{origin.state} {scale!r}"
    if run.owners_weights != "exact":
        state += f" {run.owners_weights}"
    vector = device_vector(purpose, origin.round, state)
    return StartModel(work.round, origin.model, shared, vector, origin.round, purpose)


def state_name(host: TaskHost, run: ActiveRun, work: Work, residual: Residual | None = None) -> str:
    """Names what some work depends on that this device keeps between rounds; empty for nothing.

    By its content, and not only by the round that it is of: a server decides what a device trains,
    and so what it keeps, and could have one device keep something else between two sums of one
    model. The difference of the two would be about that device alone.
    """
    if residual is None and not run.personal.size:
        return ""
    number = work.comparison if isinstance(work, link_pb2.Score) else work.round
    name = f"{work.run_id}/{number}/"
    if residual is not None:
        assert isinstance(work, link_pb2.TrainLocal)
        name += f"{work.summed_round}/{work.summed_attempt}/{residual.digest.hex()}"
    if run.personal.size:
        name += f"/{host.state_digest(work).hex()}"
    return name


def _spacing(
    run: ActiveRun, layout: TensorLayout, exponents: torch.Tensor, steps: int, scale: float
) -> Spacing:
    """The spacing of an update of so many steps, from the exponents of the model (N).

    Args:
        run: as it was open then.
        layout: of the update, or of a gradient and the update.
        exponents: see `SecureSessions.exponents`.
        steps: of the training.
        scale: factor of all elements.
    """
    import torch

    from isthmus_privacy.secagg.spacing import DIGITS_OF, LEAST, Spacing

    before = layout.size - len(exponents)
    # Running statistics, which follow the parameters, are no sums over steps.
    ends = (before, before + run.layout.trained_size, layout.size)
    factors = (1.0, scale * run.job.federated.normalization(steps), scale)
    if before:  # a gradient, which is no difference
        exponents = torch.cat([torch.full((before,), LEAST, dtype=torch.int8), exponents])
    digits = DIGITS_OF[run.job.federated.precision]
    return Spacing(exponents, digits, tuple(zip(ends, factors, strict=True)))


def _is_compressed(run: ActiveRun, work: link_pb2.TrainLocal) -> bool:
    """Whether what earlier updates have left is added to the update."""
    return run.job.federated.compression is not None and not work.gradient_scale


def _in_round(request: link_pb2.Request, trained: int) -> link_pb2.Request:
    """A request for training, with the random numbers of that round."""
    if request.train_local.round == trained:
        return request
    repeated = link_pb2.Request()
    repeated.CopyFrom(request)
    repeated.train_local.round = trained
    return repeated


def without_effect(
    config: RoundConfig, vector: torch.Tensor | None
) -> tuple[torch.Tensor, int, dict[str, float]]:
    """What a device without a usable vector gives: zeros, their weight and figures.

    The weight is 0, and one figure says so, of which the server sees the sum. Without that figure,
    as in a job with differential privacy, nobody is to know how many these are: then zeros count as
    any other vector, and are within every bound.

    Args:
        config: of the sum.
        vector: one that cannot be encoded, which the zeros are like; None for none.
    """
    import torch

    from isthmus_privacy.slots import UNUSABLE, WITHIN_CLIP

    kind = torch.int64 if config.whole else torch.float32
    kind = kind if vector is None else vector.dtype
    zeros = torch.zeros(1, dtype=kind).expand(config.size)  # takes no memory
    names = [slot.name for slot in config.slots]
    said = {name: float(name in (UNUSABLE.name, WITHIN_CLIP.name)) for name in names}
    return zeros, int(UNUSABLE.name not in names), said


def check_wanted(wanted: Callable[[], bool]) -> None:
    """Refuse to join after the server has ended the work, which may be why it failed.

    Raises:
        UpdateError: it has.
    """
    if not wanted():
        raise UpdateError("the server has cancelled this request, or closed its run")
