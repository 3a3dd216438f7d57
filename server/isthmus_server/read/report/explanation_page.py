"""Print explained decisions: one in full, several in a few lines each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from isthmus.printable import counted, in_a_line
from isthmus_server.budgets.budget import ADJACENCY, UNIT
from isthmus_server.model.summed_evaluation import SummedEvaluation
from isthmus_server.read.report.durations import duration
from isthmus_server.read.report.explain import ExplainedDecision, Explanation
from isthmus_server.read.report.forecasts import compared, in_words
from isthmus_server.read.report.left_out_groups import left_out_sums
from isthmus_server.read.report.report import figures_apart, format_metrics
from isthmus_server.storage.records import EndedAttempt, FailedAttempt
from isthmus_server.strategy.decision import Decision, RequestedComparison
from isthmus_server.strategy.gradients import REST, GradientMeasurement, GroupSum
from isthmus_server.strategy.loading import state_in_words
from isthmus_server.strategy.policy import (
    CURRENT,
    Comparison,
    Forecast,
    Kind,
    Observation,
    Plan,
    Side,
)

INCIDENTS = 8
"""Participants of an attempt that are named."""

_SIDES: dict[Side, str] = {"federated": "devices", "datacenter": "datacenter"}


def show(explanation: Explanation, console: Console) -> None:
    """Print the explanation: one decision in full, several in a few lines each."""
    decisions = explanation.decisions
    title = f"{explanation.run_id}, policy {explanation.policy}: {explanation.status}"
    console.print(Text(title, style="bold"))
    for explained in decisions:
        single = len(decisions) == 1
        console.print(_page(explained, explanation.policy) if single else _paragraph(explained))
    if not decisions:
        console.print("no round has been decided on so far")
    if explanation.reason:
        console.print(Text(f"it ended because: {explanation.reason}"))
    if explanation.device_examples_privacy is not None:
        console.print(Text(f"privacy: {explanation.device_examples_privacy.sentence}"))
    if len(decisions) > 1:
        console.print("add a round's number to print everything that its decision was based on")


def _paragraph(explained: ExplainedDecision) -> RenderableType:
    lines = [title_of(explained)]
    lines += [f"  limits: {sentence}" for sentence in _limits(explained.decision)]
    lines += [f"  asked:  {line}" for line in _comparisons(explained.decision)]
    lines += [f"  then:   {line}" for line in _outcome(explained)]
    return Text("\n".join(lines))


def _page(explained: ExplainedDecision, policy: str) -> RenderableType:
    parts = [_part(title, rows) for title, rows in sections(explained, policy)]
    return Group(Text(title_of(explained)), *parts)


def sections(explained: ExplainedDecision, policy: str) -> list[tuple[str, list[tuple[str, str]]]]:
    """One decision in full: titles, each with rows of a label, which may be empty, and a text.

    `policy` is the name of the policy that decided.
    """
    limits = _limits(explained.decision) or ["nothing: it is within them"]
    parts = [
        ("what the policy saw", list(_observed(explained, policy))),
        ("what the job's limits changed", list(_labelled("", limits))),
    ]
    if explained.stop is None:
        outcome = _outcome(explained) or ["it was not finished"]
        parts.append(("what was planned", list(_labelled("", _planned(explained)))))
        parts.append(("what came of it", list(_labelled("", outcome))))
    return parts


def _part(title: str, rows: Iterable[tuple[str, str]]) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    for row in rows:
        grid.add_row(*(Text(cell) for cell in row))
    return Group(Text(f"\n{title}", style="bold"), Padding(grid, (0, 0, 0, 2)))


def title_of(explained: ExplainedDecision) -> str:
    """What was decided, and why, in a sentence."""
    plan = explained.decision.answer
    round_ = explained.round
    if explained.stop is not None or not isinstance(plan, Plan):
        return f"before round {round_}: the end, because {explained.stop}"
    return f"round {round_}: {plan.regime}, because {plan.reason}"


# -- the observation -------------------------------------------------------------------------------


def _observed(explained: ExplainedDecision, policy: str) -> Iterator[tuple[str, str]]:
    """Everything a decision was based on, as rows of a label and a sentence.

    `policy` is the name of the one that decided.
    """
    decision = explained.decision
    observation = decision.observation
    yield from _labelled("so far", _past(explained))
    devices = counted(observation.clients_ready, "device")
    ready = f"{devices} and {counted(observation.datacenters, 'datacenter')}"
    if observation.clients_ineligible:
        ready += f" ({observation.clients_ineligible} more may not be asked now)"
    cohort = f"a federated round invites {observation.invited()} and needs {observation.quorum}"
    yield "here", f"{ready}; {cohort}"
    if observation.groups:
        counts = observation.groups.items()
        yield "groups", ", ".join(f"{_group(name)}: {count}" for name, count in counts)
    yield from _labelled("forecast", [_window(side, observation) for side in _SIDES])
    kinds: tuple[Kind, ...] = ("datacenter", "federated", "hybrid")
    prices = ", ".join(f"{kind} {observation.price(kind):g}" for kind in kinds)
    yield (
        "a round costs",
        f"{prices}; one device scoring one model {observation.comparison_price:g}",
    )
    yield from _labelled("left", _left(observation))
    yield from _labelled("comparisons", _comparisons(decision) or ["none was requested"])
    yield from _labelled("waited", _waits(decision, by_limit=False))
    kept = [name for name in observation.models if name not in ("current", "served", "initial")]
    if kept:
        yield "kept models", ", ".join(kept)
    if observation.state:
        yield from _labelled("its notes", state_in_words(policy, observation.state))


def _limits(decision: Decision) -> list[str]:
    """What the job's limits changed: waits, and adjustments of the last answer."""
    waits = [f"waited {line}" for line in _waits(decision, by_limit=True)]
    return [*waits, *decision.adjustments]


def _waits(decision: Decision, *, by_limit: bool) -> list[str]:
    return [
        f"{duration(wait.seconds)}: {wait.reason}"
        for wait in decision.waits
        if wait.by_limit == by_limit
    ]


def _labelled(label: str, lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Rows of which only the first has the label."""
    for number, line in enumerate(lines):
        yield ("" if number else label), line


def _past(explained: ExplainedDecision) -> list[str]:
    if not explained.recent:
        return ["this was the first round"]
    counts = ", ".join(f"{number} {kind}" for kind, number in sorted(explained.regimes.items()))
    lines = [f"rounds: {counts}"]
    for past in explained.recent:
        metrics = format_metrics(past.metrics) if past.metrics else "not evaluated"
        cosine = "" if past.cosine is None else f", cosine of both sides {past.cosine:.2f}"
        lines.append(f"round {past.round}, {past.regime}: held-out {metrics}{cosine}")
        lines += [f"  {_gradients(past.gradients)}"] if past.gradients is not None else []
        lines += [f"  {line}" for line in _groups(past.groups)]
    return lines


def _window(side: Side, observation: Observation) -> str:
    forecast = observation.forecast.get(side, Forecast())
    name = _SIDES[side]
    if forecast.changes_in is None:
        return f"{name}: {'always' if forecast.ready else 'never'} within a window"
    position = "within their hours for" if forecast.ready else "outside of their hours for"
    share = f"{forecast.share:.0%} of the time that is left is within"
    return f"{name}: {position} another {duration(forecast.changes_in)}; {share}"


def _left(observation: Observation) -> list[str]:
    """The rest of each limit that the job sets."""
    lines = []
    if observation.budget is not None and observation.budget_left is not None:
        lines.append(f"{max(observation.budget_left, 0):g} of the budget of {observation.budget:g}")
    if observation.seconds_left is not None:
        lines.append(f"{duration(observation.seconds_left)} of the run's time")
    if observation.bytes_left is not None:
        lines.append(f"{max(observation.bytes_left, 0) / 1e6:.3g} MB to and from devices")
    if observation.epsilon is not None:
        lines.append(
            f"epsilon {observation.epsilon_left:.4g} of {observation.epsilon:g} for the {UNIT} "
            "that was asked most"
        )
    lines.append(f"{counted(observation.rounds - observation.round + 1, 'round')} with this one")
    if observation.target is not None:
        lines.append(f"until the target, {observation.target}")
    return lines


def _comparisons(decision: Decision) -> list[str]:
    """Each requested comparison: models, reason, and the scores or why there are none."""
    results = list(decision.observation.comparisons)
    made = sum(request.refused is None for request in decision.requested)
    lines = []
    while len(results) > made:  # those from before a crash have no request here
        lines += _scores(results.pop(0))
    for request in decision.requested:
        lines.append(_request(request))
        if request.refused is not None:
            lines.append(f"  not made: {request.refused}")
        else:
            lines += _scores(results.pop(0))
    return lines


def _request(request: RequestedComparison) -> str:
    models = " against ".join(request.models)
    return f"{models} on {counted(request.devices, 'device')}, because {request.reason}"


def _scores(comparison: Comparison) -> list[str]:
    first, *others = comparison.models
    lines = []
    for name in others:
        difference = comparison.difference[name]
        error = comparison.standard_error[name]
        word = "better" if difference < 0 else "worse"
        significant = comparison.beats(name) or comparison.loses(name)
        doubt = "" if significant else ", which may be chance"
        lines.append(
            f"  {counted(comparison.devices, 'device')} found {name} {word} than {first} by "
            f"{abs(difference):.4f} (+-{error:.4f}){doubt}, for {comparison.price:g}"
        )
    return lines


# -- plan and outcome ------------------------------------------------------------------------------


def _planned(explained: ExplainedDecision) -> list[str]:
    """The plan in words, a line for each part of it."""
    plan = explained.decision.answer
    observation = explained.decision.observation
    assert isinstance(plan, Plan)  # a stop has no page about a plan
    lines = []
    if plan.regime != "datacenter":
        cohort = plan.cohort or observation.cohort
        lines.append(f"{len(explained.invited)} devices are invited for {cohort} updates")
    if plan.regime != "federated":
        steps = plan.datacenter_steps or observation.datacenter_steps
        lines.append(
            f"the datacenter's gradient is the mean of {steps} batches"
            if (plan.merge or observation.merge) == "transfer" and plan.regime == "hybrid"
            else f"{counted(steps, 'step')} in the datacenter"
        )
    if plan.regime == "hybrid" and plan.merge:
        lines.append(f"merged by merge={plan.merge!r}")
    lines += [
        f"the weight of {name} is {weight:.3g}" if weight else f"{name} is left out"
        for name, weight in sorted(plan.datacenter_weights.items())
    ]
    if plan.by_group:
        lines.append("each group of devices is summed by itself, if it is large enough")
    lines += [
        f"the weight of {_group(name)} is {weight:.3g} times its examples"
        for name, weight in sorted(plan.group_weights.items())
    ]
    if plan.measure_gradients:
        lines.append("both sides measure their gradients at the model that the round starts from")
    if plan.start != CURRENT:
        lines.append(f"from the model {plan.start!r}")
    if plan.reset_optimizer:
        lines.append("the server optimizer begins anew")
    if plan.step_scale != 1:
        lines.append(f"the step is scaled by {plan.step_scale:g}")
    for name, model in plan.keep.items():
        lines.append(f"{model!r} is kept as {name!r}" if model else f"{name!r} is not kept on")
    forecast = explained.decision.forecast
    return [*lines, in_words(forecast)] if forecast is not None else lines


def _incidents(record: EndedAttempt) -> list[str]:
    """What happened to the participants that were not accepted, or not without incident."""
    groups, others = left_out_sums(record)
    named = [receipt for receipt in others if receipt.reason]
    lines = [f"{who}: {reason}" for who, reason in groups]
    lines += [
        in_a_line(f"{receipt.participant} {receipt.outcome}: {receipt.reason}")
        for receipt in named[:INCIDENTS]
    ]
    more = len(named) - INCIDENTS
    return [*lines, f"and {more} more; `isthmus report --json` has all"] if more > 0 else lines


def _outcome(explained: ExplainedDecision) -> list[str]:
    """The outcome of each attempt, in a few lines."""
    lines = []
    evaluated = [past.metrics for past in explained.recent if past.metrics]
    before = evaluated[-1] if evaluated else {}
    for record in explained.attempts:
        took = f"{record.seconds:.2f} s, cost {record.cost.price:g}"
        if record.epsilon is not None:
            took += f", epsilon {record.epsilon:.4g} for one {UNIT} ({ADJACENCY})"
        if isinstance(record, FailedAttempt):
            lines.append(f"try {record.attempt} failed after {took}: {record.error}")
            lines += _incidents(record)
            continue
        counts = record.participants
        parts = [f"{counts.accepted} of {counts.invited} took part"]
        parts += [f"{counts.rejected} rejected"] if counts.rejected else []
        late = sum(receipt.late for receipt in record.receipts)
        parts += [f"{counts.dropped - late} dropped"] if counts.dropped > late else []
        parts += [f"{late} late"] if late else []
        moved = f"{record.cost.device_bytes / 1e6:.3g} MB to and from devices"
        lines.append(", ".join([*parts, took, moved]))
        lines += _incidents(record)
        lines += record.incidents
        lines += [_gradients(record.gradients)] if record.gradients is not None else []
        lines += _groups(record.groups)
        lines += _on_devices(record.evaluation) if record.evaluation is not None else []
        if record.metrics:
            change = _change(before, record.metrics)
            lines.append(f"held-out {format_metrics(record.metrics)}{change}")
        forecast = explained.decision.forecast
        comparison = compared(forecast, record) if forecast is not None else ""
        lines += [comparison] if comparison else []
    return lines


def _on_devices(evaluation: SummedEvaluation) -> list[str]:
    """How many devices evaluated the model, and what groups of them found."""
    lines = [f"{evaluation.devices} of {evaluation.asked} devices evaluated the model"]
    lines += [f"an evaluation on devices failed: {evaluation.error}"] if evaluation.error else []
    lines += evaluation.clipped.values()
    return lines + [f"{who}: {figures}" for who, figures in figures_apart(evaluation)]


def _gradients(measured: GradientMeasurement) -> str:
    """The lengths of both gradients and their cosine, or why the devices' is not known.

    >>> _gradients(GradientMeasurement(devices_norm=2.0, datacenter_norm=0.5, cosine=0.25,
    ...     examples=60, scale=1.0))
    'gradients at its start: devices 2, datacenter 0.5, cosine 0.25'
    """
    parts = []
    if measured.devices_norm is not None:
        parts.append(f"devices {measured.devices_norm:.4g}")
    elif measured.lost > measured.rounding:
        parts.append(f"devices unknown, because clipping removed {measured.lost:.0%} of it")
    else:
        parts.append(f"devices unknown, because {measured.rounding:.0%} of it may be rounding")
    if measured.datacenter_norm is not None:
        parts.append(f"datacenter {measured.datacenter_norm:.4g}")
    if measured.cosine is not None:
        parts.append(f"cosine {measured.cosine:.2f}")
    sentence = f"gradients at its start: {', '.join(parts)}"
    if len(measured.datacenters) < 2:
        return sentence
    each = (
        f"{name} {figures.norm:.4g}"
        + (f" (cosine {figures.cosine:.2f})" if figures.cosine is not None else "")
        for name, figures in sorted(measured.datacenters.items())
    )
    return f"{sentence}; of the datacenters {', '.join(each)}"


def _groups(sums: Mapping[str, GroupSum]) -> list[str]:
    """A line for the sum of each group.

    >>> _groups({REST: GroupSum(devices=5, examples=60, loss=1.25, norm=2.0, cosine=0.5)})
    ['the other devices: 5 updates, 60 examples, loss 1.25, update 2, cosine 0.50']
    >>> _groups({"random-1-of-3": GroupSum(devices=9, examples=9, loss=2, norm=50, left_out=True)})
    ['group random-1-of-3: 9 updates, 9 examples, loss 2, update 50, left out']
    """
    lines = []
    for name, one in sums.items():
        parts = [f"{one.devices} updates", f"{one.examples} examples"]
        parts += [f"loss {one.loss:.4g}"] if one.loss is not None else []
        parts.append(f"update {one.norm:.4g}")
        parts += [f"gradient {one.gradient_norm:.4g}"] if one.gradient_norm is not None else []
        parts += [f"cosine {one.cosine:.2f}"] if one.cosine is not None else []
        parts += ["left out"] if one.left_out else []
        lines.append(f"{_group(name)}: {', '.join(parts)}")
    return lines


def _group(name: str) -> str:
    return "the other devices" if name == REST else f"group {name}"


def _change(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    if "loss" not in before or "loss" not in after:
        return ""
    decrease = before["loss"] - after["loss"]
    return f"; the loss {'fell' if decrease >= 0 else 'rose'} by {abs(decrease):.4g}"
