"""The workload in a simulation of Isthmus; prints the ends of rounds and the accuracy as JSON."""

import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from simulation_peers.mnist_users import BATCH, COHORT, EPOCHS, USERS, Users, accuracy

import isthmus
from isthmus.job import parse_job
from isthmus_server.observability.observers import Observers
from isthmus_server.storage.events import Event, EventStream, RoundCommitted
from isthmus_simulation.run import Simulation
from isthmus_simulation.virtual_time import VirtualTimeLoop


def main(name: str, rounds: int) -> None:
    """Simulate the rounds; the last model is evaluated afterwards, as by the others."""
    job = parse_job(
        'name = "mnist"\n[task]\nsource = "simulation_peers.isthmus_task:MnistUsers"',
        [
            f"task.settings.model={name}",
            f"rounds={rounds}",
            "strategy.policy=federated",
            f"federated.cohort={COHORT}",
            f"federated.local_epochs={EPOCHS}",
            f"federated.batch_size={BATCH}",
            "federated.secure_aggregation=false",
            f"federated.device={os.environ['DEVICE']}",
            f"simulation.clients={USERS}",
        ],
    )
    ends: list[float] = []

    def note(event: Event) -> None:
        if isinstance(event, RoundCommitted):
            ends.append(time.perf_counter())

    @contextlib.contextmanager
    def follow(run_id: str, label: str, events: EventStream) -> Iterator[None]:
        unsubscribe = events.subscribe(note)
        yield
        unsubscribe()

    observers = Observers(Console(quiet=True))
    observers.followers.append(follow)
    with tempfile.TemporaryDirectory() as folder:
        simulation = Simulation.new(job, Path(folder), Path(folder) / "run")
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            runner.run(simulation.run(observers))
        model = isthmus.load_model(Path(folder) / "run")
    print(json.dumps({"ends": ends, "accuracy": accuracy(model, Users())}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
