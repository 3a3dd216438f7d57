"""What participants exchange, what stays on each device, and how updates are compressed."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from isthmus.job.codec_choice import CodecChoice
from isthmus.job.section import FREE, ProvidedName, Section

Pattern = Annotated[str, Field(min_length=1)]
OneIn = Annotated[int, Field(ge=1, le=256)]


class LowRankSection(Section):
    """Matrices whose change in a device's training is a product of two factors (LoRA)."""

    include: Annotated[tuple[Pattern, ...], Field(min_length=1)]
    """Patterns of these matrices, which must be exchanged."""
    rank: Annotated[int, Field(ge=1)] = 8
    """The rank of the product; a task may choose another for a device by `adapter_rank()`."""
    alpha: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 16.0
    """The product is multiplied by alpha / rank."""


class ExchangeSection(Section):
    """What participants exchange, and what stays on each device.

    Patterns are those of `fnmatch`, for names as in `model.named_parameters()`: `head.*` matches
    `head.weight`, and `*` also matches dots.
    """

    include: tuple[Pattern, ...] = ()
    """Patterns of the parameters and running statistics that are trained and exchanged; others are
    frozen. Empty for all."""
    exclude: tuple[Pattern, ...] = ()
    """Patterns of those that are frozen although `include` or `personal` names them."""
    personal: tuple[Pattern, ...] = ()
    """Patterns of those that each device trains for itself and keeps between its rounds. They are
    not exchanged, and have their initial values elsewhere."""
    buffers: Literal["average", "frozen", "local", "recompute"] = "average"
    """Running statistics of normalisation layers such as BatchNorm: `average`, the participants'
    mean, like parameters but without the server optimizer; `frozen`, those that the model was built
    with, by which layers normalise in training too; `local`, these layers' statistics and
    parameters are personal (FedBN); `recompute`, devices send none, and after each round in which
    they trained, a datacenter computes them on its data."""
    low_rank: LowRankSection | None = None
    """Devices train factors of some matrices instead of these; none by default. The products are
    summed, so that devices may have different ranks."""

    @property
    def has_personal(self) -> bool:
        """Whether something may stay on each device."""
        return bool(self.personal) or self.buffers == "local"


class Compression(Section):
    """Fewer bytes up: devices send some elements of an update in a round, with few bits each.

    All devices send the same elements, so that secure aggregation sums what they send. What they
    did not send, or rounded away, stays with them and is added to their next update.
    """

    codec: ProvidedName = "sampled"
    """Which numbers are sent of an update: `sampled`, some of its elements; or what a codec for
    sums that a package provides makes of it, which the devices need too."""
    settings: Annotated[dict[str, Any], FREE] = Field(default={})
    """Settings of a codec that a package provides, see docs/extend.md."""
    bits: Annotated[int, Field(ge=2, le=8)] = 3
    """An element has one of 2**bits - 1 values."""
    one_in: OneIn = 4
    """One of that many neighbouring elements is sent in a round; 1 sends all of them."""
    one_in_of: Annotated[dict[Pattern, OneIn], Field(max_length=64, default_factory=dict)]
    """`one_in` of the parameters that match patterns: 1 for small ones that matter, such as norms,
    biases and embeddings. If several patterns match a parameter, the smallest number counts."""
    step_ahead: Annotated[float, Field(ge=0, le=1)] = 0.7
    """A device trains from the model to which it has added this part of what it has not sent yet;
    true is all of it, false nothing. It protects from large losses; where little is lost without
    it, it may lose some tenths of a point itself. Simulated devices then train one by one."""

    @model_validator(mode="after")
    def _settings_have_an_effect(self) -> Compression:
        if self.codec == SAMPLED:
            if self.settings:
                raise ValueError(
                    f"settings has no effect on codec={SAMPLED!r}, whose keys are one_in and "
                    "one_in_of; remove it"
                )
            return self
        default = type(self).model_fields["one_in"].default
        unused = "one_in" if self.one_in != default else "one_in_of" if self.one_in_of else None
        if unused is not None:
            raise ValueError(
                f"{unused} has no effect on codec={self.codec!r}; remove it, and set what the "
                "codec reads in settings"
            )
        return self

    @property
    def choice(self) -> CodecChoice:
        """The codec of secure sums."""
        key = "federated.compression"
        if self.codec != SAMPLED:
            return CodecChoice(f"{key}.codec", self.codec, f"{key}.settings", self.settings)
        settings = {"one_in": self.one_in, "one_in_of": self.one_in_of}
        return CodecChoice(f"{key}.codec", self.codec, key, settings)


SAMPLED = "sampled"
"""The codec of secure sums that is Isthmus' own."""
