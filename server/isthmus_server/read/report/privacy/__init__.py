"""What differential privacy will cost a job, and what it has cost a run."""
