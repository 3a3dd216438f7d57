"""The registry of participants, tokens and certificates, in a SQLite file of the state directory.

The running server and the operator's commands use the file at the same time; every change is one
transaction. A certificate that is not in the registry is invalid, even with a valid signature.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from isthmus.errors import AdmissionRefused, CertificateExpired, UserError
from isthmus.identity import tls
from isthmus.names import checked_name
from isthmus.system.clocks import BY_SERVERS_CLOCK, utc
from isthmus_server.fleet.registry_file import NAME, SCHEMA
from isthmus_server.fleet.rollouts import Rollouts
from isthmus_server.storage import audit
from isthmus_server.storage.sealed_database import SealedDatabase, database_error

REPEAT_SECONDS = 600.0
"""Period after the use of a token in which its user can get the same certificate again."""

_PART = 1000
"""Names that are read at a time."""

MAX_CERTIFICATES = 1000
"""Maximum number of valid certificates of one participant; it exceeds what a participant needs that
repeatedly fails to store the next one."""

_KEEP_SECONDS = 24 * 3600.0
"""Period after which a used token, or an expired certificate that has been replaced, is deleted."""


@dataclasses.dataclass(frozen=True)
class RegistryEntry:
    """One participant, for the operator's list."""

    name: str
    kind: str
    identity: bytes
    joined: float
    """Unix seconds, like all times in the registry."""
    revoked: float | None
    not_after: float | None
    """End of validity of its latest certificate."""
    rollout: str = ""
    """Name of the token for many devices with which it joined; empty for a token of its own."""


class ParticipantList(Protocol):
    """What admission needs of a registry: this one, or a copy of it."""

    @property
    def version(self) -> int:
        """A number that changes whenever the participants change."""
        ...

    def check(self, subject: tls.Subject) -> None:
        """Check that the holder of a certificate is a participant now."""
        ...

    def participants(self) -> list[RegistryEntry]:
        """All participants that ever joined, by name."""
        ...

    def devices(self) -> int:
        """Number of edge devices."""
        ...

    def revoked_identities(self) -> set[bytes]:
        """Identity keys that are no longer accepted."""
        ...

    def revoked_names(self) -> set[str]:
        """Names of participants that are revoked, and have not joined again."""
        ...

    def clients(self) -> Iterator[str]:
        """Names of the edge devices that are not revoked; only as many are read as are taken."""
        ...

    def close(self) -> None:
        """Close it."""
        ...


Issue = Callable[[str], tuple[bytes, tls.Subject]]
"""Issues the certificate for a name; returns PEM and its subject."""


class Registry:
    """One connection to the file; use it from one thread.

    Guarantees:
      * a token, a join and a revocation are in the audit log of the directory exactly once, also if
        the process ended before it could write there: the next one to open the registry does;
      * a token is used once: of any number of joins at the same time, one gets the name;
      * a name, and an identity, belong to one participant at a time;
      * a revoked identity is never accepted again;
      * nothing that a participant may still use is deleted because of the time, for the clock may
        be wrong: not its last certificate, and no unused token.
    """

    def __init__(self, directory: Path, *, now: Callable[[], float] = time.time) -> None:
        """Check and open the file; creates it if there was none. `now` returns Unix seconds.

        Raises:
            UserError: it is damaged or missing, or cannot be opened.
        """
        self._now = now
        self._directory = directory
        path = directory / NAME
        try:
            # Only if it is new: closing a file that SQLite has open releases SQLite's locks.
            if not path.with_suffix(".head").exists():
                audit.refuse_lost_registry(path)
                with contextlib.suppress(FileExistsError):
                    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
            self._log = SealedDatabase.checked(path, SCHEMA)
            self._db = self._log.connection
            self._rollouts = Rollouts(self._db)
            self._record_changes()
        except (OSError, sqlite3.Error) as error:
            raise database_error(path, error) from None

    def close(self) -> None:
        """Close the file."""
        self._log.close()

    @property
    def version(self) -> int:
        """A number that changes whenever another connection changed the file."""
        return int(self._db.execute("PRAGMA data_version").fetchone()[0])

    # -- tokens ------------------------------------------------------------------------------------

    def add_token(
        self,
        digest: bytes,
        *,
        name: str,
        kind: str,
        expires: float,
        uses: int | None = None,
    ) -> None:
        """Allow one join under a name; with `uses`, as many under NAME-1, NAME-2 and so on.

        In the audit log it is by the user who runs this process.

        Raises:
            UserError: the name is taken.
        """
        checked_name(name)
        with self._transaction():
            long_ago = self._now() - _KEEP_SECONDS
            self._db.execute("DELETE FROM tokens WHERE used < ?", (long_ago,))
            self._refuse_taken(name)
            self._note(
                "token",
                by=audit.local_user(),
                name=name,
                kind=kind,
                expires=utc(expires),
                token=digest.hex(),
                **({} if uses is None else {"uses": str(uses)}),
            )
            if uses is not None:
                self._rollouts.add(digest, name=name, kind=kind, expires=expires, uses=uses)
                return
            self._db.execute(
                "INSERT INTO tokens (digest, name, kind, expires) VALUES (?, ?, ?, ?)",
                (digest, name, kind, expires),
            )

    def redeem(self, digest: bytes, kind: str, identity: bytes, issue: Issue) -> tuple[str, bytes]:
        """Use a token; returns the name, and the certificate (PEM) from `issue(name)`.

        A participant that joined with the token gets the same certificate again for a while,
        because the first answer may have been lost. The caller must have proved that it has the
        key of `identity`.

        Raises:
            AdmissionRefused: the token is unknown, expired, used or for another kind, or the name
                or the identity is taken. Nothing was changed.
        """
        with self._transaction():
            now = self._now()
            placed = self._rollouts.place(digest, kind, identity, now, REPEAT_SECONDS)
            if placed is not None:
                name, certificate = placed
                if certificate is None or not self._is_in(name, identity):
                    certificate = self._admit(name, kind, identity, digest, issue)
                    self._rollouts.joined(digest, name, identity, certificate, now)
                return name, certificate
            row = self._db.execute(
                "SELECT name, kind, expires, used, certificate FROM tokens WHERE digest=?",
                (digest,),
            ).fetchone()
            if row is None:
                raise AdmissionRefused(
                    "this server does not know this token, or it was used long ago"
                )
            name, for_kind, expires, used, certificate = row
            if used is not None:
                if now < used + REPEAT_SECONDS and self._is_in(name, identity):
                    return name, certificate
                raise AdmissionRefused("this token has been used; ask the operator for another")
            if now >= expires:
                raise AdmissionRefused(
                    f"this token ended at {utc(expires)} {BY_SERVERS_CLOCK} {utc(now)}; ask the "
                    "operator for another"
                )
            if kind != for_kind:
                raise AdmissionRefused(
                    f"this token is for a participant of kind {for_kind!r}, not {kind!r}"
                )
            certificate = self._admit(name, kind, identity, digest, issue)
            self._db.execute(
                "UPDATE tokens SET used=?, certificate=? WHERE digest=?",
                (now, certificate, digest),
            )
            return str(name), certificate

    def _admit(self, name: str, kind: str, identity: bytes, digest: bytes, issue: Issue) -> bytes:
        """Make a participant by the token with the digest; returns its certificate (PEM)."""
        try:
            self._refuse_taken(name)
        except UserError as error:
            raise AdmissionRefused(str(error)) from None
        if self._is_known(identity):
            raise AdmissionRefused("this identity belongs to a participant already, or was revoked")
        certificate, subject = issue(name)
        self._db.execute(
            "INSERT OR REPLACE INTO participants VALUES (?, ?, ?, ?, NULL)",
            (name, kind, identity, self._now()),
        )
        self._add_certificate(subject)
        self._note("join", by=name, kind=kind, identity=identity.hex(), token=digest.hex())
        return bytes(certificate)

    # -- certificates ------------------------------------------------------------------------------

    def check(self, subject: tls.Subject) -> None:
        """Check that the holder of a certificate is a participant now.

        Raises:
            CertificateExpired: it is over by this server's clock.
            AdmissionRefused: it is revoked or unknown, with the reason.
        """
        row = self._db.execute(
            "SELECT p.kind, p.identity, p.revoked, c.serial FROM participants p "
            "LEFT JOIN certificates c ON c.serial=? AND c.name=p.name WHERE p.name=?",
            (subject.serial, subject.name),
        ).fetchone()
        if row is None:
            raise AdmissionRefused(f"{subject.name!r} is not a participant of this server")
        kind, identity, revoked, serial = row
        if revoked is not None:
            raise AdmissionRefused(f"{subject.name!r} has been revoked")
        if serial is None or (kind, identity) != (subject.kind, subject.identity):
            raise AdmissionRefused(f"this certificate of {subject.name!r} is not valid any more")
        if (now := self._now()) > subject.not_after:
            raise CertificateExpired(
                f"the certificate of {subject.name!r} ended at {utc(subject.not_after)} "
                f"{BY_SERVERS_CLOCK} {utc(now)}; if that clock is right, join again with a new "
                "token"
            )

    def renew(self, old: tls.Subject, issue: Issue) -> bytes:
        """Issue the next certificate (PEM) of a participant.

        Raises:
            AdmissionRefused: it is not a participant any more, or has too many certificates.
        """
        with self._transaction():
            self.check(old)
            query = "SELECT count(*) FROM certificates WHERE name=? AND not_after>?"
            (valid,) = self._db.execute(query, (old.name, self._now())).fetchone()
            if valid >= MAX_CERTIFICATES:
                raise AdmissionRefused(
                    f"{old.name!r} has {valid} valid certificates; use one of them"
                )
            certificate, subject = issue(old.name)
            self._add_certificate(subject)
            self._db.execute(
                "DELETE FROM certificates WHERE name=? AND not_after < ? AND rowid < "
                "(SELECT rowid FROM certificates WHERE serial=?)",  # the one it connected with
                (old.name, self._now() - _KEEP_SECONDS, old.serial),
            )
            return certificate

    def revoke(self, name: str) -> None:
        """Revoke a participant's certificates and identity permanently.

        Raises:
            UserError: there is no such participant, or it was revoked before.
        """
        with self._transaction():
            row = self._db.execute(
                "SELECT identity, revoked FROM participants WHERE name=?", (name,)
            ).fetchone()
            # An unused token would let it join again.
            tokens = self._db.execute(
                "DELETE FROM tokens WHERE name=? AND used IS NULL", (name,)
            ).rowcount
            if row is None and tokens == 0:
                raise UserError(f"there is no participant or token named {name!r}")
            if row is not None and row[1] is not None and tokens == 0:
                raise UserError(f"{name!r} is revoked already")
            self._note("revoke", by=audit.local_user(), name=name)
            if row is not None:
                self._exclude(name, row[0])

    def revoke_rollout(self, name: str) -> list[str]:
        """End a rollout's token, and revoke the participants that joined with it; their names.

        Raises:
            UserError: there is no such rollout, or it was revoked before.
        """
        with self._transaction():
            members = self._rollouts.revoke(name, self._now())
            now_in = [(each, key) for each, key in members if self._is_in(each, key)]
            for each in (name, *(participant for participant, _ in now_in)):
                self._note("revoke", by=audit.local_user(), name=each, rollout=name)
            for participant, identity in now_in:
                # A token of its own would let a revoked name join again.
                self._db.execute("DELETE FROM tokens WHERE name=? AND used IS NULL", (participant,))
                self._exclude(participant, identity)
            return [participant for participant, _ in now_in]

    def end_tokens(self) -> None:
        """End all tokens that were made; participants stay as they are."""
        with self._transaction():
            self._db.execute("DELETE FROM tokens WHERE used IS NULL")
            self._db.execute("UPDATE rollouts SET revoked=? WHERE revoked IS NULL", (self._now(),))

    def _exclude(self, name: str, identity: bytes) -> None:
        self._db.execute(
            "UPDATE participants SET revoked=? WHERE name=? AND revoked IS NULL",
            (self._now(), name),
        )
        self._db.execute("DELETE FROM certificates WHERE name=?", (name,))
        self._db.execute("INSERT OR IGNORE INTO revoked_identities VALUES (?)", (identity,))

    # -- queries -----------------------------------------------------------------------------------

    def participants(self) -> list[RegistryEntry]:
        """Return all participants that ever joined, by name."""
        rows = self._db.execute(
            "SELECT p.name, p.kind, p.identity, p.joined, p.revoked, max(c.not_after), "
            "coalesce(max(m.rollout), '') FROM participants p "
            "LEFT JOIN certificates c ON c.name=p.name "
            "LEFT JOIN rollout_members m ON m.identity=p.identity GROUP BY p.name ORDER BY p.name"
        )
        return [RegistryEntry(*row) for row in rows]

    def certificates(self) -> dict[str, list[tuple[str, float]]]:
        """Serial number (hexadecimal) and end (Unix seconds) of all certificates, by name."""
        found: dict[str, list[tuple[str, float]]] = {}
        for name, *rest in self._db.execute("SELECT name, serial, not_after FROM certificates"):
            found.setdefault(name, []).append((rest[0], rest[1]))
        return found

    def devices(self, ended_within: float = 0.0) -> int:
        """Number of edge devices with a valid certificate, at least 1.

        A certificate counts for `ended_within` seconds more after its end.
        """
        query = (
            "SELECT count(DISTINCT p.name) FROM participants p JOIN certificates c USING (name) "
            "WHERE p.kind='client' AND p.revoked IS NULL AND c.not_after>?"
        )
        since = self._now() - ended_within
        return max(1, int(self._db.execute(query, (since,)).fetchone()[0]))

    def revoked_identities(self) -> set[bytes]:
        """Return Ed25519 public keys that are no longer accepted."""
        return {row[0] for row in self._db.execute("SELECT identity FROM revoked_identities")}

    def revoked_names(self) -> set[str]:
        """Return the names of participants that are revoked, and have not joined again."""
        # By their keys, which have an index: it is asked at each change of a large registry.
        query = (
            "SELECT p.name FROM revoked_identities r JOIN participants p USING (identity) "
            "WHERE p.revoked IS NOT NULL"
        )
        return {name for (name,) in self._db.execute(query)}

    def clients(self) -> Iterator[str]:
        """Yield the names of edge devices that are not revoked; reads only those that are taken."""
        query = (
            "SELECT name FROM participants "
            "WHERE name>? AND kind='client' AND revoked IS NULL ORDER BY name LIMIT ?"
        )
        last = ""
        # In parts, each to its end: an open query would keep the file from being written.
        while rows := self._db.execute(query, (last, _PART)).fetchall():
            for (last,) in rows:
                yield last

    # -- internals ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._log.transaction():
            yield
        self._log.write_head()
        self._record_changes()

    def _note(self, action: str, *, by: str, **details: str) -> None:
        """Commit an entry of the audit log together with the change that it is about."""
        self._db.execute(
            "INSERT INTO unrecorded (mark, log_bytes, action, author, details) "
            "VALUES (?, ?, ?, ?, ?)",
            (
                secrets.token_hex(8),
                audit.size(self._directory),
                action,
                by,
                json.dumps(details),
            ),
        )

    def _record_changes(self) -> None:
        """Write noted entries into the audit log: of this process, and of any that has ended.

        Raises:
            UserError: the log cannot be read or written; the entries stay.
        """
        query = (
            "SELECT number, mark, log_bytes, action, author, details FROM unrecorded "
            "ORDER BY number"
        )
        if self._db.execute(query).fetchone() is None:
            return
        # In a transaction, so that no other process writes the same entries.
        with self._log.transaction():
            noted = self._db.execute(query).fetchall()
            # A process may have ended after it wrote there, and before it could say so here. Times
            # do not show it: the clock may have been set back since an earlier entry of the same
            # action.
            start = min((log_bytes for _, _, log_bytes, *_ in noted), default=0)
            written = audit.marks_since(self._directory, start)
            for number, mark, _, action, by, text in noted:
                if mark not in written:
                    audit.record(self._directory, action, by=by, mark=mark, **json.loads(text))
                self._db.execute("DELETE FROM unrecorded WHERE number=?", (number,))

    def _refuse_taken(self, name: str) -> None:
        row = self._db.execute(
            "SELECT 1 FROM participants WHERE name=? AND revoked IS NULL", (name,)
        ).fetchone()
        if row is not None:
            raise UserError(
                f"{name!r} is a participant already; revoke it first, or choose another name"
            )

    def _is_known(self, identity: bytes) -> bool:
        query = (
            "SELECT 1 FROM participants WHERE identity=?1 "
            "UNION ALL SELECT 1 FROM revoked_identities WHERE identity=?1"
        )
        return self._db.execute(query, (identity,)).fetchone() is not None

    def _is_in(self, name: str, identity: bytes) -> bool:
        row = self._db.execute(
            "SELECT 1 FROM participants WHERE name=? AND identity=? AND revoked IS NULL",
            (name, identity),
        ).fetchone()
        return row is not None

    def _add_certificate(self, subject: tls.Subject) -> None:
        row = (subject.serial, subject.name, subject.not_after)
        self._db.execute("INSERT INTO certificates VALUES (?, ?, ?)", row)
