"""Sharded checkpoints, and the whole model as one flat file."""
