"""The job's table `[model]`: what the model starts from."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from pydantic import Field, model_validator

from isthmus.errors import JobError, UserError
from isthmus.job.section import Section

Pattern = Annotated[str, Field(min_length=1)]
Source = Annotated[str, Field(pattern=r"^https://[!-~]+$", max_length=4096)]
CONFIG = "start_config"
"""The key of the task's settings with the configuration of the start."""
TOKENIZER = "start_tokenizer"
"""The key of the task's settings with the folder and the digest of the start's tokenizer."""


class ModelSection(Section):
    """What the model starts from; by default the values that `model()` draws from the seed."""

    start: Annotated[str, Field(min_length=1)] | None = None
    """A safetensors file, or a folder with such files: of Hugging Face, of a run or of an export.
    Relative to the job file. Its tensors replace those of `model()`."""
    base: Annotated[str, Field(min_length=1)] | None = None
    """If `start` is an adapter of PEFT: the file or folder of the model that it adapts."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """Digest of these files, as `isthmus model inspect` prints it. Computed when the job is loaded,
    unless it is given; every participant compares what it loads."""
    fresh: tuple[Pattern, ...] = ()
    """Patterns of the model's tensors that do not come from `start`, such as a new head: they have
    the values that `model()` draws from the seed."""
    unused: tuple[Pattern, ...] = ()
    """Patterns of tensors in `start` that are not loaded."""
    sources: tuple[Source, ...] = ()
    """Where devices may get the files of `start`, if their owners allow it: `https://` addresses of
    a folder, which end in `/`, or of one file each."""

    @model_validator(mode="after")
    def _about_a_start(self) -> ModelSection:
        given = [
            name for name in ("base", "sha256", "fresh", "unused", "sources") if getattr(self, name)
        ]
        if self.start is None and given:
            raise ValueError(f"{given[0]} has no effect without start; set start, or remove it")
        if self.start is not None and self.sha256 is None:
            raise ValueError(
                "sha256 is missing, the digest of start; `isthmus model inspect` prints it"
            )
        return self

    def check_inside(self) -> None:
        """Refuse files that are not in the directory of a machine's tasks, by their names.

        Links that are in it were put there by its owner, and are followed.

        Raises:
            JobError: so it is.
        """
        for key in ("start", "base"):
            path = getattr(self, key)
            if path is None:
                continue
            parts = PurePosixPath(path).parts
            if PurePosixPath(path).is_absolute() or ".." in parts:
                raise JobError(
                    f"model.{key}={path!r} is not below the directory of tasks, where this machine "
                    "keeps what its owner allows; put the files there, and name them from there"
                )


def add_start(table: dict[str, Any], folder: Path) -> None:
    """Put the digest of `model.start` into the job, and its `config.json` into the task's settings.

    With the place and the digest of its tokenizer, if the folder has one. So every participant has
    them with the job. If the job has the digest already, the files need not be on this machine.

    Raises:
        JobError: the files cannot be used.
    """
    from isthmus.start.files import StartFiles, digest_of_all
    from isthmus.start.tokenizer_files import tokenizer_digest

    model = table.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("start"), str):
        return
    path = folder / model["start"]
    if model.get("sha256") and not path.exists():
        return
    try:
        found = StartFiles.find_all(path, _path(folder, model.get("base")))
        config = found[0].config()
        if not model.get("sha256"):
            model["sha256"] = digest_of_all(found)
        tokenizer = tokenizer_digest(found[0].path)
    except UserError as error:
        raise JobError(f"model.start: {error}") from None
    task = table.setdefault("task", {})
    settings = task.setdefault("settings", {}) if isinstance(task, dict) else None
    if config is None or not isinstance(settings, dict):
        return
    for key, what in ((CONFIG, "config.json"), (TOKENIZER, "tokenizer")):
        if key in settings:
            raise JobError(
                f"task.settings.{key} is the place of the start's {what}; rename the setting"
            )
    settings[CONFIG] = config
    if tokenizer is not None:
        # Of an adapter, that of the model under it.
        folder_name = model["base"] if len(found) > 1 else model["start"]
        settings[TOKENIZER] = {"folder": folder_name, "sha256": tokenizer}


def _path(folder: Path, name: Any) -> Path | None:
    return folder / name if isinstance(name, str) else None
