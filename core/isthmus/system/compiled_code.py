"""Where PyTorch keeps compiled code: in a directory that no other user of this machine can change.

By default it is `torchinductor_USER` in the folder for temporary files. The user who makes that
directory first owns it, and what is in it is executed: programs by a name that follows from the
model alone, and pickles. So it is made here, before PyTorch does, and used only if it is this
user's.
"""

from __future__ import annotations

import getpass
import logging
import os
import re
import stat
import tempfile
from pathlib import Path

from isthmus.errors import UserError

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
"""Environment variable with the directory in which PyTorch keeps compiled code."""
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

log = logging.getLogger(__name__)


def keep_compiled_code_private() -> None:
    """Have this process, and those that it starts, keep compiled code where only this user writes.

    Another directory that the user has named in the environment stays. To be called before PyTorch
    is imported, which makes the usual one and names it there.

    Raises:
        UserError: others can write to the usual one, and there can be no other.
    """
    try:
        usual = _usual()
        if os.environ.get(VARIABLE, str(usual)) != str(usual):
            return
        refusal = _refusal(usual)
    except OSError:
        # Without a folder for temporary files nothing can be planted there, and nothing compiled.
        log.debug("no directory for compiled code", exc_info=True)
        return
    if not refusal:
        os.environ[VARIABLE] = str(usual)
        return
    try:
        # Another name that follows from the user could be taken, too.
        private = tempfile.mkdtemp(prefix="isthmus-compiled-")  # of mode 0700
    except OSError as error:
        raise UserError(
            f"{usual}, where PyTorch keeps compiled code, {refusal}, and there can be no other "
            f"directory ({error.strerror}); set {VARIABLE} to a folder of your own"
        ) from None
    os.environ[VARIABLE] = private
    log.warning(
        "compiled code is kept in %s, where no later command finds it, because %s %s; remove that, "
        "or set %s to a folder of your own",
        private,
        usual,
        refusal,
        VARIABLE,
    )


def _usual() -> Path:
    """The directory that PyTorch would use, so that what it has compiled before is found."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without a name
        user = f"uid_{os.getuid()}"
    sanitized = re.sub(r'[\\/:*?"<>|]', "_", user)
    return Path(tempfile.gettempdir()) / f"torchinductor_{sanitized}"


def _refusal(path: Path) -> str:
    """Why others may have written to a directory, which is made if it is missing; or nothing.

    Raises:
        OSError: it cannot be made.
    """
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        status = path.lstat()  # a link of another user could lead anywhere, and later elsewhere
        if not stat.S_ISDIR(status.st_mode):
            return "is no directory"
        if status.st_uid != os.geteuid():
            return "is of another user"
        if status.st_mode & _OTHERS_WRITE:
            return "can be written by others"
    return ""
