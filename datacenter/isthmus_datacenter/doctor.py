"""``isthmus doctor datacenter``: check a machine with ranks."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import click

from isthmus.doctor import checks
from isthmus.doctor.checks import Diagnosis, diagnose
from isthmus.doctor.commands import tell
from isthmus.identity.proxies import ProxyChoice
from isthmus.identity.proxy_options import proxy_options

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the kernel's, where ranks of a host exchange data


@click.command("datacenter")
@click.option(
    "--state",
    type=click.Path(file_okay=False, path_type=Path),
    help="The datacenter's directory, as for `launch`, if its service runs on this machine.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@proxy_options
def doctor_datacenter(state: Path | None, as_json: bool, proxy: ProxyChoice) -> None:
    """Check this machine as a host of ranks: GPUs, NCCL, memory, and its membership."""
    tell(_results(state, proxy), as_json=as_json)


def _results(state: Path | None, proxy: ProxyChoice) -> Iterator[Diagnosis]:
    yield from diagnose("versions", checks.versions)
    yield checks.tls_version()
    if state is not None:
        keys = state / "membership"
        yield from diagnose("membership", lambda: checks.membership(keys, ("datacenter",), proxy))
        yield from diagnose("disk", lambda: checks.disk(state))
    yield from diagnose("GPU", _gpus)
    yield from diagnose("shared memory", _shared_memory)


def _gpus() -> Iterator[Diagnosis]:
    import torch
    import torch.distributed

    if not torch.cuda.is_available():
        yield Diagnosis(
            "WARN",
            "GPU",
            "PyTorch finds none; ranks use the CPU",
            "install a driver and a PyTorch for it, if this machine has a GPU",
        )
        return
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        name = torch.cuda.get_device_name(number)
        found = f"{name}, {free / 1e9:.0f} of {total / 1e9:.0f} GB are free"
        yield Diagnosis("OK", f"GPU {number}", found)
    if not torch.distributed.is_nccl_available():
        yield Diagnosis("FAIL", "NCCL", "this PyTorch has none", "install PyTorch with CUDA")
        return
    numbers: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]  # PyTorch has no types for it
    version = ".".join(map(str, numbers))
    yield Diagnosis("OK", "NCCL", version)


def _shared_memory() -> Diagnosis:
    free = shutil.disk_usage(_SHARED_MEMORY).free
    found = f"{free / 1e9:.1f} GB are free in {_SHARED_MEMORY}"
    if free < 1e9:
        remedy = "give the container more, for example --shm-size=8g"
        return Diagnosis("WARN", "shared memory", found, remedy)
    return Diagnosis("OK", "shared memory", found)
