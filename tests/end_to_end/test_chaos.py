"""A job survives a short plan of faults in a whole deployment."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests import forked


def test_a_short_plan_of_faults_violates_nothing(folder: Path) -> None:
    arguments = ["chaos", "job.toml", "--seed", "2", "--minutes", "0.3", "--json"]
    for change in ("strategy.policy=federated", "datacenter.ranks=0", "rounds=10"):
        arguments += ["--set", change]
    process, pipe = forked.start(arguments, folder, os.environ)
    with os.fdopen(os.dup(pipe.fileno()), encoding="utf-8") as output:
        report = json.loads(output.read())
    process.join()
    assert report["violations"] == []
    assert process.exitcode == 0
    assert report["faults"]
    assert report["jobs"] >= 1
