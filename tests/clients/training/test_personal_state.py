"""What stays on a device between rounds: in the model, and in files."""

import stat

import pytest
import torch
from safetensors.torch import load_file

from isthmus.errors import AdmissionRefused, TaskError
from isthmus.task import Participant, load_task
from isthmus.task.scoring import build_model
from isthmus.tensors.division import divide
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.wire import link_pb2
from isthmus_clients.device.task_host import InProcessHost
from isthmus_clients.training.local_run import DeviceRun
from isthmus_clients.training.personal_state import PersonalStates, is_initial

LAYOUT = TensorLayout.from_shapes({"head": (3,)})
BIAS = "exchange.personal=['bias']"


def encoded(value):
    return LAYOUT.encode(torch.full([3], float(value)))


def value(state):
    return None if is_initial(state) else float(LAYOUT.decode(state)[0])


def open_states(folder, key="run", **limits):
    return PersonalStates(folder, **limits).open(key, LAYOUT)


def train(states, round_):
    """One round: the state increases by one; returns what it started from."""
    start = value(states.begin(round_))
    states.save(round_, encoded((start or 0) + 1))
    return start


def test_attempts_at_a_round_start_from_the_round_before(tmp_path):
    states = open_states(tmp_path)
    assert [train(states, 1), train(states, 1)] == [None, None]
    assert [train(states, 2), train(states, 2), train(states, 5)] == [1, 1, 2]
    states = open_states(tmp_path)  # the process was started again
    assert [train(states, 5), train(states, 6)] == [2, 3]
    assert (value(states.newest(5)), value(states.newest())) == (3, 4)


def test_a_state_whose_update_was_not_used_is_forgotten(tmp_path):
    states = open_states(tmp_path)
    train(states, 1)
    train(states, 2)
    states.drop(2)
    assert train(states, 3) == 1


def test_after_a_rollback_the_oldest_state_is_used(tmp_path):
    states = open_states(tmp_path)
    for round_ in (1, 2, 3, 4):
        train(states, round_)
    assert [train(states, 2), train(states, 2)] == [3, 3]
    assert [train(states, 3), train(states, 4)] == [4, 5]
    fresh = open_states(tmp_path, "other")
    train(fresh, 3)
    assert train(fresh, 1) is None, "its first state was trained from the initial values"


def test_files_are_private_small_in_number_and_readable_by_others_tools(tmp_path):
    states = open_states(tmp_path)
    for round_ in range(1, 5):
        train(states, round_)
    files = sorted(tmp_path.rglob("*.safetensors"))
    assert len(files) == 2
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files)
    assert stat.S_IMODE(files[0].parent.stat().st_mode) == 0o700
    assert load_file(files[1])["head"].tolist() == [4.0] * 3


def file_of(folder, round_):
    (file,) = folder.rglob(f"{round_}-*.safetensors")
    return file


def flip(file, position=-1):
    data = bytearray(file.read_bytes())
    data[position] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        flip,
        lambda file: flip(file, 0),
        lambda file: file.write_bytes(file.read_bytes()[:-1]),
        lambda file: file.write_bytes(b""),
        lambda file: file.write_bytes(file.read_bytes() + b"x"),
    ],
)
def test_a_damaged_state_costs_this_state_only(tmp_path, caplog, damage):
    states = open_states(tmp_path)
    assert [train(states, round_) for round_ in (1, 2, 3)] == [None, 1, 2]
    damage(file_of(tmp_path, 3))
    assert (value(states.newest()), value(states.newest())) == (2, 2)
    (note,) = states.take_notes()
    assert note.startswith("a personal state of this device cannot be used: the one of round 3 was")
    assert str(tmp_path) not in note
    assert str(tmp_path) in caplog.text
    assert [train(states, 4), train(states, 4), train(states, 5)] == [2, 2, 3]
    assert states.take_notes() == []


def test_without_any_undamaged_state_training_begins_anew(tmp_path):
    states = open_states(tmp_path)
    for round_ in (1, 2):
        train(states, round_)
        flip(file_of(tmp_path, round_))
    assert [train(states, 3), train(states, 4)] == [None, 1]
    assert len(states.take_notes()) == 2


@pytest.mark.parametrize("damage", [flip, lambda file: file.unlink()])
def test_a_repeated_attempt_without_its_start_begins_anew(tmp_path, damage):
    states = open_states(tmp_path)
    for round_ in (1, 2):
        train(states, round_)
    damage(file_of(tmp_path, 1))
    assert [train(states, 2), train(states, 3)] == [None, 1]
    (note,) = states.take_notes()
    assert "the one of round 1" in note


def test_the_owner_limits_their_size(tmp_path):
    large = TensorLayout.from_shapes({"head": (100_000,)})  # 400 kB, two of them are kept
    states = PersonalStates(tmp_path, 1)
    with pytest.raises(AdmissionRefused, match="allows personal_mb=1 for all runs"):
        states.open("run", TensorLayout.from_shapes({"head": (200_000,)}))
    first = states.open("first", large)
    first.begin(1)
    first.save(1, large.encode(torch.ones(large.size)))
    states.open("second", large)
    assert not list(tmp_path.rglob("*.safetensors")), "the earlier run made room"


@pytest.fixture
def open_host(write_task, make_job, tmp_path):
    def open_host(*overrides, methods="pass"):
        write_task(methods)
        job = make_job(*overrides, "federated.local_steps=2")
        model = build_model(load_task(job.task.source, {}, base=tmp_path), job.seed)
        divided = divide(model, job.exchange)
        work = link_pb2.OpenRun(
            run_id="run",
            job=job.model_dump_json(),
            base=str(tmp_path),
            layout=divided.exchanged.header,
            personal=divided.personal.header,
        )
        who = Participant(name="a", regime="federated")
        host = InProcessHost(who, None, None, 1, states=PersonalStates(tmp_path / "personal"))
        host.open(work)
        return host

    return open_host


def update(host, round_, accepted=True):
    layout = host.run.layout
    payload = host.buffer(layout.nbytes)
    payload[:] = layout.encode(torch.linspace(-1, 1, layout.size))
    work = link_pb2.TrainLocal(run_id="run", round=round_, attempt=1)
    _, result = host.train(str(round_), work, payload, lambda progress: None)
    result = bytes(result)
    host.release(str(round_), accepted)
    return result


def test_personal_parameters_are_trained_kept_and_not_sent(open_host):
    host = open_host(BIAS)
    assert host.run.layout.names == ("weight",)
    initial = host.run.model.bias.detach().clone()
    first = update(host, 1)
    after = host.run.model.bias.detach().clone()
    assert not torch.equal(after, initial)
    assert update(host, 1) == first, "a repeated attempt starts from the same state"
    second = update(host, 2)
    assert not torch.equal(host.run.model.bias, after)
    again = open_host(BIAS)  # the device was started again
    assert update(again, 2) == second
    rejected = update(again, 3, accepted=False)
    assert update(again, 4) != rejected
    again._personal.drop(4)


def test_the_name_of_a_state_does_not_tell_whether_a_training_has_failed(open_host):
    """A crafted model may fail where a feature is large, and a server sees what is refused."""
    host = open_host(BIAS)
    score = link_pb2.Score(run_id="run")
    third = link_pb2.TrainLocal(run_id="run", round=3, attempt=1)
    update(host, 1)
    update(host, 2)
    state = host._personal.newest()
    names = [host.state_digest(score)]
    repeated = host.state_digest(third)
    for attempt in (1, 2):
        payload = host.buffer(host.run.layout.nbytes)
        payload[:] = host.run.layout.encode(torch.full([host.run.layout.size], 3e38))
        with pytest.raises(TaskError, match="lower the learning rate"):
            host.train(str(attempt), third, payload, lambda progress: None)
        assert host._personal.newest() == state
        names.append(host.state_digest(score))
        assert host.state_digest(third) == repeated  # where a repeated attempt begins
    update(host, 3)
    names.append(host.state_digest(score))
    assert len(set(names)) == len(names) == 4
    again = open_host(BIAS)  # the device was started again
    assert again.state_digest(score) == names[-1]


def test_no_note_tells_that_a_training_of_a_committed_round_has_failed(tmp_path):
    """What belongs to the sum is the variate of before: zeros have changed nothing of it."""
    states = PersonalStates(tmp_path).open("run", LAYOUT, follows_commits=True)
    states.begin(1)
    states.save(1, encoded(5))
    states.begin(2, committed=1)
    states.save_unchanged(2)
    assert value(states.begin(3, committed=2)) == 5
    states.save_unchanged(3)
    assert value(states.begin(4, committed=3)) == 5
    assert states.take_notes() == []
    first = PersonalStates(tmp_path).open("first", LAYOUT, follows_commits=True)
    first.begin(1)
    first.save_unchanged(1)
    assert value(first.begin(2, committed=1)) is None
    assert first.take_notes() == []


def test_scores_and_evaluations_use_the_personal_state(open_host):
    validates = "def validation_data(self, participant):\n    return rows(20, seed=5)"
    host = open_host(BIAS, methods=validates)
    layout = host.run.layout
    payload = layout.encode(torch.zeros(layout.size))
    work, score = link_pb2.Evaluate(run_id="run", round=1), link_pb2.Score(run_id="run")
    score.candidates.add(of=[0])
    before = host.evaluate("e", work, payload), host.score("s", score, payload)
    for round_ in range(1, 4):
        update(host, round_)
        host.run.model.bias.data.fill_(1e6)  # what is left in the model has no effect
    work.round = 3
    after = host.evaluate("e", work, payload), host.score("s", score, payload)
    assert after[0] != before[0]
    assert after[1] != before[1]
    assert host.evaluate("e", work, payload) == after[0]


def test_an_evaluation_after_fine_tuning_leaves_nothing(open_host):
    validates = "def validation_data(self, participant):\n    return rows(20, seed=5)"
    steps = ("federated.fine_tune_steps=20", "evaluation.devices=1")
    host, plain = open_host(BIAS, *steps, methods=validates), open_host(BIAS, methods=validates)
    layout = host.run.layout
    payload = layout.encode(torch.zeros(layout.size))
    work = link_pb2.Evaluate(run_id="run", round=1)
    tuned = host.evaluate("e", work, payload)
    assert tuned != plain.evaluate("e", work, payload)
    assert tuned == host.evaluate("e", work, payload)
    assert update(host, 1) == update(plain, 1)


def test_head_and_body_are_trained_in_turn(open_host):
    """As in FedRep: the first steps change only the head, the others only the body."""
    host = open_host(BIAS, "federated.personal_steps=1")
    seen = []

    class Watched(torch.optim.SGD):
        def step(self, closure=None):
            parameters = self.param_groups[0]["params"]
            seen.append({each.ndim for each in parameters if each.grad is not None})
            super().step(closure)

    host.run.task.optimizer = lambda parameters, participant: Watched(parameters, lr=0.1)
    update(host, 1)
    assert seen == [{1}, {2}]  # the bias is the head, the weight the body


def test_normalisation_of_its_own(open_host):
    methods = """
        def model(self):
            return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    """
    host = open_host("exchange.buffers='local'", methods=methods)
    assert host.run.layout.names == ("0.bias", "0.weight")
    update(host, 1)
    means = host.run.model[1].running_mean.clone()
    assert means.abs().max() > 0
    update(host, 2)
    torch.testing.assert_close(host.run.model[1].running_mean, means, rtol=1, atol=1)
    assert not torch.equal(host.run.model[1].running_mean, means)


def test_statistics_that_a_datacenter_recomputes_are_not_sent(open_host):
    methods = """
        def model(self):
            return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    """
    host = open_host("exchange.buffers='recompute'", methods=methods)
    layout = host.run.layout
    sent = layout.decode(bytearray(update(host, 1)))
    assert sent[layout.trained_size :].eq(0).all()
    assert sent[: layout.trained_size].any()


def test_a_server_with_another_division_is_refused(open_host, make_job, tmp_path):
    layout = open_host().run.layout
    work = link_pb2.OpenRun(
        job=make_job().model_dump_json(),
        base=str(tmp_path),
        layout=layout.header,
        personal=LAYOUT.header,
    )
    with pytest.raises(TaskError, match="what stays on this device is not what the server says"):
        DeviceRun(work, Participant(name="a", regime="federated"), None)
