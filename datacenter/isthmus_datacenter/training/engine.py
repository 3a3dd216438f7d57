"""One rank's part of one run: model shard, optimizer and data, always at an absolute step.

The engine has the state; `round.train_round` and `mean_gradient.mean_gradient` train on it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from isthmus.errors import TaskError, UserError
from isthmus.job import Job
from isthmus.system.process import return_freed_memory, trim_freed_memory
from isthmus.task import Participant, Task, load_task, user_code
from isthmus.task.definition import defines
from isthmus.task.made_optimizers import made_by
from isthmus.task.optimizers import ScheduleState, job_schedule
from isthmus.task.own_numbers import own_numbers
from isthmus.task.scoring import build_rank_model, count_examples, pair_of
from isthmus.task.scoring.steps import training_step
from isthmus.tensors.exchange_set import TensorLayout
from isthmus_datacenter.checkpointing.checkpoints import ShardedCheckpoints
from isthmus_datacenter.checkpointing.model_file import store_shards
from isthmus_datacenter.messages import Command
from isthmus_datacenter.parallel import auto_layout
from isthmus_datacenter.parallel.equivalence_check import has_left_others
from isthmus_datacenter.parallel.model_shard import ModelShard
from isthmus_datacenter.parallel.optimizer import ShardedOptimizer
from isthmus_datacenter.parallel.parallel_dims import ParallelDims
from isthmus_datacenter.parallel.parallelize import parallelize
from isthmus_datacenter.parallel.seed_values import SeedValues
from isthmus_datacenter.parallel.unfilled_model import (
    NeedsWholeModel,
    UnfilledModel,
    may_be_filled_later,
    on_all_ranks,
)
from isthmus_datacenter.rank_messages import RankMessages
from isthmus_datacenter.training.consensus import fail_together
from isthmus_datacenter.training.data import BatchSource, ExampleOrder
from isthmus_datacenter.training.evaluation import Evaluator
from isthmus_datacenter.training.forward_backward import ForwardBackward
from isthmus_datacenter.training.positions import DataPositions
from isthmus_datacenter.training.private.ghost_step import GhostForwardBackward
from isthmus_datacenter.training.private.refusals import check_numbers
from isthmus_datacenter.training.private.step import (
    PerExampleForwardBackward,
    PrivateForwardBackward,
)
from isthmus_datacenter.training.rng import kept_generators, seed_rank
from isthmus_datacenter.training.whole_batches import check_layout, check_optimizers
from isthmus_privacy.dp_sgd.examples import SampledExamples
from isthmus_privacy.dp_sgd.isolation import EXAMPLES
from isthmus_privacy.dp_sgd.refusals import check_layers, check_task, check_trained

_TABLE = "datacenter.privacy"
_POSITIONS: RankMessages[DataPositions] = RankMessages("positions", DataPositions, 1 << 20)
_LARGE_BYTES = 256 << 20
"""Size of a model from which memory matters more than the time to get it from the kernel."""
_RETURNED_BYTES = 1 << 20
"""Smallest block of memory that is returned then: less than a matrix of such a model."""
_SEEDED = "seeded.safetensors"
"""The file with the model that the seed gives, while the ranks read it."""
_SAMPLE_EXAMPLES = 2
"""Size of the sample on which a sharded model is compared with the whole one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankPlacement:
    """A rank's number, device and directory."""

    rank: int
    ranks: int
    device: torch.device
    participant: str
    """Name of the datacenter."""
    state: Path
    """Directory of the run's checkpoints."""


class Engine:
    """One run on one rank.

    Guarantees:
      * the state at a step depends only on the job, the data, the numbers of replicas that trained
        the steps before and the models that were sent: not on restarts, and not on attempts that
        failed;
      * a failure that only some ranks see is raised there as it is; one that all see is a
        `ConsensusError` on all.
    """

    def __init__(self, command: Command, placement: RankPlacement) -> None:
        """Load the task and its data, and distribute the model. All ranks call this together.

        Raises:
            ConsensusError: the task failed on some rank.
            TaskError: its optimizer failed on shards, maybe on this rank only.
        """
        self.placement = placement
        self.job = Job.model_validate_json(command.job)
        self.layout = TensorLayout.from_header(command.layout.encode("latin-1"))
        self.frozen = command.frozen
        self.base = Path(command.base)
        self.checkpoints = ShardedCheckpoints(placement.state)
        self.note = ""
        """Decisions made here that the user may want to know."""
        with fail_together():
            self.task = self._load_task(command)
            self.data = self._load_data()
            streamed = isinstance(self.data, IterableDataset)
            self.examples = 0 if streamed else count_examples(self.data, "local_data()")
            self.dims = self._choose_dims()
            self._limit_freed_memory()
            self._check_statistics()
            check_layout(self.task, self.dims)
            self.private = self.job.datacenter.privacy is not None
            """Whether examples are protected by differential privacy."""
            if self.private:
                check_task(self.task, self.data, _TABLE)
                check_numbers(self.job.datacenter, self.examples, self.dims.data)
            self.order = ExampleOrder.of(
                self.task, self.data, self.examples, self.dims.data, self.job
            )
        # What may fail on some ranks only is above, and is over on all of them: what follows has
        # collectives, which a rank that had failed would leave out.
        self.coordinates = self.dims.coordinates(placement.rank)
        self.batch_source = self._make_batch_source()
        batch_size = self.job.evaluation.batch_size
        self.evaluator = Evaluator(self.task, batch_size, placement.device)
        self.positions = DataPositions()
        """Where the steps of the last command begin in the order of examples."""
        self._step_flops: float | None = None
        self.round = 0
        """The round that is trained, from 1; 0 before the first."""
        self._schedules: Mapping[str, ScheduleState] = {}
        """Schedules at the last round's start, from which those of a new optimizer continue."""
        self.figures: dict[str, float] = {}
        """Profile of the last round."""
        self.shard, self.forward_backward, self.optimizer = self._build_initial_state()
        # Outside of `fail_together`: a rank that fails in it may leave the others in a collective.
        self.optimizer.check()
        self.step: int | None = 0
        """Step of the state in memory; None if it is that of no step."""
        self.note = "; ".join(filter(None, [self.note, self._offload_note(), *self.shard.notes]))

    def _offload_note(self) -> str:
        offload = self.job.datacenter.offload
        if offload == "none" or self.placement.device.type != "cpu":
            return ""
        return (
            f"datacenter.offload = {offload!r} saves nothing here: ranks on processors have no "
            "memory but the host's"
        )

    # -- state ----------------------------------------------------------------------------------

    def export(self, command: Command) -> None:
        """Write the model of a step into a file.

        Raises:
            ConsensusError: there is no state of that step.
        """
        assert command.result is not None
        self.restore_step(command.from_step)
        store_shards(Path(command.result), self.layout, self.shard)

    def restore_step(self, step: int) -> None:
        """Bring the state of a step into memory, from its checkpoint or from the seed.

        All ranks call this together.

        Raises:
            ConsensusError: there is no checkpoint of that step, or it is damaged.
        """
        if self.step == step:
            return
        self.invalidate_state()
        if step == 0 and not self.checkpoints.has(0):
            self.reset_to_initial_state()
            return
        with fail_together():
            self.reset_optimizer()
            if not self.checkpoints.has(step):
                raise UserError(
                    f"the datacenter has no checkpoint of step {step} in {self.placement.state}; "
                    "start it with the state directory it had before"
                )
            self.checkpoints.check(step)
        self.checkpoints.restore(step, self.shard, self.optimizer)
        self.step = step

    def reset_to_initial_state(self) -> None:
        """Build the state of step 0 from the seed. All ranks call this together."""
        self.shard, self.forward_backward, self.optimizer = self._build_initial_state()
        self.step = 0

    def reset_optimizer(self) -> None:
        """Replace the optimizer by a new one without state.

        Raises:
            TaskError: the task's optimizer() raised.
        """
        self.optimizer = self._build_optimizer(self.shard)

    def begin_schedules(self, position: int) -> float | None:
        """Set the rates of a round's first step, at a position of the run.

        Returns:
            The learning rate; None without a schedule.

        Raises:
            TaskError: the task's LRScheduler raised.
        """
        self.optimizer.go_to(position)
        self._schedules = self.optimizer.schedules
        return self.optimizer.scheduled_rate

    def go_to_step(self, step: int, *, trains: bool) -> None:
        """Read the data of the steps from one on where the steps before ended.

        All ranks call this together.

        Args:
            step: the first step.
            trains: whether the steps are trained, so that later ones begin after them.

        Raises:
            ConsensusError: the file of the positions cannot be used, or the data are not those of
                the steps before, or not the same on all ranks.
        """
        if self.private:  # its examples are drawn independently in each step
            return
        order = self.order
        read = DataPositions()
        own = getattr(self.data, "digest", "")
        directory = self.placement.state
        with fail_together():
            if self.placement.rank == 0:
                before = DataPositions.read(directory)
                read = before.with_data(own, step)
                read = read.with_size(step, replicas=order.replicas, batch_size=order.batch_size)
                if trains and read != before:
                    read.write(directory)
        self.positions = _POSITIONS.broadcast(read)
        if self.positions.data:
            with fail_together():
                self._check_same_data(own)
        self.order = dataclasses.replace(order, origin=(step, self.positions.at(step)))
        if isinstance(self.batch_source, BatchSource):
            self.batch_source.order = self.order

    def _check_same_data(self, own: str) -> None:
        """Refuse data that are not those of the first rank.

        Raises:
            TaskError: the digests differ.
        """
        if own != self.positions.data:
            raise TaskError(
                f"rank {self.placement.rank} has other training data than rank 0; give all nodes "
                "the same files"
            )

    def invalidate_state(self) -> None:
        """Declare that the parameters are about to be overwritten by those of no step."""
        self.step = None

    def step_flops(self, batch: Any) -> float:
        """Count the operations of one step on this rank, once; 0 if they are unknown."""
        if self._step_flops is None:
            samples = self.order.batch_size / _SAMPLE_EXAMPLES
            self._step_flops = self.forward_backward.step_flops(batch, samples)
        return self._step_flops

    def seed_generators(self, step: int) -> None:
        """Seed the random number generators for training that begins at a step."""
        seed_rank(self.job.seed, step, self.dims, self.placement.rank)

    # -- construction ---------------------------------------------------------------------------

    def _load_task(self, command: Command) -> Task:
        return load_task(
            self.job.task.source,
            self.job.task.settings,
            base=self.base,
            data=None if command.data is None else Path(command.data),
        )

    def _load_data(self) -> Dataset[object]:
        participant = self._participant()
        # The same on all ranks, and in all attempts.
        with own_numbers(self.job.seed, participant.name), user_code("local_data()"):
            return self.task.local_data(participant)

    def _participant(self) -> Participant:
        return Participant(name=self.placement.participant, regime="datacenter")

    def _choose_dims(self) -> ParallelDims:
        section = self.job.datacenter
        if section.layout == "auto":
            section, why = auto_layout.choose_for_devices(
                section, self.placement.ranks, self.layout.size
            )
            self.note = f"layout: {why}"
        dims = ParallelDims.from_section(section, self.placement.ranks)
        own = self.job.datacenter.for_replicas(dims.data)
        self.job = self.job.model_copy(update={"datacenter": own})
        return dims

    def _limit_freed_memory(self) -> None:
        """Have freed memory returned where a rank gathers a large model part by part.

        glibc would keep what was gathered between what stays, which adds up to several times the
        model. Small models are faster if the memory is kept for the next step.
        """
        if self._saves_memory():
            return_freed_memory(_RETURNED_BYTES)

    def trim_memory(self) -> None:
        """Return what was freed to the kernel, where memory matters more than time.

        Steps leave room between blocks that stay: that of activations and gradients which are too
        small to be returned at once.
        """
        if self._saves_memory():
            trim_freed_memory()

    def _saves_memory(self) -> bool:
        """Whether a model is sharded for which memory matters more than time."""
        return self.dims.needs_fully_shard and self.layout.nbytes >= _LARGE_BYTES

    def _check_statistics(self) -> None:
        """Refuse pipelines, which would normalise by a micro-batch and not by a batch."""
        if self.layout.statistics and self.dims.pipeline > 1:
            raise TaskError(
                f"the model has running statistics ({self.layout.statistics[0]!r}), which cannot "
                "be kept with pipeline_parallel above 1; set it to 1, or exchange.buffers = "
                "'frozen'"
            )

    def _build_initial_state(self) -> tuple[ModelShard, ForwardBackward, ShardedOptimizer]:
        """Build the state of step 0: the model as initialised from the seed, and its optimizer."""
        shard = self._shard_in_parts()
        if shard is None:
            shard = self._shard_whole()
        if not self.private:  # noise is added to parameters without a gradient, too
            shard.watch_gradients()
        with fail_together():
            forward_backward = self._make_forward_backward(shard)
            forward_backward.model.train()
            if self.private:
                check_layers(forward_backward.model, _TABLE)
            if isinstance(forward_backward, PrivateForwardBackward):
                assert isinstance(self.batch_source, SampledExamples)
                self.batch_source.watch(forward_backward.model)
                sample = range(min(EXAMPLES, self.examples))
                forward_backward.check(self.batch_source.check(sample)[0])
            optimizer = self._build_optimizer(shard)
        return shard, forward_backward, optimizer

    def _shard_whole(self) -> ModelShard:
        """Build the whole model on this rank, and keep this rank's part of it."""
        # Apart from what follows, which has collectives: files may differ between the nodes.
        with fail_together():
            model = self._build_whole()
        return self._parallelize(model)

    def _build_whole(self) -> nn.Module:
        model, division = build_rank_model(
            self.task,
            self.job,
            self.layout.header,
            self.frozen,
            "the datacenter",
            base=self.base,
        )
        division.check_datacenter()
        return model

    def _shard_in_parts(self) -> ModelShard | None:
        """Shard the model before it has values, and read this rank's; None if that cannot be."""
        if not may_be_filled_later(self.job, self.dims, self.placement.device):
            return None
        if self.job.datacenter.frozen_dtype != "float32":  # which values are rounded is known then
            return None
        first = self.placement.rank == 0
        seeded = self.placement.state / _SEEDED
        with fail_together():
            unfilled = UnfilledModel.of(self.task, self.job, self.base, self.layout, seeded)
        if first:  # left by ranks that ended one by one
            seeded.unlink(missing_ok=True)
        if not on_all_ranks(unfilled is not None):
            return None
        assert unfilled is not None
        values = unfilled.values
        if isinstance(values, SeedValues):
            with fail_together():
                if first:  # for all nodes, which share the directory
                    values.write(self._build_whole())
        may_be_read = False
        try:
            return self._parallelize(unfilled.model, unfilled)
        except NeedsWholeModel:
            return None
        except UserError as error:
            may_be_read = has_left_others(error)
            raise
        finally:
            # All ranks have read it if they leave `_parallelize` together.
            if isinstance(values, SeedValues) and first and not may_be_read:
                seeded.unlink(missing_ok=True)

    def _parallelize(self, model: nn.Module, unfilled: UnfilledModel | None = None) -> ModelShard:
        with fail_together():
            return parallelize(
                self.task,
                model,
                self.dims,
                self.placement.rank,
                self.placement.device,
                sample=self._sample,
                try_batch=self._try_batch,
                unfilled=unfilled,
                saves_memory=self._saves_memory(),
            )

    def _sample(self) -> Any:
        """Inputs of a few examples, to compare the sharded model with the whole one."""
        return pair_of(self.task, self._first_batch(_SAMPLE_EXAMPLES))[0]

    def _first_batch(self, examples: int) -> Any:
        order = dataclasses.replace(self.order, replicas=1, batch_size=examples, origin=(0, 0))
        source = BatchSource(self.task, self.data, order, 0, torch.device("cpu"), 0)
        return next(source.batches(0, 1))

    def _try_batch(self, model: nn.Module, examples: int, training: bool) -> None:
        """Pass some examples through a model on the processor, as a step does, without a trace."""
        with kept_generators(torch.device("cpu")):
            batch = self._first_batch(examples)
            if training and defines(self.task, "training_step"):
                training_step(self.task, model, batch)
                return
            with torch.no_grad():
                self.task.forward(model, pair_of(self.task, batch)[0])

    def _make_batch_source(self) -> BatchSource | SampledExamples:
        device = self.placement.device
        section = self.job.datacenter
        if section.privacy is not None:
            own = range(self.coordinates.data, self.examples, self.dims.data)
            probability = section.private_batch / section.privacy.examples
            return SampledExamples(self.task, self.data, own, probability, device)
        replica = self.coordinates.data
        readers = section.readers
        return BatchSource(self.task, self.data, self.order, replica, device, readers)

    def _make_forward_backward(self, shard: ModelShard) -> ForwardBackward:
        rank = self.placement.rank
        device = self.placement.device
        section = self.job.datacenter
        if section.privacy is not None:
            kind = {"per_example": PerExampleForwardBackward, "ghost": GhostForwardBackward}
            return kind[section.privacy.clipping](self.task, shard, rank, device, section)
        return ForwardBackward(self.task, shard, rank, device, self.order.batch_size)

    def _build_optimizer(self, shard: ModelShard) -> ShardedOptimizer:
        section = self.job.datacenter
        participant = dataclasses.replace(self._participant(), round=self.round)
        optimizer = ShardedOptimizer(
            shard,
            lambda parameters: made_by(self.task, parameters, participant),
            section.clip_norm,
            section.precision == "fp16",
            job_schedule(self.job, self.order.replicas * section.batch_size),
            self._schedules,
            rounded_moments=section.optimizer_states == "bf16",
            moments_on_host=section.offload == "optimizer",
        )
        check_optimizers(self.task, shard, optimizer.names)
        if self.private:
            check_trained(optimizer.inner, shard.parameters().values(), _TABLE)
        return optimizer
