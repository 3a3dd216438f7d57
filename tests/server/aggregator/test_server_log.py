"""What the log of `isthmus server start` says of aggregators, at its default level, and metrics."""

import asyncio
import re

from click.testing import CliRunner
from tests.server.service.test_leaving import join, read, started
from tests.server.waiting import wait_until

from isthmus.task import Participant
from isthmus_clients.commands import client
from isthmus_clients.device.agent import Agent
from isthmus_clients.device.own_link import OwnLink
from isthmus_server.aggregator.process import AggregatorProcess
from isthmus_server.fleet.authority import initialise


async def status(member):
    """What a device's owner sees."""
    words = ["status", "--state", str(member.directory)]
    return (await asyncio.to_thread(CliRunner().invoke, client, words)).output


async def shown(metrics, lines):
    """Wait until all of these lines are in the server's metrics, which follow its devices."""
    async with asyncio.timeout(300.0):
        while not lines <= set((await asyncio.to_thread(read, metrics)).decode().splitlines()):
            pass


async def test_an_aggregator_and_the_number_of_its_devices_are_in_log_and_metrics(tmp_path):
    state = tmp_path / "fleet"
    initialise(state, hosts=("localhost",))
    async with started(state, "--metrics", "127.0.0.1:0") as server:
        metrics = (await server.line(r"metrics at (\S+)"))[1]
        member = await join(server, state, "127.0.0.1", "aggregator")
        process = AggregatorProcess(member)
        ready = asyncio.Event()
        run = process.run("127.0.0.1", 0, server=server.link, ready=ready.set)
        serving = asyncio.create_task(run)
        await server.line("INFO the aggregator 127.0.0.1 is connected")
        await ready.wait()
        phone = await join(server, state, "phone-0", "client")
        participant = Participant(name="phone-0", regime="federated")
        agent = Agent(participant, None, own_link=OwnLink(phone.directory))
        assert (await status(phone)).splitlines()[1:] == []
        locked = phone.locked()
        locked.__enter__()
        device = asyncio.create_task(agent.uplink(f"127.0.0.1:{process.port}", phone).run())
        counted = {
            "isthmus_aggregators 1.0",
            'isthmus_aggregator_devices{aggregator="127.0.0.1"} 1.0',
            'isthmus_devices{state="aggregated"} 1.0',
            'isthmus_devices{state="direct"} 0.0',
            "isthmus_devices_enrolled 1.0",
            "isthmus_serving 1.0",
            "isthmus_tenure 1.0",
        }
        await shown(metrics, counted)
        # The server may know of the device before its welcome is there.
        await wait_until(lambda: OwnLink.read(phone.directory).sentence.startswith("linked to"))
        line = (await status(phone)).splitlines()[1]
        assert re.fullmatch(rf"linked to 127.0.0.1:{process.port} since \S+ \S+ UTC", line)
        serving.cancel()
        await server.line("INFO the aggregator 127.0.0.1 has left, with 1 device")
        await wait_until(lambda: OwnLink.read(phone.directory).sentence.startswith("without a "))
        assert re.match(
            r"without a link since \S+ \S+ UTC: \S", (await status(phone)).splitlines()[1]
        )
        locked.__exit__(None, None, None)
        assert (await status(phone)).splitlines()[1:] == ["not running"]
        device.cancel()
        await asyncio.gather(serving, device, return_exceptions=True)
