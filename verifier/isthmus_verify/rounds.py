"""The rounds of a run: that they follow one another, and that their records add up."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from isthmus_verify.chain import canonical
from isthmus_verify.charges import TOLERANCE, Charge, Charges
from isthmus_verify.fields import Fields
from isthmus_verify.messages import random_group
from isthmus_verify.sums import SignedSum, SignedSums
from isthmus_verify.violation import Violation, shown

CURRENT = "current"
SERVED = "served"
_STATUSES = ("accepted", "rejected", "dropped")
_RECEIPT = (
    "bytes_in",
    "bytes_out",
    "examples",
    "group",
    "late",
    "loss",
    "messages_in",
    "messages_out",
    "participant",
    "reason",
    "regime",
    "seconds",
    "sent",
    "staleness",
    "started",
    "status",
    "steps",
)
_STAGES = ("invited", "started", "sent", "accepted", "rejected", "dropped")
_COST = (
    "bytes_down",
    "bytes_up",
    "datacenter_seconds",
    "device_bytes",
    "device_seconds",
    "price",
)
_ATTEMPT = (
    "attempt",
    "cost",
    "elapsed",
    "epsilon",
    "metrics",
    "model_sha256",
    "participants",
    "reason",
    "receipts",
    "regime",
    "round",
    "seconds",
    "started_at",
)
_ROUND = (
    *_ATTEMPT,
    "comparisons",
    "cosine",
    "evaluation",
    "gradients",
    "groups",
    "noise",
    "norms",
    "training",
)
_FAILED = (*_ATTEMPT, "error", "given_up")
MIN_GROUPS = 3
"""Fewest random groups of a round."""
_REGIMES = ("federated", "datacenter", "hybrid")


@dataclasses.dataclass(frozen=True)
class JobFacts:
    """What the checks of rounds need of the job."""

    secure: bool
    buffered: bool
    privacy: Fields | None
    """The table of the job, if devices are charged for rounds."""
    distributed: bool
    """Whether devices add noise themselves."""
    quorum: int
    """Fewest updates of a round; 0 if the job leaves it to its default."""
    client_update: float
    """Price of a device in a round."""
    recomputes: bool
    """Whether a datacenter computes the running statistics of each round."""
    robust_minimum: int
    """Fewest devices in the sum of a random group; 0 without robust sums."""
    robust_groups: int
    """Most random groups of a round; 0 without robust sums."""

    @classmethod
    def of(cls, job: Fields) -> JobFacts:
        """Read them."""
        federated = job.table("federated")
        privacy = job.table("privacy") if job.has("privacy") else None
        return cls(
            secure=federated.flag("secure_aggregation"),
            buffered=federated.text("mode") == "buffered",
            privacy=privacy,
            distributed=privacy is not None and privacy.text("mechanism") == "distributed",
            quorum=federated.count("quorum") if federated.has("quorum") else 0,
            client_update=job.table("prices").number("client_update"),
            recomputes=job.table("exchange").text("buffers") == "recompute",
            robust_minimum=federated.count("robust_minimum") if federated.has("robust") else 0,
            robust_groups=federated.count("robust_groups") if federated.has("robust") else 0,
        )


@dataclasses.dataclass(frozen=True)
class Plan:
    """An attempt that was about to begin."""

    round: int
    attempt: int
    invited: frozenset[str]
    datacenters: frozenset[str]
    draw: int
    start: str
    """SHA-256 of the model that it begins with; empty if the server did not have it."""
    regime: str
    reason: str
    measures: bool
    """Whether datacenters that do not train in it may give a gradient."""
    by_group: bool
    """Whether there may be a sum for each group of devices."""


class Rounds:
    """The attempts of a transcript, in order."""

    def __init__(self, job: JobFacts, sums: SignedSums, charges: Charges) -> None:
        self._job = job
        self._sums = sums
        self._charges = charges
        self._plan: Plan | None = None
        self._planned: set[tuple[int, int]] = set()
        self._attempt = 0
        """Last attempt at the next round."""
        self.committed = 0
        """Last committed round."""
        self.models: dict[str, str] = {}
        """Digests of the models that the last commit has, by name."""
        self._in_datacenter = False
        self._groups: dict[str, str] = {}
        """Groups of the devices of the attempt that is checked, by device, as its receipts say."""
        self._charged: list[Charge] = []
        """Charges of the attempt that is checked."""
        self._initial = ""
        """Digest of the model that the run began with, as soon as it is known."""
        self.counts = Counter[str]()
        self.receipts = 0
        self.secure_rounds = 0
        self.signed_rounds = 0
        self.signed_starts = 0
        self.served: dict[int, str] = {}
        """Digest of the served model by committed round."""
        self._metrics: dict[int, dict[str, Any]] = {}
        """Figures of the evaluation by committed round; empty for one that was not evaluated."""
        self._best: dict[int, str] = {}
        self._current: dict[int, str] = {}
        """Digest of the current model by committed round, where the server has it."""

    # -- plans ---------------------------------------------------------------------------------

    def plan(self, content: Fields) -> None:
        """Check a plan.

        Raises:
            Violation: it does not follow the last commit.
        """
        content.only("attempt", "datacenters", "decision", "draw", "invited", "round", "start")
        round_ = content.count("round")
        attempt = content.count("attempt")
        where = f"the plan of round {round_} attempt {attempt}"
        if round_ != self.committed + 1:
            raise Violation(f"{where} follows the commit of round {self.committed}")
        if attempt <= self._attempt:
            raise Violation(f"{where} follows attempt {self._attempt} at this round")
        self._attempt = attempt
        start = content.table("start")
        start.only("name", "sha256")
        digest = start.digest("sha256") if start.has("sha256") else ""
        if content.count("draw") and not self._job.secure:
            raise Violation(f"{where} has a draw, and its devices were not drawn")
        answer = content.table("decision").table("answer")
        if answer.text("start") != start.text("name"):
            raise Violation(
                f"{where} starts from {shown(start.text('name'))}, and was decided to start from "
                f"{shown(answer.text('start'))}"
            )
        self._check_start(start.text("name"), digest, where)
        self._planned.add((round_, attempt))
        self._plan = Plan(
            round=round_,
            attempt=attempt,
            invited=frozenset(content.texts("invited")),
            datacenters=frozenset(content.texts("datacenters")),
            draw=content.count("draw"),
            start=digest,
            regime=answer.text("regime"),
            reason=answer.text("reason"),
            measures=answer.flag("measure_gradients"),
            by_group=answer.flag("by_group"),
        )
        self.counts["plan"] += 1

    def _check_start(self, name: str, digest: str, where: str) -> None:
        """Check that a round begins with the last committed model, or one that the run has kept."""
        known = self.models.get(name, "")
        if name == CURRENT and self._in_datacenter:
            known = ""  # only the datacenter has it
        if digest != known:
            raise Violation(
                f"{where} starts from the model {shown(name)} with the digest "
                f"{digest or 'none'}, and the last commit has {known or 'none'}"
            )

    # -- outcomes ------------------------------------------------------------------------------

    def failed(self, content: Fields) -> None:
        """Check a failed attempt."""
        content.only("record")
        record = content.table("record")
        plan = self._record(record, committed=False)
        if record.has("model_sha256"):
            raise Violation(f"round {plan.round} attempt {plan.attempt} failed, and names a model")
        self._plan = None
        self.counts["failed"] += 1

    def round(self, content: Fields) -> None:
        """Check a committed round, and take over its models.

        Raises:
            Violation: something about it does not hold.
        """
        content.only("ledger_head", "model_in_datacenter", "models", "optimizer", "record")
        record = content.table("record")
        plan = self._record(record, committed=True)
        where = f"round {plan.round}"
        models = content.digests("models")
        if content.has("optimizer"):
            content.digest("optimizer")
        self._check_ledger(plan, record, content.text("ledger_head"), where)
        self._in_datacenter = content.flag("model_in_datacenter")
        served = models.get(SERVED, models.get(CURRENT, ""))
        stated = record.digest("model_sha256") if record.has("model_sha256") else ""
        if self._in_datacenter:
            if stated:
                raise Violation(f"{where} names a model that is only in the datacenter")
        elif not served or served != stated:
            raise Violation(
                f"the record of {where} names the model {stated or 'none'}, and its commit "
                f"{served or 'none'}"
            )
        self.models = models
        self.served[plan.round] = stated
        self._metrics[plan.round] = record.table("metrics").values
        self._best[plan.round] = models.get("best", "")
        if not self._in_datacenter:
            self._current[plan.round] = models.get(CURRENT, "")
        self.committed = plan.round
        self._attempt = 0
        self._plan = None
        self.counts["round"] += 1

    def _record(self, record: Fields, *, committed: bool) -> Plan:
        """Check what the records of both kinds of outcome have."""
        plan = self._plan
        record.only(*(_ROUND if committed else _FAILED))
        round_ = record.count("round")
        attempt = record.count("attempt")
        where = f"round {round_} attempt {attempt}"
        if plan is None or (plan.round, plan.attempt) != (round_, attempt):
            raise Violation(f"{where} ended without a plan before it")
        regime = record.text("regime")
        if regime not in _REGIMES:
            raise Violation(f"{where} has the regime {shown(regime)}")
        if (regime, record.text("reason")) != (plan.regime, plan.reason):
            raise Violation(
                f"{where} was {shown(regime)} because {shown(record.text('reason'))}, and was "
                f"planned as {shown(plan.regime)} because {shown(plan.reason)}"
            )
        self._groups = {}
        accepted, sent, started = self._check_receipts(record, plan, where, committed=committed)
        self._check_cost(record, plan, where, committed=committed)
        for key in ("started_at", "seconds", "elapsed"):
            record.number(key)
        if record.has("epsilon") and (self._job.privacy is None or record.number("epsilon") < 0):
            raise Violation(
                f"{where} states epsilon {shown(record.get('epsilon'))}, which no such job has"
            )
        self._charged = []
        if self._job.privacy is not None and started:
            self._charged = self._charges.check_round(
                round_,
                attempt,
                invited=plan.invited,
                answered=sent,
                privacy=self._job.privacy,
                where=where,
            )
        sums = self._sums.of_round.get((round_, attempt), [])
        for each in sums:
            self._check_sum(each, plan, where)
        if committed:
            self._check_sums(sums, plan, accepted, regime, where)
            if self._job.robust_minimum and accepted:
                self._check_left_out(record, where)
        return plan

    def _check_ledger(self, plan: Plan, record: Fields, head: str, where: str) -> None:
        """Check what a commit remembers of the ledger, and the epsilon that its record states."""
        line = self._charges.check_head(head, where)
        privacy = self._job.privacy
        if any(charge.number > line for charge in self._charged):
            raise Violation(f"{where} remembers no line of the privacy ledger with its own charge")
        if privacy is None:
            return
        stated = record.number("epsilon")
        least = self._charges.epsilon_at(line, privacy)
        if least is not None and stated < least * (1 - TOLERANCE):
            raise Violation(
                f"{where} states epsilon {stated:.6g}, and its charges add up to {least:.6g}"
            )

    def _check_receipts(
        self, record: Fields, plan: Plan, where: str, *, committed: bool
    ) -> tuple[set[str], set[str], set[str]]:
        """The devices that were accepted, have sent, and have started."""
        seen = set[tuple[str, str]]()
        counted = Counter[str]()
        devices: dict[str, set[str]] = {"accepted": set(), "sent": set(), "started": set()}
        for receipt in record.tables("receipts"):
            name = receipt.text("participant")
            regime = receipt.text("regime")
            status = receipt.text("status")
            if status not in _STATUSES:
                raise Violation(f"{where} has a receipt with the status {shown(status)}")
            if (name, regime) in seen:
                raise Violation(f"{where} has two receipts of {shown(name)}")
            seen.add((name, regime))
            asked = plan.invited if regime == "federated" else plan.datacenters
            late = self._job.buffered and regime == "federated"  # invited in an earlier round
            # It gives a gradient or running statistics, and no update.
            measured = (plan.measures or self._job.recomputes) and regime == "datacenter"
            if name not in asked and not late and not measured:
                raise Violation(
                    f"{where} has a receipt of {shown(name)}, whom its plan did not ask"
                )
            counted["invited"] += 1
            counted[status] += 1
            flags = {key for key in ("started", "sent") if receipt.flag(key)}
            counted.update(flags)
            receipt.only(*_RECEIPT)
            for key in ("examples", "steps", "staleness"):
                receipt.count(key)
            if receipt.flag("late") and status != "dropped":
                raise Violation(f"{where} has {status} a result of {shown(name)} that was late")
            if receipt.count("staleness") and not self._job.buffered:
                raise Violation(f"{where} has a result of {shown(name)} for an earlier round")
            if receipt.number("seconds") < 0:
                raise Violation(f"{where} has a receipt of {shown(name)} with less than no time")
            group = receipt.text("group") if receipt.has("group") else ""
            if group and not (self._job.robust_minimum and regime == "federated"):
                raise Violation(
                    f"{where} has a receipt of {shown(name)} in the group {shown(group)}, and the "
                    "job has no random groups"
                )
            if regime != "federated":
                continue
            self._groups[name] = group
            if status == "accepted" and not {"started", "sent"} <= flags:
                raise Violation(
                    f"{where} has accepted a result of {shown(name)}, which has sent none"
                )
            if status == "accepted":
                devices["accepted"].add(name)
            for flag in flags:
                devices[flag].add(name)
        stated = record.table("participants")
        stated.only(*_STAGES)
        for key in _STAGES:
            if stated.count(key) != counted[key]:
                raise Violation(
                    f"{where} counts {stated.count(key)} participants as {key}, and its receipts "
                    f"{counted[key]}"
                )
        if committed and not self._job.buffered:
            # In buffered mode a device that was asked here may answer in a later round.
            expected = {(name, "federated") for name in plan.invited}
            expected |= {(name, "datacenter") for name in plan.datacenters}
            if missing := expected - seen:
                name, _ = min(missing)
                raise Violation(f"{where} has no receipt of {shown(name)}, whom its plan has asked")
        self.receipts += counted["invited"]
        self._check_weights(record, len(devices["accepted"]), where)
        return devices["accepted"], devices["sent"], devices["started"]

    def _check_weights(self, record: Fields, accepted: int, where: str) -> None:
        """Check that the weight of a secure mean is at least that of its usable updates.

        Who has which weight is nobody's to see, and with noise the total is not exact.
        """
        training = record.table("training") if record.has("training") else None
        if training is None or not training.has("federated") or self._job.privacy is not None:
            return
        figures = training.table("federated")
        unusable = figures.number("unusable") if figures.has("unusable") else 0.0
        if not 0 <= unusable <= accepted:
            raise Violation(f"{where} counts {unusable:g} unusable updates of {accepted}")
        if figures.has("examples") and figures.number("examples") < accepted - unusable:
            raise Violation(
                f"{where} has a mean over {figures.number('examples'):g} examples of "
                f"{accepted - unusable:g} devices with a usable update"
            )

    def _check_cost(self, record: Fields, plan: Plan, where: str, *, committed: bool) -> None:
        """Check that the bytes and seconds are those of the receipts and of what was measured.

        The price of a datacenter's steps follows from its plan, of which the server makes more than
        is known here; that of all else is checked.
        """
        found = Counter[str]()
        prices = [0.0]
        seconds: dict[str, list[float]] = {"federated": [], "datacenter": []}
        for receipt in record.tables("receipts"):
            up = receipt.count("bytes_in") + receipt.count("messages_in")
            down = receipt.count("bytes_out") + receipt.count("messages_out")
            found.update(bytes_up=up, bytes_down=down)
            regime = receipt.text("regime")
            if regime not in seconds:
                raise Violation(f"{where} has a receipt with the regime {shown(regime)}")
            if regime == "federated":
                found["device_bytes"] += up + down
                # A failed attempt pays for the devices that it has reached.
                if committed or receipt.flag("started"):
                    prices.append(self._job.client_update)
            seconds[regime].append(receipt.number("seconds"))
        if record.has("comparisons"):
            for comparison in record.tables("comparisons"):
                found["device_bytes"] += comparison.count("device_bytes")
                prices.append(comparison.number("price"))
                for receipt in comparison.tables("receipts"):
                    up = receipt.count("bytes_in") + receipt.count("messages_in")
                    down = receipt.count("bytes_out") + receipt.count("messages_out")
                    found.update(bytes_up=up, bytes_down=down)
        if record.has("evaluation"):
            evaluation = record.table("evaluation")
            measured = evaluation.count("device_bytes")
            down = evaluation.count("bytes_down")
            prices.append(evaluation.number("price"))
            found.update(device_bytes=measured, bytes_down=down, bytes_up=measured - down)
        cost = record.table("cost")
        cost.only(*_COST)
        least = math.fsum(prices)
        more = cost.number("price") - least
        close = math.isclose(more, 0.0, abs_tol=1e-6 * (1 + least))
        without_steps = plan.regime == "federated" and not plan.measures
        exact = without_steps or not committed
        if min(prices) < 0 or (more < 0 and not close) or (exact and not close):
            raise Violation(
                f"{where} has the price {cost.number('price'):.6g}, and its devices and "
                f"measurements {least:.6g}"
            )
        for key in ("bytes_up", "bytes_down", "device_bytes"):
            if cost.count(key) != found[key]:
                raise Violation(
                    f"{where} counts {cost.count(key)} as {key}, and its receipts {found[key]}"
                )
        for key, regime in (("device_seconds", "federated"), ("datacenter_seconds", "datacenter")):
            if not math.isclose(cost.number(key), math.fsum(seconds[regime]), abs_tol=1e-6):
                raise Violation(f"{where} counts other {key} than its receipts")

    def _check_sum(self, signed: SignedSum, plan: Plan, where: str) -> None:
        """Check a sum that devices have signed against the plan that asked them."""
        if not self._job.buffered and not signed.roster <= plan.invited:
            raise Violation(
                f"{shown(min(signed.roster - plan.invited))} has signed a sum of {where}, whose "
                "plan did not ask it"
            )
        if signed.draw != plan.draw:
            raise Violation(
                f"the devices of {where} have signed the draw {signed.draw}, and its plan has "
                f"{plan.draw}"
            )
        grouped = plan.by_group or self._job.robust_minimum
        self._check_random_group(signed, where)
        if not self._job.buffered and not grouped and signed.clients_min < self._job.quorum:
            raise Violation(
                f"the devices of {where} have signed a sum over at least {signed.clients_min}, and "
                f"the job's quorum is {self._job.quorum}"
            )
        if self._job.distributed != (signed.noise_multiplier is not None):
            raise Violation(
                f"the devices of {where} have signed a sum "
                + ("with noise" if signed.noise_multiplier is not None else "without noise")
                + ", and the job is another"
            )
        if signed.noise_multiplier is None:
            return
        # Theorem 1 of Kairouz et al. 2021: at least this, whatever the discrete noise adds.
        least = 0.5 / signed.noise_multiplier**2 if signed.noise_multiplier > 0 else math.inf
        for charge in self._charged:
            if charge.run != self._charges.run_id:
                raise Violation(
                    f"{where} was charged by the run {shown(charge.run)}, and its devices have "
                    "signed a sum of this one"
                )
            if charge.event.number("rho") < least * (1 - TOLERANCE):
                raise Violation(
                    f"{where} was charged with rho {charge.event.number('rho'):.6g}, and the noise "
                    f"that its devices have signed costs {least:.6g}"
                )

    def _check_random_group(self, signed: SignedSum, where: str) -> None:
        """Check the group of a robust sum: who is in it, how many, and what receipts say of it."""
        if not self._job.robust_minimum:
            return
        found = random_group(signed.group)
        if found is None or not MIN_GROUPS <= found[1] <= self._job.robust_groups:
            raise Violation(
                f"the devices of {where} have signed the sum of the group {shown(signed.group)}, "
                f"and the job has 3 to {self._job.robust_groups} random groups"
            )
        if signed.clients_min < self._job.robust_minimum:
            raise Violation(
                f"the devices of {where} have signed a sum over at least {signed.clients_min}, and "
                f"federated.robust_minimum is {self._job.robust_minimum}"
            )
        # Without a lottery the server has divided the devices.
        if signed.draw and not signed.in_group:
            raise Violation(
                f"the devices of {where} have signed the sum of the group {shown(signed.group)}, "
                f"and the draw {signed.draw} has put one of them into another group"
            )
        for name in sorted(signed.roster & self._groups.keys()):
            if self._groups[name] != signed.group:
                raise Violation(
                    f"{where} has a receipt of {shown(name)} in the group "
                    f"{shown(self._groups[name])}, and it has signed a sum of {shown(signed.group)}"
                )

    def _check_left_out(self, record: Fields, where: str) -> None:
        """Check that groups of a round, and those that were left out, are as its receipts say.

        The rule that has left them out compared vectors that are not in a transcript.
        """
        accepted = Counter[str]()
        blamed = Counter[str]()
        for receipt in record.tables("receipts"):
            if (receipt.text("regime"), receipt.text("status")) != ("federated", "accepted"):
                continue
            group = receipt.text("group") if receipt.has("group") else ""
            accepted[group] += 1
            blamed[group] += receipt.text("reason").startswith(
                f"the sum of its group {group} was left out"
            )
        left_out = {group for group, number in blamed.items() if number}
        for group in sorted(left_out):
            if blamed[group] != accepted[group]:
                raise Violation(
                    f"{blamed[group]} of {accepted[group]} receipts in the group {shown(group)} of "
                    f"{where} say that its sum was left out, and the others do not"
                )
        groups = record.table("groups") if record.has("groups") else Fields({}, where)
        if groups.values.keys() != accepted.keys():
            raise Violation(
                f"{where} has the groups {shown(sorted(groups.values))}, and its receipts "
                f"{shown(sorted(accepted))}"
            )
        found = {random_group(name) for name in accepted}
        divisions = {0 if group is None else group[1] for group in found}
        most = self._job.robust_groups
        if len(divisions) != 1 or not MIN_GROUPS <= min(divisions) <= most:
            raise Violation(
                f"the groups of {where} are not of one division of its devices into 3 to {most}"
            )
        if len(left_out) == len(accepted):
            raise Violation(f"{where} has left out the sums of all of its groups")
        if sum(accepted.values()) < self._job.quorum:
            raise Violation(
                f"{where} has {sum(accepted.values())} devices in the sums of its groups, and the "
                f"job's quorum is {self._job.quorum}"
            )
        if len(accepted) < MIN_GROUPS:
            raise Violation(f"{where} has a robust sum of {len(accepted)} groups")
        for name, devices in accepted.items():
            stated = groups.table(name)
            if stated.count("devices") != devices:
                raise Violation(
                    f"{where} counts {stated.count('devices')} devices in the group {shown(name)}, "
                    f"and its receipts {devices}"
                )
            if stated.flag("left_out") != (name in left_out):
                raise Violation(
                    f"{where} has "
                    + ("left out" if stated.flag("left_out") else "used")
                    + f" the sum of the group {shown(name)}, and its receipts say otherwise"
                )

    def _check_sums(
        self,
        sums: Sequence[SignedSum],
        plan: Plan,
        accepted: set[str],
        regime: str,
        where: str,
    ) -> None:
        """Check that the devices of a secure round are those that have signed its sum."""
        if not self._job.secure or not accepted:
            return
        self.secure_rounds += 1
        if not sums:
            if self.signed_rounds:
                raise Violation(
                    f"{where} has no signed sum, and an earlier round has one: from then on they "
                    "are all kept"
                )
            return
        self.signed_rounds += 1
        if self._job.robust_minimum and len({each.group for each in sums}) != len(sums):
            raise Violation(f"the devices of {where} have signed two sums of one random group")
        if self._job.robust_minimum or plan.by_group:
            # The sum of a group may be refused after it was signed: then nobody of it is accepted.
            sums = [each for each in sums if each.devices & accepted]
        signed = frozenset[str]().union(*(each.devices for each in sums))
        if signed != accepted:
            raise Violation(
                f"the receipts of {where} accept {len(accepted)} devices, which are not the "
                f"{len(signed)} that are in the sums that devices have signed"
            )
        if sum(len(each.devices) for each in sums) != len(signed):
            raise Violation(f"a device is in two signed sums of {where}")
        for each in sums:
            for number, model in each.starts.items():
                known = self._current.get(number - 1, "")
                if number > plan.round or (known and model != known):
                    raise Violation(
                        f"the devices of {where} have signed the start model {model} of round "
                        f"{number}, which the run has not committed as such"
                    )
        # A full buffer has updates from several models, and a hybrid round may move devices' start.
        if self._job.buffered or regime != "federated":
            return
        models = {each.model for each in sums}
        if len(models) != 1:
            raise Violation(f"the devices of {where} have signed different start models")
        (model,) = models
        if plan.start and model != plan.start:
            raise Violation(
                f"the devices of {where} have signed the start model {model}, and the last commit "
                f"has {plan.start}"
            )
        self.signed_starts += bool(plan.start)
        if not plan.start and not self.models:
            self._check_initial(model, where)

    def _check_initial(self, model: str, where: str) -> None:
        if self._initial not in ("", model):
            raise Violation(f"the devices of {where} have signed another first model than before")
        self._initial = model

    # -- end -----------------------------------------------------------------------------------

    def end(self) -> None:
        """Check what has to be there when there are no more rounds.

        Raises:
            Violation: something is missing.
        """
        self._sums.check_planned(self._planned)

    def final(self, final: Fields) -> str:
        """Check the final model; returns its digest.

        Raises:
            Violation: it is not a model that the run has committed.
        """
        final.only("best", "metrics", "model_sha256", "round")
        digest = final.digest("model_sha256")
        round_ = final.count("round")
        if round_ > self.committed:
            raise Violation(
                f"the final model is of round {round_}, and {self.committed} is the last"
            )
        if final.flag("best"):
            known = self._best.get(self.committed, "")
            if not known:
                raise Violation("the final model is the best one, and the run has kept none")
        else:
            known = self.served.get(round_, "")
            if round_ != self.committed:
                raise Violation(
                    f"the final model is of round {round_}, and the last committed is "
                    f"{self.committed}"
                )
        if known and digest != known:
            raise Violation(
                f"the final model has the digest {digest}, and the run has committed {known}"
            )
        metrics = self._metrics.get(round_)
        if metrics and canonical(metrics) != canonical(final.table("metrics").values):
            raise Violation(f"the final model has other metrics than round {round_}")
        return digest

    @property
    def final_is_known(self) -> bool:
        """Whether a commit names the digest of the final model."""
        return bool(self.served.get(self.committed))
