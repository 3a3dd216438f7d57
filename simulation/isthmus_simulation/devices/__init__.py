"""Simulated devices that train in one process, or in a few."""
