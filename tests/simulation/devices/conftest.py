"""Requests that open runs on virtual devices."""

import pytest

from isthmus.task import load_task
from isthmus.task.scoring import build_model
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.wire import link_pb2


@pytest.fixture
def opening(write_task, make_job, tmp_path):
    def opening(*overrides, methods="pass"):
        write_task(methods)
        job = make_job("federated.batch_size=4", *overrides)
        layout = TensorLayout.of(
            build_model(load_task(job.task.source, {}, base=tmp_path), job.seed)
        )
        return link_pb2.OpenRun(
            run_id="run", job=job.model_dump_json(), base=str(tmp_path), layout=layout.header
        )

    return opening
