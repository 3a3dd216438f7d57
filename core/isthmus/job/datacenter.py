"""The job's table `[datacenter]`: rounds on a group of ranks and the layout of the model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from isthmus.job.codec_choice import CodecChoice
from isthmus.job.privacy import DatacenterPrivacy
from isthmus.job.section import FREE, ProvidedName, Section

_BLOCK_TOP_K = "block-top-k"
_MOST_RECORDS = 1000
"""Steps of a round that may have figures: they are kept with the round."""
_MOST_PROFILED = 100
"""Steps of a trace, which is in memory until it is written."""


class DatacenterCompression(Section):
    """Fewer bytes from each of several datacenters (SparseLoCo, Sarfi et al. 2025).

    Of its update a datacenter sends the elements of largest magnitude, in two bits each, with their
    positions. What it did not send stays there: it trains on from it, and sends it later.
    """

    codec: ProvidedName = _BLOCK_TOP_K
    """How an update is encoded: `block-top-k`, as above; or a codec that a package provides, which
    the datacenters need too."""
    settings: Annotated[dict[str, Any], FREE] = Field(default={})
    """Settings of a codec that a package provides, see docs/extend.md."""
    keep: Annotated[int, Field(ge=1, le=4096)] = 64
    """Elements that are sent of each block of 4,096 neighbouring ones."""

    @model_validator(mode="after")
    def _settings_have_an_effect(self) -> DatacenterCompression:
        if self.codec == _BLOCK_TOP_K and self.settings:
            raise ValueError(
                f"settings has no effect on codec={_BLOCK_TOP_K!r}, whose key is keep; remove it"
            )
        if self.codec != _BLOCK_TOP_K and self.keep != type(self).model_fields["keep"].default:
            raise ValueError(
                f"keep has no effect on codec={self.codec!r}; remove it, and set what the codec "
                "reads in settings"
            )
        return self

    @property
    def choice(self) -> CodecChoice:
        """The codec of datacenters' updates."""
        key = "datacenter.compression"
        if self.codec != _BLOCK_TOP_K:
            return CodecChoice(f"{key}.codec", self.codec, f"{key}.settings", self.settings)
        return CodecChoice(f"{key}.codec", self.codec, key, {"keep": self.keep})


_CHOSEN = (
    "zero_stage",
    "data_parallel",
    "shard_groups",
    "tensor_parallel",
    "sequence_parallel",
    "context_parallel",
    "pipeline_parallel",
)
"""What ranks choose with `layout = "auto"`, or do without. A default cannot be told from a value
that was given."""

_SHARDED = (
    "fully_shard gathers parameters and reduces gradients by hooks for a batch as a whole, so that "
    "no rank ever has the gradient of one example"
)
_PRIVATE_LAYOUT: tuple[tuple[str, object, str], ...] = (
    ("layout", "given", "it may choose to shard the model"),
    ("zero_stage", 0, _SHARDED),
    ("tensor_parallel", 1, "no rank has the whole gradient of an example to clip"),
    ("context_parallel", 1, "no rank has the whole gradient of an example to clip"),
    ("expert_parallel", 1, "no rank has the whole gradient of an example to clip"),
    ("pipeline_parallel", 1, "no rank has the whole gradient of an example to clip"),
    ("offload", "none", "gradients of examples are clipped on the device"),
    (
        "precision",
        "fp32",
        "the bound on the gradient of an example would not hold with its rounding",
    ),
    ("float8", False, "the bound on the gradient of an example would not hold with its rounding"),
    ("accumulate", 1, "the examples of a step are already taken in parts"),
    ("compile", False, "torch.compile does not compile per-example gradients"),
    ("checkpoint_activations", False, "per-example gradients cannot recompute activations"),
    ("global_batch", None, "here the size of a step is random"),
    ("clip_norm", None, "datacenter.privacy.clip already bounds every example's gradient"),
    ("log_steps", 0, "nobody may know the loss of a step of private examples"),
    (
        "profile_steps",
        None,
        "a trace has how many examples were drawn, and numbers computed from them",
    ),
    ("readers", 0, "they read batches of equal size, and here the size of a step is random"),
)
"""Keys of `[datacenter]`, the one value that is possible, and why others are not with `privacy`."""


_PARTITIONED = "as ranks compare a partitioned model with the whole one in float32"
_OTHER_TYPES = "which has layers compute in other types"
_FLOAT32_BASE: Mapping[str, tuple[object, str]] = {
    "layout": ("given", "as ranks may choose to partition the model"),
    "tensor_parallel": (1, _PARTITIONED),
    "context_parallel": (1, _PARTITIONED),
    "pipeline_parallel": (1, _PARTITIONED),
    "expert_parallel": (1, _PARTITIONED),
    "precision": ("fp32", _OTHER_TYPES),
    "float8": (False, _OTHER_TYPES),
    "compile": (False, "as compiled blocks may round elsewhere"),
    "offload": ("none", "as nothing tests it with two types of parameters"),
    "privacy": (None, "as each example's gradient is computed in float32"),
}
"""Keys of `[datacenter]`, their one value with `frozen_dtype`, and the reason."""


class DatacenterSection(Section):
    """Rounds on a group of ranks."""

    ranks: Annotated[int, Field(ge=0, le=1024)] = 0
    """Ranks that `isthmus run` starts on this machine; 0 for none."""
    layout: Literal["given", "auto"] = "given"
    """`auto` chooses zero_stage and tensor_parallel from the model's size and devices; there is no
    pipeline then."""
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 2
    """Sharded over data_parallel: 1 the optimizer state, 2 also gradients, 3 also parameters."""
    shard_groups: Annotated[int, Field(ge=1, le=1024)] = 1
    """Groups of replicas that each hold the whole model in shards (hybrid sharding): set it to the
    number of nodes, and only sums of gradients pass between them."""
    data_parallel: Annotated[int, Field(ge=1)] | None = None
    """Replicas that train on different examples. Default: all ranks, divided by the others."""
    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    """Ranks that share each layer's matrices."""
    sequence_parallel: bool = False
    """Have tensor-parallel ranks share the positions of sequences between the layers of a block,
    which saves memory of activations."""
    context_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    """Ranks that share the positions of each sequence and have whole layers, for long sequences."""
    expert_parallel: Annotated[int, Field(ge=1, le=256)] = 1
    """Data-parallel replicas that divide the experts of mixtures among themselves and exchange
    tokens."""
    pipeline_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    """Ranks that each hold a contiguous part of the layers."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = "1f1b"
    """Order of a pipeline's passes; the last two give each rank two parts of the layers."""
    microbatches: Annotated[int, Field(ge=1)] | None = None
    """Microbatches of a batch in a pipeline. Default: two for each of its ranks, or one."""
    accumulate: Annotated[int, Field(ge=1)] = 1
    """Parts of a batch trained in sequence before an optimizer step, to save memory."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Precision of the layers; parameters, gradient sums and the optimizer stay float32."""
    frozen_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which ranks hold parameters that are not trained, as `federated.frozen_dtype` says it
    of devices. What is trained stays float32."""
    offload: Literal["none", "optimizer", "parameters"] = "none"
    """What a GPU keeps in the host's memory: the optimizer's state between its steps; or shards of
    parameters, gradients and that state, so that the processor takes the steps."""
    optimizer_states: Literal["fp32", "bf16"] = "fp32"
    """Precision of the optimizer's moments between steps; "bf16" rounds them stochastically."""
    float8: bool = False
    """Have linear layers of blocks multiply in float8, on GPUs that can; needs torchao."""
    compile: bool = False
    """Compile each block with `torch.compile`."""
    checkpoint_activations: bool | Literal["operators"] = False
    """Recompute each block in the backward pass instead of keeping its activations. "operators"
    keeps the outputs of matrix products, convolutions and attention, and recomputes the rest."""
    checkpoint_every: Annotated[int, Field(ge=1, le=1024)] = 1
    """Recompute every n-th block only, to trade memory for time."""
    clip_norm: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Largest 2-norm of the whole gradient; a longer one is scaled down. Default: no limit."""
    steps: Annotated[int, Field(ge=1)] = 50
    """Optimizer steps in one round."""
    log_steps: Annotated[int, Field(ge=0)] = 0
    """Loss, gradient norm, learning rate and scored units per second of every so many steps go to
    console and trackers; 0: of none."""
    profile_steps: (
        Annotated[Sequence[Annotated[int, Field(ge=1)]], Field(min_length=2, max_length=2)] | None
    ) = None
    """First and last step of the run, from 1, of which each rank writes a trace. Default: none."""
    checkpoint_steps: Annotated[int, Field(ge=0)] = 0
    """Steps between checkpoints written during a round; 0: only at its end."""
    batch_size: Annotated[int, Field(ge=1)] = 32
    """Examples in one step on one data-parallel replica; with `global_batch` the most at a time."""
    global_batch: Annotated[int, Field(ge=1)] | None = None
    """Examples in one step of all replicas, however many there are: each accumulates its share, in
    parts of at most batch_size / accumulate. Default: batch_size for each replica."""
    readers: Annotated[int, Field(ge=0, le=64)] = 0
    """Processes on each rank that prefetch its data; with 0 it is read between the steps."""
    hang_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """End the ranks when none of them has got on for this long: set it above the longest step,
    compilation, evaluation or checkpoint. Default: only where a rank is in the task's code while
    others wait, after a quarter of `time.round_seconds`, or ten of the longest steps if more."""
    optimizer_on_load: Literal["reset", "keep"] = "reset"
    """Inner optimizer state when a model that others trained is loaded: its moments are stale."""

    privacy: DatacenterPrivacy | None = None
    """Differential privacy of the datacenter's examples; none by default."""
    compression: DatacenterCompression | None = None
    """Send fewer bytes from several datacenters. Default: 32 bits for every element."""

    @property
    def needed(self) -> int:
        """Least number of datacenters of a round."""
        return 1 if self.compression is None else 2

    @property
    def private_batch(self) -> int:
        """Expected examples in a step of all ranks with `privacy`; 0 if the ranks are unknown."""
        return self.batch_size * (self.data_parallel or self.ranks)

    @model_validator(mode="after")
    def _layout_fits(self) -> DatacenterSection:
        parts = self.accumulate * (self.microbatches or 1)
        if self.batch_size % parts:
            raise ValueError(
                f"batch_size={self.batch_size} cannot be divided into {parts} equal parts "
                f"(accumulate={self.accumulate} x microbatches={self.microbatches or 1})"
            )
        fields = type(self).model_fields
        given = [name for name in _CHOSEN if getattr(self, name) != fields[name].default]
        if self.layout == "auto" and given:
            raise ValueError(
                f'layout="auto" has the ranks choose the layout and ignore {", ".join(given)}; '
                'remove that, or set layout = "given"'
            )
        if self.schedule == "zero_bubble" and self.zero_stage == 3 and self.layout == "given":
            raise ValueError(
                "schedule='zero_bubble' with zero_stage=3 loses gradients in PyTorch; "
                "use zero_stage=2 or another schedule"
            )
        if self.frozen_dtype != "float32":
            self._check_frozen_parameters_can_be_rounded()
        if self.checkpoint_activations == "operators" and self.compile:
            raise ValueError(
                'checkpoint_activations="operators" does not see the operators of compiled blocks; '
                "set compile = false, or checkpoint_activations = true"
            )
        if self.checkpoint_activations == "operators" and self.schedule == "zero_bubble":
            raise ValueError(
                'checkpoint_activations="operators" keeps outputs for one backward pass, and '
                "schedule='zero_bubble' has two; set checkpoint_activations = true, or another "
                "schedule"
            )
        if self.context_parallel > 1 and (self.tensor_parallel > 1 or self.compile):
            why = "tensor_parallel = 1" if self.tensor_parallel > 1 else "compile = false"
            raise ValueError(
                f"context_parallel={self.context_parallel} needs {why}; remove one of the two"
            )
        if self.offload == "parameters" and (self.tensor_parallel > 1 or self.context_parallel > 1):
            key = "tensor_parallel" if self.tensor_parallel > 1 else "context_parallel"
            raise ValueError(
                f'offload="parameters" needs {key} = 1, whose ranks sum gradients on their '
                'devices; set it, or offload = "optimizer"'
            )
        if self.float8:
            for key in ("tensor_parallel", "context_parallel"):
                if getattr(self, key) > 1:
                    raise ValueError(f"float8 needs {key} = 1; remove one of the two")
            if self.precision == "fp16":
                raise ValueError(
                    'float8 does not work with precision = "fp16", whose losses are scaled for '
                    'another range of numbers; set precision = "bf16"'
                )
        if self.expert_parallel > 1:
            self._check_experts_can_be_divided()
        if self.sequence_parallel and (self.tensor_parallel == 1 or self.compile):
            why = "tensor_parallel above 1" if self.tensor_parallel == 1 else "compile = false"
            raise ValueError(
                f"sequence_parallel needs {why}; set that, or sequence_parallel = false"
            )
        if self.checkpoint_every > 1 and not self.checkpoint_activations:
            raise ValueError(
                f"checkpoint_every={self.checkpoint_every} has no effect without "
                "checkpoint_activations; set that, or remove it"
            )
        if self.shard_groups > 1 and self.zero_stage == 0:
            raise ValueError(
                f"shard_groups={self.shard_groups} is for zero_stage 1 to 3: here nothing is "
                "sharded; remove it"
            )
        if self.ranks and self.layout == "given":
            self.for_replicas(self.replicas(self.ranks))
        if self.log_steps and self.steps > _MOST_RECORDS * self.log_steps:
            raise ValueError(
                f"log_steps={self.log_steps} gives figures of {self.steps // self.log_steps} steps "
                f"in a round, and a round keeps {_MOST_RECORDS}; raise it to "
                f"{-(-self.steps // _MOST_RECORDS)}"
            )
        if self.profile_steps is not None:
            first, last = self.profile_steps
            if not first <= last < first + _MOST_PROFILED:
                raise ValueError(
                    f"profile_steps={[first, last]} are the first and the last step of a trace, "
                    f"which has at most {_MOST_PROFILED}"
                )
        if self.privacy is not None:
            self._check_privacy(self.privacy)
        return self

    def _check_frozen_parameters_can_be_rounded(self) -> None:
        """Refuse what has not the values of one processor over such a model.

        Raises:
            ValueError: there is such a key.
        """
        for key, (value, why) in _FLOAT32_BASE.items():
            if getattr(self, key) != value:
                raise ValueError(
                    f"frozen_dtype={self.frozen_dtype!r} needs {key} = {json.dumps(value)}, {why}"
                )

    def _check_experts_can_be_divided(self) -> None:
        """Refuse keys with which divided experts are not what they are whole.

        Raises:
            ValueError: with what to change.
        """
        for name, needed in (
            ("tensor_parallel", 1),
            ("context_parallel", 1),
            ("compile", False),
            ("layout", "given"),
        ):
            if getattr(self, name) != needed:
                raise ValueError(
                    f"expert_parallel={self.expert_parallel} needs {name} = {json.dumps(needed)}; "
                    "remove one of the two"
                )
        if self.schedule == "zero_bubble":
            raise ValueError(
                f"expert_parallel={self.expert_parallel} does not work with "
                "schedule='zero_bubble', which computes gradients of parameters apart from those "
                "of tokens; use another schedule"
            )

    def _check_privacy(self, privacy: DatacenterPrivacy) -> None:
        """Refuse a layout in which the gradients of single examples cannot be had.

        Raises:
            ValueError: with what to change.
        """
        for name, needed, why in _PRIVATE_LAYOUT:
            if name == "zero_stage" and privacy.clipping == "ghost":
                continue
            if getattr(self, name) != needed:
                remedy = f"set {name} = {json.dumps(needed)}"
                if name == "zero_stage":
                    remedy += ', or datacenter.privacy.clipping = "ghost"'
                raise ValueError(
                    f"datacenter.privacy: {name}={getattr(self, name)!r} does not work with it, "
                    f"because {why}; {f'remove {name}' if needed is None else remedy}"
                )
        batch = self.private_batch
        if not batch:
            raise ValueError(
                "datacenter.privacy: the probability with which an example is in a step follows "
                "from the number of ranks; set datacenter.data_parallel to it"
            )
        if batch > privacy.examples:
            raise ValueError(
                f"datacenter.privacy: a step of {batch} examples (batch_size on all ranks) is more "
                f"than examples={privacy.examples}; lower batch_size"
            )
        if privacy.delta >= 1 / privacy.examples:
            raise ValueError(
                f"datacenter.privacy: delta={privacy.delta:g} is not below 1 / {privacy.examples} "
                f"examples: it would allow to publish one of them; use {0.1 / privacy.examples:.1g}"
            )

    def microbatches_in_pipeline(self) -> int | None:
        """The job's number of micro-batches; by default two for each rank of the pipeline, or one.

        None if the examples that are trained at a time cannot be split so.
        """
        if self.microbatches is not None:
            return self.microbatches
        examples = self.batch_size // self.accumulate
        choices = (2 * self.pipeline_parallel, self.pipeline_parallel)
        return next((each for each in choices if examples % each == 0), None)

    def for_replicas(self, replicas: int) -> DatacenterSection:
        """The section with the `batch_size` and `accumulate` that `global_batch` asks for.

        Raises:
            ValueError: the examples of a step cannot be divided among so many replicas.
        """
        if self.global_batch is None:
            return self
        own, rest = divmod(self.global_batch, replicas)
        if rest or not own:
            raise ValueError(
                f"global_batch={self.global_batch} cannot be divided among {replicas} replicas "
                "into equal parts; use another number of ranks"
            )
        at_once = self.batch_size // self.accumulate
        microbatches = self.microbatches or 1
        parts = [
            parts
            for parts in range(-(-own // at_once), own + 1)
            if own % (parts * microbatches) == 0
        ]
        if not parts:
            raise ValueError(
                f"the {own} examples of a replica (global_batch={self.global_batch} / {replicas} "
                f"replicas) cannot be divided into microbatches={microbatches} equal parts"
            )
        return self.model_copy(update={"batch_size": own, "accumulate": parts[0]})

    def examples_at_once(self, ranks: int) -> int:
        """Examples that a replica computes together, on so many ranks.

        Raises:
            ValueError: see `replicas` and `for_replicas`.
        """
        own = self.for_replicas(self.replicas(ranks))
        return own.batch_size // own.accumulate

    def replicas(self, ranks: int) -> int:
        """The data-parallel degree on a number of ranks.

        Raises:
            ValueError: the degrees do not multiply to the number of ranks, or the groups of shards
                or of experts do not divide the replicas.
        """
        others = self.tensor_parallel * self.context_parallel * self.pipeline_parallel
        left, rest = divmod(ranks, others)
        if rest or left == 0 or self.data_parallel not in (None, left):
            degrees = f"tensor_parallel={self.tensor_parallel}"
            if self.context_parallel > 1:
                degrees = f"context_parallel={self.context_parallel}"
            degrees += f" x pipeline_parallel={self.pipeline_parallel}"
            multiple = " or a multiple"
            if self.data_parallel is not None:
                degrees += f" x data_parallel={self.data_parallel}"
                multiple = ""
            needed = others * (self.data_parallel or 1)
            raise ValueError(f"{degrees} needs {needed} ranks{multiple}, and there are {ranks}")
        if left % self.shard_groups:
            raise ValueError(
                f"shard_groups={self.shard_groups} cannot divide {left} data-parallel replicas "
                "into equal groups"
            )
        own = left // self.shard_groups
        if own % self.expert_parallel:
            group = (
                "" if self.shard_groups == 1 else f" of each of shard_groups={self.shard_groups}"
            )
            raise ValueError(
                f"expert_parallel={self.expert_parallel} cannot divide the {own} data-parallel "
                f"replicas{group} into equal groups"
            )
        return left
