"""Blobs that contain several models."""

import errno
import os

import pytest
import torch

from isthmus.tensors.exchange_set import TensorLayout
from isthmus_server.transport.bundle import published


async def test_a_full_disk_is_an_error_and_does_not_kill_the_process(
    network, tmp_path, monkeypatch
):
    """The kernel kills a process that writes to a mapped file on a full disk."""

    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.posix_fallocate", full)
    link, layout = await network.listen(), TensorLayout.from_shapes({"weight": (4,)})
    with pytest.raises(OSError, match="No space left"):
        async with published(link, layout, tmp_path, [torch.ones(4)], 1):
            raise AssertionError("unreachable")
    assert not link.published_blobs
