"""Models without memory, and the rows that are read for them."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from isthmus.errors import UserError
from isthmus.start.files import StartFiles
from isthmus.start.loading import ModelStart
from isthmus.start.plan import Exceptions
from isthmus.start.slices import StartSlices
from isthmus.start.unfilled import parameters_without_memory
from isthmus.task import load_task
from isthmus.task.scoring import build_model
from isthmus.task.scoring.building import build_without_memory

SIZES = {"vocab_size": 11, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.second = nn.Linear(3, 5)
        self.second.weight = self.first.weight


def slices(tmp_path, model, sha256=None, **tensors):
    path = tmp_path / "start.safetensors"
    save_file(tensors, path)
    compared = ModelStart(path).compare(model)
    assert StartSlices.are_enough(compared)
    return StartSlices(path, compared, sha256)


def test_parameters_have_no_memory_and_stay_tied():
    with parameters_without_memory():
        model = Tied()
        decoder = AutoModelForCausalLM.from_config(
            LlamaConfig(**SIZES, num_attention_heads=2, tie_word_embeddings=True)
        )
    assert model.second.weight is model.first.weight
    assert decoder.lm_head.weight is decoder.model.embed_tokens.weight
    assert all(each.is_meta for each in (*model.parameters(), *decoder.parameters()))
    assert not decoder.model.rotary_emb.inv_freq.is_meta
    assert not nn.Linear(2, 2).weight.is_meta


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_those_of_the_tensor(tmp_path, monkeypatch, dtype):
    monkeypatch.setattr("isthmus.start.safetensors_file.PIECE_BYTES", 16)
    weight = torch.randn(5, 3).to(dtype)
    with parameters_without_memory():
        model = nn.Linear(3, 5)
    read = slices(tmp_path, model, weight=weight, bias=torch.arange(5.0)).read
    assert read("weight").equal(weight.float())
    assert read("weight", 1, 3).equal(weight.float()[1:4])
    assert read("weight", 5, 0).shape == (0, 3)
    assert read("bias", 4, 1).tolist() == [4]
    with pytest.raises(UserError, match=r"has no rows from 4 on of the shape \(2, 3\)"):
        read("weight", 4, 2)


def test_tied_tensors_are_compared_row_by_row(tmp_path):
    weight = torch.randn(5, 3)
    other = weight.clone()
    other[4, 2] += 1
    bias = {"first.bias": torch.zeros(5), "second.bias": torch.ones(5)}
    stored = {"first.weight": weight, "second.weight": other}
    read = slices(tmp_path, Tied(), **bias, **stored).read
    assert read("second.weight", 0, 4).equal(weight[:4])
    with pytest.raises(UserError, match="have other values, and are one tensor in the model"):
        read("first.weight", 2, 3)


def test_what_was_read_is_compared_with_the_digest(tmp_path):
    path = tmp_path / "start.safetensors"
    values = {"weight": torch.zeros(1, 2), "bias": torch.zeros(1)}
    save_file(values, path)
    digest = StartFiles.find(path).digest()
    other = slices(tmp_path, nn.Linear(2, 1), "0" * 64, **values)
    with pytest.raises(UserError, match=f"has the digest {digest} here, and the job is for 000"):
        other.check()
    found = slices(tmp_path, nn.Linear(2, 1), digest, **values)
    found.check()
    # Written again with the same bytes, it may have had others meanwhile.
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data)
    with pytest.raises(UserError, match="has changed while it was read"):
        found.check()


def test_values_that_are_not_of_the_files_are_not_enough(tmp_path):
    path = tmp_path / "start.safetensors"
    save_file({"weight": torch.zeros(1, 2)}, path)
    missing = ModelStart(path).compare(nn.Linear(2, 1))
    fresh = ModelStart(path, exceptions=Exceptions(fresh=["bias"])).compare(nn.Linear(2, 1))
    assert not StartSlices.are_enough(missing)
    assert not StartSlices.are_enough(fresh)


@pytest.mark.parametrize(
    ("statement", "possible"),
    [
        ("pass", True),
        ("model.half()", True),
        ("model.register_buffer('angles', torch.arange(4.0))", True),
        ("model.register_buffer('draws', torch.rand(4))", False),
        ("__import__('random').random()", False),
        ("__import__('numpy').random.rand()", False),
        ("model.weight[0, 0].item()", False),
        ("nn.init.zeros_(model.bias); nn.init.normal_(model.weight)", True),
        ("model.weight = nn.Parameter(torch.randn(3, 4))", False),
        ("one = nn.Parameter(torch.ones(3)); model.one = one", True),
        ("one = nn.Parameter(torch.ones(3)); model.one = one; model.get = lambda: one", False),
        ("one = nn.Parameter(torch.ones(3)); one.rate = 0.5; model.one = one", False),
    ],
)
def test_a_model_is_built_without_memory_only_if_it_is_the_same(
    write_task, tmp_path, statement, possible
):
    import numpy  # noqa: F401 - a generator of it is looked at only if it was imported

    write_task(f"def model(self):\n    model = nn.Linear(4, 3)\n    {statement}\n    return model")
    task = load_task("task.py:Learn", {}, base=tmp_path)
    state = torch.get_rng_state()
    model = build_without_memory(task, 3)
    assert (model is not None) == possible
    assert torch.get_rng_state().equal(state)
    if model is not None:
        whole = build_model(task, 3).state_dict()
        built = model.state_dict()
        kinds = {name: (each.shape, each.dtype) for name, each in whole.items()}
        assert kinds == {name: (each.shape, each.dtype) for name, each in built.items()}
