"""Runs that a Flower ServerApp directs instead of the round loop.

The app is user code that blocks, changes its working directory's files and cannot be interrupted in
a thread. It has a process of its own, which reaches the devices through the server's `LinkGrid`.
"""
