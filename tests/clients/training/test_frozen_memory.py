"""What a process takes to get a frozen base in a smaller type."""

import subprocess
import sys
import textwrap

import pytest
import torch
from safetensors.torch import save_file

MEASURED = """
    import sys
    from pathlib import Path

    import torch
    from torch import nn

    from isthmus.start.loading import ModelStart
    from isthmus.task.scoring.frozen_form import FrozenForm, change_types, smaller_types

    def memory(key):
        rows = dict(row.split(":") for row in Path("/proc/self/status").read_text().splitlines())
        return int(rows[key].split()[0]) / 1024

    def read(path, width, choice):
        with torch.device("meta"):
            layers = [nn.Linear(width, width, bias=False) for _ in range(6)]
        model = nn.Sequential(*layers).requires_grad_(False)
        types = smaller_types(model, choice)
        start = ModelStart(path)
        compared = start.compare(model)
        change_types(model, types)
        form = FrozenForm(path, compared, types, list(types))
        start.fill(model, rounded=types)
        form.fill_int8(model)
        return model

    torch.set_num_threads(1)
    small, path, choice = sys.argv[1:]
    read(Path(small), 8, choice)  # what it loads of PyTorch
    before = memory("VmRSS")
    model = read(Path(path), 2048, choice)
    print(memory("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
@pytest.mark.parametrize(("choice", "most"), [("int8", 24 + 20), ("bfloat16", 48 + 20)])
def test_a_base_takes_little_more_than_its_own_memory_while_it_is_read(tmp_path, choice, most):
    """It has 96 MB in its file, in float32; one layer of it has 16 MB."""
    paths = []
    for width in (8, 2048):
        paths.append(str(tmp_path / f"{width}.safetensors"))
        save_file({f"{index}.weight": torch.randn(width, width) for index in range(6)}, paths[-1])
    command = [sys.executable, "-c", textwrap.dedent(MEASURED), *paths, choice]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert float(printed) < most, printed
