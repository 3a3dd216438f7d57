"""A client's record of earlier sums, which prevents replay and differencing attacks.

>>> from isthmus_privacy.secagg.config import ClientRequirements, RoundConfig
>>> history = History()
>>> config = RoundConfig(
...     run_id="demo", round=3, attempt=0, model_hash=bytes(32), purpose=bytes(32), size=8,
...     clients_max=20)
>>> history.begin(config, ClientRequirements())
>>> history.begin(config, ClientRequirements())
Traceback (most recent call last):
    ...
isthmus.errors.PeerMisbehaved: round 3 attempt 0 of run 'demo' is not after round 3 attempt 0, ...

**One survivor set for each model.** A client that has helped to unmask a sum of updates to a model
takes part for that model again only with exactly the same survivors, in any run; likewise for the
same round of a run. It is checked before the masked vector is sent, because a vector that was sent
is in the sum even if its owner then refuses to sign.

Why it bounds what sums reveal together: the sums that a set of updates can be in are those for one
model. For these, each client goes through its attempts in one order. Within a run it is that of the
round and attempt numbers, and between runs there is only one until the sum is unmasked: a client
that has sent a masked vector for a model in one run sends none for it in another. Take any linear
combination of unmasked sums over distinct sets, and of those with a non-zero coefficient the
earliest one, S. For each secret, `threshold` clients have revealed a share, at most `corrupt` of
them corrupt (`GraphParameters`); on a complete graph a client reveals none of its own secret, so
these are at least `threshold + 1 - corrupt` honest ones, more than half of all. Each of them is in
no later sum over another set, and earlier ones have coefficient zero. So the combination contains
the updates of all of them, with the coefficient of S: none is about fewer honest clients.

**One vector for each model.** The same holds if a client's vectors for a model differ, because it
was asked to train or to encode them in another way. With its shares a client binds itself to the
vector as well, so that those that have revealed shares for S are in no later sum with another one.
Otherwise a server could choose two encodings in which all vectors but one are the same, and
subtract the sums of one set.

Clients that are in S and were not asked for shares are bound less: they may be in later sums over
other sets, in which none of the others is. A later sum over the same set is asked for in the same
way, as the others would refuse it otherwise; but what a client's vector depends on besides, the
round of its random numbers and what it keeps between rounds, could differ for these. So a client
remembers it when it sends a masked vector, and refuses to be asked in the same way for another
one. Then a later sum over that set is S again.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from isthmus_privacy.crypto import refusal
from isthmus_privacy.crypto.canonical import NUMBER, tagged_hash
from isthmus_privacy.dp.accounting import epsilon_of_rho

if TYPE_CHECKING:
    from isthmus_privacy.secagg.config import ClientRequirements, RoundConfig

_KEY_BYTES = 16
"""Size of a key in memory: it must be unlikely to collide, and a collision only refuses more."""


@dataclasses.dataclass(frozen=True)
class StartModel:
    """The model that a client's update was computed from."""

    round: int
    """The round in which the server sent it."""
    model_hash: bytes
    """SHA-256."""
    shared: bool = True
    """Whether all updates of the sum start from it; False for a buffer of several."""
    vector: bytes = bytes(32)
    """Hash of what else the client's vector depends on, but for its data and the encoding: see
    `isthmus_privacy.purpose.device_vector`."""
    trained: int | None = None
    """The round whose random numbers the vector has; None for `round`."""
    work: bytes = bytes(32)
    """Hash of the part of `vector` that is the same for all clients of a sum."""

    data: bytes = b""
    """Names what else the client's vectors for other models are about, which it gives only together
    with the same clients; empty for nothing."""

    @property
    def trained_round(self) -> int:
        """The round whose random numbers the vector has."""
        return self.round if self.trained is None else self.trained


@dataclasses.dataclass(frozen=True)
class Begun:
    """An attempt that the client has begun."""

    run_id: str
    round: int
    attempt: int
    participations: int
    """Attempts of this run that the client has begun, this one included."""
    draw: int
    rho: float = 0.0
    """What the noise of these attempts guarantees together: their zero-concentrated differential
    privacy for this client's data, added up. Attempts without noise guarantee nothing, and are not
    in it."""


@dataclasses.dataclass(frozen=True)
class Masked:
    """A run in which the client has sent masked updates to a model."""

    run_id: str
    model_hash: bytes
    asked: bytes = b""
    """Hash of how the client was asked for its vector, as all others of the sum were, 16 bytes;
    empty in an entry of an earlier version."""
    vector: bytes = b""
    """See `Unmasked.vector`."""
    trained: int | None = None
    """The round whose random numbers the vector has."""


@dataclasses.dataclass(frozen=True)
class Unmasked:
    """A sum that the client has helped to unmask."""

    run_id: str
    round: int
    """Round of the start model."""
    model_hash: bytes
    """SHA-256 of the start model."""
    survivors: bytes
    """Hash of the survivor set, 32 bytes."""
    vector: bytes = b""
    """Hash of all that this client's vector depends on but the model and its data, 16 bytes; empty
    in an entry of an earlier version, with which no vector agrees."""
    trained: int = 0
    """The round whose random numbers the vector was computed with."""


Entry = Begun | Masked | Unmasked


def essential(entries: Iterable[Entry]) -> list[Entry]:
    """The entries that a history needs: without attempts that a later one of the run replaces."""
    kept: dict[tuple[object, ...], Entry] = {}
    masked: dict[bytes, set[bytes]] = {}
    for entry in entries:
        match entry:
            case Begun():
                key: tuple[object, ...] = ("begun", entry.run_id)
            case Masked():
                key = ("masked", entry.model_hash, entry.asked)
                masked.setdefault(entry.model_hash, set()).add(entry.asked)
            case Unmasked():
                for asked in masked.pop(entry.model_hash, ()):
                    kept.pop(("masked", entry.model_hash, asked), None)
                key = ("unmasked", entry.run_id, entry.round, entry.model_hash)
        kept.pop(key, None)  # the latest is at the end
        kept[key] = entry
    return list(kept.values())


class History:
    """One client's record. Keep its entries as long as the identity key.

    Guarantees:
      * a client never takes part in an attempt twice, nor in one before an attempt already begun;
      * it is in one attempt at a time, the last that it has begun;
      * once it has unmasked a sum of updates to a model, in any run, or of a round, it takes part
        for that model or round only with exactly the same survivors, and gives for that model only
        the same vector;
      * an entry is recorded before the client acts on it;
      * memory of about 300 bytes for each unmasked sum and each run, and one short entry recorded
        for each step that matters, however many there were before.
    """

    def __init__(
        self,
        entries: Iterable[Entry] = (),
        record: Callable[[Entry], None] = lambda entry: None,
    ) -> None:
        """Restore a history.

        Args:
            entries: what `record` has received so far, or the `essential` part of it.
            record: stores an entry durably before it returns; if it raises, the client does not
                act on the entry.
        """
        self._begun: dict[str, Begun] = {}
        """The last attempt of each run."""
        self._current: tuple[str, int, int] | None = None
        self._draw = 0
        """The latest draw, of any run."""
        self._participations = 0
        self._masked: dict[bytes, str] = {}
        """Model to the run with masked updates to it, until a sum is unmasked."""
        self._given: dict[bytes, dict[bytes, bytes]] = {}
        """Model to the masked vectors for it by how they were asked for, until then."""
        self._trained: dict[bytes, int] = {}
        """Model to the round of the random numbers of these."""
        self._unmasked: dict[bytes, bytes] = {}
        """Model, and round of a run, to the survivor set."""
        self._vectors: dict[bytes, tuple[bytes, int]] = {}
        """Model to the vector of its unmasked sum, and the round that it was trained in."""
        self._record = record
        for entry in entries:
            self._take(entry)

    def participations(self, run_id: str | None = None) -> int:
        """Attempts that this client has begun, of one run or in total."""
        if run_id is None:
            return self._participations
        return self._begun[run_id].participations if run_id in self._begun else 0

    def rho(self, run_id: str | None = None) -> float:
        """See `Begun.rho`, of one run or of all runs."""
        if run_id is None:
            return sum(begun.rho for begun in self._begun.values())
        return self._begun[run_id].rho if run_id in self._begun else 0.0

    def trained_round(self, model_hash: bytes) -> int | None:
        """The round in which this client has trained from a model that it gave a vector for.

        A vector that is given again has the random numbers of that round, and is thus the same.
        None if it gave none.
        """
        key = _model_key(model_hash)
        known = self._vectors.get(key)
        return self._trained.get(key) if known is None else known[1]

    def check_vector(self, config: RoundConfig, start: StartModel) -> None:
        """Refuse to give another vector for a model than the one of a sum.

        Args:
            config: of the attempt.
            start: of the vector that is asked for.

        Raises:
            PeerMisbehaved: the client has helped to unmask a sum of vectors that were computed, or
                encoded, in another way; or it was asked for its vector in the same way before, and
                what it keeps between rounds has changed since.
        """
        key = _model_key(start.model_hash)
        own = _vector_key(config, start)
        bound, _ = self._vectors.get(key, (own, 0))
        given = self._given.get(key, {}).get(_asked_key(config, start), own)
        if bound != own or given != own:
            refusal.refuse(
                "another-vector-for-model",
                "this device has helped to unmask a sum with its vector for the same model, or was "
                "asked for it in the same way before, and gives no other one: it was computed with "
                "other settings or code or from another state, or encoded in another range or with "
                "another largest weight; go on with those, or change the job's seed, which gives "
                "another model",
            )

    def begin(self, config: RoundConfig, requirements: ClientRequirements) -> None:
        """Record that an attempt begins.

        Raises:
            PeerMisbehaved: it is not after the last one, its draw is before the last one, or a
                limit of this client is reached: on participations, of the run or of all runs, or on
                epsilon.
        """
        if requirements.selection_slack is not None and config.draw < self._draw:
            refusal.refuse(
                "draw-before-last",
                f"the draw of {config.draw} is before that of {self._draw}, in which this device "
                "has taken part",
            )
        last = self._begun.get(config.run_id)
        if last is not None and (config.round, config.attempt) <= (last.round, last.attempt):
            refusal.refuse(
                "config-replayed",
                f"round {config.round} attempt {config.attempt} of run {config.run_id!r} is not "
                f"after round {last.round} attempt {last.attempt}, which this device has seen",
            )
        count = self.participations(config.run_id)
        limit = requirements.participations_per_run
        if limit is not None and count >= limit:
            refusal.refuse(
                "participation-limit-of-run",
                f"this device has taken part in {count} attempts of run {config.run_id!r}, its own "
                "limit",
            )
        limit = requirements.participations
        if limit is not None and self.participations() >= limit:
            refusal.refuse(
                "participation-limit",
                f"this device has taken part in {self.participations()} attempts of all runs, its "
                "own limit",
            )
        noise = config.noise
        rho = 0.0
        if noise is not None:
            rho = noise.zcdp_rho(config.size, clients=config.clients_max)
        if requirements.epsilon is not None:
            total = math.inf if noise is None else self.rho() + rho
            epsilon = epsilon_of_rho(total, requirements.delta)
            if epsilon > requirements.epsilon:
                refusal.refuse(
                    "epsilon-limit",
                    f"with this sum, {'which has no noise' if noise is None else 'and its noise'}, "
                    f"the data of this device would have an epsilon of {epsilon:.4g}, and its own "
                    f"limit is {requirements.epsilon:g} (its owner sets [privacy] in policy.toml)",
                )
        # Without a lottery nobody has checked the draw: a false one would shut the device out.
        draw = self._draw if requirements.selection_slack is None else config.draw
        rho += self.rho(config.run_id)
        begun = Begun(config.run_id, config.round, config.attempt, count + 1, draw, rho)
        self._store(begun)
        self._current = (config.run_id, config.round, config.attempt)

    def mask(self, config: RoundConfig, start: StartModel, share_owners: bytes) -> None:
        """Record that a masked vector is sent, if it may be.

        Args:
            config: of the attempt.
            start: model of this client's update.
            share_owners: hash of the clients that may survive.

        Raises:
            PeerMisbehaved: see `check`; or masked updates to this model were sent in another run,
                and no sum of them was unmasked.
        """
        self.check(config, start, share_owners)
        key = _model_key(start.model_hash)
        run_id = self._masked.get(key, config.run_id)
        if run_id != config.run_id:
            refusal.refuse(
                "masked-in-another-run",
                # Its name may be of no concern to the operators of this one.
                "this device has sent a masked update to the same model in another run and waits "
                "for its sum; continue that run, or change the job's seed, which gives another "
                "model",
            )
        asked = _asked_key(config, start)
        if key not in self._unmasked and asked not in self._given.get(key, {}):
            vector = _vector_key(config, start)
            trained = start.trained_round
            self._store(Masked(config.run_id, start.model_hash, asked, vector, trained))

    def check(self, config: RoundConfig, start: StartModel, survivors: bytes) -> None:
        """Refuse a survivor set, or a vector, that differs from that of an unmasked sum.

        Args:
            config: of the attempt.
            start: model of this client's update.
            survivors: hash of the set.

        Raises:
            PeerMisbehaved: it differs, for the same model or round; or see `check_vector`; or the
                client has begun another attempt since.
        """
        if self._current != (config.run_id, config.round, config.attempt):
            refusal.refuse(
                "attempt-superseded",
                f"this device has begun another attempt since attempt {config.attempt} at round "
                f"{config.round}",
            )
        if start.data and self._unmasked.get(_model_key(start.data), survivors) != survivors:
            refusal.refuse(
                "unmasked-for-data",
                "this device has helped to unmask counts of the same data, and its owner lets it "
                "give them, also of other models, only with exactly the same devices ([privacy] "
                "counts in policy.toml)",
            )
        for key in _keys(config.run_id, start.round, start.model_hash):
            if self._unmasked.get(key, survivors) != survivors:
                refusal.refuse(
                    "unmasked-for-model",
                    "this device has helped to unmask a sum of updates to the same model or of the "
                    "same round, and takes part again only with exactly the same devices; to train "
                    "the same job again with others, change its seed",
                )
        self.check_vector(config, start)

    def note_unmasked(self, config: RoundConfig, start: StartModel, survivors: bytes) -> None:
        """Record that this client helps to unmask the sum over `survivors`."""
        self.check(config, start, survivors)
        keys = _keys(config.run_id, start.round, start.model_hash)
        if any(key not in self._unmasked for key in keys):
            entry = Unmasked(
                config.run_id,
                start.round,
                start.model_hash,
                survivors,
                _vector_key(config, start),
                start.trained_round,
            )
            self._store(entry)
        if start.data and _model_key(start.data) not in self._unmasked:
            # A name of its own in place of a run: no round of a run has it.
            name = f"data/{start.data.hex()}"
            self._store(Unmasked(name, 0, start.data, survivors))

    def _store(self, entry: Entry) -> None:
        self._record(entry)
        self._take(entry)

    def _take(self, entry: Entry) -> None:
        match entry:
            case Begun():
                self._participations += entry.participations - self.participations(entry.run_id)
                self._begun[entry.run_id] = entry
                self._draw = max(self._draw, entry.draw)
            case Masked():
                key = _model_key(entry.model_hash)
                self._masked[key] = entry.run_id
                if entry.trained is not None:
                    self._given.setdefault(key, {})[entry.asked] = entry.vector
                    self._trained.setdefault(key, entry.trained)
            case Unmasked():
                for known in (self._masked, self._given, self._trained):
                    known.pop(_model_key(entry.model_hash), None)
                for key in _keys(entry.run_id, entry.round, entry.model_hash):
                    self._unmasked[key] = entry.survivors
                key = _model_key(entry.model_hash)
                # The first: later ones are of the same vector, perhaps in a later round.
                self._vectors.setdefault(key, (entry.vector, entry.trained))


def _model_key(model_hash: bytes) -> bytes:
    return tagged_hash("history-model", model_hash)[:_KEY_BYTES]


def _vector_key(config: RoundConfig, start: StartModel) -> bytes:
    return tagged_hash("history-vector", start.vector, config.encoding_hash)[:_KEY_BYTES]


def _asked_key(config: RoundConfig, start: StartModel) -> bytes:
    return tagged_hash("history-asked", start.work, config.encoding_hash)[:_KEY_BYTES]


def _keys(run_id: str, round_: int, model_hash: bytes) -> tuple[bytes, bytes]:
    of_round = tagged_hash("history-round", run_id.encode(), NUMBER.write(round_))
    return _model_key(model_hash), of_round[:_KEY_BYTES]
