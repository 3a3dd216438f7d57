"""The devices' part of a plan: bytes, cohort, memory, and time on a link."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

from isthmus.job import Job
from isthmus.job.planned import EXACT, GIVEN, Figure
from isthmus_server.plan.model_parts import ModelParts
from isthmus_server.plan.update_bytes import model_figures, update_figures

WHERE_MBIT = "time on a link is not said: give its rate by --mbit, or set time.least_rate"
"""Which option says what a plan does not."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedDevices:
    """What a federated round asks of devices and their links."""

    cohort: list[Figure]
    """Updates wanted, updates needed, devices invited."""
    received: list[Figure]
    """Bytes to one device in a round."""
    sent: list[Figure]
    """Bytes from one device in the first round, and in later ones if they differ."""
    run: list[Figure]
    """Bytes to and from all invited devices, if every round is federated."""
    memory: list[Figure]
    """Memory of one device, at least."""
    link: Figure | None
    """Seconds of one device in a round; None without a rate."""
    notes: list[str]

    @classmethod
    def of(
        cls,
        job: Job,
        parts: ModelParts,
        mbit: float | None = None,
        *,
        hybrid: bool = False,
        always: bool = True,
    ) -> Self:
        """Compute it.

        Args:
            job: the job.
            parts: of its model.
            mbit: rate of a device's link in both directions, in megabits per second.
            hybrid: whether rounds may be hybrid.
            always: whether each round asks devices.

        Raises:
            UserError: the updates cannot be encoded, with the reason.
        """
        federated = job.federated
        layout = parts.division.exchanged
        received = model_figures(job, layout)
        if job.strategy.merge == "transfer" and hybrid:
            both = 2 * layout.nbytes  # the datacenter's gradient has the form of a model
            received.append(Figure("model and gradient, hybrid", both, "bytes", EXACT))
        sent = update_figures(job, layout)
        notes = [
            "bytes are those of models and updates; messages, and gradients that a policy asks "
            "for, are on top"
        ]
        if job.evaluation.devices:
            every = job.evaluation.every
            rounds = "round" if every == 1 else f"{every} rounds"
            notes.append(
                f"each of {job.evaluation.devices} devices that evaluate receives the model, "
                f"{layout.nbytes:,} bytes at most, after every {rounds}"
            )
        if job.model.start:
            notes.append("each device gets the files of model.start once, on top")
        if federated.mode == "buffered":
            notes.append(
                "in buffered mode a round is of cohort updates, whenever they arrive; devices that "
                "are broken off, or too late, are on top in bytes and in cost"
            )
        return cls(
            cohort=[
                Figure("cohort", federated.cohort, "updates", GIVEN),
                Figure("quorum", federated.needed, "updates", EXACT),
                Figure("invited", federated.invited, "devices", EXACT),
            ],
            received=received,
            sent=sent,
            run=_of_run(job, received, sent, always=always),
            memory=[
                Figure("parameters and buffers", parts.parameters, "bytes", EXACT),
                Figure("gradients", parts.gradients, "bytes", EXACT),
                Figure("update", 4 * layout.size, "bytes", EXACT),
            ],
            link=_on_link(job, received, sent, mbit),
            notes=notes,
        )

    def to_json(self) -> dict[str, Any]:
        """All figures."""
        listed = {
            name: [each.to_json() for each in getattr(self, name)]
            for name in ("cohort", "received", "sent", "run", "memory")
        }
        link = None if self.link is None else self.link.to_json()
        return {**listed, "link": link, "notes": self.notes}

    def lines(self) -> list[tuple[str, str]]:
        """Names and texts for a terminal."""
        cohort = ", ".join(f"{each.name} {each.value:g}" for each in self.cohort)
        found = [("round", f"{cohort} (as the job says)")]
        found += [("received", f"{each.name}: {each.text}") for each in self.received]
        found += [("sent", f"{each.name}: {each.text}") for each in self.sent]
        found += [("run", f"{each.name}: {each.text}") for each in self.run]
        found += [("memory", f"{each.name}: {each.text}") for each in self.memory]
        found.append(("", "the optimizer's state and activations of a device are on top"))
        link = WHERE_MBIT if self.link is None else self.link.text
        found.append(("link", link))
        return found + [("note", each) for each in self.notes]


def _of_run(job: Job, received: list[Figure], sent: list[Figure], *, always: bool) -> list[Figure]:
    """Bytes of all invited devices in all rounds, if each is federated."""
    devices = job.federated.invited
    later = job.rounds - 1
    whole = received[0]
    down = devices * job.rounds * whole.value
    most_down = devices * job.rounds * max(each.highest for each in received)
    # A device that has evaluated a model, or has the one before, gets less.
    is_sure = not job.federated.sends_changes and not job.evaluation.devices
    least_down = down if is_sure else devices * whole.value
    others = sent[-1]
    up = devices * (sent[0].value + later * others.value)
    most_up = devices * (sent[0].highest + later * others.highest)
    how = sent[0].how
    if devices > job.federated.cohort:
        # Once there are enough updates, the others are not waited for.
        up = up * job.federated.cohort / devices
        how = f"from the updates wanted to those of all invited; {how}"
    bound = whole.how if is_sure else "the first round, to whole models in all"
    if not always:
        how = f"if each round asks devices; {how}"
        bound = f"if each round asks devices; {bound}"
    return [
        Figure("to devices", least_down, "bytes", bound, most=most_down),
        Figure("from devices", up, "bytes", how, most=most_up),
    ]


def _on_link(
    job: Job, received: list[Figure], sent: list[Figure], mbit: float | None
) -> Figure | None:
    if mbit is not None:
        rate = mbit * 1e6 / 8
        how = f"bytes above at {mbit:g} Mbit/s, as given"
    elif "least_rate" in job.time.model_fields_set:
        rate = job.time.least_rate
        how = f"bytes above at time.least_rate={rate:g} bytes/s"
    else:
        return None
    least = min(each.value for each in received) + min(each.value for each in sent)
    most = max(each.highest for each in received) + max(each.highest for each in sent)
    return Figure("a device's transfers in a round", least / rate, "s", how, most=most / rate)
