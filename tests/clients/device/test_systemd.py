import subprocess
import sys

from tests.machine import needs_systemd

from isthmus_clients.device.owner_limits import OwnerLimits
from isthmus_clients.device.systemd import unit


def test_the_unit_has_the_command_and_the_limits():
    limits = OwnerLimits(cpu_percent=50, memory_mb=900)
    lines = unit(["isthmus", "client", "start", "--data", "my 100% $data"], "/s", limits).split(
        "\n"
    )
    assert "ExecStart=isthmus client start --data 'my 100%% $$data'" in lines
    assert {"CPUQuota=50%", "MemoryMax=900M", "WorkingDirectory=/s"} <= set(lines)
    assert "RestartPreventExitStatus=1" in lines


def test_only_the_given_directories_can_be_written_to():
    lines = unit(["isthmus"], "/s", OwnerLimits(), ["/home/me/my 100% state", "/t"]).split("\n")
    assert "ProtectSystem=strict" in lines
    assert [line for line in lines if line.startswith("ReadWritePaths=")] == [
        'ReadWritePaths="/home/me/my 100%% state"',
        'ReadWritePaths="/t"',
    ]


def test_the_unit_leaves_the_task_its_own_restrictions():
    """Its process makes namespaces and filters of its own, and PyTorch generates code."""
    text = unit(["isthmus"], "/s", OwnerLimits())
    for directive in ("RestrictNamespaces", "SystemCallFilter", "MemoryDenyWriteExecute"):
        assert directive not in text


@needs_systemd
def test_systemd_accepts_the_unit(tmp_path):
    text = unit(
        [sys.executable, "-m", "isthmus.cli"],
        str(tmp_path),
        OwnerLimits(cpu_percent=50, memory_mb=900),
        [str(tmp_path)],
    )
    (tmp_path / "isthmus.service").write_text(text)
    command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / "isthmus.service")]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    ours = [line for line in found.stderr.splitlines() if "isthmus.service" in line]
    assert ours == []
