"""Sources that are slow, cut off or ignore what is asked, and the owner's limits on them."""

import asyncio
import threading

import pytest
from tests.clients.device.weights.test_keeper import LINK, NO_LINK, loaded
from tests.server.waiting import wait_until

from isthmus.errors import UserError
from isthmus.system.sealed_files import read_sealed
from isthmus.transport import timely_answers
from isthmus.transport.https_source import HttpsSource
from isthmus_clients.device.weights import keeper as keeper_module


async def test_a_source_that_gives_a_byte_for_each_connection_is_left(
    device, job, manifest, mirror, pull
):
    mirror.sends = 1
    limits = LINK + f"[weights]\nsources = ['{mirror.address}']\n"
    async with asyncio.timeout(30):
        assert loaded(await device.get(job, limits, pull=pull), manifest)
    assert len(mirror.asked) == 3


async def test_a_source_that_trickles_is_left(device, job, manifest, mirror, pull, monkeypatch):
    monkeypatch.setattr(keeper_module, "SILENT_SECONDS", 0.1)
    mirror.sends = 1000
    mirror.slow = 0.01
    limits = LINK + f"[weights]\nsources = ['{mirror.address}']\n"
    async with asyncio.timeout(30):
        assert loaded(await device.get(job, limits, pull=pull), manifest)
    assert len(mirror.asked) == 1


@pytest.mark.parametrize("in_chunks", [False, True])
async def test_a_source_whose_answer_trickles_is_left(
    device, job, manifest, mirror, pull, monkeypatch, in_chunks
):
    monkeypatch.setattr(timely_answers, "LINES_SECONDS", 0.2)
    mirror.drips_answers = True
    mirror.drips_chunks = in_chunks
    mirror.slow = 0.01
    limits = LINK + f"[weights]\nsources = ['{mirror.address}']\n"
    async with asyncio.timeout(30):
        assert loaded(await device.get(job, limits, pull=pull), manifest)
    assert len(mirror.asked) == 3


async def test_bytes_before_the_wanted_one_are_counted_and_paced(
    device, job, model, manifest, mirror, tmp_path
):
    """A server without ranges sends all of a file again."""
    [file] = manifest.files
    mirror.has_ranges = False
    with device.store.filling(file) as partial:
        partial.write((model / "model.safetensors").read_bytes()[:700_000])
    limits = "bytes_per_day = 10_000_000\n" + NO_LINK + "kb_per_second = 2000\n"
    started = asyncio.get_running_loop().time()
    limits += f"sources = ['{mirror.address}']\n"
    assert loaded(await device.get(job, limits), manifest)
    assert read_sealed(tmp_path / "state" / "usage.json")["bytes"] >= manifest.size
    assert asyncio.get_running_loop().time() - started > 0.3


async def test_a_request_that_is_cancelled_and_comes_again_gets_no_more_bytes(
    device, job, manifest, pull
):
    limits = LINK + "[weights]\nkb_per_second = 2000\n"
    loop = asyncio.get_running_loop()
    started = loop.time()
    device.keeper(limits)
    kept = device.kept
    device.keeper = lambda *_, **__: kept
    getting = asyncio.create_task(device.get(job, limits, pull=pull))
    await wait_until(lambda: any(report.bytes for report in device.reports))
    kept.cancel("1")
    with pytest.raises(Exception, match="nobody waits"):
        await getting
    assert loaded(await device.get(job, limits, pull=pull), manifest)
    assert loop.time() - started > 0.34  # 0.4 s, of which the last 0.05 are not waited for


async def test_hours_that_end_during_a_slow_download_stop_it(device, job, manifest, mirror):
    limits = "hours = ['22:00-06:00']\n" + NO_LINK + f"sources = ['{mirror.address}']\n"

    mirror.gate = threading.Event()
    mirror.sends = 1000
    clock = [23 * 3600.0]
    device.keeper(limits, look_seconds=0.001)
    kept = device.kept
    kept.guard.now = lambda: clock[0]
    device.keeper = lambda *_, **__: kept
    getting = asyncio.create_task(device.get(job, limits))
    await asyncio.to_thread(mirror.sent.wait, 30)
    await wait_until(lambda: any(report.bytes for report in device.reports))
    clock[0] = 12 * 3600.0
    mirror.gate.set()
    await wait_until(lambda: any(report.pause for report in device.reports) or getting.done())
    assert device.reports[-1].pause == "its owner's hours are 22:00-06:00 (UTC)"
    clock[0] = 23 * 3600.0
    assert loaded(await getting, manifest)


async def test_a_file_that_was_complete_when_the_process_ended_needs_no_source(
    device, job, model, manifest
):
    with device.store.filling(manifest.files[0]) as partial:
        partial.write((model / "model.safetensors").read_bytes())
    assert loaded(await device.get(job, NO_LINK), manifest)


def test_an_address_with_a_login_is_refused_without_it():
    with pytest.raises(UserError, match=r"^https://...@hub.test has a login") as error:
        HttpsSource("//user:password@hub.test/")
    assert "password" not in str(error.value)
