"""Devices with factors of different ranks: their products are summed, securely and exactly."""

import torch
from safetensors.torch import load_file
from tests.clients.training.factor_reference import LOW_RANK, METHODS, STEPS, matrix_of, reference
from torch import nn

from isthmus.task import Participant, load_task
from isthmus.task.scoring import build_model
from isthmus.tensors.division import divide
from isthmus.wire import link_pb2
from isthmus_clients.training.local_run import DeviceRun

RANKS = {"a": 2, "b": 4, "c": 8}
SETTINGS = (*STEPS, LOW_RANK, "rounds=1", "strategy.server_optimizer.options={lr=1.0}")


def wider(factor, shape):
    """With zeros for the columns or rows that a smaller rank lacks."""
    return nn.functional.pad(factor, (0, shape[1] - factor.shape[1], 0, shape[0] - len(factor)))


async def test_a_secure_sum_is_that_of_the_products(deployment, tmp_path):
    await deployment.start(METHODS, names=tuple(RANKS))
    store = deployment.create_run("kept", *SETTINGS)
    report, _ = await deployment.run("secure", *SETTINGS)
    assert report["job"]["federated"]["secure_aggregation"] is True

    task = load_task(store.job.task.source, {}, base=tmp_path)
    layout = divide(build_model(task, store.job.seed), store.job.exchange).exchanged
    work = link_pb2.OpenRun(
        job=store.job.model_dump_json(), base=str(tmp_path), layout=layout.header
    )
    update, products, factors, total = 0, 0, [], 0
    for name, rank in RANKS.items():
        run = DeviceRun(work, Participant(name=name, regime="federated"), None)
        start = layout.gather(build_model(task, store.job.seed))
        own, product = reference(run, start, rank)
        assert torch.linalg.matrix_rank(product.product, rtol=1e-4) == rank
        total += run.examples
        update, products = update + run.examples * own, products + run.examples * product.product
        factors.append((run.examples, product.scale * product.left, product.right))
    assert len({examples for examples, _, _ in factors}) == 3, "the weights differ"

    final = load_file(report["final"]["model_path"])
    changed = final["2.weight"] - matrix_of(run, start)
    precision = {"rtol": 0, "atol": 2e-6}
    torch.testing.assert_close(changed, (products / total).detach(), **precision)
    for name, part in layout.parts(start - update / total):
        torch.testing.assert_close(final[name], part, **precision)

    left = sum(examples * wider(left, (12, 8)) for examples, left, _ in factors) / total
    right = sum(examples * wider(right, (8, 16)) for examples, _, right in factors) / total
    mean_of_factors = left @ right
    assert (changed - mean_of_factors).norm() > 0.3 * changed.norm()
    assert torch.linalg.matrix_rank(changed, rtol=1e-4) == 12, "2 + 4 + 8, in 12 dimensions"
