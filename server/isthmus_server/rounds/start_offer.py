"""The files that a job's model starts from, which devices get before the run is opened on them.

They are read from disk while they are sent, so that the server's memory does not depend on their
size.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from isthmus.errors import JobError, UserError
from isthmus.job import Job
from isthmus.start.files import StartFiles
from isthmus.start.manifest import StartManifest
from isthmus.task.scoring.building import is_all_exchanged
from isthmus.tensors.division import Division
from isthmus.transport.blobs import InFile
from isthmus.transport.requests import listed_messages
from isthmus.wire import link_pb2
from isthmus_server.model.global_model import GlobalModel
from isthmus_server.transport.link import Link


class StartOffer:
    """What devices need of a start, and the request with which they get it."""

    def __init__(self, request: link_pb2.Prepare, files: dict[bytes, Path]) -> None:
        """`files` are by their SHA-256."""
        self.request = request
        self._files = files
        self._opened = contextlib.ExitStack()

    @classmethod
    def of(
        cls, opening: link_pb2.OpenRun, job: Job, base: Path, model: GlobalModel
    ) -> StartOffer | None:
        """The files of a job; None if devices get all of the model with each round.

        Args:
            opening: the request with which devices open the run.
            job: of the run.
            base: directory of the job's relative paths.
            model: of the run, as it begins.

        Raises:
            JobError: the files cannot be read, or are not those that the job was made with.
        """
        section = job.model
        if section.start is None or job.strategy.policy == "datacenter":
            return None
        if is_all_exchanged(model.module, Division(model.layout, model.personal)):
            return None
        under = None if section.base is None else base / section.base
        try:
            found = StartFiles.find_all(base / section.start, under)
            manifest = StartManifest.of(found)
        except UserError as error:
            raise JobError(f"model.start: {error}") from None
        if manifest.digest != section.sha256:
            raise JobError(
                f"model.start: {base / section.start} has the digest {manifest.digest} here, and "
                f"the job is for {section.sha256}; put the files here with which it was made"
            )
        folders = [each.path if each.path.is_dir() else each.path.parent for each in found]
        parts = list(dict.fromkeys(file.part for file in manifest.files))
        files = {
            bytes.fromhex(file.sha256): folders[parts.index(file.part)] / file.name
            for file in manifest.files
        }
        request = link_pb2.Prepare(
            run_id=opening.run_id,
            job=opening.job,
            files=listed_messages(manifest),
            memory=opening.memory,
        )
        return cls(request, files)

    def publish(self, link: Link) -> None:
        """Let participants pull the files until `retract`.

        Raises:
            JobError: one cannot be opened.
        """
        for listed in self.request.files:
            path = self._files[listed.blob.sha256]
            try:
                file = self._opened.enter_context(path.open("rb"))
            except OSError as error:
                raise JobError(f"model.start: {path} cannot be read: {error.strerror}") from None
            link.publish(listed.blob, InFile(file, listed.blob.size), together=False)

    def retract(self, link: Link) -> None:
        """Offer the files no more."""
        for listed in self.request.files:
            link.retract(listed.blob)
        self._opened.close()
