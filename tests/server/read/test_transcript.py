"""`isthmus prove`: recorded runs of all kinds, which the stand-alone verifier accepts."""

import base64
import hashlib
import io
import json
import os
import random
import re
import shlex
import ssl
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from tests.server.read.transcript_mutations import unnoticed

from isthmus.errors import DamagedError, UserError
from isthmus_server.cli.prove import prove
from isthmus_server.fleet.authority import CertificateAuthority, initialise
from isthmus_server.read.export.model_card import model_card
from isthmus_server.read.report.report import read_report
from isthmus_server.read.transcript import Transcript, head_of
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.run_parts import RunParts
from isthmus_server.storage.recovery import roll_back
from isthmus_server.storage.signed_sums import SignedSum, SignedSums, read_signed_sums
from isthmus_verify import command
from isthmus_verify.chain import MAX_LINE, canonical
from isthmus_verify.check import check
from isthmus_verify.violation import Violation

PLAIN = "federated.secure_aggregation=false"
PRIVATE = ("privacy.epsilon=5", "privacy.delta=0.01")
BUFFERED = ("federated.mode=buffered", "federated.buffer={concurrency=3}")
SCHEDULED = (
    "strategy.policy=schedule",
    "strategy.schedule=[{regime='federated', rounds=1}, {regime='federated', rounds=1}]",
)
"""Each part has values that are defaults, which devices open without."""

DEVICES = {
    "secure": (),
    "plain": (PLAIN,),
    "evaluated on devices": ("evaluation.devices=3",),
    "distributed noise": (*PRIVATE, "privacy.mechanism=distributed"),
    "correlated noise": (*PRIVATE, "privacy.mechanism=correlated", PLAIN),
    "compressed": ("federated.compression={}",),
    "best model": (PLAIN, 'evaluation.keep_best={name="accuracy",mode="max"}'),
    "scheduled": SCHEDULED,
    "buffered": BUFFERED,
    "buffered, plain": (*BUFFERED, PLAIN),
}
VALIDATION = "def validation_data(self, participant):\n    return rows(20, seed=3)"
MIXED = {
    "datacenter": ("strategy.policy=datacenter",),
    "hybrid": ("strategy.policy=hybrid",),
    "adaptive": ("strategy.policy=adaptive", "rounds=4"),
}


def transcript_of(store):
    return b"".join(Transcript(store).lines())


@pytest.fixture
async def recorded(deployment):
    """The transcript of a secure run with noise, of which one is made; and its store, if new."""
    if "transcript" not in _RECORDED:
        await deployment.start()
        private = (*PRIVATE, "privacy.mechanism=distributed")
        store = deployment.create_run("run", "rounds=2", *private)
        await Coordinator(RunParts.of(store, deployment.link)).run()
        _RECORDED["transcript"] = transcript_of(store)
    return _RECORDED["transcript"]


@pytest.fixture
async def recorded_with_ranges(deployment):
    """The transcript of a secure run whose sums are set up by those of the ranges."""
    if "ranges" not in _RECORDED:
        await deployment.start()
        store = deployment.create_run("run", "rounds=1")
        await Coordinator(RunParts.of(store, deployment.link)).run()
        _RECORDED["ranges"] = transcript_of(store)
    return _RECORDED["ranges"]


_RECORDED: dict[str, bytes] = {}


def chained(entries):
    """The transcript of entries, as somebody without the head can write it."""
    before = "0" * 64
    lines = []
    for number, (kind, content) in enumerate(entries, 1):
        if kind == "end":
            content = {**content, "entries": number}
        table = {"content": content, "kind": kind, "number": number}
        hashed = hashlib.sha256(bytes.fromhex(before) + canonical(table))
        before = hashed.hexdigest()
        lines.append(canonical({**table, "hash": before}) + b"\n")
    return b"".join(lines)


def entries_of(data):
    tables = map(json.loads, data.splitlines())
    return [(table["kind"], table["content"]) for table in tables]


@pytest.mark.parametrize("kind", DEVICES)
async def test_a_run_with_devices_is_verified(deployment, kind):
    await deployment.start(VALIDATION if "evaluated" in kind else "pass")
    store = deployment.create_run("run", "rounds=2", *DEVICES[kind])
    await Coordinator(RunParts.of(store, deployment.link)).run()
    data = transcript_of(store)
    assert transcript_of(store) == data
    with (store.directory / "model.safetensors").open("rb") as model:
        verdict = check(
            io.BytesIO(data),
            head=head_of(store),
            authority=deployment.link.enrolments.authority,
            model=model,
        )
    holds = " ".join(verdict.holds)
    assert "The given file is the final model of this run." in holds
    assert "2 committed rounds and 0 failed attempts" in holds
    secure = PLAIN not in DEVICES[kind]
    assert (
        "In 2 of 2 rounds with secure sums, the accepted devices are exactly" in holds
    ) == secure
    private = PRIVATE[0] in DEVICES[kind]
    first = "as the one that they start from; in 1, before any commit, the first model."
    assert (first in holds) == (secure and BUFFERED[0] not in DEVICES[kind])
    assert ("No device was asked for more than the epsilon of the job" in holds) == private
    # Nothing is left open but what no transcript can show.
    assert len(verdict.unknown) == 2, verdict.unknown


@pytest.mark.parametrize("kind", MIXED)
async def test_a_run_with_a_datacenter_is_verified(run_with_datacenter, kind):
    store, coordinator, _ = await run_with_datacenter(*MIXED[kind])
    await coordinator.run()
    verdict = check(io.BytesIO(transcript_of(store)), head=head_of(store))
    report = read_report(store)
    assert f"has {len(report.rounds)} committed rounds" in " ".join(verdict.holds)
    card = model_card(report, store.job, report.final, "model.safetensors", "0" * 64, "0" * 64)
    assert "1 datacenter trained on data of its own." in card


async def test_failed_attempts_and_a_run_under_way_are_verified(deployment):
    await deployment.start()
    deployment.faults["a"][(2, 1)] = "the battery is empty"
    store = deployment.create_run("run", "rounds=2")
    empty = check(io.BytesIO(transcript_of(store)))
    assert "How the run ends: it is 'running'." in empty.unknown
    await Coordinator(RunParts.of(store, deployment.link)).run()
    verdict = check(io.BytesIO(transcript_of(store)))
    assert "An `isthmus run` makes one of its own" in " ".join(verdict.unknown)
    assert "2 committed rounds and 1 failed attempts" in " ".join(verdict.holds)
    entries = entries_of(transcript_of(store))
    record = next(content["record"] for kind, content in entries if kind == "round")
    record["training"]["federated"]["examples"] = 2
    with pytest.raises(Violation, match="has a mean over 2 examples of 3 devices"):
        check(io.BytesIO(chained(entries)))


async def test_a_run_that_went_back_is_verified_and_has_no_sums_of_what_it_dropped(deployment):
    deployment.of_one_machine = True  # devices of others take part in no earlier round
    await deployment.start()
    store = deployment.create_run("run", "rounds=2")
    await Coordinator(RunParts.of(store, deployment.link)).run()
    store.close()
    roll_back(store.directory)
    store = deployment.reopen(store)
    verdict = check(io.BytesIO(transcript_of(store)))
    assert "In 1 of 1 rounds with secure sums" in " ".join(verdict.holds)
    await Coordinator(RunParts.of(store, deployment.link)).run()
    verdict = check(io.BytesIO(transcript_of(store)))
    assert "In 2 of 2 rounds with secure sums" in " ".join(verdict.holds)


@pytest.mark.parametrize(
    ("edit", "place"),
    [
        (lambda parts: parts[1].update(rounds=2), "strategy.schedule.1.rounds"),
        (lambda parts: parts.pop(), "strategy.schedule.length"),
    ],
)
async def test_another_schedule_than_devices_have_opened_is_found(deployment, edit, place):
    await deployment.start()
    store = deployment.create_run("run", "rounds=2", *SCHEDULED)
    await Coordinator(RunParts.of(store, deployment.link)).run()
    entries = entries_of(transcript_of(store))
    edit(entries[0][1]["job"]["strategy"]["schedule"])
    with pytest.raises(Violation, match=re.escape(f"'{place}' is")):
        check(io.BytesIO(chained(entries)))


async def test_random_mutations_are_found(recorded):
    assert unnoticed(recorded, 400, seed=1) == []


def _edit(kind, edit, which=0):
    """A forgery: one entry of a kind is changed, and the chain is written anew."""

    def forge(entries):
        found = [content for name, content in entries if name == kind]
        edit(found[which])
        return entries

    return forge


def _without(kind, which=0):
    def forge(entries):
        at = [number for number, (name, _) in enumerate(entries) if name == kind][which]
        return entries[:at] + entries[at + 1 :]

    return forge


def _twice(kind):
    def forge(entries):
        at = next(number for number, (name, _) in enumerate(entries) if name == kind)
        return entries[: at + 1] + entries[at:]

    return forge


def _other_bytes(key, at):
    """One bit of a signed message is another one."""

    def edit(content):
        data = bytearray(base64.b64decode(content[key]))
        data[at] ^= 1
        content[key] = base64.b64encode(data).decode()

    return _edit("sum", edit)


def _receipts(content):
    return content["record"]["receipts"]


def _swap_model(content):
    content["models"] = dict.fromkeys(content["models"], "0" * 64)
    content["record"]["model_sha256"] = "0" * 64


def _claim_more(content):
    content["job"]["privacy"]["epsilon"] = 50.0


FORGERIES = {
    "a receipt twice": (
        _edit("round", lambda c: _receipts(c).append(_receipts(c)[0])),
        "two receipts",
    ),
    "a receipt of another device": (
        _edit("round", lambda c: _receipts(c)[0].update(participant="z")),
        "whom its plan did not ask",
    ),
    "a rejected device": (
        _edit("round", lambda c: _receipts(c)[0].update(status="rejected")),
        "participants as accepted",
    ),
    "fewer bytes": (_edit("round", lambda c: _receipts(c)[0].update(bytes_in=1)), "bytes_up"),
    "more seconds": (_edit("round", lambda c: _receipts(c)[0].update(seconds=1e6)), "seconds"),
    "another model": (_edit("round", _swap_model), "the last commit has 0000"),
    "another last model": (_edit("round", _swap_model, 1), "and the run has committed 0000"),
    "another final model": (
        _edit("end", lambda c: c["final"].update(model_sha256="0" * 64)),
        "the final model has the digest 0000",
    ),
    "a start that was not committed": (
        _edit("plan", lambda c: c["start"].update(sha256="0" * 64), 1),
        "starts from the model 'current' with the digest 0000",
    ),
    "a round left out": (_without("round"), "follows"),
    "a plan left out": (_without("plan"), "without a plan"),
    "a plan twice": (_twice("plan"), "follows attempt 1"),
    "a sum twice": (_twice("sum"), "there before"),
    "a charge left out": (_without("charge"), "does not follow the line"),
    "no charges": (
        lambda entries: [each for each in entries if each[0] != "charge"],
        "without a charge that names just these",
    ),
    "a larger budget": (_edit("run", _claim_more), "in the job that devices have opened"),
    "another roster": (_other_bytes("roster", -70), "has not signed the configuration"),
    "another certificate": (_other_bytes("roster", 120), "no certificate of the authority"),
    "another configuration": (_other_bytes("config", -20), "has not signed the configuration"),
    "an empty set-up": (
        _edit("sum", lambda c: c.update(set_up="")),
        "names the sum before, whose keys it does not have",
    ),
    "other survivors": (_other_bytes("survivors", -1), "is a sum over 2 of 3"),
    "other signatures": (_other_bytes("signatures", -1), "is not valid"),
    "another purpose": (_other_bytes("purpose", -1), "not the one that the devices signed"),
}


SET_UP_FORGERIES = {
    "no set-up": (_edit("sum", lambda c: c.pop("set_up")), "ends too early"),
    "the set-up of itself": (
        _edit("sum", lambda c: c.update(set_up=c["config"])),
        "signed for another sum than that of its ranges",
    ),
    "another set-up": (_other_bytes("set_up", 60), "signed for another sum"),
    "a configuration after another": (_other_bytes("config", -1), "signed for another sum"),
    "another configuration": (_other_bytes("config", -95), "not of its roster"),
    "another roster": (_other_bytes("roster", -70), "has not signed the configuration"),
    "a set-up that is not needed": (
        _edit("sum", lambda c: c.update(config=c["set_up"])),
        "names the sum before",
    ),
}


@pytest.mark.parametrize("forgery", SET_UP_FORGERIES)
async def test_a_forged_sum_that_another_one_has_set_up_is_found(recorded_with_ranges, forgery):
    forge, sentence = SET_UP_FORGERIES[forgery]
    entries = entries_of(recorded_with_ranges)
    assert chained(entries) == recorded_with_ranges
    with pytest.raises(Violation, match=re.escape(sentence)):
        check(io.BytesIO(chained(forge(entries))))


@pytest.mark.parametrize("forgery", FORGERIES)
async def test_a_forgery_with_a_chain_that_fits_is_found(recorded, forgery):
    forge, sentence = FORGERIES[forgery]
    entries = entries_of(recorded)
    assert chained(entries) == recorded
    with pytest.raises(Violation, match=re.escape(sentence)):
        check(io.BytesIO(chained(forge(entries))))


async def test_another_head_authority_or_model_is_refused(recorded, tmp_path):
    with pytest.raises(Violation, match="it is of another run, or all of it was written anew"):
        check(io.BytesIO(recorded), head="0" * 64)
    with pytest.raises(Violation, match="names another authority than the given one"):
        check(io.BytesIO(recorded), authority=bytes(32))
    with pytest.raises(Violation, match="the given model has the digest"):
        check(io.BytesIO(recorded), model=io.BytesIO(b"another"))


DEEP = b"[" * 200_000 + b"]" * 200_000
HOSTILE = {
    "empty": b"",
    "not JSON": b"\xff\xfe\n",
    "deep": DEEP + b"\n",
    "deep content": b'{"content":' + DEEP + b',"hash":"","kind":"run","number":1}\n',
    "large number": b'{"content":{},"hash":"","kind":"run","number":' + b"9" * 5000 + b"}\n",
    "not finite": b'{"content":NaN,"hash":"","kind":"run","number":1}\n',
    "a key twice": b'{"kind":"run","kind":"end"}\n',
    "a long line": b" " * (MAX_LINE + 1),
}
WRONG = [None, True, -1, 10**400, 1e308, "x", "\ud800", [], {}, [[]], {"a": {}}]


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_transcript_gets_a_sentence(name):
    with pytest.raises(Violation):
        check(io.BytesIO(HOSTILE[name]))


def places(value, at=()):
    """Where there are values in JSON data, the inner ones included."""
    yield at
    keys = value if isinstance(value, dict) else ()
    for key in range(len(value)) if isinstance(value, list) else keys:
        yield from places(value[key], (*at, key))


async def test_values_of_other_types_get_a_sentence_or_are_of_no_account(recorded):
    """With a chain that fits, so that all of the program sees them; nothing else is raised."""
    dice = random.Random(2)
    refused = 0
    for _ in range(600):
        entries = entries_of(recorded)
        content = dice.choice(entries)[1]
        at = dice.choice([place for place in places(content) if place])
        inner = content
        for key in at[:-1]:
            inner = inner[key]
        inner[at[-1]] = dice.choice(WRONG)
        try:
            check(io.BytesIO(chained(entries)))
        except Violation:
            refused += 1
    assert refused > 200


async def test_the_commands_write_and_check_a_transcript(deployment, tmp_path, capsys):
    await deployment.start()
    store = deployment.create_run("run", "rounds=1")
    await Coordinator(RunParts.of(store, deployment.link)).run()
    before = {path.name for path in store.directory.iterdir()}
    result = CliRunner().invoke(prove, [str(store.directory)])
    assert result.exit_code == 0, result.output
    assert {path.name for path in store.directory.iterdir()} == before
    path = tmp_path / "run.transcript.jsonl"
    head = head_of(store)
    model = str(store.directory / "model.safetensors")
    call = f"isthmus-verify {path} --head {head} --model {model}"
    assert result.output.splitlines()[1:] == [f"head        {head}", f"check       {call}"]
    report = read_report(store)
    card = model_card(report, store.job, report.final, "model.safetensors", "0" * 64, head)
    assert f"| head of the run's transcript (`isthmus prove`) | `{head}` |" in card.splitlines()
    assert command.main(shlex.split(call)[1:]) == 0
    assert f"head     {head}" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        command.main([str(path), "--head", head[:12]])
    assert f"--head '{head[:12]}' is not a hash; give all of its 64" in capsys.readouterr().err
    path.write_bytes(path.read_bytes()[:-10])
    assert command.main([str(path)]) == 1
    assert "was cut short within entry" in capsys.readouterr().err
    assert command.main([str(tmp_path / "none")]) == 1
    assert "none: No such file or directory" in capsys.readouterr().err


async def test_a_transcript_replaces_no_part_of_its_run_and_no_device(deployment, tmp_path):
    await deployment.start()
    store = deployment.create_run("run", "rounds=1")
    await Coordinator(RunParts.of(store, deployment.link)).run()
    log = store.directory / "run.sqlite"
    before = log.read_bytes()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(log)
    (tmp_path / "file.jsonl").touch()
    (tmp_path / "to-a-file").symlink_to(tmp_path / "file.jsonl")
    refused = {
        log: "is in the directory of the run, which is only read",
        store.directory / "new.jsonl": "is in the directory of the run, which is only read",
        tmp_path / "link": "is in the directory of the run, which is only read",
        tmp_path / "to-a-file": "is a link, which a transcript would replace; name the file itself",
        tmp_path / "pipe": "is not a file; a transcript replaces a file as a whole",
        "": "is not a file; a transcript replaces a file as a whole",
    }
    for output, reason in refused.items():
        result = CliRunner().invoke(prove, [str(store.directory), "--output", str(output)])
        assert isinstance(result.exception, UserError), result.output
        assert reason in str(result.exception)
    assert log.read_bytes() == before
    assert (tmp_path / "pipe").is_fifo()
    other = tmp_path / "other.jsonl"
    other.write_text("an older one")
    result = CliRunner().invoke(prove, [str(store.directory), "--output", str(other)])
    assert result.exit_code == 0, result.output
    assert command.main([str(other)]) == 0


async def test_the_printed_check_of_a_fleets_run_names_its_authority(deployment):
    await deployment.start()
    deployment.link.enrolments.deployment = "separate"
    store = deployment.create_run("run", "rounds=1")
    assert "--" not in check_of(store).partition("--head ")[2]  # it has no final model yet
    await Coordinator(RunParts.of(store, deployment.link)).run()
    assert check_of(store).endswith("/model.safetensors --authority authority.pem")
    said = CliRunner().invoke(prove, [str(store.directory)]).output
    assert "authority.pem is the certificate of the fleet's authority, which each" in said
    plain = deployment.create_run("plain", "rounds=1", PLAIN)
    await Coordinator(RunParts.of(plain, deployment.link)).run()
    assert check_of(plain).endswith("/model.safetensors")


async def test_a_run_without_signed_sums_says_that_simulated_devices_sign_nothing(deployment):
    await deployment.start()
    store = deployment.create_run("run", "rounds=1")
    await Coordinator(RunParts.of(store, deployment.link)).run()
    (store.directory / "signed-sums.jsonl").unlink()
    unknown = " ".join(check(io.BytesIO(transcript_of(store))).unknown)
    assert "in 1 secure rounds: there are no signed sums of them. Simulated devices sign" in unknown


def check_of(store):
    """The line of `isthmus prove` that has the call of the verifier."""
    result = CliRunner().invoke(prove, [str(store.directory)])
    assert result.exit_code == 0, result.output
    (check,) = (line for line in result.output.splitlines() if line.startswith("check "))
    return check


async def test_a_run_with_a_signature_that_does_not_hold_has_no_transcript(deployment, tmp_path):
    deployment.honest = False
    await deployment.start()
    store = deployment.create_run("run", "rounds=1")
    await Coordinator(RunParts.of(store, deployment.link)).run()
    path = store.directory / "signed-sums.jsonl"
    job, line = path.read_text().splitlines()
    signed = json.loads(line)
    data = bytearray(base64.b64decode(signed["signatures"]))
    data[-1] ^= 1
    signed["signatures"] = base64.b64encode(data).decode()
    path.write_text(f"{job}\n{json.dumps(signed)}\n")
    result = CliRunner().invoke(prove, [str(store.directory)])
    assert isinstance(result.exception, DamagedError)
    assert "of its survivors is not valid" in str(result.exception)
    assert not (tmp_path / "run.transcript.jsonl").exists()
    store.reopen()  # under way: it may sign a sum after its log was read
    path.write_text(f"{job}\n{line}\n")
    store.log.connection.execute("DELETE FROM attempts")
    store.log.write_head()
    assert CliRunner().invoke(prove, [str(store.directory)]).exit_code == 0


def test_an_authority_is_read_from_its_certificate(tmp_path):
    initialise(tmp_path / "state", ["localhost"])
    certificate = tmp_path / "state/authority.pem"
    key = CertificateAuthority(tmp_path / "state").enroller.public
    assert command.authority_key(certificate) == key
    (tmp_path / "other.pem").write_text("x")
    loaded = x509.load_pem_x509_certificate(certificate.read_bytes())
    der = loaded.public_bytes(serialization.Encoding.DER)
    version = b"\xa0\x03\x02\x01"  # 2, which is the third, comes after it
    name = bytes([0x86, len(b"isthmus-enroller:") + 64])  # of an address; 0xa3 is none
    assert version in der
    assert name in der
    for other in (
        b"x",
        der.replace(version + b"\x02", version + b"\x05", 1),
        der.replace(name, bytes([0xA3]) + name[1:], 1),
    ):
        (tmp_path / "other.pem").write_text(ssl.DER_cert_to_PEM_cert(other))
        with pytest.raises(Violation, match=r"other.pem is no certificate of an authority"):
            command.authority_key(tmp_path / "other.pem")


async def test_an_outcome_that_cannot_be_printed_is_none(deployment, tmp_path):
    await deployment.start()
    store = deployment.create_run("run", "rounds=1")
    await Coordinator(RunParts.of(store, deployment.link)).run()
    path = tmp_path / "run.jsonl"
    path.write_bytes(b"".join(Transcript(store).lines()))
    call = "import sys; from isthmus_verify.command import main; sys.exit(main())"
    environment = {**os.environ, "PYTHONPATH": str(Path(command.__file__).parents[1])}

    def called(output):
        return subprocess.run(
            [sys.executable, "-c", call, str(path)],
            env=environment,
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )

    full = os.open("/dev/full", os.O_WRONLY)
    found = called(full)
    os.close(full)
    reason = "isthmus-verify: the outcome cannot be written: No space left on device\n"
    assert (found.returncode, found.stderr) == (1, reason)
    reader, writer = os.pipe()
    os.close(reader)
    found = called(writer)
    os.close(writer)
    assert (found.returncode, found.stderr) == (1, "")


def test_a_line_that_a_crash_cut_short_is_left_out_and_replaced(tmp_path):
    sums = SignedSums(tmp_path)
    signed = SignedSum(bytes(32), b"config", b"roster", b"survivors", b"signatures")
    sums.add(signed, b"", "{}")
    path = tmp_path / "signed-sums.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + whole.splitlines()[-1][:50])
    assert len(list(read_signed_sums(tmp_path))) == 2
    SignedSums(tmp_path).add(signed, b"", "{}")
    assert len(list(read_signed_sums(tmp_path))) == 4
    path.write_bytes(b"{}\n" + whole)
    with pytest.raises(DamagedError, match=r"line 1 of .* is damaged"):
        list(read_signed_sums(tmp_path))


def test_a_set_up_that_is_named_and_empty_is_damage(tmp_path):
    """The line would have another form, and say the same."""
    signed = SignedSum(bytes(32), b"config", b"roster", b"survivors", b"signatures")
    SignedSums(tmp_path).add(signed, b"", "{}")
    path = tmp_path / "signed-sums.jsonl"
    path.write_bytes(path.read_bytes().replace(b'{"authority"', b'{"set_up": "", "authority"', 1))
    with pytest.raises(DamagedError, match=r"line 2 of .* is damaged"):
        list(read_signed_sums(tmp_path))
