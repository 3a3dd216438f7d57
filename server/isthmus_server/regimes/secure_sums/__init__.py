"""Secure sums of updates and scores over the link."""
