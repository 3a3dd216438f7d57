"""What a sweep of faults past one process counts as tried."""

from __future__ import annotations

import pytest

from isthmus_chaos.network_plan import NetworkFault
from isthmus_chaos.network_sweep import NetworkReport, NetworkSweep
from isthmus_chaos.plan import CUT, KILL, MIRROR, SERVER


class Deployment:
    """A deployment in which nothing runs."""

    job = type("Job", (), {"rounds": 2})
    devices = 2
    models_from_mirror = 0

    def jobs(self) -> dict[str, tuple[str]]:
        """Each job goes on."""
        return {"plain": ("running",)}

    async def start(self) -> None:
        """Nothing."""

    async def until_connected(self) -> None:
        """Nothing."""

    async def stop(self) -> list[str]:
        """Nothing went wrong."""
        return []


@pytest.fixture
def checked(monkeypatch):
    """Without files to check."""

    class Checker:
        repeatable = False

        def __init__(self, _: object) -> None:
            self.attempts = self.rounds = {}

        def check_end(self) -> list[str]:
            return []

        def model_bytes(self, _: str) -> int:
            return 1000

    monkeypatch.setattr("isthmus_chaos.network_sweep.InvariantChecker", Checker)


class Sweep(NetworkSweep):
    """Jobs end at once, and their devices get some models from the mirror."""

    models_of_job = 1

    async def _submit(self, kind):
        self.deployment.models_from_mirror += self.models_of_job
        return kind

    async def _until_attempts(self, id_, count):
        return True

    async def _finished(self, id_):
        return True

    async def _check(self, about):
        pass


@pytest.mark.parametrize("models", [0, 3])
async def test_faults_of_a_mirror_that_nobody_uses_are_not_tested(checked, models):
    class Watched(Sweep):
        models_of_job = models

        async def _disturb(self, fault):
            disturbed.append(fault)

    said = []
    disturbed = []
    faults = [NetworkFault("plain", CUT, MIRROR), NetworkFault("plain", KILL, SERVER)]
    report = await Watched(Deployment(), said.append, seed=1, faults=faults).run()
    assert disturbed == (faults if models else faults[1:])
    assert report.not_tested == (0 if models else 1)
    assert [line for line in said if "not tested" in line] == (
        [] if models else [f"{faults[0]}  not tested: nobody gets a model from the mirror"]
    )


async def test_devices_forget_after_a_fault_of_the_mirror_that_it_failed(checked, monkeypatch):
    """They leave it alone for ten minutes, in which its other faults would meet nobody."""
    carried_out = []

    class Injector:
        def __init__(self, *_: object) -> None:
            pass

        async def run(self, faults):
            carried_out.extend((each.kind, each.target) for each in faults)

    monkeypatch.setattr("isthmus_chaos.network_sweep.FaultInjector", Injector)
    faults = [NetworkFault("plain", CUT, MIRROR)]
    report = await Sweep(Deployment(), lambda _: None, seed=1, faults=faults).run()
    assert len(report.faults) == 1
    assert carried_out == [(CUT, MIRROR), (KILL, "phone-0"), (KILL, "phone-1")]


def test_the_summary_is_in_plain_words():
    report = NetworkReport(not_compared=2, not_tested=2, faults=[{}, {}])
    report.why_not_from_mirror = ", as models have less than 64 KiB"
    assert report.summary() == (
        "2 faults met a running job; 0 jobs ended with the model of one without faults; 2 jobs "
        "could not be compared, as timing or the devices in a round decide the model; 2 faults of "
        "the mirror were not tested: nobody got a model from it; no model came from the mirror, as "
        "models have less than 64 KiB; 0 violations"
    )
