"""Flower's own quickstart examples, unmodified, as jobs of `isthmus run` over real processes.

Their files are not part of this repository: ISTHMUS_FLOWER_EXAMPLES names the folder `examples` of
a checkout of Flower. Without it these tests are skipped, and `tests/flower/server_apps` runs a
project of the same structure. The data sets that they download are replaced by local ones, see
`flower_quickstarts`.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = os.environ.get("ISTHMUS_FLOWER_EXAMPLES")
STAND_INS = Path(__file__).with_name("flower_quickstarts")
JOB = """
name = "{name}"
[federated]
clients = 3
cohort = 3
secure_aggregation = false
[federated.flower]
app = "{package}.client_app:app"
server_app = "{package}.server_app:app"
"""


@pytest.mark.skipif(
    EXAMPLES is None,
    reason="Flower's examples are somewhere else; set ISTHMUS_FLOWER_EXAMPLES to their folder",
)
@pytest.mark.parametrize(
    ("name", "package", "config", "written", "printed"),
    [
        (
            "quickstart-pytorch",
            "pytorchexample",
            ["num-server-rounds=1"],
            "final_model.pt",
            "'eval_acc'",
        ),
        (
            "quickstart-sklearn",
            "sklearnexample",
            ["num-server-rounds=2"],
            "logreg_model.pkl",
            "'test_logloss'",
        ),
        (
            "quickstart-pandas",
            "pandas_example",
            [],
            None,
            "Aggregated histogram: {'SepalLengthCm': array([ 0,  0,  9, 50, 56, 28,  7,",
        ),
    ],
)
def test_a_quickstart_runs_unmodified(name, package, config, written, printed, tmp_path):
    if name != "quickstart-pytorch" and importlib.util.find_spec("pandas") is None:
        pytest.skip("pandas is not installed")
    project = tmp_path / name
    project.mkdir()
    for path in (Path(EXAMPLES) / name).iterdir():  # its files stay as they are
        (project / path.name).symlink_to(path)
    (project / "job.toml").write_text(JOB.format(name=name, package=package))
    options = [f"--set=federated.flower.config.{each}" for each in config]
    run = tmp_path / "run"
    finished = subprocess.run(
        [
            *(str(Path(sys.executable).with_name("isthmus")), "run", str(project / "job.toml")),
            *("--run-dir", str(run), *options),
        ],
        env={**os.environ, "PYTHONPATH": str(STAND_INS), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert printed in (run / "logs" / "server-app.log").read_text()
    files = [path.name for path in (run / "server_app").iterdir()]
    assert files == ([] if written is None else [written])
