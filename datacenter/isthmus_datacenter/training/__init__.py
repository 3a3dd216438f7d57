"""Training of one run on one rank.

Reading order: `engine` (the state of a run), `round` (one training command),
`forward_backward` and `optimizer` (one step), `data` (which examples), `consensus` (what all ranks
decide together).
"""
