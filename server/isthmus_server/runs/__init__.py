"""How jobs are run: on one machine, for operators, and over the years."""
