"""Train a recorded run again, and compare the model of each round with the recorded one.

The plans are those of the record: whom each round asks, from which model and with how many steps.
So the policy, which may follow measured times, is not asked, and the job's limits, which a slower
machine would meet sooner, do not count. What has to give the same bits is the training: on devices,
on ranks, in the sums, and in the server's optimizer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from isthmus.errors import UserError
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.readiness import RoundReadiness
from isthmus_server.rounds.run_parts import RunParts
from isthmus_server.runs.local.processes import started_roles
from isthmus_server.runs.local.session import LocalRun
from isthmus_server.storage.events import EventStream, RunAdopted, RunBranched
from isthmus_server.storage.records import CommittedState, FinalModel, PlannedAttempt, Receipt
from isthmus_server.storage.run_description import is_simulated
from isthmus_server.storage.store import Store
from isthmus_server.strategy.decision import Decision
from isthmus_server.strategy.policy import Plan, Stop
from isthmus_server.transport.link import Link


@dataclasses.dataclass(frozen=True)
class RecordedRound:
    """A committed round, as far as it can be compared."""

    planned: PlannedAttempt
    """The attempt that was committed."""
    models: Mapping[str, str]
    """SHA-256 of the models after it, by name, without what only a datacenter has."""
    groups: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    """Devices of each random group; empty for a round without robust sums."""


@dataclasses.dataclass(frozen=True)
class Recording:
    """A run that can be trained again."""

    rounds: Sequence[RecordedRound]
    final: FinalModel

    @classmethod
    def of(cls, store: Store) -> Recording:
        """The rounds of a run.

        Raises:
            UserError: it gives other bits each time, or its participants are not on this machine.
        """
        status, _, final = store.status()
        if status != "finished" or final is None:
            raise _not_replayed(store, f"it is {status}, and only a run with a final model can be")
        if reason := _not_repeatable(store):
            raise _not_replayed(store, reason)
        started = started_roles(store.job).keys()
        rounds = []
        for logged, committed in store.proved_attempts():
            if committed is None or logged.record is None:
                continue
            planned = logged.planned
            where = f"round {planned.round}"
            if missing := {*planned.invited, *planned.datacenters} - started:
                raise _not_replayed(
                    store, f"{min(missing)!r} of {where} is not a participant that this job starts"
                )
            # The sums of what is left of a cohort are rounded otherwise than those of all of it.
            for receipt in logged.record.receipts:
                if receipt.status != "accepted":
                    raise _not_replayed(
                        store,
                        f"{receipt.participant!r} was {receipt.outcome} in {where}, and when that "
                        "happens nothing repeats",
                    )
            groups = random_groups_of(logged.record.receipts)
            rounds.append(RecordedRound(planned, models_of(committed), groups))
        if not rounds:
            raise _not_replayed(store, "it has no committed round")
        return cls(rounds, final)


def models_of(state: CommittedState) -> dict[str, str]:
    """SHA-256 of the models of a commit by name, without what only a datacenter has."""
    if state.model_in_datacenter:
        return {}
    return {name: saved.sha256 for name, saved in state.models.items()}


def random_groups_of(receipts: Sequence[Receipt]) -> dict[str, list[str]]:
    """The devices of each random group of a round; empty for a round without.

    A round that repeats sums which devices had unmasked has the groups of before, of fewer devices.
    """
    groups: dict[str, list[str]] = {}
    for receipt in receipts:
        if receipt.group:
            groups.setdefault(receipt.group, []).append(receipt.participant)
    return dict(sorted(groups.items()))


class Replay(LocalRun):
    """A second run of a recorded one, in a directory of its own."""

    def __init__(self, store: Store, recording: Recording) -> None:
        """Use `begin`."""
        super().__init__(store)
        self.recording = recording

    @classmethod
    def begin(cls, recorded: Store, directory: Path) -> Replay:
        """Create the second run; the recorded one is only read.

        Raises:
            UserError: see `Recording.of`; or the directory cannot be written.
        """
        recording = Recording.of(recorded)
        # With an id of its own: no model depends on it, and devices take part in no round twice.
        store = Store.create(directory, recorded.job, recorded.base)
        return cls(store, recording)

    def _made_loop(self, link: Link, events: EventStream) -> ReplayCoordinator:
        return ReplayCoordinator(RunParts.of(self.store, link, events), self.recording)


class ReplayCoordinator(Coordinator):
    """Carries out recorded plans, and ends at the first model that is another one."""

    def __init__(self, parts: RunParts, recording: Recording) -> None:
        """Prepare.

        Args:
            parts: of the second run.
            recording: the rounds of the first.
        """
        readiness = RoundReadiness(
            job=parts.job, roster=parts.roster, cohorts=parts.cohorts, limits=_NoLimits()
        )
        super().__init__(dataclasses.replace(parts, readiness=readiness))
        self._recording = recording

    async def run(self) -> FinalModel:
        """Train all rounds again; returns the final model, which is the recorded one.

        Raises:
            UserError: a round, or the whole, gives another model; or it cannot be carried out.
        """
        final = await super().run()
        self._compare_models(self._recording.rounds[-1])
        recorded = self._recording.final.model_sha256
        if final.model_sha256 != recorded:
            raise UserError(
                f"trained again, the final model is {final.model_sha256}, and the recorded one is "
                f"{recorded}"
            )
        return final

    async def _decide(self) -> Decision:
        done = self.state.round
        rounds = self._recording.rounds
        if done:
            self._compare_models(rounds[done - 1])
        if done == len(rounds):
            # A run ends by a decision that is none of its plans.
            return dataclasses.replace(
                rounds[-1].planned.decision, answer=Stop("all recorded rounds are done")
            )
        planned = rounds[done].planned
        if not await self.parts.cohorts.replay(planned, rounds[done].groups):
            raise UserError(
                f"round {planned.round} cannot be trained again: not all of its participants are "
                "ready"
            )
        return planned.decision

    def _compare_models(self, recorded: RecordedRound) -> None:
        found = models_of(self.state.committed())
        for name, digest in recorded.models.items():
            if found.get(name) != digest:
                raise UserError(
                    f"round {recorded.planned.round}, trained again, gives the model "
                    f"{found.get(name, 'none')} ({name}), and the run has committed {digest}"
                )


class _NoLimits:
    """In place of the limits of the job, which the recorded run has kept."""

    async def wait_for(self, plan: Plan) -> Stop | None:
        """Nothing is waited for."""
        return None

    def allow(self, plan: Plan) -> bool:
        """No other plan takes the place of a recorded one."""
        return False


def _not_repeatable(store: Store) -> str:
    """Why a run gives other bits each time, or begins elsewhere; empty if it does not."""
    job = store.job
    if is_simulated(store.directory):
        return "its participants are simulated; `isthmus simulate` repeats it"
    if job.federated.server_app is not None:
        return "a ServerApp directs it"
    if job.federated.mode == "buffered":
        return "the order in which updates arrive decides its models (federated.mode)"
    if store.is_private:
        return "it adds noise, which is drawn anew each time"
    if store.layout_changes():
        return "the layout of its ranks was changed while it ran"
    # What participants keep between rounds, such as the state of an optimizer, is in no copy.
    events = store.events()
    if any(isinstance(each, RunAdopted) for each in events):
        return "it went on in a copy, where its participants began without what they had kept"
    for each in events:
        if isinstance(each, RunBranched):
            return (
                f"its rounds up to {each.round} are those of another run, of which it is a branch"
            )
    return ""


def _not_replayed(store: Store, reason: str) -> UserError:
    return UserError(f"{store.directory} cannot be trained again: {reason}")
