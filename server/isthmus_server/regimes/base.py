"""What every regime shares: results, and the protocols that attempts and aggregators implement.

A federated round is one `FederatedAttempt`: plaintext, secure, buffered, or a Flower app. A
plaintext attempt hands each update to an `Aggregator`: the weighted mean, or a Flower strategy. A
`FederatedExtension` replaces the aggregation of a whole run; extensions register themselves under
the entry-point group `isthmus.federated_extensions`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Protocol

import torch

from isthmus.errors import RoundFailed, UserError
from isthmus.job.federated import MIN_ROBUST_GROUPS, FederatedSection
from isthmus.job.learning_rate import FIRST_POSITION, RoundPosition
from isthmus.wire import link_pb2
from isthmus_server.storage.records import Receipt, StepFigures

if TYPE_CHECKING:
    from isthmus.tensors.exchange_set import TensorLayout
    from isthmus_server.regimes.context import FederatedContext
    from isthmus_server.regimes.upload_places import UploadPlaces

EXTENSIONS = "isthmus.federated_extensions"
"""Entry-point group; the name of an entry is the key of its table in `[federated]`."""


class AttemptFailed(RoundFailed):
    """An attempt without a result, with the receipts of all participants."""

    def __init__(
        self,
        reason: str,
        receipts: Sequence[Receipt],
        *,
        excused: bool = False,
        task_failures: Collection[str] = (),
    ) -> None:
        """Describe the failure.

        Args:
            reason: the sentence for users.
            receipts: of all participants.
            excused: it failed only because devices were lost or refused for privacy.
            task_failures: how tasks of participants failed, without the participants' names.
        """
        super().__init__(reason)
        self.receipts = receipts
        self.excused = excused
        self.task_failures = frozenset(task_failures)

    def all_refused(self, participants: Collection[str]) -> bool:
        """Whether it is certain that none of these has accepted what the attempt asked it for.

        Each has a receipt, by which it was not connected or has refused before it began to work.
        """
        refused = {
            receipt.participant
            for receipt in self.receipts
            if not receipt.started and receipt.status != "accepted"
        }
        return bool(participants) and refused >= set(participants)


def check_devices(devices: int, groups: int, settings: FederatedSection, shortage: str) -> None:
    """Refuse an attempt that has too few devices, so that nobody is asked.

    Args:
        devices: of the cohort.
        groups: that are summed by themselves.
        settings: the job's `[federated]` in this round.
        shortage: why the lottery or the job's selection left too few, if so.

    Raises:
        AttemptFailed: they are below the quorum, or have no groups for a robust rule, or too few:
            the mean of all devices is no robust one.
    """
    if devices < settings.needed:
        few = f"{devices} devices are ready and the quorum is {settings.needed}"
    elif settings.robust is not None and groups < MIN_ROBUST_GROUPS:
        few = (
            f"federated.robust={settings.robust!r} needs {MIN_ROBUST_GROUPS} groups and there are "
            f"{groups}"
        )
    else:
        return
    raise AttemptFailed(shortage or few, [], excused=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FederatedResult:
    """The result of a federated attempt."""

    pseudo_gradient: torch.Tensor
    """Weighted mean of start minus end, or what an extension made of the updates, float32 (N)."""
    training: Mapping[str, float]
    """Weighted means of the devices' own figures: loss."""
    receipts: Sequence[Receipt]
    gradient: torch.Tensor | None = None
    """Weighted mean of the devices' gradients at the start model times a scale, float32 (N), if it
    was requested."""
    gradient_scale: float = 0.0
    rounding: float = 0.0
    """Bound on the standard deviation of the error of an element, with secure aggregation."""
    noise: float = 0.0
    """Standard deviation of the noise of an element, in a job with `[privacy]`."""
    groups: Mapping[str, FederatedResult] = dataclasses.field(default_factory=dict)
    """The sum of each group by itself, in a round that was summed by group."""
    left_out: frozenset[str] = frozenset()
    """Groups whose sums a robust rule has left out."""
    doubt: str = ""
    """Why the sum of a group is to be left out by a robust rule; empty if nothing is known."""
    extension_state: Any = None
    """State of the extension after this attempt; it becomes current when the round commits."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DatacenterResult:
    """The result of one datacenter."""

    vector: torch.Tensor | None
    """The model at the new step or the mean gradient, float32 (N), if it was requested."""
    is_update: bool = False
    """Whether `vector` is the model before minus the model after, from a compressed update."""
    training: Mapping[str, float]
    evaluation: Mapping[str, float]
    profile: Mapping[str, float]
    """Rates and memory of the ranks; they differ between runs."""
    step_figures: Sequence[StepFigures] = ()
    """Figures of some steps."""
    receipts: Sequence[Receipt]

    @property
    def examples(self) -> int:
        """Weight of its vector."""
        return sum(receipt.examples for receipt in self.receipts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttemptSpec:
    """Start model, devices and settings of one federated attempt."""

    round: int
    attempt: int
    model: link_pb2.Blob
    """The start model, which is published during the attempt."""
    cohort: Mapping[str, int]
    """Names of the invited devices, with the number of examples each declared."""
    settings: FederatedSection
    """The job's `[federated]`, with the cohort size and quorum of this round."""
    start: torch.Tensor | None = None
    """The start model as a vector, float32 (N); only extensions need it."""
    exact: bool = False
    """The sum must be that of the whole cohort; see `SecureAggregationAttempt`."""
    with_gradient: bool = False
    """Whether the blob of the model also contains a gradient that devices add to their own."""
    gradient_scale: float = 0.0
    """Factor of the devices' gradients at the start model, which are summed with the updates; 0 for
    the updates alone."""
    position: RoundPosition = FIRST_POSITION
    """Position of the round in the schedules of the learning rate."""
    changes: Sequence[link_pb2.ModelChange] = ()
    """What leads to the start model from those of earlier rounds; published with it."""
    first_model: bytes = b""
    """SHA-256 of the model that the blob begins with, if it also contains a gradient."""
    groups: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    """Devices of each group, `REST` included, where the cohort is summed by group; else empty."""
    group_weights: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Factors of the groups' examples in the mean."""
    draw: int = 0
    """Draw in which the devices were selected by their tickets; 0 without tickets."""
    selected_ppm: int = 1_000_000
    """Millionths of all enrolled devices that were eligible in it."""
    shortage: str = ""
    """Why the lottery or the job's selection left too few devices, if so."""

    @property
    def name(self) -> bytes:
        """What secure sums call the start model: the SHA-256 of it alone, without a gradient."""
        return self.first_model or self.model.sha256

    def result_layout(self, layout: TensorLayout) -> TensorLayout:
        """The layout of what each device sends, for the layout of the model."""
        return layout.gradient_and_update if self.gradient_scale else layout

    def check_devices(self) -> None:
        """Refuse too few devices; see the function `check_devices`."""
        check_devices(len(self.cohort), len(self.groups), self.settings, self.shortage)


class FederatedAttempt(Protocol):
    """One attempt at a federated round."""

    async def run(self) -> FederatedResult:
        """Invite the cohort, aggregate its updates, and return the result.

        Ends when enough updates have arrived, when the quorum cannot be reached any more, or at
        the deadline.

        Raises:
            AttemptFailed: fewer updates than the quorum.
        """
        ...

    def cancelled(self, reason: str) -> Sequence[Receipt]:
        """Receipts of all invited devices after `run` was cancelled for `reason`."""
        ...


class Aggregator(Protocol):
    """Turns the updates of one plaintext attempt into a pseudo-gradient."""

    async def add(
        self,
        name: str,
        trained: link_pb2.Trained,
        accept: Callable[[], None],
        places: UploadPlaces,
    ) -> None:
        """Fetch the update of a device when there is a place for it, check it and add it.

        `accept` is called once the update is complete; if it raises, the update is withdrawn.

        Raises:
            ParticipantLost: the device was lost before the update was complete.
            TransferStalled: others wait, and the update comes below the least rate.
            UpdateError: the update cannot be used.
        """
        ...

    def end(self) -> None:
        """The attempt is given up: free what is kept elsewhere for it."""
        ...

    async def settle(self) -> Mapping[str, str]:
        """Get what is summed elsewhere, once no more updates are added.

        Returns the devices whose accepted updates are lost all the same, each with why.
        """
        ...

    async def result(self) -> tuple[torch.Tensor, Any]:
        """The pseudo-gradient, float32 (N), and the extension's state after it.

        Raises:
            RoundFailed: the updates cannot be aggregated.
        """
        ...


class FederatedExtension(Protocol):
    """Replaces the aggregation of a run, and keeps state from round to round."""

    def attempt(self, context: FederatedContext, spec: AttemptSpec) -> FederatedAttempt:
        """An attempt at a round; it has no effect if it is not run.

        Raises:
            RoundFailed: the cohort cannot be aggregated.
        """
        ...

    def commit(self, state: Any) -> None:
        """Make the state of an attempt the current one; `ModelVersions.undo` can take it back."""
        ...

    def reset(self) -> None:
        """Return to the state before the first round."""
        ...

    def export_state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """The current state as tensors and JSON values, to be stored with a checkpoint."""
        ...

    def import_state(self, tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any]) -> None:
        """Restore what `export_state` returned."""
        ...


def load_extension(federated: FederatedSection, layout: TensorLayout) -> FederatedExtension | None:
    """The extension whose table a job has in `[federated]`; None if it has none.

    Raises:
        UserError: its packages are missing, or its settings cannot be used.
    """
    configured = [
        entry
        for entry in entry_points(group=EXTENSIONS)
        if getattr(federated, entry.name, None) is not None
    ]
    if not configured:
        if federated.flower is not None:  # an installation older than the extension's entry point
            raise UserError(
                "[federated.flower] is set, but the installed isthmus does not register it; "
                "install isthmus again"
            )
        return None
    if len(configured) > 1:
        names = " and ".join(sorted(f"[federated.{entry.name}]" for entry in configured))
        raise UserError(f"{names} both replace the aggregation; remove all but one")
    extension: FederatedExtension = configured[0].load()(federated, layout)
    return extension
