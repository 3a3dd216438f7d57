"""The workload in Flower's simulation (Ray); prints the ends of rounds and the accuracy as JSON.

Every core of the machine is an actor that trains one client at a time, on the CPU or on a GPU that
all of them share.
"""

import json
import os
import sys
import time

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from simulation_peers.mnist_users import COHORT, IMAGES, USERS, Users, accuracy, build, train

NAME, ROUNDS, DEVICE = sys.argv[1], int(sys.argv[2]), os.environ["DEVICE"]
client_app, server_app = ClientApp(), ServerApp()
data: list[Users] = []
"""Loaded once in each actor."""


@client_app.train()
def fit(message: Message, context: Context) -> Message:
    torch.set_num_threads(1)
    if not data:
        data.append(Users(DEVICE))
    user = int(context.node_config["partition-id"])
    model = build(NAME).to(DEVICE)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    train(model, data[0].inputs[user], data[0].digits[user])
    arrays = ArrayRecord(model.state_dict())
    metrics = MetricRecord({"num-examples": IMAGES})
    return Message(content=RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    torch.manual_seed(0)
    model = build(NAME)
    strategy = FedAvg(
        fraction_train=COHORT / USERS,
        fraction_evaluate=0.0,
        min_train_nodes=COHORT,
        min_available_nodes=USERS,
    )
    ends: list[float] = []
    """The first is that of the evaluation before the first round."""

    def note_end_of_round(server_round: int, arrays: ArrayRecord) -> None:
        ends.append(time.perf_counter())

    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(model.state_dict()),
        num_rounds=ROUNDS,
        evaluate_fn=note_end_of_round,
    )
    model.load_state_dict(result.arrays.to_torch_state_dict())
    figures = {"ends": ends[1:], "accuracy": accuracy(model, Users())}
    print(json.dumps(figures), flush=True)


run_simulation(
    server_app=server_app,
    client_app=client_app,
    num_supernodes=USERS,
    backend_config={
        "client_resources": {
            "num_cpus": 1,
            "num_gpus": 1 / len(os.sched_getaffinity(0)) if DEVICE == "cuda" else 0.0,
        },
        "init_args": {"logging_level": "error", "log_to_driver": False},
    },
)
