"""Server optimizers: they turn a merged pseudo-gradient into the next model (Reddi et al. 2021).

Jobs can use any optimizer of `torch.optim`, and `Yogi`, which PyTorch does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from isthmus.errors import JobError, TaskError
from isthmus.job import Job, ServerOptimizer
from isthmus.task import Participant, Task
from isthmus.task.definition import Parameters
from isthmus.task.made_optimizers import made_by
from isthmus.task.optimizers import NO_LENGTH, TaskOptimizers


class Yogi(torch.optim.Optimizer):
    """Adam whose second moment moves by at most a squared gradient a step (Zaheer et al. 2018).

    FedYogi of Reddi et al. 2021, algorithm 2: no bias correction, and the second moment begins at
    `initial ** 2`. The defaults are those of the paper; `eps` is its tau.

    >>> weight = torch.zeros(1)
    >>> weight.grad = torch.ones(1)
    >>> Yogi([weight], lr=0.1, betas=(0.0, 0.9), eps=0.0, initial=1.0).step()
    >>> weight
    tensor([-0.1000])
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor],
        lr: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-3,
        initial: float = 1e-3,
    ) -> None:
        """Create the optimizer; the arguments are those of `torch.optim.Adam`, and `initial`.

        Raises:
            ValueError: an argument is out of range.
        """
        if not (lr >= 0 and eps >= 0 and initial >= 0 and all(0 <= beta < 1 for beta in betas)):
            raise ValueError(
                f"lr={lr}, eps={eps} and initial={initial} must be at least 0, and betas={betas} "
                "at least 0 and below 1"
            )
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "initial": initial})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # returns no loss
        """One step on the parameters that have a gradient."""
        assert closure is None  # the gradient is given
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["mean"] = torch.zeros_like(parameter)
                    state["square"] = torch.full_like(parameter, group["initial"] ** 2)
                state["mean"].lerp_(gradient, 1 - first)
                square = gradient * gradient
                direction = torch.sign(state["square"] - square)
                state["square"].addcmul_(square, direction, value=second - 1)
                denominator = state["square"].sqrt().add_(group["eps"])
                parameter.addcdiv_(state["mean"], denominator, value=-group["lr"])


def check_round_length(job: Job, task: Task, build: Callable[[], nn.Module]) -> None:
    """Refuse a task with a schedule in a job that does not say how long a federated round is.

    A device that noticed it could not tell the server, with secure aggregation. Code that fails
    here is left to the participants, whose optimizer it is. `build` returns the model.

    Raises:
        JobError: the task's `optimizer()` returns a scheduler, and the job has no length.
    """
    if job.federated_round_steps or job.strategy.policy == "datacenter":
        return
    participant = Participant(name="server", regime="federated", round=1)
    parameters = Parameters(build().named_parameters())
    try:
        optimizers = TaskOptimizers(made_by(task, parameters, participant), parameters)
    except TaskError:
        return
    if optimizers.needs_position:
        raise JobError(NO_LENGTH)


def make_optimizer(
    config: ServerOptimizer, parameters: list[nn.Parameter]
) -> torch.optim.Optimizer:
    """Create the optimizer that a job configures.

    Raises:
        JobError: unknown optimizer, or options that it does not accept.
    """
    optimizer_class = Yogi if config.name == "Yogi" else getattr(torch.optim, config.name, None)
    if (
        not isinstance(optimizer_class, type)
        or not issubclass(optimizer_class, torch.optim.Optimizer)
        or optimizer_class is torch.optim.Optimizer
    ):
        raise JobError(
            f"strategy.server_optimizer.name={config.name!r} is not an optimizer of torch.optim, "
            "nor Yogi"
        )
    if optimizer_class is torch.optim.LBFGS:
        raise JobError("strategy.server_optimizer.name='LBFGS' needs a closure; choose another")
    if optimizer_class is torch.optim.SparseAdam:
        raise JobError(
            "strategy.server_optimizer.name='SparseAdam' takes sparse gradients only; "
            "choose another"
        )
    try:
        return optimizer_class(parameters, **config.options)
    except (RuntimeError, TypeError, ValueError) as error:
        raise JobError(f"strategy.server_optimizer.options: {config.name}: {error}") from error
