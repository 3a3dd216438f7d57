"""Simulate a job with many devices in one process, on a clock that does not wait."""
