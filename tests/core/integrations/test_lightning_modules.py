"""A LightningModule and its data module are trained as by Lightning's own Trainer, or refused."""

from __future__ import annotations

import copy
import importlib
import re
import subprocess
import sys

import pytest
import torch
from tests.core.integrations.conftest import REGIMES, STEPS, assert_moved_alike, start_of
from torch.utils.data import (
    DataLoader,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from isthmus.errors import TaskError
from isthmus.integrations import lightning_task
from isthmus.task.definition import Parameters, Participant
from isthmus.task.scoring.steps import training_step

lightning = pytest.importorskip("lightning", reason="lightning is not installed; install lightning")

OWN = """
from lit_rows import LitRows, RowsData

from isthmus.integrations import lightning_task

Own = lightning_task(LitRows, RowsData)
"""


def by_lightning(start, monkeypatch, tmp_path):
    """The state of a module after the script's own training from a start."""
    script = importlib.import_module("lit_rows")
    module = script.LitRows()
    module.load_state_dict(start)
    trainer = lightning.Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=script.RowsData())
    return module.state_dict(), trainer.callback_metrics


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # of Lightning itself
@pytest.mark.parametrize("regime", REGIMES)
def test_a_run_trains_a_module_as_lightning_does(project, trained, monkeypatch, tmp_path, regime):
    task = project("lit_rows.py", OWN)
    start = copy.deepcopy(start_of(task).state_dict())
    run = trained(regime)
    plain, figures = by_lightning(start, monkeypatch, tmp_path)
    assert_moved_alike(start, run.model().state_dict(), plain)
    metrics = run.rounds[-1].metrics
    assert metrics["loss"] == pytest.approx(float(figures["val_loss"]), rel=1e-4)
    assert metrics["val_loss"] == metrics["loss"]


PLAIN = """
from lit_rows import LitRows, RowsData
from torch import nn

from isthmus.integrations import lightning_task


class Plain(LitRows):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.ReLU())  # BatchNorm sees its rank's rows


Own = lightning_task(Plain, RowsData)
"""


def test_ranks_that_share_the_parameters_train_as_one(project, trained):
    start = start_of(project("lit_rows.py", PLAIN)).state_dict()
    section = REGIMES["datacenter"]["datacenter"]
    alone = trained("datacenter").model().state_dict()
    two = {**section, "ranks": 2, "zero_stage": 3, "batch_size": 4}
    assert_moved_alike(
        start, trained("datacenter", "two", datacenter=two).model().state_dict(), alone
    )


def test_neither_library_is_imported_with_the_integrations():
    code = "import isthmus.integrations, sys; print(*sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"lightning", "pytorch_lightning", "transformers"} & set(shown.stdout.split())


@pytest.fixture
def script(project):
    """The module of the user's script."""
    project("lit_rows.py", OWN)
    return importlib.import_module("lit_rows")


def batch_of(task):
    rows = task.local_data(Participant(name="device", regime="federated"))
    return task.collate([rows[index] for index in range(8)])


@pytest.mark.parametrize(
    ("members", "sentence"),
    [
        (
            {"on_train_epoch_start": lambda self: None, "optimizer_step": lambda self: None},
            "Changed cannot be carried over as it is, because this may change what is trained: "
            "on_train_epoch_start (a run has rounds and no epochs), optimizer_step (a run calls "
            "the optimizer itself); change it, or say ignore=['on_train_epoch_start', "
            "'optimizer_step'] if nothing of the result",
        ),
        ({"automatic_optimization": False}, "Changed has automatic_optimization=False, and a run"),
        (
            {"setup": lambda self, stage: setattr(self, "automatic_optimization", False)},
            "Changed has automatic_optimization=False, and a run",
        ),
        ({"on_train_end": lambda self: None}, "on_train_end (a run keeps the model that its last"),
        ({"clip_gradients": lambda self, *_: None}, "clip_gradients (set federated.clip_norm and"),
        ({"manual_backward": lambda self, _: None}, "manual_backward (a run does not call it)"),
        ({"training_step_end": lambda self, _: None}, "training_step_end (Lightning 2 has no such"),
        (
            {"on_validation_model_train": lambda self: None},
            "on_validation_model_train (a run sets the modes of modules itself)",
        ),
        (
            {"setup": lambda self, stage: self.trainer.max_epochs},
            "the LightningModule asks its Trainer for 'max_epochs', and a run has no Trainer",
        ),
    ],
)
def test_a_module_that_would_train_otherwise_is_refused(script, members, sentence):
    task = lightning_task(type("Changed", (script.LitRows,), members), script.RowsData)({})
    with pytest.raises(TaskError, match=re.escape(sentence)):
        task.model()


@pytest.mark.parametrize(
    ("step", "sentence"),
    [
        (lambda self, batch, batch_idx: None, "training_step() returned no loss, with which"),
        (
            lambda self, batch, batch_idx: self.head.bias.sum() if batch_idx % 2 else None,
            "the step uses batch_idx, Lightning's index of the batch in an epoch, which a run does",
        ),
        (
            lambda self, batch, batch_idx: self.head.bias.sum() * self.current_epoch,
            "the LightningModule asks its Trainer for 'current_epoch', and a run has no Trainer",
        ),
        (lambda self, dataloader_iter: None, "training_step() takes dataloader_iter, and a run"),
    ],
)
def test_a_step_that_needs_the_trainer_is_refused(script, step, sentence):
    changed = type("Changed", (script.LitRows,), {"training_step": step})
    task = lightning_task(changed, script.RowsData)({})
    model = task.model()
    with pytest.raises(TaskError, match=re.escape(sentence)):
        training_step(task, model, batch_of(task))
    assert "log" not in vars(model)  # it is the user's again
    assert model.current_epoch == 0


def test_modules_in_evaluation_mode_stay_in_it_as_in_lightning(script):
    class Frozen(script.LitRows):
        def setup(self, stage):
            self.body.eval()

    task = lightning_task(Frozen, script.RowsData)({})
    model = task.model().train()
    training_step(task, model, batch_of(task))
    assert model.training
    assert model.head.training
    assert not model.body[1].training
    assert model.body[1].num_batches_tracked == 0
    model.body = None
    with pytest.raises(TaskError, match="'body' was in evaluation mode when the model was made"):
        training_step(task, model, batch_of(task))


def test_a_module_prepares_its_own_data_before_it_is_set_up(script):
    class Prepared(script.LitRows):
        def prepare_data(self):
            type(self).calls = ["prepare_data"]

        def setup(self, stage):
            self.calls.append("setup")

    lightning_task(Prepared, script.RowsData)({}).model()
    assert Prepared.calls == ["prepare_data", "setup"]


@pytest.mark.parametrize(
    ("members", "sentence"),
    [
        (
            {"setup": lambda self, stage: self.trainer.current_epoch},
            "the LightningDataModule asks its Trainer for 'current_epoch', and a run has no Traine",
        ),
        (
            {"on_after_batch_transfer": lambda self, batch, _: batch},
            "on_after_batch_transfer (do it in the module's steps)",
        ),
    ],
)
def test_a_data_module_that_needs_the_trainer_is_refused(script, members, sentence):
    task = lightning_task(script.LitRows, type("Changed", (script.RowsData,), members))({})
    with pytest.raises(TaskError, match=re.escape(sentence)):
        task.eval_data()


def test_a_data_module_may_divide_by_the_number_of_ranks(script):
    class Divided(script.RowsData):
        name = "rows"

        def setup(self, stage):
            super().setup(stage)
            self.size = 20 // self.trainer.world_size

    assert len(lightning_task(script.LitRows, Divided)({}).eval_data()) == 20


def one_by_epoch(self):
    optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
    return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def two(self):
    return [torch.optim.SGD(each.parameters(), lr=0.1) for each in (self.body, self.head)]


@pytest.mark.parametrize(
    ("configure", "sentence"),
    [
        (one_by_epoch, "returned a scheduler with interval='epoch' and frequency=1, and a run "),
        (two, "configure_optimizers() returned 2 optimizers and 0 schedulers, and one optimizer"),
        (lambda self: None, "configure_optimizers() returned 0 optimizers and 0 schedulers"),
    ],
)
def test_optimizers_that_cannot_be_followed_are_refused(script, configure, sentence):
    changed = type("Changed", (script.LitRows,), {"configure_optimizers": configure})
    task = lightning_task(changed, script.RowsData)({})
    parameters = Parameters(task.model().named_parameters())
    with pytest.raises(TaskError, match=re.escape(sentence)):
        task.optimizer(parameters, None)


def test_an_optimizer_has_the_given_parameters_and_no_frozen_ones(script):
    class Frozen(script.LitRows):
        def setup(self, stage):
            self.head.bias.requires_grad_(False)

    task = lightning_task(Frozen, script.RowsData)({})
    model = task.model()
    own = dict(model.named_parameters())
    given = {name: torch.nn.Parameter(each.clone()) for name, each in own.items()}
    del given["head.bias"]
    optimizer, _ = task.optimizer(Parameters(given.items()), None)
    held = [each for group in optimizer.param_groups for each in group["params"]]
    assert {id(each) for each in held} == {id(each) for each in given.values()}
    assert all(each is own[name] for name, each in model.named_parameters())
    with pytest.raises(TaskError, match=r"'head\.left' is none of them; override optimizer"):
        task.optimizer(Parameters({"head.left": torch.nn.Parameter(torch.ones(1))}.items()), None)


def test_loaders_keep_their_order_and_whole_batches_or_are_refused(script):
    def orders(**options):
        class Data(script.RowsData):
            def train_dataloader(self):
                return DataLoader(self.train, **options)

        task = lightning_task(script.LitRows, Data)({})
        rows = task.local_data(Participant(name="device", regime="federated"))
        return task.order(rows, 10, torch.Generator().manual_seed(1))

    assert list(orders(batch_size=8)) == list(range(48))
    assert list(orders(batch_size=8, drop_last=True)) == list(range(40))
    assert orders(batch_size=8, shuffle=True) is None
    assert orders(batch_size=8, sampler=SubsetRandomSampler(range(0, 48, 2))) is None
    drawn = orders(batch_size=8, shuffle=True, drop_last=True)
    assert len(set(drawn)) == 40 > sum(a == b for a, b in enumerate(drawn))
    weighted = WeightedRandomSampler([1.0] * 48, 48)
    with pytest.raises(TaskError, match="draws rows by WeightedRandomSampler, which is not carr"):
        orders(batch_size=8, sampler=weighted)


class Doubled(DataLoader):
    def __iter__(self):
        for batch in super().__iter__():
            yield from (batch, batch)


def test_held_out_rows_are_those_of_the_loader_or_are_refused(script):
    def rows(loader=DataLoader, **options):
        class Data(script.RowsData):
            def val_dataloader(self):
                return loader(self.held_out, **options)

        return lightning_task(script.LitRows, Data)({}).eval_data()

    chosen = rows(sampler=SubsetRandomSampler([3, 5]))
    assert [chosen.dataset[each][0].tolist() for each in range(len(chosen))] == [
        rows()[each].value[0].tolist() for each in (3, 5)
    ]
    assert len(rows(batch_size=5, drop_last=True)) == 20
    for options, sentence in (
        ({"sampler": WeightedRandomSampler([1.0] * 20, 20)}, "draws rows by WeightedRandomSampler"),
        ({"sampler": SequentialSampler(range(7))}, "draws rows by SequentialSampler, and a run ev"),
        ({"batch_size": 8, "drop_last": True}, "which leaves out 4 of 20 rows, and a run evaluat"),
        ({"loader": Doubled}, "returned a Doubled, whose __iter__() is not called, because a job"),
    ):
        with pytest.raises(TaskError, match=re.escape(sentence)):
            rows(**options)


def test_arguments_of_the_trainer_are_refused_or_listed(script):
    ordinary = {"max_epochs": 3, "logger": False, "gradient_clip_val": None, "precision": "32"}
    task = lightning_task(script.LitRows, script.RowsData, trainer=ordinary)({})
    assert task.not_carried_over[:2] == ("Trainer(max_epochs=...)", "Trainer(logger=...)")
    clipped = {**ordinary, "gradient_clip_val": 0.5, "callbacks": ["any"]}
    with pytest.raises(TaskError, match=r"gradient_clip_val \(set federated.clip_norm and datac"):
        lightning_task(script.LitRows, script.RowsData, trainer=clipped)
    lightning_task(
        script.LitRows,
        script.RowsData,
        trainer=clipped,
        ignore=["gradient_clip_val", "callbacks"],
    )
    with pytest.raises(TaskError, match=r"limit_train_batches \(a job has no such key\)"):
        lightning_task(script.LitRows, script.RowsData, trainer={"limit_train_batches": 1})
    lightning_task(script.LitRows, script.RowsData, trainer={"limit_train_batches": 1.0})
    trainer = type("Trainer", (), {})()
    with pytest.raises(TaskError, match="trainer is a Trainer, and not the arguments of a Trainer"):
        lightning_task(script.LitRows, script.RowsData, trainer=trainer)
    with pytest.raises(TaskError, match="needs classes or functions, and got a LitRows; each part"):
        lightning_task(script.LitRows(), script.RowsData)
