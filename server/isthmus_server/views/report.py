"""What a run came to: one document for programs, one page for people."""

from __future__ import annotations

from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from isthmus_server.storage.store import Store


def document(store: Store) -> dict[str, Any]:
    """The report of a run; programs may rely on its keys."""
    status, reason, final = store.status()
    return {
        "run_id": store.run_id,
        "job": store.job.model_dump(mode="json"),
        "status": status,
        "reason": reason,
        "rounds": [row["outcome"]["round"] for row in store.attempts("committed")],
        "failed_attempts": [row["outcome"]["round"] for row in store.attempts("failed")],
        "events": store.events(),
        "final": final,
    }


def page(report: dict[str, Any]) -> RenderableType:
    """The same, to be read."""
    table = Table(title=f"{report['run_id']}: {report['status']}", title_justify="left")
    for column in ("round", "regime", "because", "took part", "held-out", "cost", "s"):
        table.add_column(column, overflow="fold")
    for row in sorted(
        report["rounds"] + report["failed_attempts"], key=lambda r: (r["round"], r["attempt"])
    ):
        people = row["participants"]
        table.add_row(
            str(row["round"]) + (f" try {row['attempt']}" if row["attempt"] > 1 else ""),
            row["regime"],
            Text(row.get("error") or row["reason"], style="red" if "error" in row else ""),
            f"{people['accepted']} of {people['invited']}",
            Text(figures(row["metrics"])),
            f"{row['cost']['price']:g}",
            f"{row['seconds']:.2f}",
        )
    parts: list[RenderableType] = [table]
    incidents = [
        f"round {row['round']}: {receipt['participant']} {receipt['status']}: {receipt['reason']}"
        for row in report["rounds"] + report["failed_attempts"]
        for receipt in row["receipts"]
        if receipt["reason"]
    ]
    incidents += [
        f"{event['participant']} {event['kind']}: {event['reason']}"
        for event in report["events"]
        if event["kind"] in ("left", "declined")
    ]
    if incidents:
        parts.append(Text("\n".join(["what else happened:", *(f"  {line}" for line in incidents)])))
    if report["reason"]:
        parts.append(Text(f"it ended because: {report['reason']}"))
    if report["final"]:
        total = sum(row["cost"]["price"] for row in report["rounds"] + report["failed_attempts"])
        parts.append(
            Text(
                f"final model: {figures(report['final']['metrics'])}, cost {total:g}\n"
                f"  {report['final']['model_path']}\n  sha256 {report['final']['model_sha256']}"
            )
        )
    return Group(*parts)


def show(report: dict[str, Any], console: Console) -> None:
    """Print the page."""
    console.print(page(report), soft_wrap=False)


def figures(metrics: dict[str, float]) -> str:
    """Metrics on one line; shares as percentages read better than as fractions."""
    return " ".join(
        f"{name} {value:.1%}" if name == "accuracy" else f"{name} {value:.4g}"
        for name, value in sorted(metrics.items())
    )
