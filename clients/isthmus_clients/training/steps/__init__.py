"""One local step of a device: its gradient, with or without noise, and what applies it.

Reading order: `step_gradient` (of a batch), `private_steps` (DP-SGD in its place, for a job with
`[federated.privacy]`), `made_optimizer`.
"""
