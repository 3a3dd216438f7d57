"""The edge device: a small process that dials in, trains on its own data, sends an update.

Reading order: `agent`, then `training`.
"""
