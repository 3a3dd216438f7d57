"""The rounds of a run: that they follow one another, and that their records add up."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence, Set

from isthmus_verify.charges import TOLERANCE, Charge, Charges, check_terms
from isthmus_verify.fields import Fields
from isthmus_verify.messages import random_group
from isthmus_verify.models import CURRENT, BestModel, Models, Start
from isthmus_verify.sums import SignedSum, SignedSums
from isthmus_verify.violation import Violation, shown

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
_REGIMES_OF_POLICIES = {
    "federated": ("federated",),
    "datacenter": ("datacenter",),
    "alternate": ("federated", "datacenter"),
    # A datacenter changes the model first, where no cohort of devices may be summed.
    "hybrid": ("hybrid", "datacenter"),
}
"""Regimes of the policies that leave no other one; of all others any. These policies also start
each round from the last model, keep none, and ask for no groups or gradients."""


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
    policy: str
    averages: bool
    """Whether the served model is an average of the rounds' models."""
    best: BestModel | None
    """Which model is the best; None if none is kept."""

    @classmethod
    def of(cls, job: Fields) -> JobFacts:
        """Read them."""
        federated = job.table("federated")
        strategy = job.table("strategy")
        privacy = job.table("privacy") if job.has("privacy") else None
        if privacy is not None:
            check_terms(privacy)
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
            policy=strategy.text("policy"),
            averages=strategy.number("served_average") > 0,
            best=BestModel.of(job.table("evaluation")),
        )


@dataclasses.dataclass(frozen=True)
class Plan:
    """An attempt that was about to begin."""

    round: int
    attempt: int
    invited: frozenset[str]
    datacenters: frozenset[str]
    draw: int
    start: Start
    """The model that it begins with."""
    regime: str
    reason: str
    measures: bool
    """Whether datacenters that do not train in it may give a gradient."""
    by_group: bool
    """Whether there may be a sum for each group of devices."""
    keep: dict[str, str]
    """Models that it keeps, by name; empty for what it keeps no more."""

    @property
    def where(self) -> str:
        """The attempt in words, for sentences."""
        return f"round {self.round} attempt {self.attempt}"

    @property
    def may_stay(self) -> bool:
        """Whether its model can be in one datacenter alone."""
        return self.regime == "datacenter" and len(self.datacenters) == 1


class Rounds:
    """The attempts of a transcript, in order."""

    def __init__(self, job: JobFacts, sums: SignedSums, charges: Charges) -> None:
        self._job = job
        self._sums = sums
        self._charges = charges
        self._plan: Plan | None = None
        """The last plan, until its outcome."""
        self._planned: set[tuple[int, int]] = set()
        self._attempt = 0
        """Last attempt at the next round."""
        self.committed = 0
        """Last committed round."""
        self.models = Models(job.best, averages=job.averages)
        self._starts: dict[int, set[Start]] = {}
        """What the attempts at each round start from."""
        self._asked: set[str] = set()
        """Devices of all plans so far."""
        self._groups: dict[str, str] = {}
        """Groups of the devices of the attempt that is checked, by device, as its receipts say."""
        self._charged: list[Charge] = []
        """Charges of the attempt that is checked."""
        self._known_start = True
        """Whether it is known which models the devices start from that have signed its sums."""
        self.counts = Counter[str]()
        self.receipts = 0
        self.secure_rounds = 0
        self.signed_rounds = 0
        self.signed_starts = 0
        self.first_starts = 0
        """Rounds with signed sums whose devices start from the model that no commit is before."""
        self.unknown_starts = 0
        """Rounds with signed sums of which the run's commits do not tell the start model."""

    # -- plans ---------------------------------------------------------------------------------

    def plan(self, content: Fields) -> None:
        """Check a plan.

        Raises:
            Violation: it does not follow the last commit.
        """
        content.only("attempt", "datacenters", "decision", "draw", "invited", "round", "start")
        self._check_cut_short()
        round_ = content.count("round")
        attempt = content.count("attempt")
        where = f"the plan of round {round_} attempt {attempt}"
        if round_ != self.committed + 1:
            raise Violation(f"{where} follows the commit of round {self.committed}")
        if attempt <= self._attempt:
            raise Violation(f"{where} follows attempt {self._attempt} at this round")
        self._attempt = attempt
        start = content.table("start")
        if content.count("draw") and not self._job.secure:
            raise Violation(f"{where} has a draw, and its devices were not drawn")
        answer = content.table("decision").table("answer")
        self._check_answer(answer, start.text("name"), where)
        keep = answer.table("keep")
        self._planned.add((round_, attempt))
        self._plan = Plan(
            round=round_,
            attempt=attempt,
            invited=frozenset(content.texts("invited")),
            datacenters=frozenset(content.texts("datacenters")),
            draw=content.count("draw"),
            start=self.models.check_start(start, where),
            regime=answer.text("regime"),
            reason=answer.text("reason"),
            measures=answer.flag("measure_gradients"),
            by_group=answer.flag("by_group"),
            keep={name: keep.text(name) for name in keep.values},
        )
        self._starts.setdefault(round_, set()).add(self._plan.start)
        self._asked |= self._plan.invited
        self.counts["plan"] += 1

    def _check_answer(self, answer: Fields, start: str, where: str) -> None:
        """Check what the policy has decided, as far as it is known of the policy.

        Args:
            answer: of the policy.
            start: name of the model that the plan starts from.
            where: the plan, in sentences.

        Raises:
            Violation: the plan starts from another model, or the policy never decides so.
        """
        if answer.text("start") != start:
            raise Violation(
                f"{where} starts from {shown(start)}, and was decided to start from "
                f"{shown(answer.text('start'))}"
            )
        policy = self._job.policy
        regime = answer.text("regime")
        if regime not in _REGIMES_OF_POLICIES.get(policy, _REGIMES):
            raise Violation(
                f"{where} has the regime {shown(regime)}, which the policy {shown(policy)} never "
                "has"
            )
        asks_more = (
            bool(answer.table("keep").values)
            or answer.flag("measure_gradients")
            or answer.flag("by_group")
        )
        if policy in _REGIMES_OF_POLICIES and (start != CURRENT or asks_more):
            raise Violation(
                f"{where} has another start model than the last one, keeps models, or has groups "
                f"or gradients, which the policy {shown(policy)} never asks for"
            )

    def _check_cut_short(self) -> None:
        """Check the last plan if it has no outcome, as when the server was killed.

        Its devices may have signed a sum, and have spent what that costs.
        """
        if self._plan is None:
            return
        self._groups = {}
        self._check_asked(self._plan, set())
        self._plan = None

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
        if content.has("optimizer"):
            content.digest("optimizer")
        self._check_ledger(plan, record, content.text("ledger_head"), f"round {plan.round}")
        self.models.commit(content, plan.keep, may_stay=plan.may_stay)
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
        if committed:
            self._check_sides(plan, accepted, where)
        self._check_cost(record, plan, where, committed=committed)
        for key in ("started_at", "seconds", "elapsed"):
            record.number(key)
        if record.has("epsilon") and (self._job.privacy is None or record.number("epsilon") < 0):
            raise Violation(
                f"{where} states epsilon {shown(record.get('epsilon'))}, which no such job has"
            )
        # A device that sends its refusal has not begun, and its charge may be released.
        sums = self._check_asked(plan, sent & started)
        for each in sums:
            if missing := each.devices - started:
                raise Violation(
                    f"{shown(min(missing))} is in a signed sum of {where}, of which no receipt "
                    "says that it has begun"
                )
        if committed:
            self._check_sums(sums, plan, accepted, where)
            if self._job.robust_minimum and accepted:
                self._check_left_out(record, where)
        return plan

    def _check_asked(self, plan: Plan, sent: Set[str]) -> list[SignedSum]:
        """Check what the devices of an attempt have signed, and that they were charged for it.

        Args:
            plan: of the attempt.
            sent: devices whose receipts say that they have begun, and sent a result.

        Returns:
            The sums that they have signed.
        """
        sums = self._sums.of_round.get((plan.round, plan.attempt), [])
        self._charged = []
        self._known_start = True
        if self._job.privacy is not None and plan.invited:
            self._charged = self._charges.check_round(
                plan.round,
                plan.attempt,
                invited=plan.invited,
                answered=frozenset(sent).union(*(each.devices for each in sums)),
                privacy=self._job.privacy,
                where=plan.where,
            )
        for each in sums:
            self._check_sum(each, plan)
        return sums

    def _check_sides(self, plan: Plan, accepted: Set[str], where: str) -> None:
        """Check that a committed round has the devices and the datacenters of its regime."""
        if plan.datacenters and plan.regime == "federated":
            raise Violation(f"{where} is federated, and its plan asked a datacenter")
        if not plan.datacenters and plan.regime != "federated":
            raise Violation(f"{where} is {shown(plan.regime)}, and its plan asked no datacenter")
        if (plan.invited or accepted) and plan.regime == "datacenter":
            raise Violation(f"{where} is a datacenter's, and has devices")
        least = 0 if plan.regime == "datacenter" else max(1, self._job.quorum)
        if len(accepted) < least:
            raise Violation(
                f"{where} has accepted {len(accepted)} devices, and needs at least {least}"
            )

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
        if stated < least * (1 - TOLERANCE):
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
            asked = self._asked_for(plan) if regime == "federated" else plan.datacenters
            # It gives a gradient or running statistics, and no update.
            measured = (plan.measures or self._job.recomputes) and regime == "datacenter"
            if name not in asked and not measured:
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

    def _asked_for(self, plan: Plan) -> Set[str]:
        """Devices that may be in an attempt; in buffered mode those of earlier ones, too."""
        return self._asked if self._job.buffered else plan.invited

    def _check_weights(self, record: Fields, accepted: int, where: str) -> None:
        """Check that the weight of a secure mean is at least that of its usable updates.

        Who has which weight is nobody's to see, and with noise the total is not exact.
        """
        training = record.table("training") if record.has("training") else None
        # The figures of a plain round may have any names: those of a Flower app are its own.
        known = self._job.secure and self._job.privacy is None
        if training is None or not training.has("federated") or not known:
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

    def _check_sum(self, signed: SignedSum, plan: Plan) -> None:
        """Check a sum that devices have signed against the plan that asked them."""
        where = plan.where
        if plan.regime == "datacenter" or not self._job.secure:
            raise Violation(
                f"devices have signed a sum of {where}, in which no updates of devices are "
                "summed securely"
            )
        if others := signed.roster - self._asked_for(plan):
            raise Violation(
                f"{shown(min(others))} has signed a sum of {where}, whose plan did not ask it"
            )
        if signed.draw != plan.draw:
            raise Violation(
                f"the devices of {where} have signed the draw {signed.draw}, and its plan has "
                f"{plan.draw}"
            )
        self._known_start &= self._check_signed_start(signed, plan)
        grouped = plan.by_group or self._job.robust_minimum
        if signed.group and not grouped:
            raise Violation(
                f"the devices of {where} have signed the sum of the group {shown(signed.group)}, "
                "and its plan has no groups"
            )
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
        for charge in self._charged:
            if charge.run != self._charges.run_id:
                raise Violation(
                    f"{where} was charged by the run {shown(charge.run)}, and its devices have "
                    "signed a sum of this one"
                )
        if signed.noise_multiplier is None:
            return
        # Theorem 1 of Kairouz et al. 2021: at least this, whatever the discrete noise adds.
        least = 0.5 / signed.noise_multiplier**2 if signed.noise_multiplier > 0 else math.inf
        for charge in self._charged:
            if charge.event.number("rho") < least * (1 - TOLERANCE):
                raise Violation(
                    f"{where} was charged with rho {charge.event.number('rho'):.6g}, and the noise "
                    f"that its devices have signed costs {least:.6g}"
                )

    def _check_signed_start(self, signed: SignedSum, plan: Plan) -> bool:
        """Check the models from which devices have signed that their updates start.

        Returns:
            Whether the run's commits tell all of these models.
        """
        where = plan.where
        if not self._job.buffered:
            return self.models.check_signed(plan.start, signed.model, where)
        known = True
        # A full buffer has updates from the models of several rounds.
        for round_, model in signed.starts.items():
            starts = self._starts.get(round_, set())
            if not starts:
                raise Violation(
                    f"the devices of {where} have signed the start model {model} of round "
                    f"{round_}, which was not planned before"
                )
            # Attempts at a round can start from different models; devices accept one of them.
            if model and len(starts) == 1:
                known &= self.models.check_signed(next(iter(starts)), model, where)
            else:
                known = False
        return known

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
        self, sums: Sequence[SignedSum], plan: Plan, accepted: Set[str], where: str
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
        self.unknown_starts += not self._known_start
        # A full buffer has updates from the models of several rounds.
        if not self._job.buffered:
            self.signed_starts += bool(plan.start.digest)
            self.first_starts += plan.start.is_first

    # -- end -----------------------------------------------------------------------------------

    def end(self) -> None:
        """Check what has to be there when there are no more rounds.

        Raises:
            Violation: something is missing.
        """
        self._check_cut_short()
        self._sums.check_planned(self._planned)
