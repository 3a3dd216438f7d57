import random

import pytest
import torch

from isthmus import TaskError
from isthmus.task import Participant
from isthmus.task.scoring import build_model
from isthmus.tensors.exchange_set import TensorLayout

from .conftest import DATACENTER, device, train

SMALL = (
    'task.settings.public_speakers=["DUKE"]',
    'task.settings.public_held_out=["FOOL"]',
    "task.settings.minimum_characters=500",
    "task.settings.context=16",
    "task.settings.model={width=16, head_width=8, depth=1}",
    "task.settings.speakers=2",
)


@pytest.fixture
def play(tmp_path):
    """A play in which every speaker uses different letters, and the fool has few lines."""
    letters = {"DUKE": "abc ", "ROSE": "def ", "First Guard": "ghi ", "FOOL": "jkl "}
    speeches = {"DUKE": 60, "ROSE": 40, "First Guard": 30, "FOOL": 2}
    draw = random.Random(0)
    lines = [
        f"{speaker}:\n" + "".join(draw.choices(letters[speaker], k=40))
        for speaker, count in speeches.items()
        for _ in range(count)
    ]
    draw.shuffle(lines)
    path = tmp_path / "play.txt"
    path.write_text("\n\n".join(lines))
    return path


def letters(dataset):
    """All characters of a data set except spaces and line ends."""
    characters = "\n" + "".join(map(chr, range(32, 127)))
    numbers = {int(number) for part in dataset.tensors for number in part.flatten()}
    return "".join(sorted(characters[number] for number in numbers)).strip()


def test_each_speaker_is_a_device_and_the_datacenter_has_the_public_ones(load_example, play):
    _, task = load_example("shakespeare", *SMALL, data=play)

    assert task.federated_speakers() == ["ROSE", "First Guard"]
    assert letters(task.local_data(DATACENTER)) == "abc"
    assert letters(task.local_data(device(0, 2))) == "def"
    assert letters(task.local_data(device(1, 2))) == "ghi"
    assert letters(task.eval_data()) == "defghi"
    assert letters(task.public_eval()) == "jkl"


def test_the_last_tenth_of_each_device_is_held_out(load_example, play):
    _, task = load_example("shakespeare", *SMALL, data=play)

    whole = task.speaker("ROSE")
    training, held_out = task.divide(whole)

    assert training + held_out == whole
    assert len(held_out) == round(len(whole) / 10)
    first = task.windows([training])
    assert torch.equal(first.tensors[0], task.local_data(device(0, 2)).tensors[0])
    assert torch.equal(task.eval_data()[0][0], task.windows([held_out])[0][0])


def test_windows_do_not_overlap_and_targets_are_the_next_characters(load_example, play):
    _, task = load_example("shakespeare", *SMALL, data=play)

    inputs, targets = task.windows(["".join(map(chr, range(32, 32 + 33)))]).tensors

    assert inputs.tolist() == [list(range(1, 17)), list(range(17, 33))]
    assert torch.equal(targets, inputs + 1)
    assert len(task.windows(["", "too short"])) == 0


def test_a_device_with_its_own_text_uses_all_of_it_and_the_same_encoding(load_example, tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("ab\u00e9" * 16 + "\n", encoding="utf-8")
    _, task = load_example("shakespeare", *SMALL, data=path)

    inputs, _ = task.local_data(Participant(name="phone", regime="federated")).tensors

    a, b, unknown = (1 + ord(character) - ord(" ") for character in "ab ")
    assert inputs.flatten().tolist() == [a, b, unknown] * 16


def test_the_split_does_not_depend_on_the_seed(load_example, play):
    _, task = load_example("shakespeare", *SMALL, data=play)
    _, again = load_example("shakespeare", *SMALL, "seed=9", data=play)

    for participant in (DATACENTER, device(0, 2), device(1, 2)):
        expected = task.local_data(participant).tensors[0]
        assert torch.equal(again.local_data(participant).tensors[0], expected)


@pytest.mark.parametrize(
    ("participant", "override", "message"),
    [
        (DATACENTER, "task.settings.public_speakers=['KING']", r"^there is no speaker 'KING' in "),
        (
            device(2, 3),
            "seed=1",
            r"^there are 3 devices for 2 speakers; raise .*speakers=2 or lower",
        ),
    ],
)
def test_a_job_that_does_not_fit_the_text_is_refused(
    load_example, play, participant, override, message
):
    _, task = load_example("shakespeare", *SMALL, override, data=play)

    with pytest.raises(TaskError, match=message):
        task.local_data(participant)


def test_a_missing_text_is_one_sentence(load_example, tmp_path):
    _, task = load_example("shakespeare", data=tmp_path / "none.txt")

    with pytest.raises(TaskError, match=r"^there is no text file .*none\.txt; give one with --set"):
        task.eval_data()


def test_the_model_can_be_exchanged_and_has_one_loss_per_character(load_example):
    job, task = load_example("shakespeare")
    model = build_model(task, job.seed)
    numbers = torch.randint(96, (3, 64), generator=torch.Generator().manual_seed(0))

    values = task.loss(model(numbers), numbers)

    assert TensorLayout.of(model).size < 200_000
    assert len(model.blocks) == 2
    assert values.shape == task.metrics(model(numbers), numbers)["accuracy"].shape == (3, 64)


def test_attention_is_causal(load_example):
    job, task = load_example("shakespeare")
    model = build_model(task, job.seed)
    numbers = torch.zeros(1, 64, dtype=torch.long)
    changed = numbers.clone()
    changed[0, 40:] = 7

    torch.testing.assert_close(model(numbers)[0, :40], model(changed)[0, :40])


def test_training_lowers_the_loss(load_example, play):
    _, task = load_example("shakespeare", *SMALL, data=play)

    before, after = train(task, device(0, 2), epochs=2, batch_size=8)

    assert after["loss"] < before["loss"] - 0.5


def test_the_unchanged_job_fits_suitable_plays(load_example, tmp_path):
    """The plays themselves are not part of the project."""
    path = tmp_path / "plays.txt"
    job, task = load_example("shakespeare", data=path)
    others = [f"Lord {number}" for number in range(job.federated.clients + 2)]
    speech = "Now is the winter of our discontent made glorious summer by this son.\n"
    settings = task.settings
    names = [*settings["public_speakers"], *settings["public_held_out"], *others]
    path.write_text("\n\n".join(f"{name}:\n{120 * speech}" for name in names))

    clients = job.federated.clients
    assert len(task.federated_speakers()) == clients
    assert len(task.local_data(DATACENTER)) > 500
    assert all(len(task.local_data(device(index, clients))) > 100 for index in range(clients))
    assert len(task.eval_data()) > 40
    assert len(task.public_eval()) > 300
