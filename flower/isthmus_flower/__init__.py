"""Flower: its strategies and apps on Isthmus, and Isthmus tasks on Flower's own runtime.

Nothing of the product imports this package. It registers by entry points, which are looked up only
for a job with a table `[federated.flower]`; only such a job needs Flower.
"""
