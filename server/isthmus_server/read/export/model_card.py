"""A model card: what a model is, how it was trained, and on whose data (Mitchell et al. 2019)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from isthmus import __version__
from isthmus.job import Job
from isthmus.printable import in_a_line
from isthmus_server.read.report.report import Report
from isthmus_server.storage.records import FinalModel

FILE = "MODEL_CARD.md"


def model_card(
    report: Report, job: Job, final: FinalModel, file: str, sha256: str, transcript: str = ""
) -> str:
    """The card of a finished run's model, in Markdown; it names no participant.

    Args:
        report: of the run.
        job: of the run.
        final: its final model.
        file: name of the exported file.
        sha256: of that file.
        transcript: head of the run's transcript; empty for a card without.
    """
    return "\n".join(_lines(report, job, final, file, sha256, transcript)) + "\n"


def _lines(
    report: Report, job: Job, final: FinalModel, file: str, sha256: str, transcript: str
) -> Iterator[str]:
    regimes = Counter(record.regime for record in report.rounds)
    rounds = ", ".join(f"{count} {regime}" for regime, count in sorted(regimes.items()))
    yield f"# {job.name}\n"
    yield f"A model trained with Isthmus {__version__} in the run `{report.run_id}`.\n"
    yield "| | |\n|---|---|"
    yield f"| file | `{file}` |"
    yield f"| SHA-256 | `{sha256}` |"
    if sha256 != final.model_sha256:
        yield f"| SHA-256 of the run's model | `{final.model_sha256}` |"
    if transcript:
        yield f"| head of the run's transcript (`isthmus prove`) | `{transcript}` |"
    yield f"| task | `{in_a_line(job.task.source)}` |"
    yield f"| seed | {job.seed} |"
    if job.model.start is not None:
        yield f"| started from | `{in_a_line(job.model.start)}` |"
        yield f"| SHA-256 of the start | `{job.model.sha256}` |"
    yield f"| rounds | {len(report.rounds)} ({rounds or 'none'}) |"
    yield f"| model of round | {final.round}{', the best' if final.best else ''} |"
    cost = sum(record.cost.price for record in (*report.rounds, *report.failed_attempts))
    yield f"| cost | {cost:g} |"
    yield f"| end | {in_a_line(report.reason)} |\n"
    yield "## Metrics\n"
    if final.metrics:
        yield "| held-out metric | value |\n|---|---|"
        for name, value in sorted(final.metrics.items()):
            yield f"| `{in_a_line(name)}` | {value:.4g} |"
    else:
        yield "The model was not evaluated."
    yield "\n## Data\n"
    yield from _data_statement(report, job)


def _data_statement(report: Report, job: Job) -> Iterator[str]:
    """Lines on whose data the model was trained on, and what the server has seen of them."""
    accepted: dict[str, set[str]] = {"federated": set(), "datacenter": set()}
    for record in report.rounds:
        unused = {name for name, group in record.groups.items() if group.left_out}
        for receipt in record.receipts:
            if receipt.status == "accepted" and receipt.group not in unused:
                accepted[receipt.regime].add(receipt.participant)
    devices = len(accepted["federated"])
    datacenters = len(accepted["datacenter"])
    if devices:
        seen = (
            "only sums of their updates over at least "
            f"{job.federated.smallest_sum} devices (secure aggregation)"
            if job.federated.secure_aggregation
            else "each of their updates (secure aggregation was off)"
        )
        yield f"{devices} devices trained on data that stayed on them. The server received {seen}."
        yield f"{_noise_statement(report)}\n"
    if datacenters:
        spent = report.examples_privacy
        noise = "" if spent is None else f" Each step had noise (DP-SGD): {spent.sentence}."
        who = "datacenters" if datacenters > 1 else "datacenter"
        whose = "their" if datacenters > 1 else "its"
        yield f"{datacenters} {who} trained on data of {whose} own.{noise}\n"
    if job.exchange.has_personal:
        yield (
            "A part of the model is personal (`exchange`): each device has its own, and this file "
            "has the initial values.\n"
        )
    yield "Describe here where the data come from, who may use the model, and for what."


def _noise_statement(report: Report) -> str:
    given = [each for each in (report.privacy, report.device_examples_privacy) if each is not None]
    if not given:
        return (
            "No noise was added (differential privacy): the model may reveal something about the "
            "data that it was trained on."
        )
    sentences = "; ".join(each.sentence for each in given)
    return f"Noise was added, with differential privacy: {sentences}."
