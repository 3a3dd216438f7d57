"""The control variate of one device: in its steps, in its files, and in what it sends."""

import pytest
import torch

from isthmus.errors import AdmissionRefused, TaskError
from isthmus.task import Participant
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.wire import link_pb2
from isthmus_clients.device.owner_limits import OwnerLimits
from isthmus_clients.device.sandbox.process_host import ProcessHost
from isthmus_clients.device.task_host import InProcessHost
from isthmus_clients.training.personal_state import PersonalStates

WHO = Participant(name="a", regime="federated")
LAYOUT = TensorLayout.from_shapes({"bias": (3,), "weight": (3, 4)})
MODEL = torch.linspace(-1, 1, LAYOUT.size)
SERVER = torch.linspace(0.1, 0.2, LAYOUT.size)


@pytest.fixture
def opening(make_job, write_task, tmp_path):
    """What a run of a task with some methods is opened with."""

    def opening(methods="pass"):
        write_task(methods)
        job = make_job(
            "federated.control_variates=3",
            "federated.secure_aggregation=false",
            "federated.cohort=3",
            "federated.local_steps=2",
        )
        return link_pb2.OpenRun(
            run_id="run", job=job.model_dump_json(), base=str(tmp_path), layout=LAYOUT.header
        )

    return opening


@pytest.fixture
def open_host(opening, tmp_path):
    def open_host(methods="pass"):
        states = PersonalStates(tmp_path / "states")
        host = InProcessHost(WHO, None, None, 1, states=states)
        host.open(opening(methods))
        return host

    return open_host


def train(host, round_, committed, **changes):
    """Train a round, whose update is not acknowledged: the change and the update, in one vector."""
    work = link_pb2.TrainLocal(
        run_id="run",
        round=round_,
        summed_round=committed,
        position=link_pb2.RoundPosition(start=2 * round_, steps=2, cohort=3),
        **{"with_gradient": True, "gradient_scale": 1.0, **changes},
    )
    room = LAYOUT.gradient_room if work.gradient_scale else 0
    vectors = (MODEL, SERVER) if work.with_gradient else (MODEL,)
    payload = host.buffer(len(vectors) * LAYOUT.nbytes, room)
    payload[:] = b"".join(LAYOUT.encode(vector) for vector in vectors)
    _, result = host.train(str(round_), work, payload, lambda progress: None)
    both = LAYOUT.gradient_and_update.decode(bytearray(result)).clone()
    host.release(str(round_), accepted=False)
    return both


def test_a_repeated_attempt_is_the_same_and_one_that_was_not_committed_does_not_count(open_host):
    host = open_host()
    first = train(host, 1, committed=0)
    second = train(host, 2, committed=1)
    assert not torch.equal(first, second)
    assert torch.equal(train(host, 2, committed=1), second)
    host = open_host()  # the device was started again
    assert torch.equal(train(host, 2, committed=1), second)
    third = train(host, 3, committed=2)
    # Its round 3 was not committed with it, though its last update was acknowledged.
    assert torch.equal(train(host, 3, committed=2), third)
    assert not torch.equal(train(host, 4, committed=2), train(host, 4, committed=0))
    assert host.take_notes() == []


def test_the_next_control_variate_is_the_one_before_and_the_change_that_was_sent(open_host):
    host = open_host()
    sent = torch.zeros(LAYOUT.size)
    for round_ in (1, 2, 3):
        sent += train(host, round_, committed=round_ - 1)[: LAYOUT.size]
        kept = LAYOUT.decode(host._personal.newest())
        assert torch.equal(kept, sent)
    assert sent.norm() > 0.1


@pytest.mark.parametrize("damage", ["missing", "damaged"])
def test_a_lost_control_variate_begins_at_zero_with_a_note(open_host, tmp_path, damage):
    host = open_host()
    first = train(host, 1, committed=0)
    from_zero = train(host, 2, committed=0)
    train(host, 1, committed=0)
    (path,) = tmp_path.glob("states/*/1-*.safetensors")
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1] + b"!")
    assert torch.equal(train(host, 2, committed=1), from_zero)
    (note,) = host.take_notes()
    assert "after round 1 is missing or damaged; it begins at zero again" in note
    assert first.isfinite().all()


def test_an_owner_who_allows_no_state_refuses_the_run(opening, tmp_path):
    opened = opening()
    state = tmp_path / "state"
    tasks = tmp_path / "tasks"
    state.mkdir()
    tasks.mkdir()
    (tasks / "task.py").touch()  # which is not loaded
    host = ProcessHost(WHO, None, tasks, 1, state=state, limits=OwnerLimits())
    try:
        with pytest.raises(AdmissionRefused, match="its owner allows personal_mb=0 for all runs"):
            host.open(opened)
    finally:
        host.close()


@pytest.mark.usefixtures("forked_tasks")
def test_a_sandboxed_task_gives_the_same_and_keeps_it_for_the_next_round(
    open_host, opening, tmp_path
):
    expected = [train(open_host(), round_, committed=round_ - 1) for round_ in (1, 2)]
    tasks = tmp_path / "tasks"
    state = tmp_path / "state"
    tasks.mkdir()
    state.mkdir()
    (tasks / "task.py").write_bytes((tmp_path / "task.py").read_bytes())
    host = ProcessHost(WHO, None, tasks, 1, state=state, limits=OwnerLimits(personal_mb=1))
    try:
        host.open(opening())
        found = [train(host, round_, committed=round_ - 1) for round_ in (1, 2)]
    finally:
        host.close()
    assert all(torch.equal(*each) for each in zip(expected, found, strict=True))


@pytest.mark.parametrize(
    ("made", "sentence"),
    [
        ("Adam(parameters, lr=0.1)", r"it returned Adam\(lr=0.1, maximize=False\)"),
        ("SGD(parameters, lr=0.1, momentum=0.9)", r"it returned SGD\(lr=0.1, momentum=0.9"),
        ("SGD(parameters, lr=0.1, maximize=True)", "without momentum or maximize"),
        ("SGD(parameters, lr=0.0)", "a learning rate above 0"),
    ],
)
def test_steps_that_are_not_plain_sgd_are_refused(open_host, made, sentence):
    body = f"def optimizer(self, parameters, participant):\n    return torch.optim.{made}"
    with pytest.raises(TaskError, match=sentence):
        train(open_host(body), 1, committed=0)


def test_a_schedule_of_the_task_is_refused(open_host):
    body = """def optimizer(self, parameters, participant):
    made = torch.optim.SGD(parameters, lr=0.1)
    return made, torch.optim.lr_scheduler.StepLR(made, 1)"""
    with pytest.raises(TaskError, match="needs a constant learning rate, and optimizer"):
        train(open_host(body), 1, committed=0)


@pytest.mark.parametrize(
    "changes", [{"with_gradient": False}, {"gradient_scale": 0.0}, {"gradient_scale": 2.0}]
)
def test_a_request_without_control_variates_is_refused(open_host, changes):
    with pytest.raises(TaskError, match="the server's request has no control variate or asks"):
        train(open_host(), 1, committed=0, **changes)


def test_parameter_groups_have_their_own_rates(open_host):
    body = """def optimizer(self, parameters, participant):
    rates = {"bias": 0.1, "weight": 0.4}
    groups = [{"params": [each], "lr": rates["bias" if each.ndim == 1 else "weight"]}
              for each in parameters]
    groups.append({"params": [torch.nn.Parameter(torch.ones(2))], "lr": 9.0})
    return torch.optim.SGD(groups, lr=1.0)"""
    both = train(open_host(body), 1, committed=0)
    change = dict(LAYOUT.parts(both[: LAYOUT.size]))
    update = dict(LAYOUT.parts(both[LAYOUT.size :]))
    server = dict(LAYOUT.parts(SERVER))
    for name, rate in (("bias", 0.1), ("weight", 0.4)):
        torch.testing.assert_close(change[name], update[name] / (2 * rate) - server[name])
