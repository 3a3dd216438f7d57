"""Runs whose policy follows a list of plans."""

import pytest
from tests.server.rounds.policies import FOLLOWS_PLANS, write_policy


@pytest.fixture
def planned(deployment, tmp_path):
    """Job keys of a policy that returns these plans, one for each round."""
    written = []

    def planned(plans):
        written.append(plans)
        source = FOLLOWS_PLANS.format(plans=plans)
        return (
            write_policy(tmp_path, f"plans_{len(written)}", source),
            f"rounds={len(plans)}",
        )

    return planned
