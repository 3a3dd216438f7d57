"""Every refusal stops an attack, is raised in one place, and its removal is detected."""

import re
from pathlib import Path

import pytest
from tests.privacy import mutation
from tests.privacy.attacks import ATTACKS

import isthmus_clients
import isthmus_privacy
from isthmus.errors import AggregationAborted, IsthmusError, PeerMisbehaved, UpdateError
from isthmus_privacy.crypto.refusal import REFUSALS

CASES = [(code, attack) for code, attacks in ATTACKS.items() for attack in attacks]


@pytest.mark.parametrize(
    ("code", "attack"), CASES, ids=[f"{code}:{attack.__name__}" for code, attack in CASES]
)
def test_attack_is_refused(code, attack):
    with pytest.raises(IsthmusError) as refusal:
        attack()
    assert refusal.value.code == code
    assert isinstance(refusal.value, REFUSALS[code])
    assert len(str(refusal.value)) > 15
    assert "\n" not in str(refusal.value)


def test_every_refusal_has_an_attack():
    assert set(ATTACKS) == set(REFUSALS)


def test_every_refusal_is_raised_in_exactly_one_place():
    sources = "\n".join(
        path.read_text()
        for package in (isthmus_privacy, isthmus_clients)
        for path in Path(package.__path__[0]).rglob("*.py")
        if path.name != "refusal.py"
    )
    made = re.findall(r'\brefusal\.refuse\(\s*"([a-z-]+)"', sources)
    assert sorted(made) == sorted(REFUSALS)
    assert len(re.findall(r"\brefuse\(", sources)) == len(made)


def test_removing_any_refusal_is_detected(capsys):
    report = mutation.check()
    with capsys.disabled():
        print(f"\n{report}")
    assert report.survivors == ()
    assert report.killed == report.refusals == len(REFUSALS)


def test_the_class_of_an_error_names_the_responsible_party():
    assert issubclass(REFUSALS["roster-unsorted"], PeerMisbehaved)
    assert issubclass(REFUSALS["update-not-finite"], UpdateError)
    assert issubclass(REFUSALS["too-few-masked"], AggregationAborted)
