"""A device gets the files of a model by their digest, from where its owner allows."""

import asyncio
import shutil

import pytest
from tests.server.waiting import wait_until

from isthmus.errors import AdmissionRefused, TaskError, UserError
from isthmus.job import with_changes
from isthmus.start.files import StartFiles
from isthmus.start.manifest import ListedFile, StartManifest
from isthmus.transport.blob_sources import NamedSource

LINK = "weights_mb = 100\n"
NO_LINK = "weights_mb = 100\n[weights]\nlink = false\n"


def loaded(place, manifest):
    """Whether a task finds the model there."""
    return StartFiles.find(place.start).digest() == manifest.digest


async def test_nothing_is_fetched_of_what_the_owner_has_added(device, job, model, manifest, pull):
    device.store.add(model)
    place = await device.get(job, "", pull=pull)
    assert loaded(place, manifest)
    assert place.mapped
    assert pull.asked == []


async def test_a_model_in_the_owners_folder_is_used_where_it_is(device, job, model, manifest):
    folder = device.tasks.parent / "models"
    shutil.copytree(model, folder / "by" / "somebody")
    (folder / "by" / "somebody" / "model.safetensors").rename(folder / "by" / "other-name")
    place = await device.get(job, f"[weights]\nfolders = ['{folder}']\n")
    assert loaded(place, manifest)
    assert not place.mapped
    assert folder / "by" / "other-name" in place.readable
    assert device.store.used_bytes == 0


async def test_a_model_next_to_the_tasks_is_found_as_the_job_names_it(device, job, model, manifest):
    shutil.copytree(model, device.tasks / "base")
    assert loaded(await device.get(job, ""), manifest)


async def test_the_link_is_asked_in_pieces_of_limited_size(device, job, manifest, pull):
    place = await device.get(job, pull=pull)
    assert loaded(place, manifest)
    assert max(length for _, length in pull.asked) <= 1 << 20
    assert [report.bytes for report in device.reports] == sorted(r.bytes for r in device.reports)
    assert device.reports[-1].bytes == device.reports[-1].of == manifest.size


async def test_a_web_server_is_asked_as_the_owner_says(device, job, manifest, mirror):
    limits = NO_LINK + f"sources = ['{mirror.address}']\n"
    assert loaded(await device.get(job, limits), manifest)
    assert mirror.asked == [("/model.safetensors", None)]


async def test_an_address_of_one_file_keeps_its_signature(device, job, manifest, mirror, caplog):
    address = f"{mirror.address}model.safetensors?X-Amz-Signature=secret"
    signed = with_changes(job, {"model.sources": [address]})
    limits = NO_LINK + "job_sources = ['https://127.0.0.1:*']\n"
    assert loaded(await device.get(signed, limits), manifest)
    assert mirror.asked == [("/model.safetensors?X-Amz-Signature=secret", None)]
    assert "secret" not in caplog.text


async def test_blobs_by_their_digest_are_a_source(device, job, model, manifest, tmp_path):
    [file] = manifest.files
    (tmp_path / "blobs").mkdir()
    shutil.copy(model / "model.safetensors", tmp_path / "blobs" / file.sha256)
    blobs = [NamedSource(f"file:{tmp_path}/blobs")]
    assert loaded(await device.get(job, NO_LINK, blobs=blobs), manifest)


async def test_a_job_names_sources_only_as_the_owner_allows(device, job, mirror):
    named = with_changes(job, {"model.sources": [mirror.address]})
    with pytest.raises(UserError, match="has no source: its owner allows none"):
        await device.get(named, NO_LINK)
    assert mirror.asked == []


async def test_a_download_goes_on_where_it_ended(device, job, manifest, mirror):
    mirror.sends = 300_000
    limits = NO_LINK + f"sources = ['{mirror.address}']\n"
    assert loaded(await device.get(job, limits), manifest)
    [file] = manifest.files
    assert [asked for _, asked in mirror.asked] == [
        None,
        f"bytes=300000-{file.size - 1}",
        f"bytes=600000-{file.size - 1}",
    ]


async def test_what_another_process_has_begun_is_completed(device, job, model, manifest, pull):
    [file] = manifest.files
    data = (model / "model.safetensors").read_bytes()
    with device.store.filling(file) as partial:
        partial.write(data[:500_000])
    assert loaded(await device.get(job, pull=pull), manifest)
    assert pull.asked[0][0] == 500_000


async def test_wrong_bytes_are_fetched_again_from_another_source(
    device, job, model, manifest, mirror, pull, caplog
):
    good = (model / "model.safetensors").read_bytes()
    sent = bytearray(good)
    sent[-1] ^= 1
    lie = model.parent / "lie"
    lie.mkdir()
    (lie / "model.safetensors").write_bytes(sent)
    mirror.folder = lie
    limits = LINK + f"[weights]\nsources = ['{mirror.address}']\n"
    assert loaded(await device.get(job, limits, pull=pull), manifest)
    assert pull.asked[0][0] == 0
    assert "its bytes are others than the model's" in caplog.text


async def test_bytes_of_several_sources_that_do_not_fit_are_all_fetched_again(
    device, job, manifest, pull
):
    """Nobody knows who was wrong: from then on each source has to give all of a file."""
    [file] = manifest.files
    with device.store.filling(file) as partial:
        partial.write(b"wrong" * 1000)
    assert loaded(await device.get(job, pull=pull), manifest)
    assert [offset for offset, _ in pull.asked if offset in (0, 5000)] == [5000, 0]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("truncated", "it has 1000 bytes under this name"),
        ("other", "its bytes are others than the model's"),
        ("gone", "it does not have the file"),
    ],
)
async def test_a_source_at_fault_is_a_sentence(device, job, model, mirror, caplog, fault, said):
    served = model.parent / "served"
    served.mkdir()
    data = (model / "model.safetensors").read_bytes()
    if fault == "truncated":
        (served / "model.safetensors").write_bytes(data[:1000])
    elif fault == "other":
        (served / "model.safetensors").write_bytes(bytes(len(data)))
    mirror.folder = served
    limits = NO_LINK + f"sources = ['{mirror.address}']\n"
    with pytest.raises(UserError, match="has no source: its owner's sources: see this device's"):
        await device.get(job, limits)
    named = with_changes(job, {"model.sources": [mirror.address]})
    with pytest.raises(UserError, match=f"that 'table' starts from has no source: .*: {said}"):
        await device.get(named, NO_LINK + "job_sources = ['https://127.0.0.1:*']\n")
    assert f"model.safetensors: {said}" in caplog.text
    with pytest.raises(TaskError, match="is not here"):  # nothing is trained on something else
        device.kept.place(job)


async def test_a_redirection_out_of_https_is_not_followed(device, job, mirror):
    mirror.redirect = "http://127.0.0.1:9/model.safetensors"
    named = with_changes(job, {"model.sources": [mirror.address]})
    with pytest.raises(UserError, match="it redirects to an address without HTTPS"):
        await device.get(named, NO_LINK + "job_sources = ['*']\n")


async def test_the_owners_limit_on_disk_space_holds(device, job, manifest, pull):
    with pytest.raises(AdmissionRefused, match=r"lets it fetch no models \(weights_mb in policy"):
        await device.get(job, "", pull=pull)
    big = ListedFile("model", "model.safetensors", "ab" * 32, 2_000_000)
    large = with_changes(job, {"model.sha256": big.sha256})
    with pytest.raises(AdmissionRefused, match="lacks 2 MB here, and of the 1 MB that its owner"):
        await device.get(large, "weights_mb = 1", listed=StartManifest((big,)), pull=pull)
    assert pull.asked == []


async def test_another_model_than_the_jobs_is_refused_by_name(device, job, pull):
    other = ListedFile("model", "model.safetensors", "ab" * 32, 2_000_000)
    with pytest.raises(UserError, match="'table' starts from base with the digest"):
        await device.get(job, listed=StartManifest((other,)), pull=pull)


async def test_outside_of_the_owners_hours_it_waits(device, job, manifest, pull, monkeypatch):
    limits = LINK + "hours = ['22:00-06:00']\n"
    clock = [12 * 3600.0]
    make = device.keeper

    def keeper(*arguments, **options):
        made = make(*arguments, **options)
        made.guard.now = lambda: clock[0]
        return made

    monkeypatch.setattr(device, "keeper", keeper)
    getting = asyncio.create_task(device.get(job, limits, pull=pull))
    await wait_until(lambda: any(report.pause for report in device.reports))
    assert pull.asked == []
    assert device.reports[-1].pause == "its owner's hours are 22:00-06:00 (UTC)"
    clock[0] = 23 * 3600.0
    assert loaded(await getting, manifest)


async def test_the_bytes_of_a_day_are_counted(device, job, model, pull):
    limits = LINK + "bytes_per_day = 100000\n"
    getting = asyncio.create_task(device.get(job, limits, pull=pull))
    await wait_until(lambda: any(report.pause for report in device.reports))
    assert device.reports[-1].pause == "its owner allows 100000 bytes a day"
    device.kept.cancel("1")
    with pytest.raises(Exception, match="nobody waits"):
        await getting
    device.store.add(model)
    assert loaded(await device.get(job, limits, pull=pull), device.store.models()[0].manifest)


async def test_the_owners_rate_holds(device, job, manifest, pull):
    limits = LINK + "[weights]\nkb_per_second = 2000\n"
    started = asyncio.get_running_loop().time()
    await device.get(job, limits, pull=pull)
    # 800 kB at 2000 kB/s; the last wait is after the last byte.
    assert asyncio.get_running_loop().time() - started > 0.39


async def test_a_link_that_breaks_is_waited_for(device, job, manifest, pull):
    broken = 3

    async def sometimes(*wanted):
        nonlocal broken
        if broken:
            broken -= 1
            raise ConnectionError("the link broke")
        return await pull(*wanted)

    assert loaded(await device.get(job, pull=sometimes), manifest)
    assert "the link broke" in [report.pause for report in device.reports]


async def test_a_model_that_was_lost_is_named(device, job, manifest, pull):
    await device.get(job, pull=pull)
    device.store.path(manifest.files[0].sha256).unlink()
    with pytest.raises(TaskError, match="of the model that 'table' starts from is not here"):
        device.kept.place(job)
