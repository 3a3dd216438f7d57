"""Fault injection: run a job in a real deployment under a seeded plan of faults."""
