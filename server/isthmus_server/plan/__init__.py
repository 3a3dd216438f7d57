"""What a job needs and costs before it runs: `isthmus plan` and `isthmus.plan`."""
