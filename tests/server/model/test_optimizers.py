"""Yogi, the server optimizer that PyTorch does not have."""

import torch

from isthmus_server.model.optimizers import Yogi


def test_yogi_matches_algorithm_2_of_reddi_et_al():
    weight = torch.zeros(3)
    optimizer = Yogi([weight], lr=0.1, betas=(0.9, 0.99), eps=1e-3, initial=0.1)
    expected, mean, square = [0.0] * 3, [0.0] * 3, [0.01] * 3
    for gradient in ([1.0, -2.0, 0.0], [0.01, 3.0, 0.0], [0.5, 0.0, 1.0]):
        weight.grad = torch.tensor(gradient)
        optimizer.step()
        for i, g in enumerate(gradient):
            mean[i] = 0.9 * mean[i] + 0.1 * g
            sign = (square[i] > g * g) - (square[i] < g * g)
            square[i] -= 0.01 * g * g * sign
            expected[i] -= 0.1 * mean[i] / (square[i] ** 0.5 + 1e-3)
    torch.testing.assert_close(weight, torch.tensor(expected))
