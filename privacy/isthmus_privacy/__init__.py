"""Secure aggregation: cryptographic primitives and the SecAgg+ protocol."""
