"""Misuse of a stream by an admitted participant. Every test uses real TLS."""

import asyncio
import os

import grpc
import pytest
from tests.server.loopback import refusal
from tests.server.scripted_participant import payload_of, training_request

from isthmus.errors import ParticipantLost, UpdateError
from isthmus.transport.blobs import describe, into
from isthmus.wire import link_pb2


async def test_replaying_a_recorded_stream_has_no_effect(fleet):
    """The participant itself sends the same bytes again; others could not, because of TLS."""
    await fleet.listen()
    member = await fleet.member("phone-0")
    payload = payload_of(300_000)
    async with fleet.raw(member) as (_, send, receive):
        await receive("welcome")
        request = training_request(fleet.link)
        asking = asyncio.create_task(fleet.link.ask("phone-0", request))
        await receive("request")
        trained = link_pb2.Trained(result=describe(payload), examples=1)
        record = [{"reply": link_pb2.Reply(id=request.id, trained=trained)}]
        await send(**record[0])
        reply = await asking
        back = bytearray(len(payload))
        fetching = asyncio.create_task(
            fleet.link.fetch("phone-0", reply.trained.result, into(back))
        )
        pull = await receive("pull")
        for start in (0, 200_000):
            data = bytes(payload[start : start + 200_000])
            chunk = link_pb2.Chunk(sha256=pull.sha256, offset=start, data=data)
            record.append({"chunk": chunk})
            await send(**record[-1])
            await send(**record[-1])  # while the transfer is under way
        await fetching
        assert back == payload
        fleet.link.acknowledge("phone-0", request.id, True)
        assert (await receive("receipt")).accepted
        received = fleet.link.peers["phone-0"].received
        counted = received.total
        for body in record:
            await send(**body)
        late = await receive("receipt")
        assert (late.accepted, late.reason) == (False, "too late: the request has ended")
        assert received.total == counted


async def test_a_device_on_the_network_cannot_have_the_server_read_its_own_files(fleet, tmp_path):
    """It names one that the server has open, of the right size, where an update is expected."""
    await fleet.listen()
    member = await fleet.member("phone-0")
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(200))
    taken = []

    def take(file):
        with file:
            taken.append(file.read())

    with secret.open("rb") as file:
        async with fleet.raw(member) as (call, send, receive):
            await receive("welcome")
            blob = describe(bytes(200))
            fetching = asyncio.create_task(
                fleet.link.fetch("phone-0", blob, into(bytearray(200)), take)
            )
            pull = await receive("pull")
            assert pull.machine == ""
            offered = link_pb2.OpenFile(process=os.getpid(), descriptor=file.fileno())
            await send(chunk=link_pb2.Chunk(sha256=pull.sha256, file=offered))
            sentence = "it offered a file that was not asked for"
            assert await refusal(call) == (grpc.StatusCode.INVALID_ARGUMENT, sentence)
            with pytest.raises(UpdateError, match=sentence):
                await fetching
    assert taken == []


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ([(0, 100), (100, 101)], "a transfer of 200 bytes continued to byte 201"),
        ([(0, 100), (150, 50)], "a transfer has a gap: at byte 100, got 150"),
        ([(0, 100), (100, 0)], "a transfer has a gap: at byte 100, got 100"),
        ([(2**63, 100)], f"a transfer has a gap: at byte 0, got {2**63}"),
    ],
    ids=["oversized", "truncated in the middle", "empty", "far off"],
)
async def test_a_transfer_that_differs_from_its_announcement_is_refused(fleet, sizes, sentence):
    await fleet.listen()
    member = await fleet.member("phone-0")
    async with fleet.raw(member) as (_, send, receive):
        await receive("welcome")
        room = bytearray(200)
        fetching = asyncio.create_task(
            fleet.link.fetch("phone-0", describe(bytes(200)), into(room))
        )
        pull = await receive("pull")
        for offset, size in sizes:
            chunk = link_pb2.Chunk(sha256=pull.sha256, offset=offset, data=bytes(size))
            await send(chunk=chunk)
        if sizes[-1] == (100, 0):  # a chunk without bytes is as good as none
            await send(chunk=link_pb2.Chunk(sha256=pull.sha256, offset=101, data=b"x"))
            sentence = "a transfer has a gap: at byte 100, got 101"
        with pytest.raises(UpdateError, match=f"^{sentence}$"):
            await fetching


async def test_a_participant_whose_transfer_stops_is_lost_after_a_lease(fleet):
    await fleet.listen(lease_seconds=2.0)
    member = await fleet.member("phone-0")
    async with fleet.raw(member) as (_, send, receive):
        await receive("welcome")
        fetching = asyncio.create_task(
            fleet.link.fetch("phone-0", describe(bytes(200)), into(bytearray(200)))
        )
        pull = await receive("pull")
        await send(chunk=link_pb2.Chunk(sha256=pull.sha256, data=bytes(100)))
        with pytest.raises(ParticipantLost, match="silent for longer than the lease"):
            await fetching
