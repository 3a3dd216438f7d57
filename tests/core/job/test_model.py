"""The table `[model]`: the digest and the configuration that loading a job puts into it."""

import hashlib
import json

import pytest

from isthmus.errors import JobError
from isthmus.job import Job, load_job, read_job, write_job
from isthmus.start.files import StartFiles

JOB = 'name = "a"\n[task]\nsource = "task.py:Learn"\n[model]\nstart = "weights"\n'
FILE = b'6\0\0\0\0\0\0\0{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}' + bytes(8)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights/model.safetensors").write_bytes(FILE)
    (tmp_path / "job.toml").write_text(JOB)
    return tmp_path


def test_the_job_has_the_digest_and_the_configuration(folder):
    (folder / "weights/config.json").write_text('{"hidden_size": 8}')
    job = load_job(folder / "job.toml")
    assert job.model.sha256 == hashlib.sha256(FILE).hexdigest()
    assert job.task.settings == {"start_config": {"hidden_size": 8}}
    assert read_job(write_job(job)) == job


def test_the_job_has_the_place_and_the_digest_of_the_tokenizer(folder):
    (folder / "weights/config.json").write_text("{}")
    (folder / "weights/tokenizer.json").write_text("one")
    (folder / "weights/README.md").write_text("any")
    one = load_job(folder / "job.toml").task.settings["start_tokenizer"]
    assert one == {"folder": "weights", "sha256": hashlib.sha256(b"one").hexdigest()}
    (folder / "weights/README.md").write_text("other")
    assert load_job(folder / "job.toml").task.settings["start_tokenizer"] == one
    (folder / "weights/chat_template.jinja").write_text("two")
    two = load_job(folder / "job.toml").task.settings["start_tokenizer"]
    assert two["sha256"] != one["sha256"]


@pytest.mark.parametrize("given", [{"folder": "/etc", "sha256": "0"}, {"folder": "weights"}, 1])
def test_a_tokenizer_elsewhere_than_the_start_is_refused(folder, given):
    sent = json.loads(write_job(load_job(folder / "job.toml")))
    sent["task"]["settings"] = {"start_tokenizer": given}
    with pytest.raises(JobError, match="start_tokenizer is the place of the start's tokenizer"):
        read_job(json.dumps(sent))


def test_a_job_without_a_start_is_sent_with_the_same_bytes_as_before(folder):
    (folder / "job.toml").write_text(JOB.partition("[model]")[0])
    sent = write_job(load_job(folder / "job.toml"))
    assert json.loads(sent) == {"name": "a", "task": {"source": "task.py:Learn"}}


def test_a_digest_that_the_job_gives_is_kept_and_needs_no_files(folder):
    given = "model.sha256=" + "0" * 64
    assert load_job(folder / "job.toml", [given]).model.sha256 == "0" * 64
    elsewhere = load_job(folder / "job.toml", [given, "model.start=not/here"])
    assert elsewhere.model.start == "not/here"
    with pytest.raises(JobError, match=r"^model.start: there is neither a file nor a folder"):
        load_job(folder / "job.toml", ["model.start=not/here"])


def test_a_file_that_is_no_model_is_refused_when_the_job_is_loaded(folder):
    (folder / "weights/model.safetensors").write_bytes(FILE[:-1])
    with pytest.raises(JobError, match=r"^model.start: .* is shorter than its header says"):
        load_job(folder / "job.toml")


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["model.sha256=abc"], "model.sha256='abc': string should match pattern"),
        (["model={fresh=['a']}"], "model: fresh has no effect without start; set start, or remove"),
        (["model.fresh=['']"], "model.fresh.0='': string should have at least 1 character"),
        (["model.path=a"], "unknown key model.path; did you mean base?|known here: start, base"),
        (["task.settings.start_config=1"], "task.settings.start_config is the place of the start"),
        (["task.settings.start_tokenizer=1"], "start_tokenizer is the place of the start's token"),
    ],
)
def test_other_tables_are_refused(folder, overrides, sentence):
    (folder / "weights/config.json").write_text("{}")
    with pytest.raises(JobError, match=sentence):
        load_job(folder / "job.toml", overrides)


def test_a_job_that_was_not_loaded_from_a_file_needs_the_digest():
    with pytest.raises(ValueError, match="sha256 is missing, the digest of start; `isthmus model"):
        Job.model_validate({"name": "a", "model": {"start": "weights"}})


@pytest.mark.parametrize("path", ["/weights", "../weights", "a/../../weights"])
@pytest.mark.parametrize("key", ["start", "base"])
def test_paths_out_of_the_owners_folder_are_refused(folder, path, key):
    changes = {"start": "weights", "sha256": "0" * 64, key: path}
    job = Job.model_validate({"name": "a", "task": {"source": "a.py:B"}, "model": changes})
    with pytest.raises(JobError, match=f"model.{key}={path!r} is not below the directory"):
        job.model.check_inside()
    load_job(folder / "job.toml").model.check_inside()


def test_configurations_that_cannot_be_read_are_refused(folder):
    config = folder / "weights/config.json"
    for text, sentence in (("[1]", "is no JSON object"), ("{", "is no JSON: ")):
        config.write_text(text)
        with pytest.raises(JobError, match=sentence):
            load_job(folder / "job.toml")
    config.write_text('{"a": "' + "b" * (1 << 20) + '"}')
    with pytest.raises(JobError, match="is larger than 1048576 bytes"):
        load_job(folder / "job.toml")
    assert StartFiles.find(folder / "weights/model.safetensors").config() is None


def test_a_server_app_has_no_model_of_a_task(folder):
    text = JOB.partition("[task]")[0] + JOB[JOB.index("[model]") :]
    (folder / "job.toml").write_text(text)
    app = "federated={flower={server_app='a.py:app', app='b.py:app'}, secure_aggregation=false}"
    with pytest.raises(JobError, match=r"model has no effect on federated.flower.server_app='a.py"):
        load_job(folder / "job.toml", [app])
