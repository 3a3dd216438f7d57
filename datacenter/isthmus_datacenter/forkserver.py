"""Imported once by the process that ranks are forked from, so that they start in milliseconds.

Importing torch takes seconds, and nearly all of a rank's start is that; the fork server does it
for all ranks and all restarts. It must end with its agent, and can only arrange that itself.
"""

from __future__ import annotations

import os

import isthmus_datacenter.worker  # noqa: F401 - what the ranks run, with everything it needs
from isthmus.lifetime import die_with_parent
from isthmus_datacenter.agent import FORKSERVER_OWNER

if os.environ.get(FORKSERVER_OWNER) == str(os.getppid()):
    die_with_parent()
