"""The edge device: a small process that trains on its own data and sends updates to a server.

Reading order: `device.agent`, then `training.local_run`.
"""
