"""A Ray that asks nobody for a token is refused, unless the person who launches accepts it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.datacenter.launch.real_ray import RayCluster
from tests.machine import needs_ray

pytestmark = needs_ray


def test_a_cluster_without_a_token_is_refused_unless_it_is_accepted(tmp_path: Path) -> None:
    words = ["datacenter", "launch", "--scheduler", "ray", "--server", "127.0.0.1:1", "--ranks"]
    words += ["1", "--state", str(tmp_path / "state"), "--option", "gpus=9", "--option", "wait=1"]
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        cluster = RayCluster(Path(folder), "disabled", nodes=1)
        try:
            said = [
                subprocess.run(
                    [sys.executable, "-m", "isthmus.cli", *words, *more],
                    env={
                        **cluster.environment,
                        "RAY_ADDRESS": cluster.address,
                        "RAY_AUTH_MODE": mode,
                    },
                    capture_output=True,
                    text=True,
                ).stderr
                for mode, *more in (
                    ("disabled",),
                    ("token",),  # which this cluster takes without having asked for it
                    ("disabled", "--option", "authentication=none"),
                )
            ]
        finally:
            cluster.close()
    *refusals, accepted = said
    for refused in refusals:
        assert refused.startswith("isthmus: this Ray cluster asks nobody for a token: all who")
        assert refused.endswith(" or accept that by --option authentication=none\n")
    assert accepted.startswith("isthmus: Ray found no room within 1 s: asked for 1 node with 1 CPU")
