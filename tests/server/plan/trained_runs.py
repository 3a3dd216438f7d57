"""The runs that `isthmus what-if` is asked about: a small job, simulated under a policy."""

import contextlib

from isthmus.job import load_job, with_changes
from isthmus_server.plan.round_log import RoundLog
from isthmus_server.storage.store import Store
from isthmus_simulation.trial import train_trial

JOB = """
name = "table"
rounds = 16
budget = 80
[task]
source = "task.py:Learn"
[strategy]
policy = "schedule"
schedule = [{ regime = "datacenter", rounds = 6 }, { regime = "federated" }]
[federated]
clients = 4
cohort = 4
[datacenter]
ranks = 1
steps = 5
batch_size = 4
[prices]
client_update = 1.0
datacenter_step = 0.4
[simulation]
training = "one-by-one"
"""


def train(folder, policy, **changes):
    """Train the job in a folder under a policy; the directory of its run."""
    directory = folder / policy
    job = with_changes(load_job(folder / "job.toml"), {"strategy.policy": policy, **changes})
    train_trial(job, folder, directory, 100)
    return directory


def log_of(directory):
    with contextlib.closing(Store.open(directory)) as store:
        return RoundLog.of(store)
