"""Trackers get each committed round once, in their own files, also of a run that is continued."""

import dataclasses
import http.server
import threading

import pytest
from tests.outside_package import OutsidePackage
from tests.server.storage.records import FINAL, failed_attempt, round_record

from isthmus.errors import UserError
from isthmus_server.observability.trackers.mlflow_server import MlflowServer
from isthmus_server.observability.trackers.options import tracker_of
from isthmus_server.observability.trackers.tensorboard_files import TensorBoardFiles
from isthmus_server.observability.trackers.traces import TraceSink
from isthmus_server.observability.trackers.tracker import TrackerSink
from isthmus_server.observability.trackers.weights_and_biases import WeightsAndBiases
from isthmus_server.storage.events import RoundCommitted, RoundPlanned, RunFailed, RunFinished
from isthmus_server.storage.records import Receipt, StepFigures

PLANNED = RoundPlanned(round=1, attempt=1, regime="federated", reason="x", invited=2)


def record(round_):
    return round_record(round_, metrics={"accuracy": round_ / 10}, epsilon=0.5 * round_)


class RecordingTracker:
    def __init__(self):
        self.begun, self.rounds, self.ended = [], {}, []

    def begin(self, run):
        self.begun.append(run)
        return "id-of-the-tracker"

    def log(self, round_, figures):
        self.rounds.setdefault(round_, {}).update(figures)

    def end(self, failed):
        self.ended.append(failed)


class TrackerOfSteps(RecordingTracker):
    def __init__(self):
        super().__init__()
        self.steps = []

    def log_step(self, step, figures):
        self.steps.append((step, len(self.rounds), figures))


def with_steps(round_, *steps):
    """A committed round with figures of some steps; not every optimizer has a learning rate."""
    figures = [
        StepFigures(
            step=step,
            loss=1 / step,
            gradient_norm=0.5,
            learning_rate=None if step % 2 else 0.1,
            units_per_second=100.0,
        )
        for step in steps
    ]
    record = dataclasses.replace(round_record(round_), step_figures={"dc": figures})
    return RoundCommitted(record=record)


@pytest.fixture
def track(make_job, tmp_path):
    """Pass events of one run to a tracker, as a process does that starts or continues it."""

    def track(name, tracker, *events, earlier=()):
        job = make_job("budget=50", "federated.cohort=4", "datacenter.log_steps=5")
        sink = TrackerSink(name, tracker, job, "table-1", tmp_path, lambda: earlier)
        for event in events:
            sink(event)
        sink.close()
        return tmp_path / "tracking" / name

    return track


def committed(*rounds):
    return [RoundCommitted(record=record(round_)) for round_ in rounds]


def test_each_round_is_logged_once_also_when_the_run_is_continued(track):
    first, again = RecordingTracker(), RecordingTracker()
    track("any", first, PLANNED, *committed(1, 2), RunFailed(reason="the disk is full"))
    assert (first.begun[0].earlier, first.ended) == ("", [True])
    assert first.begun[0].parameters["budget"] == 50
    assert first.begun[0].parameters["federated.cohort"] == 4
    assert set(first.rounds) == {1, 2}
    figures = first.rounds[2]
    assert (figures["metrics/accuracy"], figures["epsilon"], figures["regime"]) == (0.2, 1.0, 1.0)
    assert (figures["cost/round"], figures["cost/spent"], figures["seconds"]) == (1.0, 2.0, 4.0)
    # Round 3 was committed while the tracker was away, and 4 comes while it begins.
    earlier = [record(1), record(2), failed_attempt(3), record(3), record(4)]
    track(
        "any",
        again,
        *committed(4, 5),
        RunFinished(reason="x", spent=5.0, final=FINAL),
        earlier=earlier,
    )
    assert (again.begun[0].earlier, again.ended) == ("id-of-the-tracker", [False])
    assert set(again.rounds) == {3, 4, 5}
    assert again.rounds[5]["cost/spent"] == 5.0
    assert again.rounds[5]["final/x"] == 1.0


def test_steps_are_logged_before_their_round_by_trackers_that_know_them(track):
    tracker = TrackerOfSteps()
    track("any", tracker, with_steps(1, 10, 15), with_steps(2, 20))
    assert [(step, rounds) for step, rounds, _ in tracker.steps] == [(10, 0), (15, 0), (20, 1)]
    assert tracker.steps[0][2] == {
        "steps/loss": 0.1,
        "steps/gradient_norm": 0.5,
        "steps/learning_rate": 0.1,
        "steps/units_per_second": 100.0,
    }
    assert "steps/learning_rate" not in tracker.steps[1][2]
    track("other", RecordingTracker(), with_steps(1, 10))
    both = with_steps(1, 10)
    figures = both.record.step_figures["dc"]
    record = dataclasses.replace(both.record, step_figures={"here": figures, "far": figures})
    several = TrackerOfSteps()
    track("several", several, RoundCommitted(record=record))
    assert [min(figures) for *_, figures in several.steps] == [
        "steps/1/gradient_norm",
        "steps/2/gradient_norm",
    ]


def test_a_run_that_never_began_is_not_tracked(track):
    tracker = RecordingTracker()
    assert not track("any", tracker).exists()
    assert tracker.begun == tracker.ended == []


def test_tensorboard_reads_the_rounds(track):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    track("tensorboard", TensorBoardFiles(), *committed(1))
    folder = track("tensorboard", TensorBoardFiles(), *committed(1), with_steps(2, 10, 20))
    events = EventAccumulator(str(folder))
    events.Reload()
    accuracies = [
        (event.step, round(event.value, 6)) for event in events.Scalars("metrics/accuracy")
    ]
    assert accuracies == [(1, 0.1)]
    losses = [(event.step, event.value) for event in events.Scalars("steps/loss")]
    assert losses == [(10, pytest.approx(0.1)), (20, pytest.approx(0.05))]
    assert [tag for tag in events.Tags()["tensors"] if tag.startswith("job")]


def test_mlflow_has_one_run_with_parameters_and_the_rounds(track, tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    uri = (tmp_path / "server").as_uri()
    for rounds in ((1,), (1, 2)):
        track("mlflow", MlflowServer(uri), *committed(*rounds))
    track("mlflow", MlflowServer(uri), with_steps(3, 10, 20))
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("table")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("table-1", "FINISHED")
    assert run.data.params["federated.cohort"] == "4"
    history = client.get_metric_history(run.info.run_id, "metrics/accuracy")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.1), (2, 0.2)]
    history = client.get_metric_history(run.info.run_id, "steps/loss")
    assert [(metric.step, metric.value) for metric in history] == [(10, 0.1), (20, 0.05)]


def test_wandb_writes_an_offline_run(track, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    steps = with_steps(3, 10, 20)
    folder = track("wandb", WeightsAndBiases("isthmus"), *committed(1, 2), steps)
    wandb.teardown()  # its process writes the file, and ends
    (run,) = folder.glob("wandb/offline-run-*-table-1/run-table-1.wandb")
    data = run.read_bytes()
    assert b"metrics/accuracy" in data
    assert b"steps/gradient_norm" in data
    assert b"steps/step" in data
    assert b"federated" in data


def test_nobody_logged_in_to_wandb_is_said(track, monkeypatch, tmp_path):
    pytest.importorskip("wandb")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    with pytest.raises(UserError, match="run `wandb login`, or set WANDB_MODE=offline"):
        track("wandb", WeightsAndBiases(None), PLANNED)


class Collector(http.server.BaseHTTPRequestHandler):
    """Keeps the requests that it gets."""

    def do_POST(self):
        self.server.requests.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def collector():
    """A collector of traces; its requests, and its URL."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        server.requests = []
        server.url = f"http://127.0.0.1:{server.server_address[1]}/v1/traces"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_trace_goes_from_the_round_to_devices_and_ranks(collector):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    receipts = (
        Receipt(participant="a", regime="federated", status="accepted", seconds=1.5),
        Receipt(participant="b", regime="federated", status="rejected", reason="no power"),
        Receipt(participant="dc", regime="datacenter", status="accepted", seconds=3.0, steps=50),
    )
    record = round_record(
        3, receipts, regime="hybrid", started_at=1e9, profile={"dc": {"mfu": 0.5}}
    )
    sink = TraceSink("table", "table-1", collector.url)
    sink(PLANNED)
    sink(RoundCommitted(record=record))
    sink.close()
    (request,) = map(ExportTraceServiceRequest.FromString, collector.requests)
    spans = request.resource_spans[0].scope_spans[0].spans
    (root,) = (span for span in spans if not span.parent_span_id)
    children = [span for span in spans if span.parent_span_id == root.span_id]
    assert {span.trace_id for span in spans} == {root.trace_id}
    assert (root.name, root.end_time_unix_nano - root.start_time_unix_nano) == (
        "round 3",
        4 * 10**9,
    )
    assert [span.name for span in children] == ["device", "device", "datacenter"]
    assert [span.status.message for span in children] == ["", "no power", ""]
    attributes = {attribute.key: attribute.value for attribute in children[2].attributes}
    assert attributes["isthmus.participant"].string_value == "dc"
    assert attributes["isthmus.ranks.mfu"].double_value == 0.5


def test_an_unknown_or_missing_tracker_is_named(monkeypatch):
    installed = r"^--track 'comet' is unknown; installed are mlflow, otel, tensorboard, wandb$"
    with pytest.raises(UserError, match=installed):
        tracker_of("comet")
    with pytest.raises(UserError, match=r"^--track 'wanbd' is unknown; did you mean wandb\? inst"):
        tracker_of("wanbd=project")
    with pytest.raises(UserError, match=r"^--track tensorboard takes no target"):
        tracker_of("tensorboard=folder")
    with pytest.raises(UserError, match="takes the http:// or https:// URL of a collector"):
        tracker_of("otel=collector:4317")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"not installed; .*pip install .*\[mlflow\]'$"):
        tracker_of("mlflow=http://tracker.example")


TRACKERS = """
from isthmus.errors import UserError


def picky(target):
    raise UserError("--track picky needs a target of good taste")


def broken(target):
    raise OSError("no route")


def empty(target):
    return object()
"""


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("picky=x", r"^--track picky needs a target of good taste$"),
        ("broken", r"^--track 'broken' cannot be constructed: OSError: no route$"),
        ("empty", r"^--track 'empty' is not a tracker: it has no begin\(\)$"),
    ],
)
def test_a_tracker_that_cannot_be_used_is_reported(tmp_path, monkeypatch, option, sentence):
    entries = {f"isthmus.trackers/{name}": name for name in ("picky", "broken", "empty")}
    package = OutsidePackage(tmp_path, "outside_trackers", TRACKERS, entries)
    with package.on_path(monkeypatch), pytest.raises(UserError, match=sentence):
        tracker_of(option)
