"""A fleet as deploy/systemd installs it: machines, each with a real systemd and one unit."""

import json
from pathlib import Path

import pytest
from tests.end_to_end import systemd_machines

UNITS = Path(__file__).parents[2] / "deploy/systemd"
STATE = Path("/var/lib/isthmus")
REASON = systemd_machines.missing()

pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)


class Installation:
    """A server of the units, and machines that join it; `folder` has the job and its task."""

    def __init__(self, machines, folder):
        """Create the server and start its unit."""
        self.machines = machines
        self.folder = folder
        self.server = machines.start("server", [UNITS / "isthmus-server.service"])
        self.manage(["init"], "--host", "localhost")
        owner = self.server.run("stat", "-c", "%u", f"{STATE}/fleet/")
        self.install_task(self.server, STATE / "fleet/tasks", owner)
        self.server.run("systemctl", "start", "isthmus-server")
        self.server.wait_for_log("isthmus-server", "joining at")

    def manage(self, command, *arguments):
        """Run a command of the server on its state directory; returns what it printed."""
        words = ("server", *command, str(STATE / "fleet"), *arguments)
        return self.server.isthmus(*words, dynamic=True)

    def install_task(self, machine, directory, owner):
        """Copy the task to a machine."""
        (machine.folder / "task.py").write_text((self.folder / "task.py").read_text())
        machine.run("install", "-d", "-o", owner, "-g", owner, "-m", "700", str(directory))
        machine.run("install", "-o", owner, "-g", owner, "/mnt/task.py", str(directory))

    def join(self, name, role, links=()):
        """Start a machine that joins, and its unit; a device dials `links` in turn."""
        unit = "isthmus-datacenter" if role == "datacenter" else "isthmus-device"
        machine = self.machines.start(name, [UNITS / f"{unit}.service"], users=["isthmus"])
        token = self.manage(["token", "create"], "--name", name, "--kind", role)
        state = STATE / {"client": "device"}.get(role, role)
        machine.isthmus(role, "join", "localhost:9401", token, "--state", str(state))
        if role == "operator":
            return machine
        tasks = state / ("membership/tasks" if role == "datacenter" else "tasks")
        self.install_task(machine, tasks, "isthmus")
        if role == "client":
            (machine.folder / "policy.toml").write_text("[privacy]\nclients_min = 2\n")
            machine.run("install", "-o", "isthmus", "/mnt/policy.toml", str(state))
        if links:
            (started,) = [
                line
                for line in (UNITS / f"{unit}.service").read_text().splitlines()
                if line.startswith("ExecStart=")
            ]
            dialled = "".join(f" --server {link}" for link in links)
            edit(machine, unit, "ExecStart=", started + dialled)
        machine.run("systemctl", "start", unit)
        return machine

    def aggregator(self, name, port):
        """Start a machine with an aggregator that listens at a port."""
        unit = "isthmus-aggregator"
        machine = self.machines.start(f"sums-{port}", [UNITS / f"{unit}.service"])
        token = self.manage(["token", "create"], "--name", name, "--kind", "aggregator")
        state = f"/var/lib/{unit}/membership"
        join = ("server", "aggregator", "join", state, "localhost:9401", token)
        machine.isthmus(*join, dynamic=True, user=unit)
        edit(machine, unit, f"Environment=ADDRESS=127.0.0.1:{port}")
        machine.run("systemctl", "start", unit)
        machine.wait_for_log(unit, f"devices at 127.0.0.1:{port}")
        return machine

    def finished(self, operator, *changes):
        """Submit the job and wait for its end; returns its report."""
        (operator.folder / "job.toml").write_text((self.folder / "job.toml").read_text())
        usual = ("federated.clients=0", "datacenter.ranks=0", "time.lease_seconds=10")
        sets = [part for change in (*usual, *changes) for part in ("--set", change)]
        state = ["--state", str(STATE / "operator")]
        job = operator.isthmus("submit", "/mnt/job.toml", *state, *sets)
        log = operator.isthmus("logs", job, "--follow", *state)
        assert log.endswith(f"{job} finished: all rounds are done"), log
        operator.isthmus("fetch", job, *state, "--output", str(STATE / "result"))
        return json.loads(operator.run("cat", str(STATE / "result/report.json")))


def edit(machine, unit, *lines):
    """Give a unit a drop-in, as `systemctl edit` does."""
    drop_in = machine.folder / "units" / f"{unit}.service.d/edited.conf"
    drop_in.write_text("\n".join(["[Service]", *lines, ""]))
    machine.run("systemctl", "daemon-reload")


def test_devices_behind_two_aggregators_finish_a_job_from_the_units(folder, tmp_path):
    with systemd_machines.Machines(tmp_path) as machines:
        site = Installation(machines, folder)
        ports = {"localhost": 9500, "localhost_2": 9501}
        aggregators = [site.aggregator(*each) for each in ports.items()]
        for number in range(4):
            link = f"localhost:{9500 + number % 2}"
            site.join(f"phone-{number}", "client", links=(link, "localhost:9400"))
        operator = site.join("alice", "operator")
        report = site.finished(
            operator,
            *("federated.cohort=4", "federated.quorum=4", "rounds=2"),
            *("strategy.policy=federated", "strategy.schedule=[]"),
        )
        for row in report["rounds"]:
            assert [each["status"] for each in row["receipts"]] == ["accepted"] * 4
        for machine in aggregators:
            log = machine.log("isthmus-aggregator")
            assert log.count("hands over the sum of 2 vectors") >= 2, log
            machine.run("systemctl", "stop", "isthmus-aggregator")
            result = machine.run("systemctl", "show", "-P", "Result", "isthmus-aggregator")
            assert (result, machine.log("isthmus-aggregator").splitlines()[-1][-7:]) == (
                "success",
                "stopped",
            )


def test_units_of_all_roles_finish_a_job_in_their_sandboxes(folder, tmp_path):
    with systemd_machines.Machines(tmp_path) as machines:
        site = Installation(machines, folder)
        phones = [site.join(f"phone-{number}", "client") for number in range(3)]
        site.join("cluster", "datacenter")
        operator = site.join("alice", "operator")
        report = site.finished(
            operator,
            *("federated.cohort=3", "rounds=4", "federated.quorum=3", "federated.download_bits=4"),
            "strategy.schedule=[{regime='hybrid',rounds=2},{regime='federated',rounds=2}]",
        )
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
