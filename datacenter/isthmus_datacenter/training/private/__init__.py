"""DP-SGD (Abadi et al. 2016): training that protects single examples of a datacenter's data.

Reading order: `refusals` (where it is not possible), `examples` (which examples are in a step),
`gradients` (one gradient for each, clipped), `step` (their sum over the ranks, and the noise). With
ghost clipping: `outer_products` and `example_norms` (norms without the gradients), `ghost_step`.

The randomness of samples and noise is the operating system's, new in every step: no seed repeats
it, and no two attempts share it. A repeated round therefore ends with another model.
"""
