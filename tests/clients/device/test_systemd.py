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
