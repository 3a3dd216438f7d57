"""Start the nodes of a group as actors of a Ray cluster, in one placement group.

A bundle of the placement group is a node with its ranks: Ray never divides a bundle. The launching
process is the driver: it stays until the group ends, and Ray ends the actors with it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import secrets
import shlex
from pathlib import Path
from typing import Any

from isthmus.errors import UserError
from isthmus.extras import install_line
from isthmus.identity.tls import split_address
from isthmus.system.private_files import make_state_directory, write_private_file
from isthmus_datacenter.launch import (
    Launch,
    NodeShell,
    check_printable,
    single_options,
    waiting,
)
from isthmus_datacenter.launch.ray_group import RayGroup
from isthmus_datacenter.launch.ray_node import CONTROL, NUMBER

_SINGLE = {"address", "authentication", "colocate", "cpus", "gpus", "memory", "wait"}
_REPEATABLE = {"resource"}
_WHOLE = re.compile(r"[0-9]{1,6}")
_AMOUNT = re.compile(r"[0-9]{1,9}(\.[0-9]{1,4})?")
_SIZE = re.compile(r"([0-9]{1,9})(Mi|Gi|Ti)")
_FORMS = {
    "cpus": (_WHOLE, "a whole number, such as 8"),
    "gpus": (_WHOLE, "a whole number, such as 8"),
    "memory": (_SIZE, "a size, such as 64Gi"),
    "wait": (_AMOUNT, "a number of seconds, such as 600"),
    "colocate": (re.compile("true|false"), "true or false"),
    "authentication": (re.compile("token|none"), "token or none"),
}
"""Options with values of one form: the form, and what users are told."""
_UNITS = {"Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}
_OWN_RESOURCES = ("CPU", "GPU", "memory", "object_store_memory")
"""Resources that Ray names itself."""
_WAIT_SECONDS = 60.0


class RayLauncher:
    """The launcher of Ray, whose driver it is."""

    shares_files = True

    def render(self, launch: Launch) -> str:
        """Render the placement group, as JSON, and the script that each node runs.

        Raises:
            UserError: an option is unknown or not valid, or a value cannot be in the script.
        """
        group = _group(launch, _script(launch))
        asked = {
            "name": group.name,
            "strategy": group.strategy,
            "bundles": [group.bundle] * group.nodes,
        }
        return f"# {json.dumps(asked)}\n{_script(launch)}"

    def submit(self, launch: Launch) -> str:
        """Run the nodes on Ray until the group ends; returns a line that says so.

        Raises:
            UserError: the request is not valid; Ray is not installed, not reached or asks for no
                token; there is no room for the nodes; or nodes failed too often.
        """
        script = _script(launch)
        group = _group(launch, script)
        if importlib.util.find_spec("ray") is None:
            raise UserError(
                f"--scheduler ray needs Ray, which is not installed; {install_line('ray')}"
            )
        from isthmus_datacenter.launch.ray_driver import run_group

        make_state_directory(launch.state)
        write_private_file(group.script, script.encode())
        drawn = _drawn_file(launch)
        write_private_file(drawn, _drawn(launch).encode())
        try:
            return run_group(group)
        finally:
            drawn.unlink(missing_ok=True)


def _group(launch: Launch, script: str) -> RayGroup:
    """What is asked of Ray.

    Raises:
        UserError: an option is unknown, or has a value of another form.
    """
    for key, _ in launch.options:
        if key not in _SINGLE | _REPEATABLE:
            known = ", ".join(sorted(_SINGLE | _REPEATABLE))
            raise UserError(f"--option {key} is not known; known options are {known}")
    options = single_options(launch, _REPEATABLE)
    for key, (form, allowed) in _FORMS.items():
        if key in options and not form.fullmatch(options[key]):
            raise UserError(f"--option {key}={options[key]} is not {allowed}")
    address = options.get("address")
    if address is not None:
        if "://" in address:
            raise UserError(
                f"--option address={address} is one of Ray's clients; run this on a node of the "
                "cluster, with its HOST:PORT"
            )
        split_address(address, "--option address")
    apart = launch.nodes > 1 and options.get("colocate") != "true"
    return RayGroup(
        name=f"{launch.title}{launch.name}",
        nodes=launch.nodes,
        bundle=_bundle(launch, options),
        # `--nodes` are machines. Without that, few machines are still better than many.
        strategy="STRICT_SPREAD" if apart else "PACK",
        address=address,
        needs_token=options.get("authentication") != "none",
        wait_seconds=float(options.get("wait", _WAIT_SECONDS)),
        grace_seconds=launch.grace_seconds,
        has_service=launch.first(_shell()) is not None,
        state=launch.state,
        script=launch.state / "launch-ray.sh",
        digest=hashlib.sha256(script.encode()).hexdigest(),
    )


def _bundle(launch: Launch, options: dict[str, str]) -> dict[str, float]:
    """The resources of a node.

    Raises:
        UserError: there is no processor, or a resource has no amount.
    """
    bundle = {"CPU": float(options.get("cpus", launch.ranks))}
    if not bundle["CPU"]:
        raise UserError("--option cpus=0 leaves the ranks no processor; give at least 1")
    if gpus := float(options.get("gpus", launch.ranks)):
        bundle["GPU"] = gpus
    if size := _SIZE.fullmatch(options.get("memory", "")):
        bundle["memory"] = float(int(size[1]) * _UNITS[size[2]])
    for key, word in launch.options:
        if key != "resource":
            continue
        name, _, amount = word.partition("=")
        if name in _OWN_RESOURCES:
            raise UserError(f"--option resource={word}: Ray's own {name} has an option; use that")
        if not name or not _AMOUNT.fullmatch(amount) or not float(amount):
            raise UserError(
                f"--option resource={word} is not of the form resource=NAME=AMOUNT, such as "
                "resource=a100=1"
            )
        if name in bundle:
            raise UserError(f"--option resource={name} is given twice; remove one of them")
        bundle[name] = float(amount)
    return bundle


def _shell() -> NodeShell:
    """How the script of a node knows its place."""
    return NodeShell(f'"${CONTROL}"', NUMBER)


def _drawn_file(launch: Launch) -> Path:
    """The file of what only the nodes know, while they run."""
    return launch.state / "launch-ray.env"


def _drawn(launch: Launch) -> str:
    """What only the nodes know; not an argument, and nothing that Ray carries or keeps."""
    return "".join(f"{name}={secrets.token_hex(32)}\n" for name in launch.secrets)


def _script(launch: Launch) -> str:
    """What each node runs.

    Raises:
        UserError: a value of the request would begin a new line.
    """
    check_printable(launch)
    shell = _shell()
    options: dict[str, Any] = dict(launch.options)
    cpus = str(options.get("cpus", launch.ranks))
    threads = max(1, (int(cpus) if _WHOLE.fullmatch(cpus) else 1) // launch.ranks)
    lines = [
        "set -eu",
        "umask 077",
        f"cd {shlex.quote(str(launch.state))}",
        "# Ray keeps no rank to its processors, and would have each use those of all.",
        f"export OMP_NUM_THREADS={threads}",
        "set -a",
        f". {shlex.quote(str(_drawn_file(launch)))}",
    ]
    if launch.environment is not None:
        lines.append(f". {shlex.quote(str(launch.environment))}")
    lines.append("set +a")
    if launch.prologue is not None:
        # Functions such as `module` are not written for `set -u`.
        lines += ["set +u", f". {shlex.quote(str(launch.prologue))}", "set -u"]
    lines.append(f"{launch.each(shell)} & main=$!")
    if (first := launch.first(shell)) is not None:
        lines.append(f'if [ "${NUMBER}" = 0 ]; then {first} & main=$!; fi')
    return "\n".join([*lines, *waiting("main", "TERM", "TERM"), 'exit "$status"', ""])
