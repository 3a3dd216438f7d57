"""Training of one run on one rank.

Reading order: `engine` (the state of a run), `round` (one training command),
`forward_backward` (one step, with `isthmus_datacenter.parallel.optimizer`), `data` (which
examples), `consensus` (what all ranks decide together).
"""
