"""Apps that work on a device in place of a task, and who opens them.

A framework registers how its apps are opened under the entry-point group `isthmus.device_work`, as
an `OpenApp`; see `isthmus.job.apps`. A device asks for it only when a job has an app.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from isthmus.task import Participant
from isthmus.transport.blobs import Buffer
from isthmus.wire import link_pb2

DEVICE_WORK = "isthmus.device_work"
"""Entry-point group of those that open apps."""


class DeviceApp(Protocol):
    """The app of an open run; it may keep a state until the run is closed."""

    def answer(
        self, work: link_pb2.AppMessage, payload: Buffer | bytes
    ) -> tuple[link_pb2.AppReply, Buffer | None]:
        """Pass a message to the app: its reply, and the records of a reply without an error.

        An exception of the app becomes an error in the reply.

        Raises:
            UpdateError: the payload cannot be decoded.
        """
        ...


class OpenApp(Protocol):
    """Opens the app of a run."""

    def __call__(
        self,
        work: link_pb2.OpenRun,
        participant: Participant,
        data: Path | None,
        tasks: Path | None,
    ) -> DeviceApp:
        """Load the app that the job of a run names.

        Args:
            work: the request that opens the run.
            participant: this device.
            data: location of its data; None for the one of the job.
            tasks: directory of the only apps that may be loaded; None loads any app.

        Raises:
            TaskError: the app cannot be loaded, or is not usable.
            JobError: the framework is not installed.
        """
        ...
