"""The job's table `[federated]`: rounds on edge devices and the selection of devices."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from isthmus.errors import JobError
from isthmus.job.codec_choice import CodecChoice
from isthmus.job.exchange import Compression
from isthmus.job.flower import FlowerSection
from isthmus.job.privacy import FederatedPrivacy
from isthmus.job.section import (
    FREE,
    DeviceHours,
    GroupName,
    PositiveSeconds,
    ProvidedName,
    Section,
)
from isthmus.job.weights import Weights, agreed, weight_of


class Participation(Section):
    """Limits on the participation of one device."""

    rounds: Annotated[int, Field(ge=1, le=1_000_000)]
    """Most rounds that it may be invited to, whether its update arrived or not."""
    hours: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Length in hours of the sliding window in which these rounds are counted. Default: the run."""


class Utility(Section):
    """Guided selection (Oort, Lai et al. 2021).

    A device's utility is its number of examples times its last mean loss, relative to the other
    devices, plus a bonus that grows with the time since its last invitation; it is reduced for
    slow devices. With secure aggregation losses and numbers of examples are unknown, so that only
    speed and bonus count.
    """

    exploration: Annotated[float, Field(ge=0, le=1)] = 0.9
    """Share of the first cohort that is reserved for devices that were never invited."""
    exploration_decay: Annotated[float, Field(gt=0, le=1)] = 0.98
    """Factor of this share in each round."""
    min_exploration: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Lower bound of this share."""
    preferred_seconds: PositiveSeconds | None = None
    """A device that takes longer counts as slow. Default: the 80th percentile of the devices."""
    slowness: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 2.0
    """alpha: a device that takes r times the preferred seconds has weight r ** -alpha; 0 is off."""
    uncertainty: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.1
    """c of the bonus sqrt(c x ln(round) / round of the last invitation)."""


class Buffer(Section):
    """Asynchronous buffered aggregation (FedBuff, Nguyen et al. 2022)."""

    concurrency: Annotated[int, Field(ge=1)] | None = None
    """Devices at work at the same time. Default: twice the cohort."""
    staleness_exponent: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.5
    """a of the weight (1 + s) ** -a of an update that began s rounds ago; 0: all weigh the same."""
    max_staleness: Annotated[int, Field(ge=0)] = 20
    """Updates that began more rounds ago are discarded."""

    def discount(self, stale: int) -> float:
        """Relative weight of an update that began `stale` rounds ago.

        >>> Buffer(staleness_exponent=0.5).discount(3)
        0.5
        """
        return float((1.0 + stale) ** -self.staleness_exponent)


class Groups(Section):
    """Groups of devices, whose updates a plan can have summed by group."""

    minimum: Annotated[int, Field(ge=3)] = 10
    """Least number of devices in the sum of a group; each device checks it. The devices of smaller
    groups are summed with those without a group."""
    names: Annotated[tuple[GroupName, ...], Field(max_length=32)] = ()
    """Groups to sum by themselves. Default: all that owners of devices declare. The devices that
    `isthmus run` starts are in these groups in turn."""

    def of_shard(self, shard: tuple[int, int] | None) -> str:
        """The group of a device that `isthmus run` starts, by its index; empty for none.

        >>> Groups(names=("north", "south")).of_shard((3, 8))
        'south'
        """
        return "" if shard is None or not self.names else self.names[shard[0] % len(self.names)]

    def accepts(self, name: str) -> bool:
        """Whether a declared group may be summed by itself."""
        return bool(name) and (not self.names or name in self.names)


MIN_ROBUST_GROUPS = 3
"""Fewest groups of which a robust rule can tell one from the others."""

LARGEST_CLIP = 1 << 24
"""Largest `clip` of a job with `max_examples`, which finds no ranges: steps are 1e-7 there."""
MAX_SECURE_COHORT = 1400
"""Devices of a secure round: the keys of all of them, at most 2.9 KB each, are one message to each
device, and messages have at most 4 MiB."""


_SELECTION = ("over_selection", "selection", "selection_settings", "utility", "participation")
"""Keys for selecting the devices of a round, which a ServerApp does by itself."""


class FederatedSection(Section):
    """Rounds on edge devices."""

    clients: Annotated[int, Field(ge=0, le=512)] = 0
    """Devices that `isthmus run` starts on this machine."""
    mode: Literal["rounds", "buffered"] = "rounds"
    """Synchronous rounds of a cohort, or a buffer of `cohort` updates that devices fill
    asynchronously."""
    buffer: Buffer = Buffer()
    """For mode = "buffered"."""
    cohort: Annotated[int, Field(ge=1)] = 8
    """Number of updates in each round."""
    over_selection: Annotated[float, Field(ge=1, le=10)] = 1.0
    """Invite cohort x this; the first `cohort` to report are taken (Bonawitz et al. 2019)."""
    quorum: Annotated[int, Field(ge=1)] | None = None
    """Least number of updates of a committed round. Default: three quarters of the cohort."""
    selection: ProvidedName = "uniform"
    """Which available devices are invited: `uniform`, random ones; `utility`, those with the
    highest `utility`; or a selection that a package provides."""
    selection_settings: Annotated[dict[str, Any], FREE] = Field(default={})
    """Settings of a selection that a package provides, see docs/extend.md."""
    utility: Utility = Utility()
    """For selection = "utility"."""
    participation: Participation | None = None
    """How often one device may be invited. Default: in every round."""
    hours: tuple[DeviceHours, ...] = ()
    """When devices may be invited, by name; devices without an entry at any time."""
    local_epochs: Annotated[int, Field(ge=1)] | None = None
    """Passes over a device's own data in one round. Default 1, unless local_steps is set."""
    local_steps: Annotated[int, Field(ge=0)] | None = None
    """Optimizer steps in one round, instead of epochs; 0 gives an update of zeros."""
    personal_steps: Annotated[int, Field(ge=0)] = 0
    """The first local steps of a round train only what is personal, and the others only what is
    exchanged (FedRep, Collins et al. 2021); a device with fewer steps sends zeros. 0 trains both in
    all steps."""
    fine_tune_steps: Annotated[int, Field(ge=0)] = 0
    """Local steps from the model that a device makes before it evaluates it (`evaluation.devices`);
    nothing of them is kept. A schedule has the rates of its first step."""
    batch_size: Annotated[int, Field(ge=1)] = 32
    """Examples in one local step."""
    accumulate: Annotated[int, Field(ge=1)] = 1
    """Parts of a batch trained in sequence before an optimizer step, to save memory."""
    proximal: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """mu of the FedProx term mu/2 |w - w_round|^2 (Li et al. 2020); 0 is off."""
    normalized_steps: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Each device multiplies its update by this number / the steps that it made, so that those with
    more data or epochs do not draw the model to themselves (FedNova, Wang et al. 2020, with this
    number as tau_eff, for plain SGD). Default: updates stay as long as they are."""
    control_variates: Annotated[int, Field(ge=1, le=1_000_000_000)] | None = None
    """Number of devices that take part in the run, with which devices correct each local step by
    the server's control variate minus their own (SCAFFOLD, Karimireddy et al. 2020, option II).
    Every device counts the same. For plain SGD, without secure aggregation. Default: none."""
    clip_norm: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Largest 2-norm of the whole gradient of a local step; a longer one is scaled down. Default:
    no limit."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Precision of the layers in local steps; parameters and updates stay float32."""
    frozen_dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    """Type in which devices hold parameters that are not trained; they are read from `model.start`
    and never held in float32 as a whole. What is trained stays float32. With `int8` weights of
    linear layers have one scale for each output, and all else is in bfloat16."""
    frozen_tolerance: Annotated[float, Field(ge=0, le=1)] = 0.02
    """Largest difference that `frozen_dtype` may make to the loss of a device's first batch, as a
    share of the loss in float32; a device where it is larger trains nothing."""
    compile: bool = False
    """Compile the model with `torch.compile` for local steps."""
    checkpoint_activations: bool | Literal["operators"] = False
    """Recompute each block in the backward pass of a local step instead of keeping its activations,
    as `datacenter.checkpoint_activations` does on ranks."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|mps|cuda(:\d{1,3})?)$")] = "cpu"
    """What the devices that `isthmus run` starts train on: `auto`, `cpu`, `cuda`, `cuda:N` or
    `mps`, and those of `isthmus simulate` (not `mps`); owners choose it by `--device`."""
    secure_aggregation: bool = True
    """The server learns only the sum of a round's updates (Bell et al. 2020)."""
    clip: Annotated[float, Field(ge=2.0**-126, allow_inf_nan=False)] | None = None
    """Largest absolute value of an element of an update: with secure aggregation, elements are
    clipped to [-clip, clip]. Default: the range follows in each round from a secure sum of how
    large the updates are, and nothing is clipped."""
    max_clipped: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Largest share of the elements of a round's updates that may have been clipped; the run ends
    where it was larger, as its model would not be that of the updates."""
    max_examples: Annotated[int, Field(ge=1, le=1 << 42)] | None = None
    """The largest weight of a device, in examples: one with more counts as one with so many.
    Default: every device counts with its number of examples."""
    weights: Weights | None = None
    """What the weights of updates say of the devices' numbers of examples: `exact`, `coarse`
    (powers of two) or `equal` (1 for each device). Devices whose owners give less are refused.
    Default: what each owner gives, `exact` unless the owner has chosen another kind."""
    aggregation: ProvidedName = "mean"
    """How the updates of a round become one: `mean`, weighted by examples; `median`,
    `trimmed-mean`, `krum`, `multi-krum`, `norm-bound`, or a rule that a package provides. All but
    `mean` need single updates, so secure_aggregation = false."""
    aggregation_settings: Annotated[dict[str, Any], FREE] = Field(default={})
    """Settings of this rule, see docs/extend.md."""
    aggregation_max_bytes: Annotated[int, Field(ge=1)] = 4 << 30
    """Most bytes of a round's updates, cohort x model, that are in the server's memory at once, for
    a rule that needs all of them."""
    robust: Literal["median", "trimmed-mean", "norm-bound"] | None = None
    """How the means of random groups of devices become one, with secure aggregation; each of them
    is a secure sum by itself. Default: one sum of all devices."""
    robust_settings: Annotated[dict[str, Any], FREE] = Field(default={})
    """Settings of this rule, those that `aggregation_settings` has for it, see docs/extend.md."""
    robust_groups: Annotated[int, Field(ge=MIN_ROBUST_GROUPS, le=32)] = 12
    """Groups of a round, or fewer where fewer devices are available."""
    robust_minimum: Annotated[int, Field(ge=3)] = 10
    """Least number of devices in the sum of such a group; each device checks it."""
    flower: FlowerSection | None = None
    """Aggregate with a strategy of Flower."""
    groups: Groups | None = None
    """Let plans have the updates summed by group of devices."""
    download_bits: Annotated[int, Field(ge=2, le=8)] | None = None
    """Send devices that have the model of one of the last rounds its change, with that many bits
    for each parameter. Default: every device receives the whole model, 32 bits for each."""
    download_codec: ProvidedName | None = None
    """How these changes are encoded: a codec that a package provides, which the devices need too.
    Default: with `download_bits`, `rounded`."""
    download_codec_settings: Annotated[dict[str, Any], FREE] = Field(default={})
    """Settings of this codec, see docs/extend.md."""
    compression: Compression | None = None
    """Send fewer bytes from devices. Default: 32 bits for every element."""
    codec: ProvidedName | None = None
    """How devices encode their updates in rounds without secure sums: `rounded`, `block-top-k`, or
    a codec that a package provides, which the devices need too. Default: 32 bits for every
    element."""
    codec_settings: Annotated[dict[str, Any], FREE] = Field(default={})
    """Settings of this codec, see docs/extend.md."""
    privacy: FederatedPrivacy | None = None
    """Differential privacy of each device's own examples; none by default."""

    @model_validator(mode="after")
    def _work_and_quorum_fit(self) -> FederatedSection:
        if self.local_epochs is not None and self.local_steps is not None:
            raise ValueError("set local_epochs or local_steps, not both")
        if self.normalized_steps is not None and self.local_steps is not None:
            raise ValueError(
                f"normalized_steps={self.normalized_steps} is for devices whose numbers of steps "
                f"differ, and local_steps={self.local_steps} gives all of them the same; remove "
                "one of them"
            )
        if self.compile and self.checkpoint_activations:
            raise ValueError(
                "checkpoint_activations is not for compiled models, whose operators it does not "
                "see; set compile = false, or remove checkpoint_activations"
            )
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"batch_size={self.batch_size} cannot be divided into accumulate="
                f"{self.accumulate} equal parts"
            )
        if self.quorum is not None and self.quorum > self.cohort:
            raise ValueError(
                f"quorum={self.quorum} is above cohort={self.cohort}; lower one or raise the other"
            )
        return self

    @model_validator(mode="after")
    def _secure_enough(self) -> FederatedSection:
        """A smaller quorum would reveal single updates, or allow two sums of one round."""
        if self.secure_aggregation and self.cohort > MAX_SECURE_COHORT:
            raise ValueError(_too_large(self.cohort))
        minimum = self._min_secure_quorum(self.cohort)
        low = "cohort" if self.cohort < minimum else "it"
        if self.secure_aggregation and self.needed < minimum:
            raise ValueError(
                f"secure_aggregation needs a quorum of at least {minimum} with cohort="
                f"{self.cohort}, not {self.needed}; raise {low}, or set secure_aggregation = false"
            )
        # Without ranges nobody would see that the updates are lost in rounding.
        has_ranges = self.clip is None or self.max_examples is None
        if self.secure_aggregation and not has_ranges and (self.clip or 0) > LARGEST_CLIP:
            raise ValueError(
                f"clip={self.clip:g} with max_examples is above {LARGEST_CLIP:,}, beyond which "
                "updates can be lost in rounding; remove one of them, and the range is checked"
            )
        return self

    @model_validator(mode="after")
    def _weights_have_an_effect(self) -> FederatedSection:
        if self.weights is None:
            return self
        shown = f"weights={self.weights!r}"
        same = {"federated.privacy": self.privacy, "control_variates": self.control_variates}
        for name, table in same.items():
            if table is not None:
                raise ValueError(
                    f"{shown} has no effect with {name}, where every device counts the same; "
                    "remove it"
                )
        if self.weights == "equal" and self.max_examples is not None:
            raise ValueError(
                f"max_examples={self.max_examples} has no effect on {shown}; remove one of them"
            )
        return self

    @model_validator(mode="after")
    def _settings_that_an_app_ignores(self) -> FederatedSection:
        fields = type(self).model_fields
        unused = [name for name in _TRAINING if getattr(self, name) != fields[name].default]
        if self.app is not None and unused:
            raise ValueError(
                f"{unused[0]} has no effect on flower.app={self.app!r}, which trains "
                "in its own way; remove it, and set what the app reads in flower.config"
            )
        unused = [name for name in _SELECTION if getattr(self, name) != fields[name].default]
        if self.server_app is not None and unused:
            raise ValueError(
                f"{unused[0]} has no effect on flower.server_app={self.server_app!r}, which "
                "selects devices in its own way; remove it"
            )
        return self

    @model_validator(mode="after")
    def _a_strategy_sees_updates(self) -> FederatedSection:
        if not self.secure_aggregation or self.flower is None:
            return self
        if self.server_app is not None:
            raise ValueError(
                f"flower.server_app={self.server_app!r} reads the reply of each device, and "
                "with secure_aggregation the server learns only their sum; set "
                "secure_aggregation = false if it may see each of them"
            )
        raise ValueError(
            f"flower.strategy.name={self.flower.strategy.name!r} works on single updates, and "
            "with secure_aggregation the server learns only their sum; set "
            "secure_aggregation = false if it may see each of them, or remove the strategy"
        )

    @model_validator(mode="after")
    def _a_rule_sees_updates(self) -> FederatedSection:
        """The settings of a rule are checked by the rule, which only the server needs to have."""
        rule = f"aggregation={self.aggregation!r}"
        if self.aggregation == "mean":
            if self.aggregation_settings:
                raise ValueError(
                    f"aggregation_settings has no effect on {rule}; name a rule, or remove it"
                )
            default = type(self).model_fields["aggregation_max_bytes"].default
            if self.aggregation_max_bytes != default:
                raise ValueError(
                    f"aggregation_max_bytes={self.aggregation_max_bytes} has no effect on {rule}, "
                    "which keeps no updates; remove it"
                )
            return self
        if self.secure_aggregation:
            raise ValueError(
                f"{rule} needs single updates, and federated.secure_aggregation is on; set "
                "secure_aggregation = false if the server may see each of them, or remove "
                "aggregation"
            )
        if self.mode == "buffered":
            raise ValueError(
                f"{rule} compares updates to one model, and those of mode='buffered' are to "
                "several; set mode = 'rounds', or remove aggregation"
            )
        if self.flower is not None:
            raise ValueError(f"{rule} and flower both replace the mean; remove one of them")
        return self

    @model_validator(mode="after")
    def _a_selection_has_settings(self) -> FederatedSection:
        if self.selection_settings and self.selection in ("uniform", "utility"):
            raise ValueError(
                f"selection_settings has no effect on selection={self.selection!r}; remove it"
            )
        if self.utility != Utility() and self.selection != "utility":
            raise ValueError(
                f"utility has no effect on selection={self.selection!r}; set selection = "
                "'utility', or remove it"
            )
        return self

    @model_validator(mode="after")
    def _buffer_fits(self) -> FederatedSection:
        if self.mode == "rounds":
            return self
        if self.over_selection != 1:
            raise ValueError(
                f"over_selection={self.over_selection:g} cannot be used with mode='buffered', "
                "which keeps buffer.concurrency devices training; remove it"
            )
        if self.flower is not None:
            raise ValueError(
                f"flower.strategy.name={self.flower.strategy.name!r} aggregates rounds; set "
                "mode = 'rounds', or remove the strategy"
            )
        return self

    @model_validator(mode="after")
    def _groups_can_be_summed(self) -> FederatedSection:
        """Sums by group are secure sums of one round's updates."""
        if self.groups is None:
            return self
        if not self.secure_aggregation or self.mode != "rounds" or self.flower is not None:
            raise ValueError(
                "groups needs secure_aggregation = true, mode = 'rounds' and no flower; remove "
                "groups, or change these"
            )
        if self.groups.minimum > self.cohort:
            raise ValueError(
                f"groups.minimum={self.groups.minimum} is above cohort={self.cohort}, so that no "
                "group could be summed; lower one or raise the other"
            )
        return self

    @model_validator(mode="after")
    def _random_groups_can_be_summed(self) -> FederatedSection:
        """The settings of the rule are checked by the rule, which only the server needs to have."""
        if self.robust is None:
            fields = type(self).model_fields
            unused = [name for name in _ROBUST if getattr(self, name) != fields[name].default]
            if unused:
                raise ValueError(f"{unused[0]} has no effect without robust; remove it")
            return self
        shown = f"robust={self.robust!r}"
        if not self.secure_aggregation:
            raise ValueError(
                f"{shown} is for secure sums of groups, and secure_aggregation is off; set "
                f"aggregation={self.robust!r}, which works on single updates"
            )
        others = {
            "mode='buffered'": self.mode == "buffered",
            "flower": self.flower is not None,
            "groups": self.groups is not None,
            "compression": self.compression is not None,
        }
        for name, is_used in others.items():
            if is_used:
                raise ValueError(
                    f"{shown} sums random groups of one round's devices, and cannot be used with "
                    f"{name}; remove one of them"
                )
        largest = self.cohort // self.robust_groups
        part = self.for_group(math.floor(largest * self.over_selection + 1e-9))
        if part is None:
            raise ValueError(
                f"robust_groups={self.robust_groups} of a cohort of {self.cohort} are groups of "
                f"{largest} devices, and the quorum of a group is {self._group_quorum(largest)} "
                f"with robust_minimum={self.robust_minimum}; raise cohort, or lower one of them"
            )
        return self

    @model_validator(mode="after")
    def _compressed_updates_can_be_summed(self) -> FederatedSection:
        if self.compression is None:
            return self
        if not self.secure_aggregation or self.mode != "rounds" or self.flower is not None:
            raise ValueError(
                "compression needs secure_aggregation = true, mode = 'rounds' and no flower; "
                "remove compression, or change these"
            )
        if self.groups is not None:
            raise ValueError(
                "compression keeps one remainder on each device, which belongs to the sum of all "
                "devices, and groups sums them by group; remove one of them"
            )
        return self

    @model_validator(mode="after")
    def _a_codec_has_single_updates(self) -> FederatedSection:
        if self.codec is None:
            if self.codec_settings:
                raise ValueError("codec_settings has no effect without codec; name one")
            return self
        if self.secure_aggregation:
            raise ValueError(
                f"codec={self.codec!r} encodes single updates, and federated.secure_aggregation is "
                "on, whose sums need elements of one ring; set secure_aggregation = false if the "
                "server may see each update, or use federated.compression"
            )
        if self.mode != "rounds" or self.flower is not None:
            raise ValueError(
                f"codec={self.codec!r} needs mode = 'rounds' and no flower; remove it, or change "
                "these"
            )
        return self

    @model_validator(mode="after")
    def _changes_can_be_sent(self) -> FederatedSection:
        key = "download_bits" if self.download_codec is None else "download_codec"
        if self.download_bits is not None and self.download_codec is not None:
            raise ValueError(
                f"download_bits has no effect with download_codec={self.download_codec!r}; remove "
                "one of them"
            )
        if self.download_codec is None and self.download_codec_settings:
            raise ValueError(
                "download_codec_settings has no effect without download_codec; name one"
            )
        if self.sends_changes and (self.mode != "rounds" or self.flower is not None):
            raise ValueError(
                f"{key} needs mode = 'rounds' and no flower; remove it, or change these"
            )
        return self

    @property
    def sends_changes(self) -> bool:
        """Whether devices that have an earlier model are sent its change."""
        return self.download_bits is not None or self.download_codec is not None

    @property
    def names_codecs(self) -> bool:
        """Whether something is encoded by a codec."""
        return self.codec is not None or self.sends_changes or self.compression is not None

    @property
    def update_codec(self) -> CodecChoice | None:
        """The codec of single updates; None if they are sent as they are."""
        if self.codec is None:
            return None
        key = "federated.codec"
        return CodecChoice(key, self.codec, f"{key}_settings", self.codec_settings)

    @property
    def change_codec(self) -> CodecChoice | None:
        """The codec of the model's changes; None if whole models are sent."""
        if self.download_bits is not None:
            key = "federated.download_bits"
            return CodecChoice(key, "rounded", key, {"bits": self.download_bits})
        if self.download_codec is None:
            return None
        key = "federated.download_codec"
        return CodecChoice(
            key, self.download_codec, f"{key}_settings", self.download_codec_settings
        )

    @property
    def app(self) -> str | None:
        """The app that works on devices in place of the task, as the job names it."""
        return None if self.flower is None else self.flower.app

    @property
    def server_app(self) -> str | None:
        """The app that directs the run in place of the round loop, as the job names it."""
        return None if self.flower is None else self.flower.server_app

    @property
    def app_max_bytes(self) -> int:
        """Most bytes of a message to an app, or of its reply; 0 without an app."""
        return 0 if self.flower is None else self.flower.max_bytes

    def steps(self, examples: int) -> int:
        """The number of local steps of a round, with that many examples in an epoch.

        >>> FederatedSection(local_epochs=2, batch_size=2).steps(3)
        4
        """
        if self.local_steps is not None:
            return self.local_steps
        return (self.local_epochs or 1) * -(-examples // self.batch_size)

    def normalization(self, steps: int) -> float:
        """Factor of the update of a device that made so many steps.

        Steps that train only what is personal do not count.

        >>> FederatedSection(normalized_steps=10).normalization(40)
        0.25
        """
        counted = steps - self.personal_steps
        if self.normalized_steps is None or counted < 1:
            return 1.0
        return self.normalized_steps / counted

    def weight(self, examples: int, owners: Weights = "exact") -> int:
        """What an update counts: the device's examples, or 1 if these are protected.

        Args:
            examples: of the device.
            owners: the kind of weights that its owner gives, see `isthmus.job.weights`; those of a
                job that is more exact are refused before.

        >>> FederatedSection(weights="coarse").weight(100)
        128
        >>> FederatedSection(secure_aggregation=False, max_examples=50).weight(100)
        50
        """
        if self.privacy is not None:
            return 1
        weight = weight_of(examples, agreed(self.weights, owners) or owners)
        if self.secure_aggregation or self.max_examples is None:
            return weight  # a secure sum has a largest weight of its own
        return min(weight, self.max_examples)

    @property
    def largest_weight(self) -> int | None:
        """The largest weight of a device in a secure sum; None if it follows from the devices'."""
        same = self.privacy is not None or self.weights == "equal"
        return 1 if same else self.max_examples

    @property
    def finds_ranges(self) -> bool:
        """Whether something of the encoding of updates follows from their ranges; see `clip`."""
        return self.secure_aggregation and (self.clip is None or self.largest_weight is None)

    @property
    def concurrency(self) -> int:
        """Devices at work at the same time with mode = "buffered"."""
        return self.buffer.concurrency or 2 * self.cohort

    @property
    def fine_tuning(self) -> FederatedSection | None:
        """The settings of the steps before an evaluation on a device; None without such steps."""
        if not self.fine_tune_steps:
            return None
        changes = {"local_epochs": None, "local_steps": self.fine_tune_steps}
        return self.model_copy(update={**changes, "proximal": 0.0, "personal_steps": 0})

    @property
    def needed(self) -> int:
        """The quorum, with its default applied."""
        return self.quorum if self.quorum is not None else -(-3 * self.cohort // 4)

    @property
    def invited(self) -> int:
        """Devices invited to one round."""
        return math.ceil(self.cohort * self.over_selection)

    def for_cohort(self, cohort: int) -> FederatedSection:
        """A copy of the section with another cohort, and the quorum that goes with it.

        A quorum that the job sets stays, and grows where secure aggregation needs more.

        Raises:
            JobError: the quorum is above the cohort, or the cohort is too small or too large for a
                secure sum.
        """
        quorum = -(-3 * cohort // 4) if self.quorum is None else self.quorum
        if self.secure_aggregation:
            if cohort > MAX_SECURE_COHORT:
                raise JobError(_too_large(cohort))
            quorum = max(quorum, self._min_secure_quorum(cohort))
        if cohort < quorum:
            raise JobError(f"a cohort of {cohort} devices is below the quorum of {quorum}")
        return self.model_copy(update={"cohort": cohort, "quorum": quorum})

    def for_group(self, invited: int, *, exact: bool = False) -> FederatedSection | None:
        """A copy of the section for one group of which that many devices are invited.

        The quorum is the same part of the cohort, and at least `least_in_group`. None if the group
        is too small to be summed by itself. With `exact`, all of them are to be summed.
        """
        cohort = invited if exact else math.floor(invited / self.over_selection + 1e-9)
        quorum = self._group_quorum(cohort)
        if cohort < quorum:
            return None
        return self.model_copy(update={"cohort": cohort, "quorum": quorum})

    @property
    def least_in_group(self) -> int | None:
        """Fewest devices in the sum of a group; None for a job without groups."""
        if self.robust is not None:
            return self.robust_minimum
        return None if self.groups is None else self.groups.minimum

    @property
    def smallest_sum(self) -> int:
        """Fewest devices of a sum of updates that may be opened, by group or not.

        >>> FederatedSection(cohort=150, robust="median").smallest_sum
        10
        """
        if self.robust is not None:
            return self.robust_minimum
        return min(self.needed, self.least_in_group or self.needed)

    @property
    def needed_groups(self) -> int:
        """Groups that a quorum of the devices can be in at least, with `robust`.

        >>> robust = {"robust": "median", "robust_groups": 10}
        >>> FederatedSection(cohort=150, **robust).needed_groups
        8
        """
        largest = -(-self.cohort // self.robust_groups)
        return max(MIN_ROBUST_GROUPS, -(-self.needed // largest))

    @property
    def robust_rule(self) -> FederatedSection | None:
        """What the rule of `robust` is made with: a plain round whose devices are the groups."""
        if self.robust is None:
            return None
        plain = {
            "aggregation": self.robust,
            "aggregation_settings": self.robust_settings,
            "secure_aggregation": False,
            "cohort": self.robust_groups,
            "quorum": self.needed_groups,
            "robust": None,
        }
        return self.model_copy(update=plain)

    def _group_quorum(self, cohort: int) -> int:
        share = -(-self.needed * cohort // self.cohort)
        return max(share, self.least_in_group or 0, self._min_secure_quorum(cohort))

    @staticmethod
    def _min_secure_quorum(cohort: int) -> int:
        return max(3, 56 * cohort // 100 + 1)


_ROBUST = ("robust_settings", "robust_groups", "robust_minimum")
"""Keys that only robust sums have."""

_TRAINING = (
    "local_epochs",
    "local_steps",
    "personal_steps",
    "fine_tune_steps",
    "batch_size",
    "accumulate",
    "proximal",
    "normalized_steps",
    "control_variates",
    "clip_norm",
    "precision",
    "frozen_dtype",
    "frozen_tolerance",
    "compile",
    "checkpoint_activations",
    "device",
    "weights",
)
"""Settings of the training on devices."""


def _too_large(cohort: int) -> str:
    return (
        f"cohort={cohort} is above {MAX_SECURE_COHORT}, the most devices of a secure sum; lower "
        "it, or set secure_aggregation = false"
    )
