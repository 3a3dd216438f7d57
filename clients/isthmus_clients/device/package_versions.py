"""Which versions of task packages this device has had, so that no server can bring back an old one.

An old package is signed as validly as a new one, and contains the errors that the author has since
corrected.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from isthmus.errors import AdmissionRefused, DamagedError
from isthmus.system.sealed_files import read_sealed, write_sealed
from isthmus.task.packages import Package

_Versions = dict[str, tuple[int, str]]
_FORM: TypeAdapter[_Versions] = TypeAdapter(_Versions)


class PackageVersions:
    """The highest version and its digest for each author and task.

    Guarantees:
      * a version is on disk before a task of it is loaded, and stays when the task is removed;
      * a file that cannot be read or written refuses every package.
    """

    def __init__(self, path: Path) -> None:
        """`path` is the file, in the device's state directory."""
        self._path = path

    def check(self, package: Package) -> None:
        """Refuse a package that is older than one that this device has had, and record others.

        Raises:
            AdmissionRefused: it is older, is another package of the same version, or the record
                cannot be read or written.
        """
        known = self._read()
        key = f"{package.author.hex()}/{package.name}"
        if key in known:
            version, digest = known[key]
            package.check_follows(version, bytes.fromhex(digest))
            if version == package.version:
                return
        known[key] = (package.version, package.digest.hex())
        try:
            write_sealed(self._path, known)
        except OSError as error:
            raise AdmissionRefused(
                f"it cannot record the version of a task ({error.strerror})"
            ) from None

    def _read(self) -> _Versions:
        try:
            return _FORM.validate_python(read_sealed(self._path))
        except FileNotFoundError:
            return {}
        except (OSError, DamagedError, ValidationError):
            raise AdmissionRefused(
                "its record of task versions cannot be read; its owner can remove "
                f"{self._path.name}, after which older versions are accepted again"
            ) from None
