"""What devices measure on their own data, as sums: evaluations of the served model."""
