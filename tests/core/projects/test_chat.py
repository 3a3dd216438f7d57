"""The project for dialogues: what its task learns, and what it refuses."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from isthmus.errors import TaskError
from isthmus.job import load_job, write_job
from isthmus.task import Participant, load_task
from isthmus.task.scoring import build_start_model
from isthmus.tensors.division import divide
from isthmus.tensors.fingerprint import fingerprint
from isthmus.wire import link_pb2
from isthmus_clients.training.local_run import DeviceRun
from isthmus_datacenter.virtual import VirtualRun

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

DATACENTER = Participant(name="datacenter-0", regime="datacenter")
ANSWERED = [{"role": "user", "content": "How?"}, {"role": "assistant", "content": "So."}]


def device(shard=(0, 4)):
    return Participant(name="device", regime="federated", shard=shard)


@pytest.fixture
def project(chat_project, tmp_path):
    folder = tmp_path / "my_chat"
    shutil.copytree(chat_project, folder)
    return folder


def loaded(project, *overrides):
    job = load_job(project / "job.toml", overrides)
    data = job.task.data_in(project)
    return job, load_task(job.task.source, job.task.settings, base=project, data=data)


def write(project, name, *dialogues):
    lines = [
        each if isinstance(each, str) else json.dumps({"messages": each}) for each in dialogues
    ]
    (project / f"data/{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")


def said(name, *contents):
    """A dialogue of which one side begins."""
    roles = ["user", "assistant"] if name == "user" else ["assistant", "user"]
    return [
        {"role": roles[number % 2], "content": content} for number, content in enumerate(contents)
    ]


# -- what is learned -------------------------------------------------------------------------------


def test_each_answer_is_a_row_with_its_tokens_as_targets(project):
    write(project, "private", said("user", "One?", "Two.", "Three?", "Four."))
    _, task = loaded(project)
    tokenizer = AutoTokenizer.from_pretrained(project / "base")
    rows = task.validation_data(device(None))
    for (tokens, targets), end in zip(rows, ("Two.<|end|>", "Four.<|end|>"), strict=True):
        assert len(tokens) == len(targets)
        learned = targets != -100
        assert tokenizer.decode(targets[learned]) == end
        # Each target is the token after the one it stands at.
        assert (targets[:-1][learned[:-1]] == tokens[1:][learned[:-1]]).all()
    assert tokenizer.decode(rows[0][0]) == "<|user|>One?<|end|><|assistant|>Two."
    assert tokenizer.decode(rows[1][0]).endswith("<|user|>Three?<|end|><|assistant|>Four.")


def test_no_private_dialogue_is_in_two_places(project):
    _, task = loaded(project)
    parts = (task.local_data, task.validation_data)
    simulated = [len(part(device((index, 4)))) for part in parts for index in range(4)]
    assert all(simulated)
    assert sum(simulated) == len(task.local_data(device(None)) + task.validation_data(device(None)))
    assert task.eval_data() is None
    assert len(task.local_data(DATACENTER)) > len(task.public_eval())


def test_padding_changes_no_loss(project):
    job, task = loaded(project)
    rows = sorted(task.local_data(DATACENTER), key=lambda row: len(row[0]))
    short = rows[0]
    long = rows[-1]
    assert len(short[0]) < len(long[0])
    model = build_start_model(task, job, project)

    def losses(*rows):
        inputs, target = task.collate(list(rows))
        values, scored = task.loss(task.forward(model, inputs), target)
        return [each[mask] for each, mask in zip(values, scored, strict=True)]

    alone, _ = losses(short)[0], None
    padded, other = losses(short, long)
    torch.testing.assert_close(padded, alone)
    torch.testing.assert_close(other, losses(long)[0])


def test_a_system_message_and_unusual_ends_of_lines_are_texts(project):
    asked = [{"role": "system", "content": "Be\u2028short."}, *ANSWERED]
    line = json.dumps({"messages": asked}, ensure_ascii=False)
    write(project, "private", line + "\r", "", line)
    _, task = loaded(project)
    tokenizer = AutoTokenizer.from_pretrained(project / "base")
    own = task.own(device(None))
    assert [messages for _, messages in own] == [asked, asked]
    (tokens, _), *_ = task.validation_data(device(None))
    assert tokenizer.decode(tokens).startswith("<|system|>Be\u2028short.<|end|><|user|>How?")


# -- steps -----------------------------------------------------------------------------------------


PLAIN = """
import torch
from task import Chat

class Plain(Chat):
    def optimizer(self, parameters, participant):
        return torch.optim.SGD(parameters, lr=0.5)
"""


def opened(project, *overrides):
    """A run of the project's task with SGD, whose steps are in proportion to gradients."""
    (project / "plain.py").write_text(PLAIN)
    source = 'task.source="plain.py:Plain"'
    job, task = loaded(project, source, *overrides)
    model = build_start_model(task, job, project)
    layout = divide(model, job.exchange).exchanged
    work = link_pb2.OpenRun(run_id="run", job=write_job(job), base=str(project))
    work.layout = layout.header
    # Not zeros, as half of the adapters are at first: then the other half would not move.
    start = torch.randn(layout.size, generator=torch.Generator().manual_seed(1)) * 0.05
    for name, values in fingerprint(model).items():
        work.frozen[name].values.extend(values)
    return job, work, layout, start


def plain_step(project, job, layout, start, dialogues):
    """The same step by transformers and PEFT, with labels that this function finds itself."""
    tokenizer = AutoTokenizer.from_pretrained(project / "base")
    rows = []
    for messages in dialogues:
        for number in range(1, len(messages), 2):
            text = tokenizer.apply_chat_template(messages[: number + 1], tokenize=False)
            before, marker, answer = text.rpartition("<|assistant|>")
            asked = tokenizer(before + marker)["input_ids"]
            answer = tokenizer(answer)["input_ids"]
            rows.append((asked + answer, [-100] * len(asked) + answer))
    longest = max(len(tokens) for tokens, _ in rows)
    batch = {
        "input_ids": [tokens + [0] * (longest - len(tokens)) for tokens, _ in rows],
        "attention_mask": [[1] * len(tokens) + [0] * (longest - len(tokens)) for tokens, _ in rows],
        "labels": [labels + [-100] * (longest - len(labels)) for _, labels in rows],
    }
    base = AutoModelForCausalLM.from_pretrained(project / "base", dtype=torch.float32)
    settings = job.task.settings["lora"]
    lora = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", **settings)
    model = get_peft_model(base, lora)
    layout.scatter(start, model)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.5)
    model(**{key: torch.tensor(value) for key, value in batch.items()}).loss.backward()
    optimizer.step()
    assert sum(each.numel() for each in trained) == layout.size
    return layout.gather(model)


def compare(start, found, expected):
    moved = (expected - start).abs().max()
    assert moved > 1e-3
    assert (found - expected).abs().max() < 1e-5 * moved


def messages_of(task_data):
    return [messages for _, messages in task_data]


def test_a_step_of_a_device_is_that_of_a_plain_loop(project):
    job, work, layout, start = opened(
        project, "federated.local_epochs=1", "federated.batch_size=64"
    )
    run = DeviceRun(work, device(), None)
    payload = layout.encode(start)
    asked = link_pb2.TrainLocal(run_id="run", round=1, attempt=1)
    trained = run.train(asked, payload, lambda progress: None, lambda: False)
    assert trained.steps == 1
    own = messages_of(run.task.own(device()))
    own = [each for number, each in enumerate(own) if number % 5]
    expected = plain_step(project, job, layout, start, own)
    compare(start, start - layout.decode(payload), expected)


def test_a_step_of_a_datacenter_is_that_of_a_plain_loop(project):
    _, task = loaded(project)
    rows = len(task.local_data(DATACENTER))
    job, work, layout, start = opened(project, f"datacenter.batch_size={rows}")
    run = VirtualRun(work, "datacenter-0", None)
    asked = link_pb2.TrainSteps(run_id="run", from_step=0, until_step=1, hand_back=True)
    _, payload = run.train(asked, layout.encode(start), 0.0)
    lines = (project / "data/public.jsonl").read_text().splitlines()
    public = [json.loads(each)["messages"] for each in lines]
    expected = plain_step(project, job, layout, start, public)
    compare(start, layout.decode(payload), expected)


# -- what is refused -------------------------------------------------------------------------------


def sentence(project, *overrides):
    _, task = loaded(project, *overrides)
    with pytest.raises(TaskError) as raised:
        task.local_data(device(None))
    text = str(raised.value)
    assert "\n" not in text
    return text


GOOD = json.dumps({"messages": ANSWERED})


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"messages": [', "line 2 is no JSON: Expecting value, at column 15"),
        ("[1]", 'line 2 is not {"messages": [...]} with a text as "role" and as "content"'),
        ('{"messages": 1}', 'line 2 is not {"messages": [...]}'),
        ('{"dialogue": []}', 'line 2 is not {"messages": [...]}'),
        ('{"messages": ["How?"]}', 'line 2 is not {"messages": [...]}'),
        ('{"messages": [{"role": "user"}]}', 'line 2 is not {"messages": [...]}'),
        ('{"messages": [{"role": "user", "content": 3}]}', 'line 2 is not {"messages": [...]}'),
        ("[" * 100_000, "line 2 is not"),
        ('{"messages": []}', "line 2 does not end with an answer"),
        (said("user", "How?"), "line 2 does not end with an answer, a message of the role 'assi"),
        (said("user", "How?", " \n"), "line 2: message 2, of the role 'assistant', is empty"),
        (said("user", "", "So."), "line 2: message 1, of the role 'user', is empty"),
        (
            said("user", "How \ud83d?", "So."),
            r"line 2: message 1, of the role 'user', has half of a character ('\ud83d'), as of an",
        ),
        (f'{{"id": {"1" * 5000}}}', 'line 2 is not {"messages": [...]} with a text as "role"'),
        (
            said("assistant", "So.", "How?"),
            "line 2: message 1 has the role 'assistant', and 'user' would be next; user and",
        ),
        (
            [*ANSWERED, *ANSWERED[1:]],
            "line 2: message 3 has the role 'assistant', and 'user' would be next",
        ),
        (
            [*ANSWERED, {"role": "system", "content": "Be short."}, ANSWERED[1]],
            "line 2: message 3 has the role 'system', and 'user' would be next",
        ),
        ([{"role": "tool", "content": "3"}], "line 2: message 1 has the role 'tool'"),
    ],
)
def test_a_dialogue_that_is_none_is_one_sentence_with_its_line(project, line, reason):
    write(project, "private", GOOD, line)
    assert f"private.jsonl, {reason}" in sentence(project)


def test_a_dialogue_that_is_too_long_is_one_sentence(project):
    write(project, "private", GOOD, said("user", "How?", "So." * 60))
    assert "private.jsonl, line 2 has " in sentence(project, "task.settings.length=32")
    assert "answer in message 2, and task.settings.length is 32; raise it, or shorten" in sentence(
        project, "task.settings.length=32"
    )
    longer = sentence(project, "task.settings.length=512")
    assert longer == "task.settings.length is 512, and the decoder takes 256 tokens; lower it"


def test_a_file_without_dialogues_is_one_sentence(project):
    path = project / "data/private.jsonl"
    path.write_text("\n \n")
    assert sentence(project).endswith("private.jsonl has no dialogues; write one in each line")
    path.write_bytes(b"\xff\xfe")
    assert sentence(project).endswith("private.jsonl is not in UTF-8; save it so")
    path.unlink()
    assert "private.jsonl cannot be read: No such file or directory" in sentence(project)


def test_a_start_without_a_tokenizer_or_a_template_is_one_sentence(project):
    template = project / "base/chat_template.jinja"
    text = template.read_text()
    template.write_text(text.replace("<|assistant|>", "<|user|>"))
    assert "the chat template gives other tokens before the answer" in sentence(project)
    template.write_text("{{ raise_exception('no such role') }}")
    assert "line 2: the chat template refuses it: no such role" in sentence(project)
    template.unlink()
    assert "has no chat template; name the folder of a chat model in model.st" in sentence(project)
    (project / "base/tokenizer.json").write_text("{}")
    assert "transformers cannot load the tokenizer in " in sentence(project)
    for path in project.glob("base/tokenizer*"):
        path.unlink()
    assert "reads the tokenizer of the model that it starts from" in sentence(project)


def test_an_export_is_the_adapter_over_the_base(project):
    """`talk.py` loads one so; what a run exports is told by the tests of the guide."""
    job, task = loaded(project)
    model = build_start_model(task, job, project)
    model.save_pretrained(project / "export")
    base = AutoModelForCausalLM.from_pretrained(project / "base", dtype=torch.float32)
    again = PeftModel.from_pretrained(base, project / "export").eval()
    inputs, _ = task.collate(task.public_eval()[:2])
    with torch.no_grad():
        torch.testing.assert_close(again(**inputs).logits, task.forward(model.eval(), inputs))
