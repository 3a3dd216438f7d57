"""Running statistics on ranks: averaged over the replicas after each step, and exported."""

import copy

import pytest
import torch

from isthmus.task.scoring import build_model
from isthmus.wire import link_pb2
from isthmus_datacenter.training.data import ExampleOrder


def expected(setup, steps):
    """The same training in one process: statistics of each replica's batch, then their mean."""
    task, job = setup.task, setup.job
    model = build_model(task, job.seed)
    data = task.local_data(None)
    order = ExampleOrder(examples=len(data), replicas=2, batch_size=4, seed=job.seed)
    optimizer = task.optimizer(model.parameters(), None)
    for step in range(steps):
        replicas = [copy.deepcopy(model) for _ in range(2)]
        optimizer.zero_grad()
        for index, replica in enumerate(replicas):
            rows = [data[i] for i in order.indices(step, step + 1, index)]
            inputs, target = (
                torch.stack([row[0] for row in rows]),
                torch.stack([r[1] for r in rows]),
            )
            task.loss(replica(inputs), target).mean().backward()
        for parameter, *others in zip(
            model.parameters(), *(replica.parameters() for replica in replicas), strict=True
        ):
            parameter.grad = torch.stack([other.grad for other in others]).mean(0)
        optimizer.step()
        for name in ("running_mean", "running_var"):
            means = torch.stack([getattr(replica[1], name) for replica in replicas])
            getattr(model[1], name).copy_(means.mean(0))
    return setup.layout.gather(model)


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_statistics_are_the_mean_of_the_replicas(make_setup, warm_datacenter, decode, zero_stage):
    setup = make_setup("Normalised", zero_stage=zero_stage)
    run = f"statistics-{zero_stage}"
    warm_datacenter.open(run, setup)
    warm_datacenter.train(run, 0, 2)
    warm_datacenter.train(run, 2, 3)
    result = decode(warm_datacenter.export(run, 3), setup.layout)
    torch.testing.assert_close(result, expected(setup, 3), rtol=1e-4, atol=1e-5)


def test_statistics_are_recomputed_at_a_model(make_setup, warm_datacenter, decode):
    """Plain means over the replicas' batches; the state of training is left alone."""
    setup = make_setup("Normalised")
    run = "recomputed"
    warm_datacenter.open(run, setup)
    warm_datacenter.train(run, 0, 2)
    model = build_model(setup.task, 3)
    sent = bytes(setup.layout.encode(setup.layout.gather(model)))
    work = link_pb2.MeanGradient(run_id=run, from_step=0, until_step=3, statistics=True)
    _, blob = warm_datacenter.ask(sent, mean_gradient=work)
    data = setup.task.local_data(None)
    order = ExampleOrder(examples=len(data), replicas=2, batch_size=4, seed=setup.job.seed)
    means, variances = [], []
    for step in range(3):
        for replica in (0, 1):
            inputs = torch.stack([data[i][0] for i in order.indices(step, step + 1, replica)])
            hidden = model[0](inputs)
            means.append(hidden.mean(0))
            variances.append(hidden.var(0))
    statistics = decode(blob, setup.layout)[setup.layout.trained_size :]
    both = torch.cat([torch.stack(means).mean(0), torch.stack(variances).mean(0)]).detach()
    torch.testing.assert_close(statistics, both, rtol=1e-4, atol=1e-5)
    warm_datacenter.train(run, 2, 3)
    result = decode(warm_datacenter.export(run, 3), setup.layout)
    torch.testing.assert_close(result, expected(setup, 3), rtol=1e-4, atol=1e-5)


def test_layouts_that_split_the_batch_are_refused(make_setup, warm_datacenter):
    setup = make_setup("Normalised", pipeline_parallel=2)
    with pytest.raises(Exception, match=r"running statistics .* cannot be kept with pipeline_par"):
        warm_datacenter.open("statistics-pipeline", setup)
