"""Check what devices of secure rounds have signed against the log of their run."""

from __future__ import annotations

import base64
import dataclasses
import hashlib

from isthmus.errors import DamagedError, PeerMisbehaved
from isthmus_privacy.crypto import keys
from isthmus_privacy.crypto.canonical import Reader, tagged, tagged_hash
from isthmus_privacy.purpose import (
    BufferedPurpose,
    RangePurpose,
    RunPurpose,
    TrainingPurpose,
    ranged_model,
    ranges_run_id,
)
from isthmus_privacy.secagg.cohort import keys_are_signed, roster_hash
from isthmus_privacy.secagg.config import RoundConfig, SetUpBefore
from isthmus_privacy.secagg.graph import corrupt_clients
from isthmus_privacy.secagg.identity import Enrolment
from isthmus_privacy.secagg.messages import (
    ConsistencySignature,
    ConsistencySignatures,
    Roster,
    Survivors,
)
from isthmus_server.storage.records import RoundRecord
from isthmus_server.storage.signed_sums import FILE, SignedSum, read_signed_sums
from isthmus_server.storage.store import Store


@dataclasses.dataclass
class _Checked:
    """What is known of the lines so far."""

    enrolments: set[tuple[bytes, Enrolment]] = dataclasses.field(default_factory=set)
    """Certificates whose signature was verified, by authority; a device has one for many sums."""
    configs: set[bytes] = dataclasses.field(default_factory=set)
    devices: dict[tuple[int, int], list[frozenset[str]]] = dataclasses.field(default_factory=dict)
    """In each sum of this run, by round and attempt."""
    sums: int = 0


def check_signed_sums(store: Store) -> str:
    """Check all signatures, and that committed rounds have accepted those who have signed.

    Once a round has a sum, all later ones with devices have one: a file that was cut is found. Of a
    run under way, what it signs meanwhile is left out.

    Returns what was checked, as a sentence.

    Args:
        store: of the run, open to read.

    Raises:
        DamagedError: a line, a signature or a set of devices is another one.
        OSError: the file cannot be read.
    """
    # The log first: a round is committed after its sum is in the file.
    with store.snapshot():
        checked = _check_lines(store)
        return _check_rounds(store, checked)


def _check_lines(store: Store) -> _Checked:
    """Check each line of the file; returns what is known of them.

    Raises:
        DamagedError: a line or a signature is another one.
    """
    checked = _Checked()
    jobs = set()
    for line in read_signed_sums(store.directory):
        if "job" in line:
            jobs.add(hashlib.sha256(line["job"].encode("utf-8", "surrogatepass")).digest())
            continue
        checked.sums += 1
        where = f"sum {checked.sums} of {store.directory / FILE}"
        try:
            config, in_sum = _check_sum(line, checked, where)
            job = _opened_job(line)
        except PeerMisbehaved as error:
            raise _damaged(where, str(error)) from error
        if config.run_id == store.run_id:
            if job is not None and job not in jobs:
                raise _damaged(where, "its devices have opened another job than those before it")
            checked.devices.setdefault((config.round, config.attempt), []).append(in_sum)
    return checked


def _check_rounds(store: Store, checked: _Checked) -> str:
    """Check which devices committed rounds have accepted; returns what was checked, as a sentence.

    Args:
        store: of the run.
        checked: of the file; the sums of attempts are removed from it.

    Raises:
        DamagedError: they are not those that have signed, or a round has no sum, or a sum no round.
    """
    secure = store.job.federated.secure_aggregation
    rounds = 0
    with_sums = 0
    for logged, _ in store.proved_attempts():
        attempt = (logged.planned.round, logged.planned.attempt)
        sums = checked.devices.pop(attempt, [])
        if not isinstance(logged.record, RoundRecord):
            continue
        accepted = {
            receipt.participant
            for receipt in logged.record.receipts
            if (receipt.regime, receipt.status) == ("federated", "accepted")
        }
        rounds += bool(accepted)
        if secure and accepted and with_sums and not sums:
            raise _damaged(
                str(store.directory / FILE),
                f"it has no sum of round {attempt[0]}, and one of an earlier round",
            )
        with_sums += bool(sums)
        if logged.record.groups:
            # The sum of a group may be refused after it was signed: then nobody of it is accepted.
            sums = [devices for devices in sums if devices & accepted]
        devices = frozenset[str]().union(*sums)
        if devices and devices != accepted:
            raise _damaged(
                str(store.directory / FILE),
                f"the devices that have signed the sum of round {attempt[0]} are not those that "
                "its record accepts",
            )
    if checked.devices and store.status()[0] != "running":
        round_, number = min(checked.devices)
        raise _damaged(
            str(store.directory / FILE),
            f"it has a sum of round {round_} attempt {number}, which the round log has not",
        )
    return (
        f"{FILE}: {checked.sums} sums with valid signatures, of {with_sums} of {rounds} committed "
        "rounds with devices"
    )


def _check_sum(
    line: dict[str, str], checked: _Checked, where: str
) -> tuple[RoundConfig, frozenset[str]]:
    """Check one sum; returns its configuration and who is in it.

    Raises:
        DamagedError, PeerMisbehaved: something about it does not hold.
    """
    signed = _decoded(line, where)
    config = RoundConfig.from_bytes(signed.config)
    roster = Roster.from_bytes(signed.roster)
    survivors = Survivors.from_bytes(signed.survivors)
    signatures = ConsistencySignatures.from_bytes(signed.signatures)
    if config.hash in checked.configs:
        raise _damaged(where, "it was there before")
    checked.configs.add(config.hash)
    if signed.purpose and tagged_hash("purpose", signed.purpose) != config.purpose:
        raise _damaged(where, "its purpose is not the one that the devices have signed")
    for entry in roster.entries:
        certificate = (signed.authority, entry.enrolment)
        if certificate not in checked.enrolments:
            enrolment = entry.enrolment
            fields = enrolment.signed_fields()
            if not keys.verify(signed.authority, enrolment.signature, "enrolment", *fields):
                raise _damaged(where, f"the certificate of {entry.name!r} is not of its authority")
            checked.enrolments.add(certificate)
        if not keys_are_signed(config, entry):
            raise _damaged(where, f"{entry.name!r} has not signed its configuration")
    _check_set_up(config, signed.set_up, where)
    if survivors.roster_hash != roster_hash(config, roster):
        raise _damaged(where, "its survivors are of another roster")
    count = len(roster.entries)
    if survivors.survivors.size != count or survivors.share_owners.size != count:
        raise _damaged(where, "its survivors are of a roster of another size")
    if len(survivors.survivors) < config.clients_min:
        raise _damaged(where, f"fewer than {config.clients_min} devices are in it")
    fields = survivors.signed_fields()
    signers = {position for position, _ in signatures.signatures}
    if len(signers) < (count + corrupt_clients(count, config.corrupt_permille)) // 2 + 1:
        raise _damaged(where, "too few of its devices have signed the survivors")
    for position, signature in signatures.signatures:
        valid = position in survivors.survivors and keys.verify(
            roster.entries[position].enrolment.identity_key,
            signature,
            ConsistencySignature.TAG,
            *fields,
        )
        if not valid:
            raise _damaged(where, f"signature {position} of its survivors is not valid")
    return config, frozenset(roster.names[at] for at in survivors.survivors.indices)


def _check_set_up(config: RoundConfig, set_up: bytes, where: str) -> None:
    """Check that the keys of a sum were signed for it, or for the ranges of its updates.

    Raises:
        DamagedError: so it is not.
        PeerMisbehaved: the configuration of the sum before cannot be read.
    """
    if not isinstance(config.set_up, SetUpBefore):
        if set_up:
            raise _damaged(where, "it has a set-up of its own, and names another one")
        return
    first = RoundConfig.from_bytes(set_up)
    is_of_ranges = (
        config.follows(first)
        and first.run_id == ranges_run_id(config.run_id)
        and first.model_hash == ranged_model(config.model_hash)
        and first.purpose == RangePurpose(config.purpose).hash
    )
    if not is_of_ranges:
        raise _damaged(where, "its keys were signed for another sum than that of its ranges")


def _opened_job(line: dict[str, str]) -> bytes | None:
    """The SHA-256 of the job that the devices of a sum had opened; None if it has no purpose.

    Raises:
        PeerMisbehaved: its purpose cannot be read.
    """
    purpose = base64.b64decode(line["purpose"])
    if not purpose:
        return None
    buffered = purpose.startswith(tagged(BufferedPurpose.TAG))
    reader = Reader(purpose)
    reader.take(len(tagged(BufferedPurpose.TAG if buffered else TrainingPurpose.TAG)))
    return RunPurpose.read(reader).job  # it comes first


def _decoded(line: dict[str, str], where: str) -> SignedSum:
    try:
        values = {
            name: base64.b64decode(text, validate=True)
            for name, text in line.items()
            if name != "authority"
        }
        return SignedSum(authority=bytes.fromhex(line["authority"]), **values)
    except ValueError as error:
        raise _damaged(where, "it is not base64") from error


def _damaged(what: str, reason: str) -> DamagedError:
    return DamagedError(
        f"{what} is damaged: {reason}; restore the file from a backup, or remove it, and the run "
        "has no signed sums any more"
    )
