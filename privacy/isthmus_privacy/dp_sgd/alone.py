"""Whether anything is learned from an example alone.

A loss that compares the examples of a batch, as with in-batch negatives, is constant for one of
them. Private training would spend its budget on noise.
"""

from __future__ import annotations

from torch import autograd, nn

from isthmus.errors import TaskError
from isthmus.task import Task, user_code
from isthmus.task.scoring import losses_of, map_tensors, pair_of
from isthmus_privacy.dp_sgd.examples import ExampleGroup
from isthmus_privacy.dp_sgd.isolation import kept_generators


def check_alone(task: Task, model: nn.Module, group: ExampleGroup) -> None:
    """Refuse a loss that has a gradient for several examples, and for none of them alone.

    Random numbers are drawn again afterwards as if this had not been.

    Args:
        task: whose loss it is.
        model: whose parameters are trained.
        group: a few examples.

    Raises:
        TaskError: it is one.
    """
    count = len(group)
    with kept_generators(group.tensors[0].device):
        try:
            for index in range(count):
                if _has_gradient(task, model, group, slice(index, index + 1)):
                    return
            if not _has_gradient(task, model, group, slice(count)):
                return
        except TaskError:  # training meets it again, or not, as with one example at a time
            return
    raise TaskError(
        "the loss of an example alone has no gradient, and that of several has one: forward() or "
        "loss() compares the examples of a batch, as with in-batch negatives, and with "
        "differential privacy of examples each gradient is that of one example alone, so that "
        "nothing would be learned; compute the loss of each example from it alone"
    )


def _has_gradient(task: Task, model: nn.Module, group: ExampleGroup, some: slice) -> bool:
    """Whether the mean loss of some examples as one batch has a gradient that is not zero."""
    rows = iter([each[some] for each in group.tensors])
    inputs, target = pair_of(task, map_tensors(lambda _: next(rows), group.one))
    with user_code("forward()"):
        output = task.forward(model, inputs)
    loss = losses_of(task, output, target).mean()
    if not loss.requires_grad:
        return False
    trained = [each for each in model.parameters() if each.requires_grad]
    with user_code("the backward pass"):
        gradients = autograd.grad(loss, trained, allow_unused=True)
    return any(each is not None and bool((each != 0).any()) for each in gradients)
