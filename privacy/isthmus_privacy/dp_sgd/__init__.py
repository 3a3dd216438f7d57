"""DP-SGD (Abadi et al. 2016): training that protects single examples, wherever they are.

Reading order: `refusals` (where it is not possible), `sampling` (which examples are in a step),
`examples` (how they are read), `gradients` (one gradient for each, clipped, and the noise of their
sum), `isolation` and `kept_state` (whether an example changes the gradients of others). The ranks
of a datacenter and devices differ in who adds the noise and who counts the steps.

The randomness of samples and noise is the operating system's, new in every step: no seed repeats
it, and no two attempts share it. A repeated round therefore ends with another model.
"""
