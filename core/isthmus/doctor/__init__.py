"""``isthmus doctor``: what a machine lacks for its role, and what to do."""
