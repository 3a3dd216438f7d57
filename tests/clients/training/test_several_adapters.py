"""A model with two adapters of PEFT is trained as PEFT itself trains it."""

import pytest
import torch
from tests.clients.training.conftest import train

from isthmus.task.scoring import build_model

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

TWO = """
    def model(self):
        from peft import LoraConfig, get_peft_model
        torch.manual_seed(3)
        inner = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        model = get_peft_model(inner, LoraConfig(r=2, lora_alpha=4, target_modules=["0", "2"]))
        model.add_adapter("second", LoraConfig(r=3, lora_alpha=3, target_modules=["2"]))
        model.base_model.set_adapter({active})
        return model
"""


@pytest.mark.parametrize(
    ("active", "trained"),
    [
        (["default"], {"0 default", "2 default"}),
        (["second"], {"2 second"}),
        (["default", "second"], {"0 default", "2 default", "2 second"}),
    ],
)
def test_what_peft_has_made_active_is_trained_and_exchanged(open_run, active, trained):
    methods = TWO.replace("{active}", repr(active))
    run = open_run("federated.local_steps=3", "federated.batch_size=20", methods=methods)
    names = [name for name in run.layout.names if "lora_A" in name]
    found = {f"{name.split('.')[2]} {name.split('.')[-2]}" for name in names}
    assert found == trained
    # Not zeros, as half of the factors are at first: then the other half would not move.
    start = torch.randn(run.layout.size, generator=torch.Generator().manual_seed(1)) / 4
    update, _, _ = train(run, start=start.clone())

    model = build_model(run.task, run.job.seed)
    run.layout.scatter(start, model)
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    rows = run.task.local_data(run.participant)
    inputs, target = rows.tensors
    for _ in range(3):
        optimizer.zero_grad()
        run.task.loss(model(inputs), target).mean().backward()
        optimizer.step()
    expected = start - run.layout.gather(model)
    assert expected.abs().max() > 1e-3
    assert (update - expected).abs().max() < 1e-5 * expected.abs().max()
