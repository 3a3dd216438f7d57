"""A job: one TOML file that says what to learn, how, and where."""

from isthmus.job.schema import (
    Job,
    Phase,
    RegimeName,
    ServerOptimizer,
    StrategySection,
    Window,
    job_schema,
    load_job,
    parse_job,
    parse_settings,
    read_job,
    with_changes,
    write_job,
)

__all__ = [
    "Job",
    "Phase",
    "RegimeName",
    "ServerOptimizer",
    "StrategySection",
    "Window",
    "job_schema",
    "load_job",
    "parse_job",
    "parse_settings",
    "read_job",
    "with_changes",
    "write_job",
]
