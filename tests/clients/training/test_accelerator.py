"""Where and in which precision a device trains."""

import pytest
import torch
from click.testing import CliRunner

from isthmus.errors import JobError, UserError
from isthmus.job.federated import FederatedSection
from isthmus_clients.commands import client
from isthmus_clients.training.accelerator import (
    Accelerators,
    Arithmetic,
    check_choice,
    may_be_nvidia,
)
from isthmus_simulation.devices.stacks.requirements import check_settings


@pytest.mark.parametrize(
    ("present", "choice", "chosen"),
    [
        (Accelerators(), "auto", "cpu"),
        (Accelerators(mps=True), "auto", "mps"),
        (Accelerators(cuda=1, mps=True), "auto", "cuda"),
        (Accelerators(cuda=2), "cuda:1", "cuda:1"),
        (Accelerators(cuda=2), "cpu", "cpu"),
        (Accelerators(mps=True), "mps", "mps"),
    ],
)
def test_a_device_trains_on_what_its_owner_chose(present, choice, chosen):
    assert present.choose(check_choice(choice)) == chosen


@pytest.mark.parametrize(
    ("present", "choice", "sentence"),
    [
        (Accelerators(), "cuda", r"cuda was chosen \(.*\), and PyTorch finds no CUDA device here"),
        (Accelerators(cuda=2), "cuda:2", "PyTorch finds 2 CUDA devices here"),
        (Accelerators(cuda=1), "mps", "PyTorch finds no GPU of Apple here"),
    ],
)
def test_a_device_that_is_missing_is_a_sentence(present, choice, sentence):
    with pytest.raises(UserError, match=sentence):
        present.choose(choice)


def test_only_a_task_on_an_nvidia_device_may_use_its_driver():
    assert [may_be_nvidia(each) for each in ("auto", "cuda:1", "cpu", "mps")] == [
        True,
        True,
        False,
        False,
    ]


def test_a_device_without_a_compiler_opens_no_run_that_needs_one(monkeypatch):
    """It would fail in each round, and a server would have chosen a device that gives zeros."""

    def fail(inputs):
        raise torch._dynamo.exc.BackendCompilerFailed(fail, RuntimeError("no g++"))

    monkeypatch.setattr(torch, "compile", lambda model: fail)
    arithmetic = Arithmetic("cpu", FederatedSection(compile=True))
    with pytest.raises(UserError, match="needs a compiler, and that of this device failed"):
        arithmetic.placed(torch.nn.Linear(2, 2))
    assert Arithmetic("cpu", FederatedSection()).placed(model := torch.nn.Linear(2, 2)) is model


def test_another_device_is_refused_at_the_start():
    result = CliRunner().invoke(client, ["start", "--device", "tpu"])
    assert "--device 'tpu' is not one of auto, cpu, mps, cuda and cuda:N" in str(result.exception)


@pytest.mark.parametrize("settings", [{"precision": "bf16"}, {"compile": True}])
def test_stacked_models_refuse_what_they_cannot_do(settings):
    with pytest.raises(JobError, match=r"stacked models train together in float32"):
        check_settings(FederatedSection(**settings))
