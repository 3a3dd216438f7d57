"""Read-only views of a run: progress, report, explanation."""
