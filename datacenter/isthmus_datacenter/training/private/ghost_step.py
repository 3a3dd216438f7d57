"""One step of DP-SGD with ghost clipping: no gradient of a single example exists.

A batch goes forward once and backward twice: first for the norm of each example's gradient
(`example_norms`), then for the sum of the losses, each times the factor that clips its gradient.
The second pass is an ordinary one, whose gradients `fully_shard` reduces to each rank's shard.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from isthmus.errors import TaskError
from isthmus.job.datacenter import DatacenterSection
from isthmus.task import Task, user_code
from isthmus.task.scoring import losses_of, map_tensors, pair_of
from isthmus.task.scoring.inputs import tensors_of
from isthmus_datacenter.parallel.model_shard import ModelShard, local
from isthmus_datacenter.training.private.example_norms import PER_EXAMPLE, ExampleNorms
from isthmus_datacenter.training.private.step import PrivateForwardBackward
from isthmus_privacy.dp.gaussian import KEY_BYTES, GaussianDraws
from isthmus_privacy.dp_sgd.alone import check_alone
from isthmus_privacy.dp_sgd.examples import ExampleGroup
from isthmus_privacy.dp_sgd.isolation import (
    ComputedBefore,
    GeneratorStates,
    Observed,
    arranged,
    check_repeats,
    check_same,
    compares,
    kept_generators,
    place_in,
    replaced,
    secret_numbers,
    summarised,
)
from isthmus_privacy.dp_sgd.kept_state import KeptState
from isthmus_privacy.dp_sgd.reference import Reference

_ROUNDING = {"cpu": 2.0**-16}
"""By how much of it the bound is lowered: the second pass rounds otherwise than the first."""
_ROUNDING_ELSEWHERE = 2.0**-10
"""Convolutions on GPUs are TensorFloat-32 by default, with 10 bits."""
_TOLERANCE = 4e-3
"""Largest error of squared norms, relative to those that `check` computes otherwise."""
_ROUNDED = 2.0**-8
"""Largest share of the bound that rounding may add to an example's clipped gradient."""
_NEGLIGIBLE = 1e-6
"""Share of the squared norm of all parameters."""
_SCALES = (2.0**-20, 2.0**20, 2.0**60)
"""Factors of a loss in proportion to which all gradients must be: powers of two round nothing.

The largest is for limits that no compared example reaches, and an outlier does."""
_GRADIENT = "the gradient of parameter"
_IN_PLACE_OF_ZERO = 0.02
"""Standard deviation of the numbers that `check` has in place of zeros."""


class GhostForwardBackward(PrivateForwardBackward):
    """Finds the norms of gradients without the gradients, also on ranks with a part of the model.

    Guarantees:
      * those of `PrivateForwardBackward`, up to how float32 rounds the sum of a rank's examples;
      * all ranks run the same number of passes, whatever they have drawn.
    """

    def __init__(
        self,
        task: Task,
        shard: ModelShard,
        rank: int,
        device: torch.device,
        section: DatacenterSection,
    ) -> None:
        """See `PrivateForwardBackward`.

        Raises:
            TaskError: the norms of a layer cannot be found.
        """
        super().__init__(task, shard, rank, device, section)
        rounding = _ROUNDING.get(device.type, _ROUNDING_ELSEWHERE)
        self._bound = self._clip * (1 - rounding)
        self._sharded = isinstance(self.model, FSDPModule)
        # Each element has its noise once: of several groups with all shards, the first adds it.
        self._adds_noise = rank < (self.dims.axes["shard"] if self._sharded else 1)
        self._norms = ExampleNorms(self.model)
        # A step has more than the expected number of examples half of the time, and a second pass
        # for a few of them would take nearly as long as the first.
        self._at_once = math.ceil(section.batch_size + 2 * math.sqrt(section.batch_size))
        self._steps = 0
        self._reference = Reference(self.model)
        self._spare: ExampleGroup | None = None
        """The first example, which `Reference` has, and which a rank without examples passes
        through the model, with nothing of it in the sum."""

    def check(self, group: ExampleGroup) -> None:
        """Refuse models whose norms would be other than those of the gradients that are clipped.

        In evaluation mode, without dropout, the norms for one of two examples are compared with
        those of the gradient of this example alone: they differ if a parameter is used outside of
        its layer. In training mode they are compared with the gradient of the same pass, and the
        loss of one example must not depend on the other at all. Each of the two is first once, as
        a model may change their order. Zeros among the parameters are replaced meanwhile: they stop
        gradients, but only until the first step of training.

        The second pass clips by a factor of the losses. So all gradients have to be in proportion
        to them, which they are not if a hook clips or normalises gradients on their way.

        Gradients do not show statistics that are detached. So what all layers get for one example
        must not change either when the others are replaced, and nothing that is kept between
        batches may change. All ranks call this together.

        Args:
            group: at least one example, the same on all ranks.

        Raises:
            TaskError: they would be, or are not finite.
        """
        self._check_hooks()
        # Gathering parameters takes all ranks, and a rank may have drawn fewer examples than
        # others.
        self._spare = ExampleGroup(group.one, [each[:1].clone() for each in group.tensors])
        two = [
            each[:2] if len(group) > 1 else each.repeat_interleave(2, 0) for each in group.tensors
        ]
        with self._without_zeros():
            state = self._state(closely=True)
            with state.explaining():
                # With shards, `autograd.grad` finds no gradient at the parameters of the model.
                if not self._sharded:
                    check_alone(self.task, self.model, group)
                self._check_reference()
                for rows in [two, [each.flip(0) for each in two]][: len(group)]:
                    self._check_evaluation(group.one, rows)
                    self._check_training(group.one, rows)
                self._check_proportion(group.one, two)
                self._check_isolation(group, state)
                self._check_reference()
            state.check()

    def _check_hooks(self) -> None:
        """Refuse hooks of parameters, which get the sum of a step before it has its noise.

        One that leaves out sums that are too long would let one example decide about all others.

        Raises:
            TaskError: a parameter has one.
        """
        if self._sharded:  # whose parameters are others, and were looked at before
            return
        for name, each in self._trained().items():
            if each._backward_hooks or each._post_accumulate_grad_hooks:
                raise TaskError(
                    f"parameter {name!r} has a hook on its gradient, which would get the sum of a "
                    "step without the noise of differential privacy; remove the hook, freeze what "
                    "should not be trained, and change gradients in the optimizer"
                )

    def _check_reference(self) -> None:
        """Compute the first example again, after whatever there was since. All ranks do it."""
        spare = self._spare
        if spare is None:
            return
        # `data` has a version of its own: that of the parameter tells whether the task changes it.
        parameters = {name: local(each).data for name, each in self._trained().items()}

        def observe(generators: GeneratorStates) -> Observed:
            with self._reference.in_place(parameters):
                self.shard.reshard()
                return self._observe(spare.one, spare.tensors, 0, generators)

        self._reference.check(parameters, self.device, observe)

    def _check_evaluation(self, one: Any, two: Sequence[torch.Tensor]) -> None:
        with _without_dropout(self.model):
            self._norms.begin(torch.ones(2, dtype=torch.bool, device=self.device))
            losses = self._losses(one, two)
            with user_code("the backward pass"):
                squares = self._norms.squares(losses)
            self._norms.end()
            # Alone in a pass of its own: only then can nothing of the other example be in it.
            loss = self._losses(one, [each[:1] for each in two]).sum()
            with user_code("the backward pass"):
                torch.autograd.backward(loss)
        self._compare(squares)

    def _check_training(self, one: Any, two: Sequence[torch.Tensor]) -> None:
        self._norms.begin(torch.ones(2, dtype=torch.bool, device=self.device))
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(0)  # fully_shard averages over the ranks, which must drop out alike
            losses = self._losses(one, two)
        self._reshard_after_backward(self.dims.reshard_after_forward)
        with user_code("the backward pass"):
            # The gradients of the first loss only: the other example's norms are then zero exactly
            # if it has no part in that loss.
            squares = self._norms.squares(losses[:1])
        self._reshard_after_backward(True)
        with user_code("the backward pass"):
            torch.autograd.backward(losses[0])
        self._norms.end()
        for name, of_both in squares.items():
            if of_both[1]:
                raise TaskError(
                    f"an example changes the outputs of others in training, as parameter {name!r} "
                    f"shows, which ghost clipping does not bound; {PER_EXAMPLE}"
                )
        self._compare(squares)

    def _check_proportion(self, one: Any, two: Sequence[torch.Tensor]) -> None:
        expected = self._scaled_squares(one, two, 1.0)
        total = sum(expected.values())
        for factor in _SCALES:
            scaled = self._scaled_squares(one, two, factor)
            for name in {**expected, **scaled}:
                square = expected.get(name, 0.0)
                found = scaled.get(name, 0.0)
                # Also what is not finite any more is not in proportion.
                if not abs(found / factor**2 - square) <= _TOLERANCE * square + _NEGLIGIBLE * total:
                    raise TaskError(
                        f"the gradient of parameter {name!r} is not in proportion to the loss, as "
                        "where a hook clips or normalises gradients on their way, and ghost "
                        f"clipping scales losses to shorten gradients; {PER_EXAMPLE}"
                    )

    def _scaled_squares(
        self, one: Any, rows: Sequence[torch.Tensor], factor: float
    ) -> dict[str, float]:
        """The squared norms of the first example's gradients of a loss that is scaled."""
        self._norms.begin(torch.ones(len(rows[0]), dtype=torch.bool, device=self.device))
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(0)
            losses = self._losses(one, rows)
        self._reshard_after_backward(self.dims.reshard_after_forward)
        with user_code("the backward pass"):
            squares = self._norms.squares(losses * factor)
        self._norms.end()
        self._reshard_after_backward(True)
        self.shard.reshard()
        return {name: float(each[0]) for name, each in squares.items()}

    def _check_isolation(self, group: ExampleGroup, state: KeptState) -> None:
        for rows, place in arranged(group.tensors):
            expected = self._observe(group.one, rows, place, gradients=True)
            state.check()
            repeated = self._repeated(group.one, rows, place)
            for others in replaced(rows, place, made_up=True):
                try:
                    found = self._observe(group.one, others, place, gradients=True)
                except TaskError as error:
                    if error.__cause__ is None:
                        raise
                    continue  # the task's code failed, with values that no example has
                state.check()
                # A gradient in which another example is zero times infinity is not compared.
                missing = [each for each in expected if each.startswith(_GRADIENT)]
                found = {**{each: expected[each] for each in missing}, **found}
                check_same(expected, found, repeated)
            again = self._observe(group.one, rows, place, gradients=True)
            check_repeats(expected, again, repeated)

    def _state(self, *, closely: bool) -> KeptState:
        # `fully_shard` has other parameters in the layers while they compute.
        return KeptState(self.task, self.model, closely=closely, parameters=not self._sharded)

    def _repeated(self, one: Any, rows: Sequence[torch.Tensor], place: int) -> Observed | None:
        """What `_observe` finds once more; None where kernels repeat their result."""
        if self.device.type == "cpu":
            return None
        return self._observe(one, rows, place, gradients=True)

    def _observe(
        self,
        one: Any,
        rows: Sequence[torch.Tensor],
        place: int,
        generators: GeneratorStates | None = None,
        *,
        gradients: bool = False,
    ) -> Observed:
        """What all layers get for one of some examples, and its loss, from one seed.

        Args:
            one: the structure of the examples.
            rows: the examples.
            place: of the one.
            generators: states of generators to begin with; None for those of now.
            gradients: whether also those of all parameters, which no step may have begun to add.
        """
        alive = torch.ones(len(rows[0]), dtype=torch.bool, device=self.device)
        self._norms.begin(alive, place)
        with kept_generators(self.device):
            if generators is not None:
                generators.restore()
            try:
                output, losses = self._outputs_and_losses(one, rows)
                self._reshard_after_backward(self.dims.reshard_after_forward)
                with user_code("the backward pass"):
                    self._norms.squares(losses)
                observed = self._norms.observed()
                if gradients:
                    observed.update(self._gradients_of(losses[place]))
            finally:
                self._norms.end()
                self._reshard_after_backward(True)
                self.shard.reshard()
            observed.update(GeneratorStates(self.device).observed())
        observed["the loss"] = losses[place].detach()
        for number, each in enumerate(tensors_of(output)):
            observed[f"tensor {number} of the output"] = each[place].detach()
        return observed

    def _gradients_of(self, loss: torch.Tensor) -> Observed:
        """The finite gradients of the loss of one example, after `ExampleNorms.squares`.

        Within a layer an example may change the gradient of others alone, neither their output nor
        what they get from other layers, such as where something is added and subtracted detached.
        """
        self._reshard_after_backward(True)
        with user_code("the backward pass"):
            torch.autograd.backward(loss)
        found: dict[str, torch.Tensor] = {}
        for name, parameter in self._trained().items():
            gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            parameter.grad = None
            # Whole on every rank, one at a time, so that all ranks find the same.
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            if bool(whole.isfinite().all()):
                found |= summarised({f"{_GRADIENT} {name!r}": whole})
        return found

    def _compare(self, squares: Mapping[str, torch.Tensor]) -> None:
        """Compare the squared norms of the first example with the parameters' `grad`."""
        expected = self._squared_gradients()
        found = {name: float(squares[name][0]) if name in squares else 0.0 for name in expected}
        total = sum(expected.values())
        if not math.isfinite(total + sum(found.values())):
            raise TaskError(
                "the gradient of one of the first examples is not finite, so that ghost clipping "
                f"cannot be checked; remove it, or {PER_EXAMPLE}"
            )
        for name, square in expected.items():
            if abs(found[name] - square) > _TOLERANCE * square + _NEGLIGIBLE * total:
                raise TaskError(
                    f"the gradient of parameter {name!r} does not follow from its layers: it is "
                    "used outside of them, or an example changes the outputs of others; "
                    f"{PER_EXAMPLE}"
                )

    @contextlib.contextmanager
    def _without_zeros(self) -> Iterator[None]:
        """Small random numbers in place of the zeros among the trained parameters."""
        generator = torch.Generator().manual_seed(0)
        changed = []
        for parameter in self._trained().values():
            part = local(parameter)
            zeros = part == 0
            numbers = torch.randn(part.shape, generator=generator).to(part)
            part.copy_(torch.where(zeros, _IN_PLACE_OF_ZERO * numbers, part))
            changed.append((part, zeros))
        try:
            yield
        finally:
            self.shard.reshard()  # what was gathered has these numbers
            for part, zeros in changed:
                part.masked_fill_(zeros, 0)

    def _set_gradients(self, batch: Any) -> None:
        self._check_hooks()
        parts = [(group.one, rows) for group in batch for rows in group.parts(self._at_once)]
        compared = compares(self._steps)
        self.shard.reshard()
        state = self._state(closely=compared)
        with state.explaining(), secret_numbers(self.device):
            before = self._before(parts) if compared else None
            self._steps += 1
            # As many passes on all ranks: each gathers parameters, which all ranks do together.
            for index in range(self._largest(len(parts)) if self._sharded else len(parts)):
                if index < len(parts):
                    self._add(*parts[index], alive=True)
                else:
                    assert self._spare is not None
                    self._add(self._spare.one, self._spare.tensors, alive=False)
            if before is not None:
                before.compare()
        state.check()
        self._finish_gradients()

    def _before(self, parts: Sequence[tuple[Any, Sequence[torch.Tensor]]]) -> ComputedBefore | None:
        """Compute one example of a step before all of them, and then the first one of all.

        All ranks make the same number of passes.
        """
        if parts:
            one, rows = max(parts, key=lambda part: len(part[1][0]))
        elif self._sharded:
            assert self._spare is not None
            one = self._spare.one
            rows = self._spare.tensors
        else:
            self._check_reference()
            return None
        place = place_in(self._steps, len(rows[0]))

        def observe(some: Sequence[torch.Tensor], generators: GeneratorStates | None) -> Observed:
            self.shard.reshard()
            return self._observe(one, some, place, generators)

        before = ComputedBefore(observe, rows, place)
        self._check_reference()
        return before

    # -- passes ---------------------------------------------------------------------------------

    def _add(self, one: Any, rows: Sequence[torch.Tensor], *, alive: bool) -> None:
        """Add the clipped gradients of some examples to the parameters' `grad`.

        Examples whose gradients are not finite are found by the first backward pass; all passes are
        then repeated without them, on all ranks, as zero times infinity is not zero. The model
        draws the same numbers again: with others, what an example adds would depend on whether
        another one has failed.
        """
        generators = GeneratorStates(self.device)
        living = torch.full((len(rows[0]),), alive, dtype=torch.bool, device=self.device)
        while True:
            self._norms.begin(living)
            losses = self._losses(one, rows)
            self._reshard_after_backward(self.dims.reshard_after_forward)
            with user_code("the backward pass"):
                squares = self._norms.squares(losses)
            squared = torch.stack(list(squares.values())).sum(0)
            failed = living & ~squared.isfinite()
            if not self._largest(int(failed.any())):
                break
            living = living & ~failed
            generators.restore()
            del losses  # with its graph
            self.shard.reshard()
        factor = (self._bound / squared.sqrt().clamp(min=1e-300)).clamp(max=1.0)
        # What rounding may add has a bound too. It matters where the terms of a gradient are much
        # larger than it and cancel, as for a number of 1e9 at all positions of an example. A power
        # of two then has the second pass round as the first did.
        most = self._clip * _ROUNDED / self._norms.rounding().clamp(min=1e-300)
        exponent = torch.frexp(most).exponent - 1
        factor = torch.where(factor > most, torch.ldexp(torch.ones_like(most), exponent), factor)
        # A factor below the least normal number would be rounded by up to a half, also upwards.
        kept = living & (factor >= torch.finfo(losses.dtype).tiny)
        factor = torch.where(kept, factor, 0.0).to(losses.dtype)
        self._reshard_after_backward(True)
        with user_code("the backward pass"):
            torch.autograd.backward((losses * factor).sum())
        self._norms.end()

    def _losses(self, one: Any, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """The loss (B) of each example, as if it were alone; the model computes all together."""
        return self._outputs_and_losses(one, rows)[1]

    def _outputs_and_losses(
        self, one: Any, rows: Sequence[torch.Tensor]
    ) -> tuple[Any, torch.Tensor]:
        inputs, target = pair_of(self.task, _with_tensors(one, rows))
        with user_code("forward()"):
            output = self.task.forward(self.model, inputs)
        count = len(rows[0])
        pairs = zip(_alone(output, count), _alone(target, count), strict=True)
        together = torch.stack([losses_of(self.task, *pair).mean() for pair in pairs])
        if not together.requires_grad:
            raise TaskError(
                "loss() does not depend on what is trained; is something detached, or in NumPy?"
            )
        self._norms.check_uses(together)
        return output, together

    def _reshard_after_backward(self, whether: bool) -> None:
        """Keep what was gathered for the first backward pass, where memory is not scarce."""
        if isinstance(self.model, FSDPModule):
            self.model.set_reshard_after_backward(whether)

    def _largest(self, number: int) -> int:
        """The largest of the numbers of all ranks."""
        if self.dims.ranks == 1 or not self._sharded:
            return number
        numbers = torch.tensor([number])  # between processors
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
        return int(numbers)

    # -- gradients ------------------------------------------------------------------------------

    def _trained(self) -> dict[str, nn.Parameter]:
        named = self.model.named_parameters()
        return {name: each for name, each in named if each.requires_grad}

    def _finish_gradients(self) -> None:
        """Turn the parameters' `grad` into the sum over all ranks with noise."""
        gradients = []
        for parameter in self._trained().values():
            if parameter.grad is None:
                # Noise is added to it all the same: its absence would tell that no example had a
                # gradient there.
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(gradient := local(parameter.grad))
            if isinstance(parameter, DTensor):
                gradient *= self.dims.data  # fully_shard has averaged
            if self._adds_noise:
                # From the operating system and not from the job's seed: who knows the noise can
                # subtract it.
                noise = GaussianDraws(os.urandom(KEY_BYTES), gradient.numel()).row(0)
                gradient += noise.mul_(self._deviation).view(gradient.shape).to(gradient)
        groups = self.dims.shard_groups if self._sharded else self.dims.ranks
        if groups > 1:
            total = torch.cat([each.flatten() for each in gradients])
            if self._sharded:
                # All groups have the same sum, and get the noise of the first.
                replicas = self._replicas()
                dist.broadcast(total, dist.get_global_rank(replicas, 0), replicas)
            else:
                dist.all_reduce(total)
            parts = torch.split(total, [each.numel() for each in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))

    def _replicas(self) -> dist.ProcessGroup:
        """The ranks that have the same shards as this one, with several groups of shards."""
        parameter = next(each for each in self._trained().values() if isinstance(each, DTensor))
        return parameter.device_mesh.get_group("replicate")

    def _squared_gradients(self) -> dict[str, float]:
        """Squared norms of the parameters' `grad`, which is deleted, over all ranks."""
        trained = self._trained()
        # Compared on the processor and in double precision, so that the check itself adds no error.
        squares = torch.zeros(len(trained), dtype=torch.float64)
        for index, parameter in enumerate(trained.values()):
            if parameter.grad is not None:
                squares[index] = local(parameter.grad).double().square().sum()
                parameter.grad = None
        if self._sharded:
            dist.all_reduce(squares)
            squares /= self.dims.shard_groups
        return dict(zip(trained, squares.tolist(), strict=True))


def _alone(value: Any, count: int) -> list[Any]:
    """A nested structure for each example, with one row of every tensor.

    Raises:
        TaskError: a tensor has another number of rows.
    """
    columns = []
    for each in tensors_of(value):
        if each.ndim == 0 or len(each) != count:
            raise TaskError(
                f"the model's output or the target has a tensor of shape {tuple(each.shape)} for "
                f"{count} examples, and ghost clipping needs one row for each; {PER_EXAMPLE}"
            )
        columns.append(torch.split(each, 1))  # one operation backward, which slices are not
    if not columns:
        return [value] * count
    return [_with_tensors(value, row) for row in zip(*columns, strict=True)]


def _with_tensors(value: Any, tensors: Iterable[torch.Tensor]) -> Any:
    """A nested structure with other tensors in place of its own, in order."""
    following = iter(tensors)
    return map_tensors(lambda _: next(following), value)


@contextlib.contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode: two passes compute the same."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
