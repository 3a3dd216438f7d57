"""The models of a run: what each commit has, what rounds start from, and which one is the last."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from isthmus_verify.chain import canonical
from isthmus_verify.fields import Fields
from isthmus_verify.violation import Violation, shown

CURRENT = "current"
SERVED = "served"
_BEST = "best"
_INITIAL = "initial"
_OF_DEVICES = "devices_"
"""How names of metrics of devices begin, which a round may lack."""


@dataclasses.dataclass(frozen=True)
class BestModel:
    """Which model of a run is the best."""

    metric: str
    rises: bool
    """Whether higher values are better."""
    least_change: float
    delivered: bool
    """Whether it is the final model, if there is one."""

    @classmethod
    def of(cls, evaluation: Fields) -> BestModel | None:
        """Read it from the job's table; None if no model is kept as the best."""
        keep = evaluation.optional("keep_best")
        if keep is None:
            return None
        return cls(
            metric=keep.text("name"),
            rises=keep.text("mode") == "max",
            least_change=keep.number("min_change"),
            delivered=evaluation.text("deliver") == "best",
        )

    def value(self, metrics: Mapping[str, Any], where: str) -> float | None:
        """The value of the metric; None if the round was not evaluated.

        Raises:
            Violation: it was, and has no number there.
        """
        missing = self.metric not in metrics
        if not metrics or (missing and self.metric.startswith(_OF_DEVICES)):
            return None
        value = metrics.get(self.metric)
        # Numbers that are not finite are texts.
        if value in ("inf", "-inf", "nan"):
            return float(value)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise Violation(
                f"{where} has no value of {shown(self.metric)}, by which the run keeps its best "
                "model"
            )
        return float(value)

    def improves(self, value: float | None, best: float | None) -> bool:
        """Whether a value is better than the best one before; never for NaN."""
        if value is None:
            return False
        if best is None:
            return not math.isnan(value)
        gain = value - best if self.rises else best - value
        return gain > self.least_change


@dataclasses.dataclass(frozen=True)
class Start:
    """The model that a round starts from, as far as the run's commits tell."""

    digest: str
    """Empty if they do not: only a datacenter has it, or it is a mean of several."""
    is_first: bool
    """Whether it is the model that the run began with."""


class Models:
    """The digests of the models that a run has, by name, from commit to commit."""

    def __init__(self, best: BestModel | None, *, averages: bool) -> None:
        """Prepare.

        Args:
            best: which model is the best; None if none is kept.
            averages: whether the served model is an average, of which nothing tells the digest.
        """
        self._best = best
        self._averages = averages
        self._round = 0
        """Last committed round."""
        self._models: dict[str, str] = {}
        """Digests of the models that the last commit has."""
        self._in_datacenter = False
        """Whether only a datacenter has the current one."""
        self._first = ""
        """Digest of the model that the run began with, as soon as devices have signed it."""
        self._best_round = 0
        self._best_value: float | None = None
        self._served = ""
        """Digest of the last committed model, if the server had it."""
        self._metrics: Mapping[str, Any] = {}
        """Figures of the last commit."""
        self._best_metrics: Mapping[str, Any] = {}
        """Figures of the commit with the best model."""
        self.final_is_best = False
        """Whether the final model is the best one."""

    @property
    def final_is_known(self) -> bool:
        """Whether a commit names the digest of the final model."""
        return self.final_is_best or bool(self._served)

    # -- what rounds start from ----------------------------------------------------------------

    def check_start(self, start: Fields, where: str) -> Start:
        """Check the model that a plan starts from.

        Raises:
            Violation: the run has none of that name, or another one.
        """
        start.only("name", "sha256")
        name = start.text("name")
        digest = start.digest("sha256") if start.has("sha256") else ""
        parts = name.split("+")
        unknown = set(parts) - {CURRENT, SERVED, _INITIAL} - self._models.keys()
        if unknown:
            raise Violation(
                f"{where} starts from the model {shown(name)}, and the run has kept none of the "
                f"name {shown(min(unknown))}"
            )
        known = "" if len(parts) > 1 else self._digest(name)
        if digest != known:
            raise Violation(
                f"{where} starts from the model {shown(name)} with the digest "
                f"{digest or 'none'}, and the last commit has {known or 'none'}"
            )
        if all(self._is_first(part) for part in parts):
            return Start("", is_first=True)
        # The mean of a model and itself is that model.
        digests = {self._first if self._is_first(part) else self._digest(part) for part in parts}
        return Start(digests.pop() if len(digests) == 1 else "", is_first=False)

    def _digest(self, name: str) -> str:
        if name in (CURRENT, SERVED) and self._in_datacenter:
            return ""  # what the server has is older
        return self._models.get(name, "")

    def _is_first(self, name: str) -> bool:
        return name == _INITIAL or (name in (CURRENT, SERVED) and not self._round)

    def check_signed(self, start: Start, model: str, where: str) -> bool:
        """Check the model from which devices have signed that they start.

        Args:
            start: of the plan that asked them.
            model: what they have signed.
            where: for sentences.

        Returns:
            Whether it is known that this is the one.

        Raises:
            Violation: the run has another one in its place.
        """
        if start.is_first:
            if self._first not in ("", model):
                raise Violation(
                    f"the devices of {where} have signed another first model than before"
                )
            self._first = model
            return True
        if start.digest and model != start.digest:
            raise Violation(
                f"the devices of {where} have signed the start model {model}, and the run has "
                f"{start.digest} in its place"
            )
        return bool(start.digest)

    # -- commits -------------------------------------------------------------------------------

    def commit(self, content: Fields, keep: Mapping[str, str], *, may_stay: bool) -> None:
        """Take over the models of a committed round.

        Args:
            content: of its entry.
            keep: what its plan keeps, by name; empty for what it keeps no more.
            may_stay: whether its model can be in one datacenter alone.

        Raises:
            Violation: they do not follow from the commit before, the plan and the record.
        """
        record = content.table("record")
        round_ = record.count("round")
        where = f"round {round_}"
        found = content.digests("models")
        stays = content.flag("model_in_datacenter")
        stated = record.digest("model_sha256") if record.has("model_sha256") else ""
        if stays and (not may_stay or self._averages or any(keep.values())):
            raise Violation(
                f"{where} has its model only in a datacenter, and it was no round of one "
                "datacenter alone, or one after which the server needs its model"
            )
        if stays and stated:
            raise Violation(f"{where} names a model that is only in the datacenter")
        served = "" if stays else found.get(SERVED, found.get(CURRENT, ""))
        if not stays and (not served or served != stated):
            raise Violation(
                f"the record of {where} names the model {stated or 'none'}, and its commit "
                f"{served or 'none'}"
            )
        metrics = record.table("metrics").values
        expected = self._after(found, keep, stays=stays)
        if self._best is not None:
            value = self._best.value(metrics, where)
            if self._best.improves(value, self._best_value):
                self._best_value = value
                self._best_metrics = metrics
                self._best_round = round_
                expected[_BEST] = expected.get(SERVED, "")
        self._compare(found, expected, where)
        self._models = found
        self._in_datacenter = stays
        self._served = served
        self._metrics = metrics
        self._round = round_

    def _after(
        self, found: Mapping[str, str], keep: Mapping[str, str], *, stays: bool
    ) -> dict[str, str]:
        """What a commit has, but for the best model, where its current model is as stated."""
        expected = dict(self._models)
        if not stays:
            expected[CURRENT] = found.get(CURRENT, "")
            expected[SERVED] = found.get(SERVED, "") if self._averages else expected[CURRENT]
        for name, kept in keep.items():
            if kept:
                expected[name] = expected.get(kept, "")
            else:
                expected.pop(name, None)
        return expected

    def _compare(self, found: Mapping[str, str], expected: Mapping[str, str], where: str) -> None:
        for name in sorted(found.keys() | expected.keys()):
            if found.get(name, "") != expected.get(name, ""):
                raise Violation(
                    f"the commit of {where} has {found.get(name, 'none')} as the model "
                    f"{shown(name)}, and by its plan and the commits before it is "
                    f"{expected.get(name, '') or 'none'}"
                )

    # -- the end -------------------------------------------------------------------------------

    def final(self, final: Fields) -> str:
        """Check the final model; returns its digest.

        Raises:
            Violation: it is not the last one, or the best one if the job wants that.
        """
        final.only("best", "metrics", "model_sha256", "round")
        digest = final.digest("model_sha256")
        round_ = final.count("round")
        best = final.flag("best")
        has_best = _BEST in self._models
        if best and not has_best:
            raise Violation("the final model is the best one, and the run has kept none")
        if best != (has_best and self._best is not None and self._best.delivered):
            raise Violation(
                f"the final model is {'the best' if best else 'the last'} one, and the job "
                f"delivers {'the last' if best else 'the best'}"
            )
        expected = self._best_round if best else self._round
        if round_ != expected:
            raise Violation(
                f"the final model is of round {round_}, and the "
                f"{'best model' if best else 'last committed'} is of round {expected}"
            )
        known = self._models.get(_BEST, "") if best else self._served
        if known and digest != known:
            raise Violation(
                f"the final model has the digest {digest}, and the run has committed {known}"
            )
        metrics = self._best_metrics if best else self._metrics
        if metrics and canonical(metrics) != canonical(final.table("metrics").values):
            raise Violation(f"the final model has other metrics than round {round_}")
        self.final_is_best = best
        return digest
