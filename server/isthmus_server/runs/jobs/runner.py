"""Run the jobs that operators submit: one after another, or several at once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from isthmus.errors import (
    AdmissionRefused,
    CannotContinue,
    IsthmusError,
    ParticipantsMissing,
    TakenOver,
    UserError,
)
from isthmus.job import Job
from isthmus.printable import in_lines
from isthmus.system.faults import is_transient
from isthmus_server.budgets.populations import of_server
from isthmus_server.observability.observers import Observers
from isthmus_server.runs.jobs.checks import check_job
from isthmus_server.runs.jobs.early_returns import EarlyReturns
from isthmus_server.runs.jobs.past_draws import restore_draws
from isthmus_server.runs.jobs.projects import Projects
from isthmus_server.runs.jobs.queue import ENDED, JobQueue, QueuedJob, State
from isthmus_server.runs.jobs.running import CANCELLED, RunningJob, cancel_resting
from isthmus_server.storage import audit
from isthmus_server.storage.events import (
    Event,
    JobEnded,
    JobPaused,
    Paused,
    ServerTakenOver,
    WaitingForParticipants,
    attempt_event,
)
from isthmus_server.storage.fence import Fence, KeptTakeover, Takeover
from isthmus_server.storage.sealed_database import database_error
from isthmus_server.storage.store import Store
from isthmus_server.transport.job_link import JobLink, LinkView, SharedLink
from isthmus_server.transport.link import Link
from isthmus_server.transport.turns import Account

_FOLLOW_SECONDS = 0.5
"""Interval in which the log of a followed run is read."""

_ROWS = 20
"""Rounds that are read at a time, because reading blocks the event loop."""

_QUEUE_SECONDS = 10.0
"""Interval of attempts to use a queue that could not be read or written."""

log = logging.getLogger(__name__)


class JobRunner:
    """Runs the jobs of a queue while the server runs, up to `at_once` at a time.

    Guarantees:
      * no job ends, pauses or fails because of another;
      * a job that cannot continue is paused with the reason, the next one runs, and it is tried
        again later, or when a participant comes that it was missing; only what is the user's
        mistake for certain fails it;
      * a cancelled job is never continued, also after a crash of the server;
      * `leave` lets the running round end, and begins nothing new;
      * a task is loaded only from the server's own directory of tasks: operators cannot
        submit code.
    """

    def __init__(
        self,
        link: Link,
        state: Path,
        observers: Observers,
        at_once: int = 1,
        fence: Fence | None = None,
        takeover: Takeover | None = None,
        earlier: Sequence[KeptTakeover] = (),
    ) -> None:
        """Open the queue.

        Args:
            link: of the server.
            state: the server's state directory.
            observers: watch the runs.
            at_once: most jobs that run at a time.
            fence: of this server, if others may take over from it.
            takeover: from whom this server took over, if it did.
            earlier: takeovers by other servers, which may have ended before they wrote them to
                the runs.

        Raises:
            UserError: the queue is damaged or cannot be used.
        """
        self.link = link
        self._fence = fence
        self._takeover = takeover
        self._earlier = earlier
        self._inherited: dict[str, Sequence[Takeover]] = {}
        """The takeovers in which a run was inherited, by the id of its job."""
        self.queue = JobQueue(state, fence)
        self.tasks = state / "tasks"
        self.runs = state / "runs"
        self.populations = of_server(state, None if fence is None else fence.held)
        self.projects = Projects.load(state)
        self.observers = observers
        self.console = observers.console
        self._at_once = at_once
        self._shared = SharedLink(link)
        self._running: dict[int, RunningJob] = {}
        """By number of the job."""
        self._leaving = False
        self._taken_over = False
        self._woken = asyncio.Event()
        self._returns = EarlyReturns(self._woken.set)

    async def run(self) -> None:
        """Run jobs until cancelled, or until the running round has ended after `leave`.

        An interrupted job continues when the server is started again.

        Raises:
            UserError: the queue's file cannot be used any more.
            TakenOver: another server has taken over.
        """
        self._claim_runs()
        self._note_inherited()
        if self._takeover is not None:
            # Not awaited, as the earlier server may be stopped while it has the audit log locked.
            work = (self._takeover, self._interrupted())
            threading.Thread(target=self._record, args=work, name="audit", daemon=True).start()
        self.link.listeners.attach(self._returns)
        self.link.check_ins.trains = lambda: bool(self._running)
        self.link.check_ins.waits = self._waits_for_participants
        enrolments = self.link.enrolments
        if enrolments.requires_tickets:
            restore_draws(enrolments.draws, self.runs, enrolments.now())
        try:
            await self._run_jobs()
        finally:
            self.link.listeners.detach(self._returns)

    def _claim_runs(self) -> None:
        """Keep an earlier server, which may still run, from committing a round of any job."""
        if self._fence is None or not self._fence.forced:
            return
        for entry in self.queue.entries(0):
            log_file = self.runs / entry.id / "run.sqlite"
            try:
                if log_file.exists():
                    self._fence.claim(log_file)
            except (sqlite3.Error, OSError) as error:  # it is claimed again before it is read
                log.warning("%s", database_error(log_file, error))

    def _note_inherited(self) -> None:
        """Note which runs servers have taken over, before this one begins any itself."""
        mine = [] if self._takeover is None else [self._takeover]
        if not mine and not self._earlier:
            return
        # Jobs can still run if it fails: only their logs then lack the takeover.
        with contextlib.suppress(sqlite3.Error, OSError):
            for entry in self.queue.entries(0):
                if not (self.runs / entry.id / "job.json").exists():
                    continue
                earlier = [each.takeover for each in self._earlier if entry.id in each.runs]
                self._inherited[entry.id] = [*earlier, *mine]

    def _interrupted(self) -> str:
        """The jobs that the earlier server had at work, with their attempts, in words."""
        found = []
        try:
            entries = self.queue.entries(0)
        except (sqlite3.Error, OSError):  # it is tried again when the jobs run
            return "unknown"
        for entry in entries:
            if entry.state != "running":
                continue
            round_, attempt = self._at_work(entry)
            where = f"after round {round_}" if round_ else "before the first round"
            if attempt:
                where = f"in round {round_}, attempt {attempt}"
            found.append(f"{entry.id} {where}")
        return "; ".join(found) or "none"

    def _at_work(self, entry: QueuedJob) -> tuple[int, int]:
        """See `Store.at_work`; zeros if the run cannot be read, which its job says when it runs."""
        try:
            with self._store(entry) as store:
                return (0, 0) if store is None else store.at_work()
        except (UserError, OSError, sqlite3.Error):
            return 0, 0

    def _record(self, takeover: Takeover, interrupted: str) -> None:
        """Write a takeover to the audit log; without it this server serves all the same."""
        try:
            audit.record(
                self.runs.parent,
                "takeover",
                by=takeover.by,
                before=takeover.before,
                why=takeover.why,
                jobs=interrupted,
            )
        except UserError as error:
            log.warning("%s", error)

    async def _run_jobs(self) -> None:
        try:
            while not self._leaving:
                self._woken.clear()
                try:
                    for number in self._returns.take():
                        self.queue.end_pause(number)
                    while (entry := self._next()) is not None:
                        self._begin(entry)
                    await self._wait(self.queue.seconds_until_due())
                except (sqlite3.Error, OSError) as error:  # the database, or its head file
                    if isinstance(self.queue.error(error), TakenOver):
                        self.give_up()
                        break
                    if not is_transient(error):
                        raise UserError(
                            f"the queue of jobs cannot be used: {self.queue.error(error)}; then "
                            "restart the server"
                        ) from error
                    now = self.queue.error(error)
                    self._print(f"the queue of jobs cannot be used now: {now}; it is tried again")
                    await self._wait(_QUEUE_SECONDS)
            await self._ended()
        finally:
            for job in self._running.values():
                assert job.task is not None
                job.task.cancel()
            await self._ended()
            await self.observers.ended()

    async def _ended(self) -> None:
        tasks = [job.task for job in self._running.values() if job.task is not None]
        await asyncio.gather(*tasks, return_exceptions=True)

    def _next(self) -> QueuedJob | None:
        """The job to begin now; None if there is none, or no room for it."""
        if len(self._running) >= self._at_once or any(
            job.entry.runs_alone for job in self._running.values()
        ):
            return None
        entry = self.queue.next(self._running)
        if entry is not None and self._running and entry.runs_alone:
            return None  # those behind it wait too, or it would never begin
        return entry

    def _begin(self, entry: QueuedJob) -> None:
        self._print(f"{entry.id}, submitted by {entry.submitted_by}, is the run {entry.run_id}")
        link = self.link
        admits = partial(self.projects.may_work, project=entry.project)
        if self._at_once > 1 and not entry.runs_alone:
            seconds = entry.job.time.join_seconds
            link = JobLink(
                self._shared, entry.id, entry.share, seconds, admits, project=entry.project
            )
        elif self.projects:
            link = LinkView(link, admits)
        takeovers = self._inherited.get(entry.id, ())
        job = self._running[entry.number] = RunningJob(entry, link, self._fence, takeovers)
        job.task = asyncio.create_task(self._run_job(job))

    def leave(self) -> None:
        """End `run` after the running rounds, or at once if there are none."""
        self._leaving = True
        self._woken.set()
        for job in self._running.values():
            job.leave()

    def give_up(self) -> None:
        """End `run` at once: another server has taken over, and continues the jobs."""
        self._taken_over = True
        self.leave()
        for job in self._running.values():
            if job.task is not None and job.task is not asyncio.current_task():
                job.task.cancel()

    def _waits_for_participants(self) -> bool:
        jobs = self._running.values()
        return any(isinstance(job.waits, WaitingForParticipants) for job in jobs)

    async def _wait(self, seconds: float | None) -> None:
        """Wait for an operator, for a participant that a job is missing, or for that long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._woken.wait()

    async def _run_job(self, job: RunningJob) -> None:
        """Run a job, and record how it ended."""
        entry = job.entry
        try:
            rounds = await self.progress(entry)
            if self._leaving or self.queue.get(entry.id).state in ENDED:  # cancelled meanwhile
                return
            self._returns.forget(entry.number)
            if entry.state != "running":
                self.queue.mark(entry, "running")
            try:
                await self.check(entry.job)
                reason = await job.train(self.runs, self.tasks, self.observers, self.populations)
            except Exception as error:  # noqa: BLE001 - whatever it is, the next job runs
                await self._end_or_pause(job, error, rounds)
            else:
                self._mark(job, "finished", reason)
        except asyncio.CancelledError:
            if self._taken_over:
                pass
            elif job.cancelled:
                self._print(f"{entry.id} is cancelled")
            elif job.paused_by:
                self._print(f"{entry.id} is paused by {job.paused_by}")
            else:
                self._print(f"{entry.id} continues when the server is started again")
        except (sqlite3.Error, OSError) as error:
            now = self.queue.error(error)
            if isinstance(now, TakenOver):
                self.give_up()
            else:
                self._print(f"{entry.id}: the queue of jobs cannot be used now: {now}")
        finally:
            if isinstance(job.link, LinkView):
                job.link.end()
            self._running.pop(entry.number, None)
            self._woken.set()

    async def _end_or_pause(self, job: RunningJob, error: Exception, rounds: int) -> None:
        """Pause a job that could not go on; only what is the user's mistake for certain fails it.

        `rounds` had been committed when it began.
        """
        entry = job.entry
        if isinstance(error, TakenOver):
            self.give_up()
            return
        transient = isinstance(error, CannotContinue) or is_transient(error)
        reason = in_lines(str(error))  # the queue and the console take only what is UTF-8
        if isinstance(error, UserError) and not transient:
            self._mark(job, "failed", reason)
            self._print(f"{entry.id} failed: {reason}")
            return
        if not isinstance(error, IsthmusError):
            log.error("%s is interrupted", entry.id, exc_info=error)
            reason = f"internal error: {type(error).__name__}: {reason}"
        if job.cancelled or job.paused_by:
            return
        progressed = await self.progress(entry) > rounds
        self._running.pop(entry.number, None)  # from now on it is cancelled like a queued job
        paused = self.queue.pause(entry, reason, progressed=progressed)
        if isinstance(error, ParticipantsMissing):
            peers = self.link.peers.values()
            connected = [peer for peer in peers if job.link.admits(peer.name)]
            self._returns.await_missing(entry.number, error, connected, progressed=progressed)
        until = time.strftime("%H:%M:%S UTC", time.gmtime(paused.next_try))
        self._print(f"{entry.id} is paused until {until}: {reason}")

    def _print(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _mark(self, job: RunningJob, state: State, reason: str = "") -> None:
        """Record how a run has ended, unless an operator has cancelled it."""
        self._returns.forget(job.entry.number, ended=True)
        if not job.cancelled:
            self.queue.mark(job.entry, state, reason)

    async def check(self, job: Job) -> None:
        """Check whether a job can run on this server, in a thread: budgets may take seconds.

        Raises:
            UserError: it cannot.
        """
        await asyncio.to_thread(check_job, job, self.tasks, self.link.lease_seconds)

    # -- requests of operators ---------------------------------------------------------------------

    def submit(
        self, job: Job, by: str, key: str, share: float = 1.0, project: str = ""
    ) -> QueuedJob:
        """Append a job that was checked to the queue.

        `share` is that of participants while others run too.

        Raises:
            AdmissionRefused: the queue is full, or the project is not one of the operator's.
        """
        entry = self.queue.submit(job, by, key, share, self.projects.chosen(by, project))
        self._woken.set()
        return entry

    def cancel(self, id_: str) -> State:
        """Remove a job from the queue, or stop it; committed rounds are kept.

        Raises:
            AdmissionRefused: there is no such job, or it has ended.
        """
        entry = self.queue.get(id_)
        if entry.state in ENDED:
            raise AdmissionRefused(f"{id_} has ended already: {entry.state}")
        running = self._running.get(entry.number)
        if running is not None and not running.cancel():
            raise AdmissionRefused(f"{id_} has ended just now")
        self._returns.forget(entry.number, ended=True)
        if running is None:
            cancel_resting(self.runs / id_, self._fence)
        self.queue.mark(
            entry, "cancelled", CANCELLED
        )  # recorded now, because the server may die before the run has ended
        self._woken.set()
        return "cancelled"

    def pause(self, id_: str, by: str) -> State:
        """Let a job rest after its running round, until `resume`.

        Raises:
            AdmissionRefused: there is no such job, or it has ended or rests already.
        """
        entry = self.queue.get(id_)
        if entry.state in ENDED or entry.state == "held":
            raise AdmissionRefused(f"{id_} is {entry.state}")
        running = self._running.get(entry.number)
        if running is not None:
            running.paused_by = by
            running.leave()
        self._returns.forget(entry.number)
        self.queue.mark(entry, "held", f"paused by {by}")
        return "held"

    def resume(self, id_: str) -> State:
        """Have a paused job tried as soon as it is its turn; returns its state until then.

        A failed one too: what made it fail may have been repaired.

        Raises:
            AdmissionRefused: there is no such job, or it is neither paused nor failed.
        """
        entry = self.queue.get(id_)
        if entry.state not in ("paused", "held", "failed") or entry.number in self._running:
            raise AdmissionRefused(f"{id_} is neither paused nor failed: it is {entry.state}")
        self.queue.resume(entry)
        self._woken.set()
        return "paused"

    async def progress(self, entry: QueuedJob) -> int:
        """Return the number of committed rounds of a job; 0 if its run cannot be read."""

        def read_progress() -> int:
            try:
                with self._store(entry) as store:
                    return 0 if store is None else store.last_round()
            except (UserError, OSError, sqlite3.Error) as error:
                log.warning("%s: %s", entry.id, error)
                return 0

        return await asyncio.to_thread(read_progress)

    async def events(self, id_: str, follow: bool) -> AsyncIterator[Event]:
        """Yield the ended attempts of a job so far, and takeovers; with `follow`, to its end.

        Raises:
            AdmissionRefused: there is no such job.
        """
        last: int | None = None
        shown = None
        told = 0
        while True:
            entry = self.queue.get(id_)
            with self._store(entry) as store:
                takeovers: Sequence[Event] = ()
                rows = [] if store is None else store.ended_since(last or 0, _ROWS)
                if store is not None and (rows or last is None):  # not each time: it reads all
                    takeovers = store.events(ServerTakenOver.kind)
                while store is not None and rows:
                    for number, record in rows:
                        last = number
                        while told < len(takeovers) and takeovers[told].at < record.started_at:
                            told += 1
                            yield takeovers[told - 1]
                        yield attempt_event(record)
                    rows = store.ended_since(last or 0, _ROWS)
                for event in takeovers[told:]:
                    told += 1
                    yield event
                last = last or 0
            if entry.state in ENDED:
                yield JobEnded(state=entry.state, reason=entry.reason)
            now = self._hindrance(entry)
            if now is not None and not _is_same_wait(now, shown):
                yield now
            shown = now
            if entry.state in ENDED or not follow:
                return
            await asyncio.sleep(_FOLLOW_SECONDS)

    def waiting(self) -> Mapping[str, str]:
        """What each running job waits for at the moment, in words; without those that do not."""
        words = {job.entry.id: job.waits_in_words() for job in self._running.values()}
        return {id_: line for id_, line in words.items() if line}

    def waiting_for(self, entry: QueuedJob, operator: str) -> str:
        """What a running job waits for at the moment, in words; empty if for nothing.

        Jobs that the operator may not see are not named.
        """
        job = self._running.get(entry.number)
        sees = partial(self.projects.may_see, operator)
        return "" if job is None else job.waits_in_words(sees)

    def usage(self, entry: QueuedJob) -> Account | None:
        """What a job has used of the participants since it runs; None if it has them alone."""
        job = self._running.get(entry.number)
        return job.link.account if job is not None and isinstance(job.link, JobLink) else None

    def _hindrance(self, entry: QueuedJob) -> Event | None:
        """Why a job does not go on at the moment."""
        if entry.state == "paused":
            return JobPaused(reason=entry.reason, next_try=entry.next_try)
        if entry.state == "held":
            return Paused(round=0, seconds=0.0, reason=f"{entry.reason}, until `isthmus resume`")
        job = self._running.get(entry.number)
        return None if job is None else job.waits

    @contextlib.contextmanager
    def _store(self, entry: QueuedJob) -> Iterator[Store | None]:
        directory = self.runs / entry.id
        store = Store.open(directory) if (directory / "job.json").exists() else None
        try:
            yield store
        except sqlite3.Error as error:
            raise database_error(directory / "run.sqlite", error) from error
        finally:
            if store is not None:
                store.close()


def _is_same_wait(now: Event, shown: Event | None) -> bool:
    """Whether a log has said it already: that more participants are ready is not said again."""
    if isinstance(now, WaitingForParticipants) and isinstance(shown, WaitingForParticipants):
        return (now.clients, now.datacenters) == (shown.clients, shown.datacenters)
    if isinstance(now, Paused) and isinstance(shown, Paused):
        return (now.round, now.reason) == (shown.round, shown.reason)
    return now == shown
