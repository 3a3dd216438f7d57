import pytest
import torch

from isthmus import TaskError
from isthmus.task import Participant
from isthmus.task.scoring import build_model
from isthmus.tensors.exchange_set import TensorLayout

from .conftest import DATACENTER, device, train


def digit_counts(dataset):
    return torch.bincount(dataset.tensors[1], minlength=10).tolist()


def test_the_images_are_those_of_scikit_learn(load_example):
    from sklearn.datasets import load_digits  # slow, so not at the top

    _, task = load_example("digits")
    images, labels = load_digits(return_X_y=True)
    assert (task.images == images).all()
    assert (task.labels == labels).all()


def test_every_image_is_in_exactly_one_place(load_example):
    _, task = load_example("digits")

    devices = task.deal(8)
    rows = [*task.held_out, *task.archive, *(row for device in devices for row in device)]

    assert sorted(rows) == list(range(1797))


def test_the_archive_and_the_devices_have_different_digits(load_example):
    _, task = load_example("digits")

    archive = digit_counts(task.local_data(DATACENTER))
    shards = [digit_counts(task.local_data(device(index, 8))) for index in range(8)]
    fleet = [sum(counts) for counts in zip(*shards, strict=True)]

    assert digit_counts(task.eval_data()) == [36] * 10
    assert digit_counts(task.public_eval()) == [32, 32, 32, 18, 18, 18, 0, 0, 0, 0]
    assert (sum(archive), sum(fleet)) == (605, 832)
    assert archive[6:] == [0] * 4
    assert all(count > 120 for count in archive[:3])
    assert all(count < 20 for count in fleet[:3])


def test_devices_differ_in_size_and_in_digits(load_example):
    _, task = load_example("digits")

    shards = [digit_counts(task.local_data(device(index, 8))) for index in range(8)]

    sizes = [sum(counts) for counts in shards]
    assert max(sizes) > 2 * min(sizes)
    assert all(max(counts) > 2 * sum(counts) / 10 for counts in shards)


@pytest.mark.parametrize("count", [1, 8, 500])
def test_every_device_has_data(load_example, count):
    _, task = load_example("digits")

    assert min(len(rows) for rows in task.deal(count)) >= 1


def test_the_split_depends_only_on_the_settings(load_example):
    _, task = load_example("digits")
    _, again = load_example("digits", "seed=9")
    _, other = load_example("digits", "task.settings.split_seed=7")

    def first_device(loaded):
        return loaded.local_data(device(0, 8)).tensors[0]

    assert torch.equal(first_device(task), first_device(again))
    assert not torch.equal(first_device(task)[:10], first_device(other)[:10])


def test_a_device_without_a_shard_is_refused(load_example):
    _, task = load_example("digits")

    with pytest.raises(TaskError, match=r"^this example splits one data set: each device needs"):
        task.local_data(Participant(name="phone", regime="federated"))


def test_each_policy_can_spend_the_whole_budget(load_example):
    job, _ = load_example("digits")

    federated = job.federated.cohort * job.prices.client_update
    datacenter = job.datacenter.steps * job.prices.datacenter_step
    prices = {
        "federated": federated,
        "datacenter": datacenter,
        "hybrid": federated + datacenter,
    }
    spent = sum(prices[phase.regime] * phase.rounds for phase in job.strategy.schedule)

    assert {phase.regime for phase in job.strategy.schedule} == set(prices)
    assert (job.budget - spent) % prices[job.strategy.schedule[-1].regime] == 0
    assert job.budget % federated == 0
    assert job.rounds * datacenter == job.budget


def test_the_model_can_be_exchanged(load_example):
    job, task = load_example("digits")

    assert TensorLayout.of(build_model(task, job.seed)).size == 64 * 128 + 3 * 128 + 128 * 10 + 10


@pytest.mark.parametrize("participant", [DATACENTER, device(0, 1)])
def test_training_lowers_the_loss(load_example, participant):
    _, task = load_example("digits", "task.settings.client_lr=0.02")

    before, after = train(task, participant, epochs=2, batch_size=32)

    assert after["loss"] < before["loss"]
    assert after["accuracy"] > before["accuracy"] + 0.2
