"""DP-SGD in a task's process: only an update leaves it, and the same request is never repeated."""

import torch

from isthmus.wire import link_pb2

from .test_process_host import LAYOUT, START, Device, opening, received


def test_a_private_update_leaves_the_process_with_nothing_else(tmp_path):
    device, reported = Device(tmp_path), []
    keys = ("federated.privacy.epsilon=5", "federated.privacy.delta=1e-3")
    try:
        assert device.host.open(opening(*keys, "federated.batch_size=5")) == 20
        updates = []
        for _ in range(2):
            work = link_pb2.TrainLocal(run_id="run", round=1, attempt=1)
            payload = received(device.host, START)
            trained, update = device.host.train("train", work, payload, reported.append)
            updates.append(LAYOUT.decode(update).clone())
            assert (trained.examples, trained.steps) == (1, 4)
            assert dict(trained.training) == {}
        assert reported == []
        assert updates[0].all()
        assert not torch.equal(*updates)
    finally:
        device.close()
