"""The notebook goes from a task to a plot and a saved model, in its own kernel."""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
import torch
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "examples/notebook/digits.ipynb"


FORKED = """
from types import SimpleNamespace
from isthmus_server.python import child_process
child_process.sys = SimpleNamespace(executable={python!r})
"""
"""For the kernel, before the cells: the run of the notebook does not import PyTorch anew."""


def test_the_notebook_trains_plots_and_saves_the_best_model(tmp_path, monkeypatch, forked_python):
    kernels = tmp_path / "share/jupyter/kernels/python3"
    kernels.mkdir(parents=True)
    argv = f'["{sys.executable}", "-m", "ipykernel_launcher", "-f", "{{connection_file}}"]'
    (kernels / "kernel.json").write_text(
        f'{{"argv": {argv}, "display_name": "Python 3", "language": "python"}}'
    )
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "share/jupyter"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    startup = tmp_path / "ipython/profile_default/startup"
    startup.mkdir(parents=True)
    (startup / "forked.py").write_text(FORKED.format(python=str(forked_python)))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert sum(bool(line.strip()) for cell in cells for line in cell.source.splitlines()) < 40
    assert not any(cell.outputs for cell in cells)  # of nobody's machine

    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=300, resources=resources).execute()

    kinds = [{kind for output in cell.outputs for kind in output.get("data", {})} for cell in cells]
    assert "text/html" in kinds[2]  # the frame
    assert "image/png" in kinds[3]  # the plot
    printed = "".join(output.get("text", "") for output in cells[1].outputs)
    assert "round   6  federated   4/4" in printed
    best = torch.load(tmp_path / "digits.pt", weights_only=True)
    assert {name: tuple(value.shape) for name, value in best.items()} == {
        "0.weight": (32, 64),
        "0.bias": (32,),
        "2.weight": (10, 32),
        "2.bias": (10,),
    }
