import torch
from parallel_memory import Stack


def test_the_task_computes_a_loss_per_element():
    task = Stack({"width": 8})
    inputs, target = next(iter(torch.utils.data.DataLoader(task.eval_data(), batch_size=4)))
    assert task.loss(task.model()(inputs), target).shape == (4, 8)
