"""The pieces of a Trainer of transformers are trained as by the Trainer itself, or refused."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import re

import pytest
import torch
from tests.core.integrations.conftest import REGIMES, assert_moved_alike, start_of

from isthmus.errors import TaskError
from isthmus.integrations import trainer_task
from isthmus.task.scoring.steps import training_step

pytest.importorskip("transformers", reason="transformers is not installed; install transformers")
pytest.importorskip("accelerate", reason="accelerate is not installed; install accelerate")

OWN = """
from reviews import ARGUMENTS, HELD_OUT, TRAIN, Weighted, build

from isthmus.integrations import trainer_task

Own = trainer_task(
    Weighted,
    model_init=build,
    args=ARGUMENTS,
    train_dataset=TRAIN,
    eval_dataset=HELD_OUT,
    ignore=["max_grad_norm"],
)
"""


def by_transformers(start):
    """The state of a model, and its held-out loss, after the script's own training."""
    script = importlib.import_module("reviews")

    def build():
        model = script.build()
        model.load_state_dict(start)
        return model

    trainer = script.Weighted(
        model_init=build,
        args=script.ARGUMENTS,
        train_dataset=script.TRAIN,
        eval_dataset=script.HELD_OUT,
    )
    trainer.train()
    return trainer.model.state_dict(), trainer.evaluate()["eval_loss"]


@pytest.mark.parametrize("regime", REGIMES)
def test_a_run_trains_a_model_as_transformers_does(project, trained, regime):
    task = project("reviews.py", OWN)
    start = copy.deepcopy(start_of(task).state_dict())
    table = "federated" if regime == "device" else "datacenter"
    clipped = {table: {**REGIMES[regime][table], "clip_norm": 1.0}}
    run = trained(regime, evaluation={"batch_size": 8}, **clipped)
    plain, loss = by_transformers(start)
    assert_moved_alike(start, run.model().state_dict(), plain)
    assert run.rounds[-1].metrics["loss"] == pytest.approx(loss, rel=1e-4)


@pytest.fixture
def script(project):
    """The module of the user's script."""
    project("reviews.py", OWN)
    return importlib.import_module("reviews")


def pieces(script, trainer=None, ignore=("max_grad_norm",), arguments=None, **others):
    """The script's task, with some arguments changed."""
    args = dataclasses.replace(script.ARGUMENTS, **(arguments or {}))
    rest = {"model_init": script.build, "train_dataset": script.TRAIN, **others}
    return trainer_task(trainer, args=args, ignore=ignore, **rest)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"ignore": ()}, "max_grad_norm (set it to 0, and clip_norm in [federated] and [datacen"),
        ({"arguments": {"label_smoothing_factor": 0.1}}, "label_smoothing_factor (do it in compu"),
        (
            {"arguments": {"gradient_accumulation_steps": 2}},
            "gradient_accumulation_steps (set batch_size and accumulate in",
        ),
        (
            {"arguments": {"train_sampling_strategy": "group_by_length"}},
            "train_sampling_strategy (choose 'random' or 'sequential'",
        ),
        ({"arguments": {"average_tokens_across_devices": False}}, "average_tokens_across_devices"),
        ({"arguments": {"max_steps": -1}}, "lr_scheduler_type='linear' of TrainingArguments follo"),
        ({"callbacks": ["any"]}, "callbacks (a run has no callbacks)"),
        ({"model_init": None}, "needs model_init, a function that makes the model, and no model"),
        ({"speed": 1}, "trainer_task() has no argument 'speed', nor has a Trainer"),
    ],
)
def test_what_would_train_otherwise_is_refused(script, changes, sentence):
    with pytest.raises(TaskError, match=re.escape(sentence)):
        pieces(script, **changes)


def test_methods_of_a_derived_trainer_are_refused_or_listed(script):
    class Logs(script.Weighted):
        def log(self, logs, start_time=None):
            print(logs)

        def training_step(self, *args, **kwargs):
            return super().training_step(*args, **kwargs) * 2

    with pytest.raises(TaskError, match=r"Logs cannot be carried .* training_step \(a run trains"):
        pieces(script, Logs)
    task = pieces(script, Logs, ignore=["training_step", "max_grad_norm"])({})
    assert {"log()", "training_step()"} < set(task.not_carried_over)
    assert "TrainingArguments(max_grad_norm=...)" in task.not_carried_over


def test_what_a_derived_trainer_is_made_with_is_refused(script):
    class Smoothed(script.Weighted):
        def __init__(self, *args, smoothing=0.1, **kwargs):
            super().__init__(*args, **kwargs)
            self.smoothing = smoothing

    with pytest.raises(TaskError, match=r"__init__ \(a run makes no Trainer; set what it sets as"):
        pieces(script, Smoothed)
    task = pieces(script, Smoothed, ignore=["max_grad_norm", "__init__"])({})
    assert "__init__()" in task.not_carried_over
    from transformers import Seq2SeqTrainer

    pieces(script, Seq2SeqTrainer, callbacks=[], optimizers=(None, None))


def test_the_configuration_of_another_library_is_refused(script):
    args = dataclasses.replace(script.ARGUMENTS)
    args.deepspeed = {"gradient_clipping": 1.0}  # to make them with it, that library is needed
    with pytest.raises(TaskError, match=r"deepspeed \(set what it says in \[datacenter\] of"):
        trainer_task(args=args, model_init=script.build, train_dataset=script.TRAIN)


def test_evaluations_of_all_rows_are_named_where_the_trainer_leaves_some_out(script):
    whole = {"dataloader_drop_last": True}
    named = pieces(script, arguments=whole, eval_dataset=script.HELD_OUT)({}).not_carried_over
    assert "TrainingArguments(dataloader_drop_last=...) of evaluations" in named


def test_a_loss_that_needs_a_running_trainer_is_refused(script):
    class Late(script.Trainer):
        def compute_loss(self, model, inputs, **_):
            return super().compute_loss(model, inputs) * self.state.epoch

    task = pieces(script, Late)({})
    model = task.model()
    batch = task.collate([script.TRAIN[index] for index in range(4)])
    with pytest.raises(TaskError, match=r"Late uses self.state, which a Trainer has when it was"):
        training_step(task, model, batch)


def test_tokens_of_a_decoder_are_weighed_as_by_the_trainer(script):
    from transformers import LlamaConfig, LlamaForCausalLM

    def build():
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
        return LlamaForCausalLM(LlamaConfig(vocab_size=20, num_hidden_layers=1, **sizes))

    words = torch.arange(16).reshape(2, 8)
    labels = words.clone()
    labels[1, 3:] = -100
    rows = [{"input_ids": a, "labels": b} for a, b in zip(words, labels, strict=True)]
    task = pieces(script, model_init=build, train_dataset=rows)({})
    model = task.model()
    step = training_step(task, model, task.collate(rows))
    assert step.weight == 7 + 2  # the first word of a row is no target
    assert step.loss.item() == pytest.approx(model(words, labels=labels).loss.item(), rel=1e-6)


def test_columns_that_the_model_does_not_take_are_left_out(script):
    task = pieces(script)({})
    batch = task.collate([script.TRAIN[index] for index in range(4)])
    assert set(batch) == {"input_ids", "labels"}
    assert list(task.order(script.TRAIN, 8, None)) == list(range(48))
