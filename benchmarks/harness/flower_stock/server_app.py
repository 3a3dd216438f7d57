"""FedAvg over devices that compute nothing; records the end and the replies of each round."""

import json
import time
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, Context, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    clients, timestamps = int(config["clients"]), Path(str(config["timestamps"]))
    answered = 0

    def count(replies: list[RecordDict], weighted_by: str) -> MetricRecord:
        nonlocal answered
        answered = len(replies)
        return MetricRecord()

    def note_end_of_round(server_round: int, arrays: ArrayRecord) -> None:
        nonlocal answered
        with timestamps.open("a") as file:
            file.write(json.dumps({"time": time.monotonic(), "answered": answered}) + "\n")
        answered = 0

    strategy = FedAvg(
        fraction_evaluate=0.0,
        min_train_nodes=clients,
        min_available_nodes=clients,
        train_metrics_aggr_fn=count,
    )
    model = np.zeros(int(config["parameters"]), dtype=np.float32)
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord([model]),
        num_rounds=int(config["rounds"]),
        evaluate_fn=note_end_of_round,
    )
