"""Audits of honest jobs give no alarm, and those of jobs with a fault give one.

Each audit is `isthmus privacy audit` of a job with four devices and a model of 515 parameters
(`harness/audited_task.py`), with the default confidence of 0.9999. Kinds of jobs, in turn:
`gaussian` (noise of the server, one round), `distributed` (noise of devices in a secure sum),
`correlated` (three rounds) and `examples` (DP-SGD on the devices). Faults are those of the tests
(`tests/simulation/audit_faults.py`), each planted into the real steps of a job whose audit has so
many canaries that it misses one in a hundred at most.

Figures: `alarms/honest`, audits of honest jobs that gave an alarm, of `runs/honest`;
`found/<fault>`, the part of the audits with a fault that gave one; `measured/<kind>`, the largest
lower bound on epsilon over the claimed epsilon; and `seconds/<kind>`, of an honest audit.
With `--datasets`, of ten devices with digits, images of MNIST and letters instead: with noise,
`data/<digits|mnist|letters>/<device|example>/<claimed|measured|guesses|seconds>`; and without,
`membership/<digits|mnist|letters>/<device|example>`, the areas under the curves of the attacks.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from harness import code_of_tests, command_line, figures
from harness.figures import Target
from regime_simulation.readers import MNIST_FILES

from isthmus.errors import UserError
from isthmus.job import parse_job
from isthmus_privacy.dp.auditing import CONFIDENCE
from isthmus_simulation.audit.audit import Audit, AuditReport
from isthmus_simulation.audit.membership import MembershipReport
from isthmus_simulation.run import Simulation
from isthmus_simulation.virtual_time import VirtualTimeLoop

# The faults are also those of the tests.
code_of_tests.make_importable()

LETTERS_FILE = "letter-recognition.data"
HARNESS = Path(__file__).parent / "harness"
JOB = """
name = "audited"
rounds = 1

[task]
source = "audited_task.py:Audited"

[strategy]
policy = "federated"

[federated]
clients = 4
cohort = 4
local_steps = 10
batch_size = 40
secure_aggregation = false

[simulation]
processes = 1
training = "one-by-one"
"""
DEVICES = "epsilon=4.4, delta=1e-5, clip=0.5"
KINDS: Mapping[str, Sequence[str]] = {
    "gaussian": (f'privacy={{mechanism="gaussian", {DEVICES}}}',),
    "distributed": (
        f'privacy={{mechanism="distributed", {DEVICES}}}',
        "federated.secure_aggregation=true",
    ),
    "correlated": (f'privacy={{mechanism="correlated", {DEVICES}}}', "rounds=3"),
    "examples": ("federated.privacy={epsilon=6, delta=1e-3}",),
}
"""Jobs, as changes of `JOB`."""
TWICE = ("rounds=4", "privacy.participations=1")
FAULTS: Mapping[str, tuple[str, str, Sequence[str], int]] = {
    "half_noise": ("gaussian", "weaker_sum", (), 400),
    "half_noise_shares": ("distributed", "weaker_shares", (), 1000),
    "half_noise_steps": ("examples", "weaker_steps", (), 600),
    "repeated_noise": ("gaussian", "repeated_noise", ("rounds=2",), 100),
    "no_clip": ("gaussian", "long_updates", (), 400),
    "no_clip_of_gradients": ("examples", "long_gradients", (), 600),
    "wrong_sampling": ("examples", "frequent_examples", (), 600),
    "double_participation": ("gaussian", "repeated_devices", TWICE, 500),
}
"""The kind of job, the fault of the tests, more changes of the job, and canaries."""
DATA = """
name = "audited-data"
rounds = 5

[task]
source = "audited_data.py:Classified"

[strategy]
policy = "federated"

[federated]
clients = 10
cohort = 10
local_epochs = 4
batch_size = 20

[simulation]
processes = 1
training = "one-by-one"
"""
DATA_SETS = ("digits", "mnist", "letters")
UNITS: Mapping[str, Sequence[str]] = {
    "device": ('privacy={mechanism="distributed", epsilon=8, delta=1e-4}',),
    # Each of the two devices has the canaries of 90 examples.
    "example": (
        "federated.privacy={epsilon=8, delta=1e-3}",
        "federated.cohort=2",
        "federated.secure_aggregation=false",
    ),
}
"""Jobs, as changes of `DATA`."""
OF_DATA = 500
"""Canaries."""
TARGETS = {"alarms/honest": Target(at_most=0), "found/*": Target(at_least=1)}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of all measurements."""

    honest: int = 200
    """Audits, of all kinds together."""
    canaries: int = 200
    """Canaries of an honest audit."""
    faulty: int = 2
    """Audits of each fault."""
    faults: Sequence[str] = tuple(FAULTS)


QUICK = Sizes(honest=8, canaries=100, faulty=1, faults=("half_noise", "no_clip"))
SMOKE = Sizes(honest=4, canaries=40, faulty=1, faults=("repeated_noise",))


def audited(kind: str, canaries: int, more: Sequence[str] = ()) -> AuditReport:
    """Audit a job of a kind, with changes."""
    report = report_of(JOB, [*KINDS[kind], *more], canaries)
    assert isinstance(report, AuditReport)
    return report


def report_of(text: str, changes: Sequence[str], canaries: int) -> AuditReport | MembershipReport:
    """Audit a job."""
    job = parse_job(text, list(changes))
    audit = Audit(job, HARNESS, unit=None, canaries=canaries, confidence=CONFIDENCE, run=simulated)
    return audit.report()


def of_data_sets(folder: Path, results: dict[str, float]) -> str:
    """Audit the jobs with real data; returns a table."""
    rows = []
    for name in DATA_SETS:
        of_set = f"task.data={folder}", f"task.settings.rows={name}"
        for unit, changes in UNITS.items():
            start = time.monotonic()
            report = report_of(DATA, [*of_set, *changes], OF_DATA)
            assert isinstance(report, AuditReport)
            found = report.measurement
            seconds = time.monotonic() - start
            figures_of = {
                "claimed": found.claimed,
                "measured": found.epsilon,
                "guesses": found.guesses,
                "seconds": seconds,
            }
            results |= {f"data/{name}/{unit}/{key}": value for key, value in figures_of.items()}
            cells = (f"{found.claimed:.2f}", f"{found.epsilon:.2f}", str(found.guesses))
            rows.append((f"{name}, {unit}", *cells, f"{seconds:.0f} s"))
            print(*rows[-1], report.is_alarm, file=sys.stderr, flush=True)
        without = report_of(DATA, of_set, OF_DATA)
        assert isinstance(without, MembershipReport)
        assert without.example is not None
        results[f"membership/{name}/device"] = without.device.area
        results[f"membership/{name}/example"] = without.example.area
        areas = f"area {without.device.area:.3f}", f"area {without.example.area:.3f}"
        rows.append((f"{name}, without noise", *areas, "", ""))
        print(*rows[-1], without.right, without.epsilon, file=sys.stderr, flush=True)
    return figures.table(("job", "claimed", "measured", "guesses", "one takes"), rows)


def simulated(simulation: Simulation) -> None:
    """Run a simulation to its end."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(simulation.run())


def fault(name: str) -> Callable[[], AbstractContextManager[object]]:
    """A fault of the tests."""
    from tests.simulation import audit_faults

    planted: Callable[[], AbstractContextManager[object]] = getattr(audit_faults, name)
    return planted


def _more_options(parser: argparse.ArgumentParser) -> None:
    command_line.add_data(parser)
    parser.add_argument("--datasets", action="store_true", help="audit jobs with real data instead")
    parser.add_argument("--honest", type=int, metavar="N", help="audits of honest jobs")


@command_line.script
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    options = command_line.options(__doc__ or "", argv, _more_options)
    sizes = command_line.of_size(options, full=Sizes(), quick=QUICK, smoke=SMOKE)
    honest = sizes.honest if options.honest is None else options.honest
    if honest < len(KINDS):
        raise UserError(f"--honest {honest} is less than the {len(KINDS)} kinds of jobs")
    results: dict[str, float] = {}
    if options.datasets:
        command_line.needs("sklearn", "scikit-learn")
        folder = command_line.data_folder(options, *MNIST_FILES, LETTERS_FILE)
        print(of_data_sets(folder, results))
        figures.write(options.json, "audit", figures.machine(), results, {})
        return 0
    faulty_rows = []
    for name in sizes.faults:
        print(f"{name} ...", file=sys.stderr, flush=True)
        kind, of_tests, more, canaries = FAULTS[name]
        with fault(of_tests)():
            faulty = [audited(kind, canaries, more) for _ in range(sizes.faulty)]
        caught = sum(each.is_alarm for each in faulty)
        largest = max(each.measurement.epsilon / each.measurement.claimed for each in faulty)
        results[f"found/{name}"] = caught / len(faulty)
        cells = f"{caught} of {len(faulty)}", f"{largest:.0%}"
        faulty_rows.append((f"{name}, {kind}", *cells, ""))
    reports: dict[str, list[AuditReport]] = {kind: [] for kind in KINDS}
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(honest):
        kind = tuple(KINDS)[number % len(KINDS)]
        start = time.monotonic()
        reports[kind].append(audited(kind, sizes.canaries))
        seconds[kind].append(time.monotonic() - start)
        alarms = sum(each.is_alarm for of_kind in reports.values() for each in of_kind)
        print(f"{number + 1} honest, {alarms} alarms", file=sys.stderr, flush=True)
    results["alarms/honest"] = alarms
    results["runs/honest"] = honest
    rows = []
    for kind, of_kind in reports.items():
        found = [each.measurement for each in of_kind]
        results[f"measured/{kind}"] = max(each.epsilon / each.claimed for each in found)
        results[f"seconds/{kind}"] = statistics.median(seconds[kind])
        of_them = f"{sum(each.is_alarm for each in of_kind)} of {len(found)}"
        cells = of_them, f"{results[f'measured/{kind}']:.0%}"
        rows.append((f"honest, {kind}", *cells, f"{results[f'seconds/{kind}']:.1f} s"))
    rows += faulty_rows
    header = ("audits", "alarms", "largest measured / claimed epsilon", "one takes")
    print(figures.table(header, rows))
    figures.write(options.json, "audit", figures.machine(), results, TARGETS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
