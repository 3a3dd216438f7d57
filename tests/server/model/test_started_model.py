"""A server that reads what is exchanged from the files of a start, and builds no module."""

import pytest
from safetensors.torch import save_model

from isthmus.errors import JobError
from isthmus.job import load_job
from isthmus.start.files import StartFiles
from isthmus.task import load_task
from isthmus.task.scoring import build_model
from isthmus_server.model.global_model import GlobalModel
from isthmus_server.regimes.opening import opening_of

MODELS = {
    "plain": "return nn.Linear(4, 3)",
    "normalised": "return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))",
    "half": """
        model = nn.Linear(4, 3)
        model.register_parameter("more", nn.Parameter(torch.full((2, 3), 0.3).bfloat16()))
        return model
    """,
    "tied": """
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3))
        model[1].weight = model[0].weight
        model[2].register_parameter("scale", nn.Parameter(torch.tensor(2.0), False))
        model[2].register_parameter("nothing", nn.Parameter(torch.zeros(0, 3), False))
        return model
    """,
}
DRAWN = "model = nn.Linear(4, 3); model.register_buffer('draws', torch.rand(3)); return model"
JOB = """
name = "table"
[task]
source = "task.py:Learn"
[model]
start = "start.safetensors"
[datacenter]
ranks = 1
"""


@pytest.fixture
def started(write_task, tmp_path):
    """The server's model of a job that starts from a file, with a policy, and its opening."""

    def start(body, policy, exchange="exchange={}"):
        write_task(f"def model(self):\n        {body}")
        task = load_task("task.py:Learn", {}, base=tmp_path)
        path = tmp_path / "start.safetensors"
        if not path.exists():
            save_model(build_model(task, 99), str(path))
        (tmp_path / "job.toml").write_text(JOB)
        job = load_job(tmp_path / "job.toml", [exchange, f"strategy.policy={policy}"])
        model = GlobalModel.of(job, task, tmp_path)
        return model, opening_of("run", job, tmp_path, model)

    return start


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("exchange", ["exchange={}", "exchange.exclude=['*weight']"])
def test_the_model_is_the_one_that_is_built(started, kind, exchange):
    parts, opening = started(MODELS[kind], "datacenter", exchange)
    assert parts._module is None
    whole, expected = started(MODELS[kind], "federated", exchange)
    assert whole._module is not None
    assert parts.layout == whole.layout
    assert parts.sha256 == whole.sha256
    assert opening.frozen == expected.frozen
    assert len(opening.frozen) == len(whole.frozen)
    assert opening.layout == expected.layout
    changed = whole.vector + 1
    for model in (parts, whole):
        model.replace(changed)
    figures = [model.evaluate(4) for model in (parts, whole)]
    assert figures[0] == figures[1]
    assert figures[0].keys() >= {"loss"}
    assert parts.module.state_dict().keys() == whole.module.state_dict().keys()
    for name, values in parts.module.state_dict().items():
        assert values.equal(whole.module.state_dict()[name]), name


def test_a_model_that_would_be_another_one_is_built(started):
    model, _ = started(DRAWN, "datacenter")
    assert model._module is not None


def test_without_data_nothing_is_built_to_evaluate(started, monkeypatch):
    model, _ = started(MODELS["plain"], "datacenter")
    monkeypatch.setattr(model.task, "eval_data", lambda: None)
    assert model.evaluate(4) == {}
    assert model._module is None


def test_files_that_changed_are_refused(started, tmp_path, monkeypatch):
    started(MODELS["plain"], "datacenter")
    digest = StartFiles.digest
    path = tmp_path / "start.safetensors"
    data = path.read_bytes()

    def changed_afterwards(files):
        found = digest(files)
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        return found

    monkeypatch.setattr(StartFiles, "digest", changed_afterwards)
    with pytest.raises(JobError, match=r"^model\.start: .*start\.safetensors has the digest"):
        started(MODELS["plain"], "datacenter")
