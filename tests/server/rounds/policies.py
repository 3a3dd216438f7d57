"""Policies that tests write next to the task, for the server to load by name."""

TRANSFER = {"regime": "hybrid", "merge": "transfer"}
"""A plan in which devices add the datacenter's gradient to their own."""

FOLLOWS_PLANS = """
from isthmus_server.strategy import Plan

PLANS = {plans!r}
DEFAULTS = {{"regime": "federated", "reason": "it is planned"}}

class Mine:
    def __init__(self, strategy): pass

    def plan(self, seen):
        return Plan(**{{**DEFAULTS, **PLANS[seen.round - 1]}})
"""

COMPARES_MODELS = """
from isthmus_server.strategy import Compare, Plan

class Mine:
    '''Compares models on {devices} devices before the second round, which trains the best one.'''

    def __init__(self, strategy): pass

    def plan(self, seen):
        if seen.round != 2 or seen.refused:
            return Plan("federated", " ".join(seen.refused) or "it is the first", dict(seen.state))
        if not seen.comparisons:
            return Compare({models!r}, {devices}, "to know", {{"asked": True}})
        comparison = seen.comparisons[0]
        best = min(comparison.models, key=lambda model: comparison.score[model])
        return Plan("federated", "devices like " + best, dict(seen.state), start=best)
"""

WAITS = """
from isthmus_server.strategy import Stop, Wait

class Mine:
    def __init__(self, strategy): pass

    def plan(self, seen):
        if seen.elapsed < {until}:
            return Wait({seconds}, "it is early")
        return Stop("it is late")
"""


def write_policy(folder, module, source):
    """Write a policy into the folder of the task; returns the key of a job that names it.

    A module is loaded once in a process, so its name also contains that of the test's folder.
    """
    module = f"{module}_{folder.name.replace('-', '_')}"
    (folder / f"{module}.py").write_text(source)
    return f"strategy.policy={module}:Mine"
