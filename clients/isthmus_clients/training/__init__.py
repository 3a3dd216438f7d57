"""Local training and the device side of secure aggregation."""
