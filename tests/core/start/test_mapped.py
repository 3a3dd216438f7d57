"""Frozen parameters are mapped from files that nothing changes, and others are copied."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from isthmus.errors import JobError
from isthmus.start.files import StartFiles
from isthmus.start.loading import ModelStart


def model():
    built = nn.Sequential(nn.Linear(300, 400), nn.Linear(400, 3))
    built[0].requires_grad_(False)
    return built


@pytest.fixture
def saved(tmp_path):
    values = model()
    save_file(values.state_dict(), tmp_path / "model.safetensors")
    return values, tmp_path / "model.safetensors"


def mapped_bytes(path, kind):
    """Bytes of a kind in this process's mappings of a file, as the kernel counts them."""
    sections = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    lines = [line for each in sections if str(path) in each for line in each.splitlines()]
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{kind}:"))


def test_frozen_values_are_those_of_the_file_and_take_no_memory_of_the_process(saved):
    values, path = saved
    filled = model()
    ModelStart(path, StartFiles.find(path).digest()).fill(filled, mapped=True)
    for one, other in zip(filled.parameters(), values.parameters(), strict=True):
        assert one.equal(other)
    assert mapped_bytes(path, "Rss") >= 4 * 300 * 400
    assert mapped_bytes(path, "Anonymous") == 0
    optimizer = torch.optim.SGD([p for p in filled.parameters() if p.requires_grad], lr=0.1)
    filled(torch.ones(2, 300)).sum().backward()
    optimizer.step()
    assert not filled[1].weight.equal(values[1].weight)
    assert mapped_bytes(path, "Anonymous") == 0


def test_what_is_written_to_a_frozen_parameter_stays_in_the_process(saved):
    values, path = saved
    before = path.read_bytes()
    filled = model()
    ModelStart(path).fill(filled, mapped=True)
    filled[0].weight.data.zero_()
    assert path.read_bytes() == before
    other = model()
    ModelStart(path).fill(other, mapped=True)
    assert other[0].weight.equal(values[0].weight)


def test_a_wrong_digest_is_refused_before_use(saved):
    _, path = saved
    with pytest.raises(JobError, match="and the job is for 0000"):
        ModelStart(path, "0" * 64).fill(model(), mapped=True)


@pytest.mark.parametrize("built", [torch.float64, torch.float32])
def test_types_that_differ_and_tied_tensors_are_copied(tmp_path, built):
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.randn(4, 4)}, path)
    filled = nn.Linear(4, 4, bias=False, dtype=built)
    filled.tied = filled.weight
    filled.requires_grad_(False)
    ModelStart(path).fill(filled, mapped=True)
    assert filled.tied is filled.weight
    assert mapped_bytes(path, "Rss") == (0 if built == torch.float64 else 4096)
