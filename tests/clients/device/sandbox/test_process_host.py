"""The agent's side of a task's process, with a real task and with a process that misbehaves."""

import os
import select
import threading
import time
from pathlib import Path

import pytest
import torch
from tests.conftest import TABLE

from isthmus.errors import TaskError, UserError
from isthmus.job import parse_job
from isthmus.task import Participant
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.wire import link_pb2
from isthmus_clients.device.owner_limits import OwnerLimits, parse
from isthmus_clients.device.sandbox import task_process
from isthmus_clients.device.sandbox.process_host import ProcessHost
from isthmus_clients.device.sandbox.settings import DATA_NUMBERS
from isthmus_clients.device.task_host import InProcessHost

LAYOUT = TensorLayout.from_shapes({"bias": (3,), "weight": (3, 4)})
WHO = Participant(name="a", regime="federated")
SECRET = bytes(range(32))
START = torch.linspace(-1, 1, LAYOUT.size)


def opening(*overrides, run_id="run"):
    plain = "federated.secure_aggregation=false"
    job = parse_job('name = "table"\n[task]\nsource = "task.py:Learn"', [plain, *overrides])
    return link_pb2.OpenRun(
        run_id=run_id, job=job.model_dump_json(), base="/nowhere", layout=LAYOUT.header
    )


def received(host, *vectors, room=0):
    payload = host.buffer(len(vectors) * LAYOUT.nbytes, room)
    payload[:] = b"".join(LAYOUT.encode(vector) for vector in vectors)
    return payload


def train(host, request_id="train", progress=lambda progress: None, round_=1, scale=0.0):
    work = link_pb2.TrainLocal(run_id="run", round=round_, with_gradient=True, gradient_scale=scale)
    room = LAYOUT.gradient_room if scale else 0
    payload = received(host, START, torch.full([LAYOUT.size], 0.01), room=room)
    trained, update = host.train(request_id, work, payload, progress)
    host.release(request_id)
    return trained, bytes(update)


class Device:
    """A folder with a task, a state with a key, and the host of a real device."""

    def __init__(self, folder, methods="    pass\n", limits=None, grace=30.0):
        self.tasks, self.state = folder / "tasks", folder / "state"
        self.tasks.mkdir()
        self.state.mkdir()
        (self.tasks / "task.py").write_text(TABLE + methods)
        limits = limits or OwnerLimits()
        self.host = ProcessHost(
            WHO, None, self.tasks, 1, state=self.state, limits=limits, grace=grace, secret=SECRET
        )

    def close(self):
        process = self.host.process
        self.host.close()
        if process is not None:
            process.wait()


HOSTILE = """
    hangs = False

    def optimizer(self, parameters, participant):
        import os, socket, subprocess
        state = os.path.join(os.environ["HOME"], "../..")
        self.hangs = participant.round == 3
        for attempt in (
            lambda: socket.create_connection(("127.0.0.1", 9)),
            lambda: open(os.path.join(state, "identity.key")),
            lambda: open(os.path.join(state, "new"), "w"),
            lambda: open("/proc/1/mem"),
        ):
            try:
                attempt()
            except OSError:
                continue
            raise AssertionError("it was permitted")
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
        return super().optimizer(parameters, participant)

    def forward(self, model, inputs):
        if self.hangs:
            import subprocess
            subprocess.Popen(["sleep", "1000"])  # tells that it hangs now
            while True:
                pass
        return super().forward(model, inputs)
"""


SPLITS = """
    def local_data(self, participant):
        import os, random
        assert "ISTHMUS_DATA_NUMBERS" not in os.environ
        return torch.utils.data.Subset(rows(20, seed=1), random.sample(range(20), 10))
"""


def test_the_data_of_both_hosts_are_drawn_from_the_secret_of_the_device(tmp_path):
    """It is in no command, which all users of a machine can read."""
    device = Device(tmp_path, SPLITS)
    updates = []
    try:
        device.host.open(opening())
        updates.append(train(device.host)[1])
        command = Path(f"/proc/{device.host.process.pid}/cmdline").read_bytes()
        assert SECRET.hex().encode() not in command
        for secret in (SECRET, SECRET, bytes(32)):
            host = InProcessHost(WHO, None, device.tasks, 1, secret=secret)
            host.open(opening())
            updates.append(train(host)[1])
    finally:
        device.close()
    first, *same, other = updates
    assert same == [first, first]
    assert other != first


SETS = """
    def local_data(self, participant):
        import random
        patients = list({f"patient-{number}" for number in range(20)})
        random.shuffle(patients)
        chosen = [int(each.split("-")[1]) for each in patients[:10]]
        return torch.utils.data.Subset(rows(20, seed=1), chosen)
"""


def test_a_run_that_is_opened_again_has_the_same_order_of_sets(tmp_path):
    """A server asks one device alone for it, and would have another update for the same model."""
    device = Device(tmp_path, SETS)
    updates = []
    try:
        for _ in range(2):
            device.host.open(opening())
            updates.append(train(device.host)[1])
    finally:
        device.close()
    assert updates[0] == updates[1]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A task that tries to leave its process in every round, and hangs in the third."""
    device = Device(tmp_path_factory.mktemp("device"), HOSTILE, grace=0.2)
    (device.state / "identity.key").write_text("private")
    device.host.open(opening())
    yield device
    device.close()


@pytest.fixture(scope="module")
def expected(hostile):
    """What the same task computes in the agent's process, with what it tries left out."""
    (hostile.tasks / "plain.py").write_text(TABLE + "    pass\n")
    host = InProcessHost(WHO, None, hostile.tasks, 1, secret=SECRET)
    host.open(opening("task.source='plain.py:Learn'"))
    return host


def test_both_hosts_give_the_same_update_and_scores(hostile, expected):
    """Bit for bit; and in the sandbox what the task tries fails."""
    reported = []
    trained, update = train(hostile.host, progress=reported.append, scale=0.5)
    also_trained, also_update = train(expected, scale=0.5)
    assert update == also_update
    both = LAYOUT.gradient_and_update.decode(bytearray(update))
    assert both[: LAYOUT.size].any()
    # Next to an update by itself, which the gradient does not change.
    _, alone = train(expected)
    assert torch.equal(both[LAYOUT.size :], LAYOUT.decode(bytearray(alone)))
    assert trained.training == also_trained.training
    assert (trained.examples, trained.steps) == (20, also_trained.steps)
    assert reported[0].steps == 1
    candidates = [link_pb2.Candidate(of=of) for of in ([0], [0, 1])]
    work = link_pb2.Score(run_id="run", candidates=candidates)
    scores = [
        host.score("score", work, received(host, START, -START))
        for host in (hostile.host, expected)
    ]
    assert scores[0] == scores[1]


def test_a_process_that_hangs_fails_one_request_and_leaves_nothing_behind(hostile, expected):
    """What it has started ends with it, and the next round has another process."""
    process = hostile.host.process
    train(hostile.host, "second", round_=2)
    left = [os.pidfd_open(int(pid)) for pid in descendants_of(process.pid)]
    assert left  # what the task started in this round

    def cancel_once_it_hangs():
        while len(descendants_of(process.pid)) < len(left) + 2:  # one of the optimizer, one more
            time.sleep(0.02)  # what another process starts can only be polled
        hostile.host.cancel("third")

    cancel = threading.Thread(target=cancel_once_it_hangs, daemon=True)
    cancel.start()
    with pytest.raises(TaskError, match=r"did not stop within 0\.2 s after its request was canc"):
        train(hostile.host, "third", round_=3)
    cancel.join()
    assert process.ended
    for handle in left:
        assert select.select([handle], [], [], 30)[0]  # it has ended
        os.close(handle)
    assert train(hostile.host, "fourth", round_=4)[1] == train(expected, round_=4)[1]
    assert hostile.host.process is not process


@pytest.mark.usefixtures("forked_tasks")
def test_what_stays_on_the_device_is_out_of_reach_of_its_tasks(tmp_path):
    """The agent keeps it: a process gets the state of its own run only, and starts again."""
    reads = """
    def optimizer(self, parameters, participant):
        import os
        try:
            os.listdir(os.path.join(os.environ["HOME"], "../../personal"))
        except OSError:
            return super().optimizer(parameters, participant)
        raise AssertionError("it was permitted")
"""
    device = Device(tmp_path, reads, limits=OwnerLimits(personal_mb=1))
    layout = TensorLayout.from_shapes({"weight": (3, 4)})
    work = opening("exchange.personal=['bias']")
    work.layout = layout.header
    work.personal = TensorLayout.from_shapes({"bias": (3,)}).header
    try:
        device.host.open(work)
        updates = []
        for round_ in (1, 2, 2):
            payload = device.host.buffer(layout.nbytes)
            payload[:] = layout.encode(torch.ones(layout.size))
            training = link_pb2.TrainLocal(run_id="run", round=round_)
            _, update = device.host.train("train", training, payload, lambda progress: None)
            updates.append(bytes(update))
            if round_ == 1:
                device.host.process.kill("a test")
                device.host.process.wait()
        assert updates[0] != updates[1] == updates[2]
        assert len(list((device.state / "personal").rglob("*.safetensors"))) == 2
    finally:
        device.close()


def descendants_of(pid):
    """Ids of the processes that a process has started, and of theirs."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [each for child in children for each in (child, *descendants_of(child))]


FAKE = """
import os, socket, sys
from isthmus.system.channel import Channel
from isthmus.system.memory_file import mapped
from isthmus.wire import link_pb2

end = socket.socket(fileno=int(sys.argv[1]))
channel = Channel(end)
def say(**body):
    channel.send(link_pb2.Envelope(**body).SerializeToString())
def reply(**outcome):
    say(reply=link_pb2.Reply(id=request.id, **outcome))
def trained(**figures):
    reply(trained=link_pb2.Trained(**figures))
def scored(*scores):
    reply(scored=link_pb2.Scored(scores=scores))

say(progress=link_pb2.Progress(note="none"))
while True:
    encoded, handles = channel.receive_with_handles()
    request = link_pb2.Envelope.FromString(encoded).request
    if request.WhichOneof("work") == "open":
        reply(opened=link_pb2.Opened(examples=20))
    else:
        {misbehave}
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A device whose process answers requests for work with the given statement."""
    made = []

    def fake(statement, **more):
        program = ("-c", FAKE.replace("{misbehave}", statement))
        monkeypatch.setattr(task_process, "PROGRAM", program)
        made.append(Device(tmp_path, **more))
        made[0].host.open(opening())
        return made[0].host

    yield fake
    for device in made:
        device.close()


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("os._exit(3)", "the process of the task ended: exit status 3"),
        ("os.kill(os.getpid(), 9)", r"the process of the task ended: signal 9 \(SIGKILL\)"),
        ("end.close()", "the process of the task ended: it closed its connection"),
        ("end.sendall(bytes([255] * 4))", "the process of the task ended: a message of 4294967295"),
        ("end.sendall(bytes([0, 0, 0, 3, 9, 9, 9]))", "ended: a message cannot be read"),
        ("request.id = 'x'; trained()", "ended: it answered another request"),
        ("scored()", "ended: it answered another kind of request"),
        ("trained(training={'loss': float('nan')})", "reported a loss of nan"),
        (
            "reply(failure=link_pb2.Failure(reason='a\\nb\\x1b[2J' + 'c' * 9000))",
            r"^a\\nb\\x1b\[2Jc+\.\.\.$",
        ),
    ],
)
def test_an_invalid_reply_fails_the_request(statement, reason, fake):
    with pytest.raises(TaskError, match=reason) as raised:
        train(fake(f"{statement}\n        import time; time.sleep(5)"))
    assert len(str(raised.value)) <= 2000


def test_requests_with_the_same_id_are_different_ones_for_the_process(fake):
    """Otherwise it would not train for one because another was cancelled."""
    host = fake(
        "sys.ids = getattr(sys, 'ids', []); trained(steps=sys.ids.count(request.id));"
        " sys.ids.append(request.id)"
    )
    assert [train(host, "same")[0].steps for _ in range(2)] == [0, 0]


@pytest.mark.parametrize("scores", ["", "0.1, 0.2", "-0.5", "float('nan')"])
def test_scores_that_cannot_be_are_refused(scores, fake):
    host = fake(f"scored({scores})")
    work = link_pb2.Score(run_id="run", candidates=[link_pb2.Candidate(of=[0])])
    with pytest.raises(TaskError, match=r"reported the scores \["):
        host.score("score", work, received(host, START))


def test_scoring_that_hangs_ends_when_it_is_cancelled(fake):
    """Its process says that the work has begun, and answers nothing."""
    host = fake("print('begun')", grace=0.1)
    work = link_pb2.Score(run_id="run", candidates=[link_pb2.Candidate(of=[0])])
    threading.Timer(0.5, host.cancel, ["score"]).start()
    with pytest.raises(TaskError, match=r"did not stop within 0\.1 s after its request was canc"):
        host.score("score", work, received(host, START))


def test_only_checked_figures_are_passed_on(fake):
    """Nothing else reaches the server, and the update is private and has the agent's header."""
    host = fake(
        "memory = mapped(handles[0]); memory[:] = bytes([7]) * len(memory)\n"
        "        say(progress=link_pb2.Progress(steps=4, loss=0.5, note='private'))\n"
        "        say(progress=link_pb2.Progress(loss=float('inf')))\n"
        "        trained(examples=9, steps=5, events=['x'], training={'loss': 0.5, 'age': 61.0},"
        " secure=b'x', result=link_pb2.Blob(size=9))"
    )
    reported = []
    trained, update = train(host, progress=reported.append)
    assert reported == [link_pb2.Progress(steps=4, loss=0.5)]
    trained.seconds = 0.0
    assert trained == link_pb2.Trained(examples=20, steps=5, training={"loss": 0.5})
    assert update == LAYOUT.header + bytes([7]) * (4 * LAYOUT.size)


def test_the_process_has_no_variable_that_may_be_secret(fake, monkeypatch):
    for name in set(os.environ) - {"LD_LIBRARY_PATH", "PYTHONPATH"}:
        monkeypatch.delenv(name)
    monkeypatch.setenv("API_TOKEN", "secret")
    monkeypatch.setenv("OMP_PROC_BIND", "true")
    host = fake("reply(failure=link_pb2.Failure(reason=' '.join(sorted(os.environ))))")
    with pytest.raises(TaskError) as raised:
        train(host)
    # The variable of its own random numbers is for it, and its program takes it out.
    assert set(str(raised.value).split()) <= {
        DATA_NUMBERS,
        *("HOME", "LC_CTYPE", "OMP_PROC_BIND", "PATH", "TMPDIR"),
        *("LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED"),
        "PYTHONHASHSEED",  # a hash of the device's secret
    }


def test_what_a_task_prints_is_logged_up_to_a_limit(fake, monkeypatch, caplog):
    monkeypatch.setattr(task_process, "MAX_OUTPUT_BYTES", 10)
    caplog.set_level("INFO")
    host = fake("print('one'); print('two \\x1b[2J'); print('three'); os._exit(0)")
    with pytest.raises(TaskError):
        train(host)
    host.process.wait()
    assert "task: one" in caplog.messages
    assert r"task: two \x1b[2J" in caplog.messages
    assert "task: three" not in caplog.messages
    assert "further output of the task is discarded" in caplog.messages


def test_closing_a_run_ends_its_process_and_removes_its_files(fake, tmp_path):
    host = fake("pass")
    process = host.process
    (scratch,) = (tmp_path / "state/scratch").iterdir()
    (scratch / "left").write_text("x")
    ready = threading.Event()

    def close():
        ready.wait()
        host.close()

    closing = threading.Thread(target=close)
    closing.start()
    threading.Timer(0.1, ready.set).start()
    with pytest.raises(TaskError, match="the process of the task ended: the run was closed"):
        train(host)
    closing.join()
    process.wait()
    assert list((tmp_path / "state/scratch").iterdir()) == []


def test_a_task_may_not_read_a_directory_that_contains_the_state(tmp_path):
    state = tmp_path / "home/state"
    state.mkdir(parents=True)
    limits = parse(f"sandbox.read = ['{tmp_path}']", "policy.toml")
    for data, given in ((tmp_path / "home", OwnerLimits()), (None, limits)):
        with pytest.raises(UserError, match=r"^tasks could read this device's keys: "):
            ProcessHost(WHO, data, tmp_path / "tasks", 1, state=state, limits=given)


def test_a_task_is_refused_where_a_required_restriction_is_missing(tmp_path, monkeypatch):
    lacking = (
        "import sys; from isthmus_clients.device.sandbox import landlock, worker\n"
        "def absent(access): raise OSError(38, 'Function not implemented')\n"
        "landlock.restrict = absent; sys.exit(worker.main(sys.argv[1:]))"
    )
    monkeypatch.setattr(task_process, "PROGRAM", ("-c", lacking))
    device = Device(tmp_path, limits=parse("sandbox.required = true", "policy.toml"))
    with pytest.raises(TaskError, match=r"requires a sandbox for tasks .* this kernel lacks Land"):
        device.host.open(opening())


@pytest.mark.usefixtures("forked_tasks")
def test_that_a_run_was_opened_is_logged_once(tmp_path, caplog):
    """Its process notes in the same log what it does."""
    caplog.set_level("INFO")
    device = Device(tmp_path)
    try:
        device.host.open(opening())
        train(device.host)
    finally:
        device.close()
    said = [line for line in caplog.messages if "opened run with" in line]
    assert said == ["opened run with 20 examples"], caplog.messages


@pytest.mark.usefixtures("forked_tasks")
@pytest.mark.usefixtures("forked_tasks")
def test_the_own_figures_of_an_evaluation_come_from_the_task_s_process(tmp_path, write_task):
    methods = """
    def validation_data(self, participant):
        return rows(15, seed=4)

    def device_metrics(self):
        return {"accuracy": isthmus.Mean()}
"""
    device = Device(tmp_path, methods)
    work = link_pb2.Evaluate(run_id="run", round=1)
    try:
        device.host.open(opening("evaluation.devices=3"))
        counted = device.host.evaluate("evaluate", work, received(device.host, START))
    finally:
        device.close()
    here = InProcessHost(WHO, None, device.tasks, 1)
    here.open(opening("evaluation.devices=3"))
    assert counted == here.evaluate("evaluate", work, received(here, START))
    summed, units = counted.counts[-24:-22]
    assert counted.own_figures["accuracy"] == summed / 2**28 / units
    assert units == 15
