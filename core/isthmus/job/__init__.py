"""Jobs: one TOML file that defines the task, the strategy and the participants of a run."""

from isthmus.job.schema import (
    Job,
    apply_override,
    job_schema,
    load_job,
    parse_job,
    parse_settings,
    read_job,
    with_changes,
    write_job,
)
from isthmus.job.strategy import (
    Phase,
    RegimeName,
    ServerOptimizer,
    StrategySection,
    TargetMetric,
    Window,
)

__all__ = [
    "Job",
    "Phase",
    "RegimeName",
    "ServerOptimizer",
    "StrategySection",
    "TargetMetric",
    "Window",
    "apply_override",
    "job_schema",
    "load_job",
    "parse_job",
    "parse_settings",
    "read_job",
    "with_changes",
    "write_job",
]
