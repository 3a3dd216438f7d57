"""DP-SGD on the ranks of a datacenter.

What does not depend on ranks is in `isthmus_privacy.dp_sgd`. Reading order: `refusals` (where the
numbers of the guarantee would be others), `step` (the sum over the ranks, and the noise). With
ghost clipping: `outer_products` and `example_norms` (norms without the gradients), `ghost_step`.
"""
