"""Why each round was trained as it was: the stored decisions, for people and for programs.

Everything here is read from the round log, where a decision is written before anything runs: what
the policy saw, what it asked, what the job's limits made of its answer, and what came of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from isthmus.errors import UserError
from isthmus_server.storage.events import RunStopped
from isthmus_server.storage.records import LoggedAttempt
from isthmus_server.storage.store import Store
from isthmus_server.strategy.observation import restored
from isthmus_server.strategy.policy import CURRENT, Comparison, Forecast, Kind, Observation, Side
from isthmus_server.views.report import format_metrics

RECENT = 5
"""Committed rounds before a decision that are shown with it."""

_SIDES: dict[Side, str] = {"federated": "devices", "datacenter": "datacenter"}


def explanation(store: Store, round_: int | None = None) -> dict[str, Any]:
    """The decisions of a run, or that on one round; programs may rely on its keys.

    Each is `{round, seen, recent, asked, waited, limits, plan, attempts}`: the observation without
    its history, of which `recent` has the last rounds; comparisons the policy `asked` for; waits;
    what the job's `limits` changed; the `plan`, None where the run ended instead, with `stop`; and
    the log's row of each attempt at it.

    Raises:
        UserError: no such round was decided on.
    """
    status, reason, _ = store.status()
    decisions = list(_decisions(store))
    if round_ is not None:
        known = [one["round"] for one in decisions]
        decisions = [one for one in decisions if one["round"] == round_]
        if not decisions:
            decided = f"those up to {known[-1]} were" if known else "none was so far"
            raise UserError(f"round {round_} of {store.run_id} was not decided on; {decided}")
    return {
        "run_id": store.run_id,
        "policy": store.job.strategy.policy,
        "rounds": store.job.rounds,
        "status": status,
        "reason": reason,
        "decisions": decisions,
    }


def _decisions(store: Store) -> Iterator[dict[str, Any]]:
    """All of them, oldest first; a round that was tried several times was decided on once."""
    tries: dict[int, list[LoggedAttempt]] = {}
    for row in store.decisions():
        tries.setdefault(row.round, []).append(row)
    committed: list[dict[str, Any]] = []
    for round_, rows in tries.items():
        outcomes = [row.record.to_json() for row in rows if row.record is not None]
        decision = _decision(round_, rows[0].observation, committed)
        yield {**decision, "plan": rows[-1].plan, "attempts": outcomes}
        committed += [outcome for outcome in outcomes if "error" not in outcome]
    stops = [event for event in store.events() if isinstance(event, RunStopped)]
    if stops:
        last = stops[-1]
        decision = _decision(last.round, last.observation, committed)
        yield {**decision, "plan": None, "stop": last.reason, "attempts": []}


def _decision(
    round_: int, logged: Mapping[str, Any], committed: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    apart = ("history", "asked", "waited", "adjustments")
    return {
        "round": round_,
        "seen": {name: value for name, value in logged.items() if name not in apart},
        "recent": [
            {name: row[name] for name in ("round", "regime", "metrics", "cost", "norms", "cosine")}
            for row in committed[-RECENT:]
        ],
        "regimes": dict(Counter(row["regime"] for row in committed)),
        "asked": logged["asked"],
        "waited": logged["waited"],
        "limits": logged["adjustments"],
    }


# -- for people ------------------------------------------------------------------------------------


def show(found: Mapping[str, Any], console: Console) -> None:
    """Print the explanation: one decision in full, several in a few lines each."""
    decisions = found["decisions"]
    title = f"{found['run_id']}, policy {found['policy']}: {found['status']}"
    console.print(Text(title, style="bold"))
    page = _page if len(decisions) == 1 else _paragraph
    for decision in decisions:
        console.print(page(decision))
    if not decisions:
        console.print("no round has been decided on so far")
    if found["reason"]:
        console.print(Text(f"it ended because: {found['reason']}"))
    if len(decisions) > 1:
        console.print("give a round's number to see all that its decision was made of")


def _paragraph(decision: Mapping[str, Any]) -> RenderableType:
    lines = [_title(decision)]
    lines += [f"  limits: {sentence}" for sentence in _limits(decision)]
    lines += [f"  asked:  {line}" for line in _comparisons(decision)]
    lines += [f"  then:   {line}" for line in _outcome(decision)]
    return Text("\n".join(lines))


def _page(decision: Mapping[str, Any]) -> RenderableType:
    held = _limits(decision) or ["nothing: it is within them"]
    parts = [
        _part("what the policy saw", _sights(decision)),
        _part("what the job's limits changed", _labelled("", held)),
    ]
    if decision["plan"] is not None:
        came = _outcome(decision) or ["it was not finished"]
        parts.append(_part("what was planned", _labelled("", _work(decision))))
        parts.append(_part("what came of it", _labelled("", came)))
    return Group(Text(_title(decision)), *parts)


def _part(title: str, rows: Iterable[tuple[str, str]]) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    for row in rows:
        grid.add_row(*(Text(cell) for cell in row))
    return Group(Text(f"\n{title}", style="bold"), Padding(grid, (0, 0, 0, 2)))


def _title(decision: Mapping[str, Any]) -> str:
    plan, round_ = decision["plan"], decision["round"]
    if plan is None:
        return f"before round {round_}: the end, because {decision['stop']}"
    return f"round {round_}: {plan['regime']}, because {plan['reason']}"


# -- what the policy saw ---------------------------------------------------------------------------


def _sights(decision: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Everything a decision was made of, as (what, sentence)."""
    seen = restored(decision["seen"])
    yield from _labelled("so far", _past(decision))
    here = f"{_count(seen.clients_ready, 'device')} and {_count(seen.datacenters, 'datacenter')}"
    if seen.clients_ineligible:
        here += f" ({seen.clients_ineligible} more may not be asked now)"
    yield "here", f"{here}; a federated round invites {seen.invited()} and needs {seen.quorum}"
    yield from _labelled("forecast", [_window(side, seen) for side in _SIDES])
    kinds: tuple[Kind, ...] = ("datacenter", "federated", "hybrid")
    prices = ", ".join(f"{kind} {seen.price(kind):g}" for kind in kinds)
    yield "a round costs", f"{prices}; one device scoring one model {seen.comparison_price:g}"
    yield from _labelled("left", _left(seen))
    yield from _labelled("comparisons", _comparisons(decision) or ["none was asked for"])
    yield from _labelled("waited", _waits(decision, by_limit=False))
    kept = [name for name in seen.models if name not in ("current", "served", "initial")]
    if kept:
        yield "kept models", ", ".join(kept)
    if seen.state:
        noted = ", ".join(f"{name}={value}" for name, value in sorted(seen.state.items()))
        yield "its notes", noted


def _limits(decision: Mapping[str, Any]) -> list[str]:
    """What was changed in the policy's answers to this round, the last one and those before it."""
    waits = [f"waited {line}" for line in _waits(decision, by_limit=True)]
    return [*waits, *decision["limits"]]


def _waits(decision: Mapping[str, Any], *, by_limit: bool) -> list[str]:
    return [
        f"{_duration(one['seconds'])}: {one['reason']}"
        for one in decision["waited"]
        if one["by_limit"] == by_limit
    ]


def _labelled(label: str, lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(lines):
        yield ("" if number else label), line


def _past(decision: Mapping[str, Any]) -> list[str]:
    recent = decision["recent"]
    if not recent:
        return ["this was the first round"]
    counts = ", ".join(f"{number} {kind}" for kind, number in sorted(decision["regimes"].items()))
    lines = [f"rounds: {counts}"]
    for row in recent:
        measured = format_metrics(row["metrics"]) if row["metrics"] else "not evaluated"
        angle = "" if row["cosine"] is None else f", cosine of both sides {row['cosine']:.2f}"
        lines.append(f"round {row['round']}, {row['regime']}: held-out {measured}{angle}")
    return lines


def _window(side: Side, seen: Observation) -> str:
    forecast = seen.forecast.get(side, Forecast())
    who = _SIDES[side]
    if forecast.changes_in is None:
        return f"{who}: {'always' if forecast.ready else 'never'} within a window"
    word = "within their hours for" if forecast.ready else "outside of their hours for"
    share = f"{forecast.share:.0%} of the time that is left is within"
    return f"{who}: {word} another {_duration(forecast.changes_in)}; {share}"


def _left(seen: Observation) -> list[str]:
    """Of each limit that the job sets."""
    lines = []
    if seen.budget is not None and seen.budget_left is not None:
        lines.append(f"{max(seen.budget_left, 0):g} of the budget of {seen.budget:g}")
    if seen.seconds_left is not None:
        lines.append(f"{_duration(seen.seconds_left)} of the run's time")
    if seen.bytes_left is not None:
        lines.append(f"{max(seen.bytes_left, 0) / 1e6:.3g} MB to and from devices")
    lines.append(f"{_count(seen.rounds - seen.round + 1, 'round')} with this one")
    return lines


def _comparisons(decision: Mapping[str, Any]) -> list[str]:
    """Each comparison that was asked for: what for, and what devices said or why they did not."""
    made = [Comparison(**one) for one in decision["seen"]["comparisons"]]
    answered = sum(not asked["refused"] for asked in decision["asked"])
    lines = []
    while len(made) > answered:  # those before a crash
        lines += _scores(made.pop(0))
    for asked in decision["asked"]:
        what = " against ".join(asked["models"])
        lines.append(f"{what} on {_count(asked['devices'], 'device')}, because {asked['reason']}")
        if asked["refused"]:
            lines.append(f"  not made: {asked['refused']}")
        else:
            lines += _scores(made.pop(0))
    return lines


def _scores(made: Comparison) -> list[str]:
    first, *others = made.models
    lines = []
    for name in others:
        by, error = made.difference[name], made.standard_error[name]
        word = "better" if by < 0 else "worse"
        sure = "" if made.beats(name) or made.loses(name) else ", which may be chance"
        lines.append(
            f"  {_count(made.devices, 'device')} found {name} {word} than {first} by "
            f"{abs(by):.4f} (+-{error:.4f}){sure}, for {made.price:g}"
        )
    return lines


# -- what was done ---------------------------------------------------------------------------------


def _work(decision: Mapping[str, Any]) -> list[str]:
    """A plan in words."""
    plan, seen = decision["plan"], restored(decision["seen"])
    lines = []
    if plan["regime"] != "datacenter":
        cohort = plan["cohort"] or seen.cohort
        lines.append(f"{len(plan['invited'])} devices are invited for {cohort} updates")
    if plan["regime"] != "federated":
        lines.append(f"{plan['datacenter_steps'] or seen.datacenter_steps} steps in the datacenter")
    if plan["regime"] == "hybrid" and plan["merge"]:
        lines.append(f"merged by merge={plan['merge']!r}")
    if plan["start"] != CURRENT:
        lines.append(f"from the model {plan['start']!r}")
    if plan["reset_optimizer"]:
        lines.append("the server optimizer begins anew")
    if plan["step_scale"] != 1:
        lines.append(f"the step is scaled by {plan['step_scale']:g}")
    for name, model in plan["keep"].items():
        lines.append(f"{model!r} is kept as {name!r}" if model else f"{name!r} is not kept on")
    return lines


def _outcome(decision: Mapping[str, Any]) -> list[str]:
    """What became of the plan, an attempt a line."""
    lines = []
    evaluated = [row["metrics"] for row in decision["recent"] if row["metrics"]]
    before = evaluated[-1] if evaluated else {}
    for row in decision["attempts"]:
        people, cost = row["participants"], row["cost"]
        took = f"{row['seconds']:.2f} s, cost {cost['price']:g}"
        if "error" in row:
            lines.append(f"try {row['attempt']} failed after {took}: {row['error']}")
            continue
        out = [f"{people[word]} {word}" for word in ("rejected", "dropped") if people[word]]
        took_part = f"{people['accepted']} of {people['invited']} took part"
        lines.append(", ".join([took_part, *out, took, f"{_moved(cost)} to and from devices"]))
        if row["metrics"]:
            change = _change(before, row["metrics"])
            lines.append(f"held-out {format_metrics(row['metrics'])}{change}")
    return lines


def _moved(cost: Mapping[str, Any]) -> str:
    return f"{cost['device_bytes'] / 1e6:.3g} MB"


def _change(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    if "loss" not in before or "loss" not in after:
        return ""
    fell = before["loss"] - after["loss"]
    return f"; the loss {'fell' if fell >= 0 else 'rose'} by {abs(fell):.4g}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _duration(seconds: float) -> str:
    """In words.

    >>> _duration(12), _duration(3600 * 3 + 1200), _duration(-1)
    ('12 s', '3 h 20 min', '0 s')
    """
    minutes, hours = seconds / 60, seconds / 3600
    if minutes < 2:
        return f"{max(seconds, 0):.0f} s"
    if hours < 2:
        return f"{minutes:.0f} min"
    whole, rest = divmod(round(minutes), 60)
    return f"{whole} h {rest} min" if rest else f"{whole} h"
