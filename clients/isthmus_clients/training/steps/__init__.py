"""The local steps of a device: their order, their gradients, and what applies these.

Reading order: `step_loop` (the order of a step, also of stacked devices), `device_model` (what a
device does in it), `step_gradient` (of a batch), `private_steps` (DP-SGD in its place, for a job
with `[federated.privacy]`), `gradient_terms`, `made_optimizer`.
"""
