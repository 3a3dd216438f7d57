import subprocess
import sys

import pytest
import torch

from isthmus import Task, TaskError, load_task
from isthmus.task import user_code, user_traceback
from isthmus.task.scoring import build_model, losses


@pytest.fixture
def load(tmp_path):
    """Write files, load one of the tasks in them."""

    def load(source, files, data=None):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return load_task(source, {"width": 3}, base=tmp_path, data=data)

    return load


GOOD = """import isthmus
class Good(isthmus.Task):
    model = loss = local_data = eval_data = optimizer = lambda self, *_: None
"""


def test_a_task_in_a_file_gets_its_settings(load):
    task = load("folder/task.py:Good", {"folder/task.py": GOOD})
    assert isinstance(task, Task)
    assert task.settings == {"width": 3}


def test_a_task_in_a_file_imports_modules_from_its_folder(load):
    task = load(
        "folder/task.py:Good",
        {
            "folder/task.py": "from beside_the_task import x\n" + GOOD,
            "folder/beside_the_task.py": "x = 1",
        },
    )
    assert type(task).__name__ == "Good"


def test_a_later_task_does_not_import_modules_from_an_earlier_folder(load):
    for folder in ("one", "other"):
        task = load(
            f"{folder}/task.py:Named",
            {
                f"{folder}/task.py": f"import same_name, package.part\n{GOOD}\n"
                "class Named(Good):\n    where = same_name.x + package.part.x",
                f"{folder}/same_name.py": f"x = '{folder}'",
                f"{folder}/package/part.py": f"x = '{folder}'",
            },
        )
        assert task.where == 2 * folder


def test_a_task_in_a_module(load, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    assert isinstance(load("task_in_a_module:Good", {"task_in_a_module.py": GOOD}), Task)


@pytest.mark.parametrize("source", ["task.py", ":Good", "task.py:", "task.py:not a name", ""])
def test_a_source_of_another_form_is_refused(load, source):
    with pytest.raises(TaskError, match=r"is not of the form path/to/file\.py:Name or package"):
        load(source, {"task.py": GOOD})


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("nowhere.py:Good", r"task\.source='nowhere\.py:Good': there is no file /.*/nowhere\.py"),
        ("task.py:Other", r"task\.source='task\.py:Other': task\.py has no 'Other'$"),
        ("task.py:Goods", r"task\.py has no 'Goods'; did you mean Good\?$"),
        ("task.py:isthmus", "isthmus is not a subclass of isthmus.Task"),
        ("task.py:Plain", "Plain is not a subclass of isthmus.Task"),
        ("no_such_package:Good", "no module 'no_such_package' can be imported here"),
        ("no_such_package.deep:Good", "no module 'no_such_package.deep' can be imported here"),
    ],
)
def test_a_missing_source_is_reported_in_one_sentence(load, source, sentence):
    with pytest.raises(TaskError, match=sentence):
        load(source, {"task.py": GOOD + "class Plain:\n    pass\n"})


@pytest.mark.parametrize(
    ("text", "line", "error"),
    [
        ("import isthmus\n\nimport no_such_package_at_all\n", 3, "ModuleNotFoundError"),
        ("x = 1\ny = (\n", 2, "SyntaxError"),
        (GOOD + "x = 1 / 0\n", 4, "ZeroDivisionError: division by zero"),
        (GOOD + "    def __init__(self, *args):\n        {}['a']\n", 5, "KeyError"),
        (GOOD + "    def __init__(self):\n        pass\n", None, "TypeError"),
    ],
)
def test_an_error_in_user_code_names_the_users_line(load, tmp_path, text, line, error):
    with pytest.raises(TaskError) as caught:
        load("task.py:Good", {"task.py": text})
    at = f" failed at {tmp_path}/task.py:{line}: " if line else " failed: "
    assert at in str(caught.value)
    assert error in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_module_whose_package_raises_names_the_users_line(load, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    good = {"raising/task.py": GOOD, "needy/task.py": GOOD}
    with pytest.raises(TaskError, match=r"raising/__init__\.py:1: ZeroDivisionError"):
        load("raising.task:Good", {"raising/__init__.py": "1 / 0", **good})
    with pytest.raises(TaskError, match=r"needy/__init__\.py:1: .*'no_such_thing'"):
        load("needy.task:Good", {"needy/__init__.py": "import no_such_thing", **good})


def test_a_method_that_raises_names_the_users_line_however_deep(write_task, tmp_path):
    path = write_task("""
        def loss(self, output, target):
            return nn.functional.cross_entropy(output, target.float().view(2, 4))
    """)
    line = (
        path.read_text()
        .splitlines()
        .index("        return nn.functional.cross_entropy(output, target.float().view(2, 4))")
    )
    task = load_task("task.py:Learn", {}, base=tmp_path)
    model = build_model(task, 0)
    with pytest.raises(TaskError, match=rf"^loss\(\) failed at {path}:{line + 1}: RuntimeError: "):
        losses(task, model, torch.zeros(2, 4), torch.zeros(2, dtype=torch.long))


def test_missing_methods_of_a_task_are_named_when_it_is_loaded(load):
    half = "class Half(isthmus.Task):\n    model = loss = lambda self, *_: None\n"
    sentence = r"Half': Half must define local_data\(\), optimizer\(\)$"
    with pytest.raises(TaskError, match=sentence):
        load("task.py:Half", {"task.py": f"import isthmus\n{half}"})


def test_a_task_can_raise_its_own_task_error():
    with pytest.raises(TaskError, match=r"^bring a shard$"), user_code("local_data()"):
        raise TaskError("bring a shard")
    sentence = r"NotImplementedError: only on Tuesdays$"
    with pytest.raises(TaskError, match=sentence), user_code("local_data()"):
        raise NotImplementedError("only on Tuesdays")


def test_the_traceback_of_a_task_begins_with_its_own_first_line(load):
    """Lines of Isthmus before it say nothing; those of a library below it may."""
    task = load(
        "t.py:Good", {"t.py": GOOD.replace("lambda self, *_: None", "lambda *_: [].pop(0)")}
    )
    with pytest.raises(TaskError) as failed:
        build_model(task, 0)
    first, place, *_, last = user_traceback(failed.value).splitlines()
    assert first == "Traceback (most recent call last):"
    assert place.strip().startswith('File "')
    assert "t.py" in place
    assert last == "IndexError: pop from empty list"
    assert user_traceback(TaskError("bring a shard")) == ""


def test_user_code_cannot_exit_the_process():
    said = r"^loss\(\) failed at .*: SystemExit: 3$"
    with pytest.raises(TaskError, match=said), user_code("loss()"):
        sys.exit(3)


KEPT = """
import os, sys, threading
from isthmus.errors import TaskError
from isthmus.task import keep_process, user_code

keep_process()
keep_process()
for what in ("optimizer()", "model()"):
    try:
        with user_code(what), user_code("forward()"):
            os._exit(3)
    except TaskError as error:
        print(error, flush=True)

def forked():
    with user_code("loss()"):
        if os.fork() == 0:
            os._exit(4)
        print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)

thread = threading.Thread(target=forked)
thread.start()
thread.join()
os._exit(5)
"""


def test_user_code_cannot_end_a_process_that_is_kept():
    """Its forked children can, and the process itself."""
    ran = subprocess.run([sys.executable, "-c", KEPT], capture_output=True, text=True, check=False)
    said = "forward() failed at <string>:11: SystemExit: 3\n"
    assert (ran.stdout, ran.returncode) == (f"{said}{said}4\n", 5), ran.stderr


def test_an_interrupt_is_not_the_users_mistake():
    with pytest.raises(KeyboardInterrupt), user_code("loss()"):
        raise KeyboardInterrupt


def test_data_is_this_machines_path(load, tmp_path):
    assert load("task.py:Good", {"task.py": GOOD}, tmp_path).data == tmp_path
    with pytest.raises(TaskError, match=r"set task\.data in the job or start the client with"):
        _ = load("task.py:Good", {"task.py": GOOD}).data


def test_optional_methods_have_defaults(load):
    task = load("task.py:Good", {"task.py": GOOD})
    assert task.metrics(1, 2) == {}
    assert task.forward(lambda inputs: inputs + 1, 1) == 2
