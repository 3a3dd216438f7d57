"""A fleet as deploy/systemd installs it: five machines, each with a real systemd and one unit."""

import json
from pathlib import Path

import pytest
from tests.end_to_end import systemd_machines

UNITS = Path(__file__).parents[2] / "deploy/systemd"
STATE = Path("/var/lib/isthmus")
REASON = systemd_machines.missing()

pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)


def test_units_of_all_roles_finish_a_job_in_their_sandboxes(folder, tmp_path):
    with systemd_machines.Machines(tmp_path) as machines:
        server = machines.start("server", [UNITS / "isthmus-server.service"])

        def manage(command, *arguments):
            return server.isthmus(
                "server", *command, str(STATE / "fleet"), *arguments, dynamic=True
            )

        def install_task(machine, directory, owner):
            (machine.folder / "task.py").write_text((folder / "task.py").read_text())
            machine.run("install", "-d", "-o", owner, "-g", owner, "-m", "700", str(directory))
            machine.run("install", "-o", owner, "-g", owner, "/mnt/task.py", str(directory))

        manage(["init"], "--host", "localhost")
        owner = server.run("stat", "-c", "%u", f"{STATE}/fleet/")
        install_task(server, STATE / "fleet/tasks", owner)
        server.run("systemctl", "start", "isthmus-server")
        server.wait_for_log("isthmus-server", "joining at")

        def join(name, role):
            unit = "isthmus-datacenter" if role == "datacenter" else "isthmus-device"
            machine = machines.start(name, [UNITS / f"{unit}.service"], users=["isthmus"])
            token = manage(["token", "create"], "--name", name, "--kind", role)
            state = STATE / {"client": "device"}.get(role, role)
            machine.isthmus(role, "join", "localhost:9401", token, "--state", str(state))
            if role == "operator":
                return machine
            tasks = state / ("membership/tasks" if role == "datacenter" else "tasks")
            install_task(machine, tasks, "isthmus")
            if role == "client":
                (machine.folder / "policy.toml").write_text("[privacy]\nclients_min = 2\n")
                machine.run("install", "-o", "isthmus", "/mnt/policy.toml", str(state))
            machine.run("systemctl", "start", unit)
            return machine

        phones = [join(f"phone-{number}", "client") for number in range(3)]
        join("cluster", "datacenter")
        operator = join("alice", "operator")
        (operator.folder / "job.toml").write_text((folder / "job.toml").read_text())
        changes = [
            *("federated.clients=0", "datacenter.ranks=0", "federated.cohort=3", "rounds=4"),
            *("federated.quorum=3", "time.lease_seconds=10", "federated.download_bits=4"),
            "strategy.schedule=[{regime='hybrid',rounds=2},{regime='federated',rounds=2}]",
        ]
        sets = [part for change in changes for part in ("--set", change)]
        state = ["--state", str(STATE / "operator")]
        job = operator.isthmus("submit", "/mnt/job.toml", *state, *sets)
        log = operator.isthmus("logs", job, "--follow", *state)
        assert log.endswith(f"{job} finished: all rounds are done"), log
        operator.isthmus("fetch", job, *state, "--output", str(STATE / "result"))
        report = json.loads(operator.run("cat", str(STATE / "result/report.json")))
        for phone in phones:
            assert (
                "task sandbox: no network (seccomp, namespace); files read-only (Landlock"
                in phone.log("isthmus-device")
            )
        for row in report["rounds"]:
            accepted = {
                each["participant"] for each in row["receipts"] if each["status"] == "accepted"
            }
            expected = {"phone-0", "phone-1", "phone-2"}
            assert accepted == expected | ({"cluster"} if row["regime"] == "hybrid" else set())
        first, *others = (
            {each["bytes_out"] for each in row["receipts"] if each["regime"] == "federated"}
            for row in report["rounds"]
        )
        assert max(max(sizes) for sizes in others) < min(first)  # changes of the model
