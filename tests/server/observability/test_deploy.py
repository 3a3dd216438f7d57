"""The dashboard and the alerts ask for what the product exports, and for nothing else."""

import json
import re
from pathlib import Path

import pytest
import yaml

from isthmus_server.observability.metrics import METRICS, OF_THE_PROCESS
from isthmus_server.observability.run_figures import OUTCOMES

DEPLOY = Path(__file__).parents[3] / "deploy"
GIVEN = {"up", "process_resident_memory_bytes"}
"""Metrics of Prometheus itself and of its client for Python."""
OF_PROMETHEUS = {"instance", "le"}


def dashboard():
    return json.loads((DEPLOY / "grafana-dashboard.json").read_text())


def expressions():
    """All queries, by where they are."""
    rules = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"][0]["rules"]
    found = {rule["alert"]: rule["expr"] for rule in rules}
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", []):
            found[f"{panel['title']} {target['refId']}"] = target["expr"]
    return found


@pytest.mark.parametrize("where", expressions())
def test_a_query_uses_metrics_and_labels_that_exist(where):
    expression = expressions()[where]
    assert expression.count("(") == expression.count(")")
    names = re.findall(r"\b(isthmus_\w+|up|process_\w+)\b(?:\{([^}]*)\})?", expression)
    labels = set()
    for name, matchers in names:
        if name in GIVEN:
            continue
        base = re.sub(r"_(bucket|sum|count)$", "", name) if name not in METRICS else name
        assert base in METRICS, name
        known = {*METRICS[base][2], *(() if base in OF_THE_PROCESS else ("job",))}
        labels |= known
        for label, _, values in re.findall(r'(\w+)(=~|=)"([^"]*)"', matchers):
            assert label in known, (name, label)
            if label == "outcome":
                assert set(values.split("|")) <= set(OUTCOMES)
        if METRICS[base][0] == "counter":
            assert re.search(rf"(rate|increase)\({name}", expression), f"{name} is a counter"
    if all(name in GIVEN for name, _ in names):
        return
    for grouped in re.findall(r"(?:by|on) \(([^)]*)\)", expression):
        assert set(re.split(r",\s*", grouped)) <= labels | OF_PROMETHEUS


def test_every_metric_is_on_the_dashboard_or_in_an_alert():
    asked = " ".join(expressions().values())
    missing = [name for name in METRICS if not re.search(rf"\b{name}(_bucket)?\b", asked)]
    assert missing == []


def test_the_dashboard_has_panels_of_their_own_place_and_number():
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (column, line)
            for column in range(place["x"], place["x"] + place["w"])
            for line in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert all(column < 24 for column, _ in cells)
        taken |= cells
