"""Properties of the repository as a whole."""

import ast
import collections
import contextlib
import dataclasses
import graphlib
import hashlib
import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import click
import pytest

from isthmus import cli
from isthmus_server.storage.records import CommittedState
from isthmus_server.storage.store import Store
from tests.server.storage.records import FINAL, planned_attempt, round_record

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
ROOTS = ["core", "privacy", "server", "clients", "datacenter", "simulation", "chaos", "flower"]
PACKAGES = [
    "core/isthmus",
    "privacy/isthmus_privacy",
    "server/isthmus_server",
    "clients/isthmus_clients",
    "datacenter/isthmus_datacenter",
    "simulation/isthmus_simulation",
    "chaos/isthmus_chaos",
    "flower/isthmus_flower",
]
NAMES = [path.partition("/")[2] for path in PACKAGES]
VERIFIER = "verifier/isthmus_verify"
"""A distribution of its own, which is not installed with the others."""
TOOLS = PROJECT["tool"]
COMMANDS = [
    "isthmus authority audit STATE",
    "isthmus authority backup STATE TARGET",
    "isthmus authority init --host --server STATE",
    "isthmus authority participants --json STATE",
    "isthmus authority restore --lost --nothing-ran-since SOURCE STATE",
    "isthmus authority revoke --rollout NAME STATE",
    "isthmus authority start --address STATE",
    "isthmus authority token create --expires --kind --name --uses STATE",
    "isthmus authority verify STATE",
    "isthmus cancel --balancer-ca --proxy --proxy-login --server --state JOB",
    (
        "isthmus chaos --clients --crash-sweep --datacenters --json --minutes --network --plan "
        "--sample --seed --set --state JOB"
    ),
    "isthmus client join --balancer-ca --proxy --proxy-login --state --token-file TOKEN URL",
    "isthmus client new-history --state",
    "isthmus client spent --delta --state",
    (
        "isthmus client start --balancer-ca --blobs --data --device --die-with-parent --hours "
        "--log-file --name --policy --print-systemd --proxy --proxy-login --server --shard "
        "--state --tasks --threads --weights"
    ),
    "isthmus client status --state",
    "isthmus compare --json --policies --public-data --run-dir --seeds --set --vary JOB",
    "isthmus console --address PATH",
    "isthmus datacenter agent --control --state",
    "isthmus datacenter join --balancer-ca --proxy --proxy-login --state --token-file TOKEN URL",
    (
        "isthmus datacenter launch --balancer-ca --blobs --data --die-with-parent --dry-run "
        "--env-file --grace --name --nodes --option --prologue --proxy --proxy-login --ranks "
        "--scheduler --server --state --tasks"
    ),
    (
        "isthmus datacenter serve --balancer-ca --blobs --control --data --grace --name "
        "--nodes --proxy --proxy-login --ranks --server --state --tasks"
    ),
    "isthmus doctor aggregator --balancer-ca --json --proxy --proxy-login STATE",
    "isthmus doctor datacenter --balancer-ca --json --proxy --proxy-login --state",
    "isthmus doctor device --balancer-ca --json --proxy --proxy-login --server STATE",
    "isthmus doctor server --address --balancer --json --one-port STATE",
    "isthmus export --format --output RUN_DIR",
    "isthmus fetch --balancer-ca --max-mb --output --proxy --proxy-login --server --state JOB",
    "isthmus job check --collectives --device --memory --ranks --set PATH",
    "isthmus job schema",
    "isthmus jobs --balancer-ca --ended --json --proxy --proxy-login --server --state",
    "isthmus logs --balancer-ca --follow --proxy --proxy-login --server --state JOB",
    "isthmus model convert FOLDER OUTPUT",
    "isthmus model import --base --set JOB PATH",
    "isthmus model inspect --base PATH",
    "isthmus new --kind FOLDER",
    "isthmus operator join --balancer-ca --proxy --proxy-login --state --token-file TOKEN URL",
    "isthmus pause --balancer-ca --proxy --proxy-login --server --state JOB",
    (
        "isthmus plan --calibrate --checkpoint-seconds --collectives --device --gpu "
        "--gpus-per-node --html --json --layouts --mbit --measure --memory-gib --mtbf-hours "
        "--peak-share --policies --ranks --restart-seconds --set --tflops --trial JOB"
    ),
    "isthmus privacy audit --canaries --confidence --json --set --unit JOB",
    "isthmus privacy ledger --devices --json RUN_DIR",
    "isthmus privacy plan --find --json --noise --set --signal-to-noise --unit JOB",
    "isthmus prove --output --replay RUN_DIR",
    "isthmus report --html --json --schema RUN_DIR",
    "isthmus resume --balancer-ca --proxy --proxy-login --server --state JOB",
    "isthmus run --address --log-format --metrics --quiet --resume --run-dir --set --track JOB",
    "isthmus runs adopt --nothing-ran-since --original-is-gone RUN_DIR",
    "isthmus runs branch SOURCE TARGET",
    "isthmus runs export RUN_DIR TARGET",
    "isthmus runs import RUN_DIR SOURCE",
    "isthmus runs list --json FOLDER",
    "isthmus runs prune --dry-run --failed --keep-best --keep-last --older-than FOLDER",
    "isthmus runs rollback RUN_DIR",
    "isthmus runs verify RUN_DIR",
    "isthmus server aggregator join --balancer-ca --proxy --proxy-login --token-file STATE TOKEN "
    "URL",
    "isthmus server aggregator start --address --folder --server STATE",
    "isthmus server audit STATE",
    "isthmus server backup STATE TARGET",
    "isthmus server init --authority --balancer-ca --host --proxy --proxy-login --token-file STATE",
    "isthmus server participants --json STATE",
    "isthmus server population NAME STATE",
    "isthmus server restore --lost --nothing-ran-since SOURCE STATE",
    "isthmus server revoke --rollout NAME STATE",
    (
        "isthmus server start --address --balancer --balancer-trusts --connected --console "
        "--fair-link --grace --jobs --log-format --metrics --mirror --mirror-url --one-port "
        "--quiet --standby --track --uploads STATE"
    ),
    "isthmus server token create --expires --kind --name --uses STATE",
    "isthmus server verify STATE",
    (
        "isthmus simulate --clients --cohort --dry-run --env-file --json --log-format "
        "--metrics --nodes --option --or-resume --prologue --public-data --quiet --ranks "
        "--resume --run-dir --scheduler --seeds --set --track --vary JOB"
    ),
    "isthmus statistics --address --output --run-dir --set JOB",
    (
        "isthmus submit --balancer-ca --project --proxy --proxy-login --server --set --share "
        "--state JOB"
    ),
    "isthmus task install --author --tasks PACKAGE",
    "isthmus task key FILE",
    "isthmus task pack --key --name --output --version FOLDER",
    "isthmus task show PACKAGE",
    "isthmus weights add --base --state --weights PATH",
    "isthmus weights list --check --json --state --weights",
    "isthmus weights remove --state --weights DIGEST",
    "isthmus what-if --json --policies --replay RUN_DIR",
    "isthmus why --json NUMBER RUN_DIR",
]

LIGHT_COMMANDS = [
    "report run",
    "report run --json",
    "report run --html report.html",
    "why run 1",
    "runs list .",
    "runs verify run",
    "runs export run run.tar",
    "runs import run.tar copy",
    "runs prune . --keep-last 1 --dry-run",
    "export run",
    "prove run",
    "job schema",
    "server init srv",
    "server token create srv --kind client --name phone-0",
    "server participants srv",
    "server verify srv",
    "server audit srv",
    "server backup srv backup",
    "server restore backup restored",
    "authority participants srv",
    "authority verify srv",
]
"""They read or administer, in a folder with a run and the state of a server."""

LIGHT_MODULES = [
    "isthmus.identity.joining",
    "isthmus_clients.commands",
    "isthmus_clients.device.agent",
    "isthmus_clients.training.history_log",
    "isthmus_datacenter.commands",
    "isthmus_server.fleet.authority_service",
    "isthmus_server.cli.run",
    "isthmus_server.read.console.serving",
    "isthmus_server.service.operator_service",
    "isthmus_server.cli.operators",
    "isthmus_server.runs.operations.doctor",
    "isthmus_server.runs.operations.retention",
    "isthmus_server.python.run",
    "isthmus_server.storage.recovery",
    "isthmus_server.read.report.privacy.examples_forecast",
    "isthmus_server.read.report.privacy.search",
    "isthmus_server.read.report.privacy.spending",
    "isthmus_simulation.commands",
]
"""What such commands and an idle server import."""

WATCHED = """
import importlib, json, sys
from click.testing import CliRunner
from isthmus.cli import isthmus

heavy, failed = {"torch", "numpy", "flwr", "pandas", "sklearn"}, {}

def note(what, result=None):
    if found := sorted(heavy & sys.modules.keys()):
        failed[what] = found
        heavy.difference_update(found)
    if result is not None and result.exit_code:
        failed[what] = result.output + repr(result.exception)

modules, commands = json.loads(sys.argv[1])
for module in modules:
    importlib.import_module(module)
    note(module)
for command in commands:
    note(command, CliRunner().invoke(isthmus, command.split()))
print(json.dumps(failed))
"""


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (TOOLS["hatch"]["build"]["dev-mode-dirs"], ROOTS),
        (TOOLS["hatch"]["build"]["targets"]["wheel"]["packages"], PACKAGES),
        (TOOLS["ruff"]["src"], [*ROOTS, "verifier"]),
        (TOOLS["mypy"]["mypy_path"].split(":"), [*ROOTS, "verifier"]),
        (TOOLS["mypy"]["packages"], [*NAMES, "isthmus_verify"]),
        (TOOLS["coverage"]["run"]["source_pkgs"], [*NAMES, "isthmus_verify"]),
        (TOOLS["importlinter"]["root_packages"], NAMES),
        (TOOLS["pytest"]["ini_options"]["testpaths"], [*ROOTS, "verifier", "tests"]),
    ],
    ids=["hatch dev", "hatch wheel", "ruff", "mypy path", "mypy", "coverage", "imports", "pytest"],
)
def test_the_lists_of_packages_agree(found, expected):
    assert list(found) == expected


def sources(*folders):
    """The Python files of some folders, without generated ones."""
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    assert files
    return [path for path in files if not path.stem.endswith("_pb2")]


def test_every_class_name_of_the_product_is_used_once():
    places = collections.defaultdict(list)
    for path in sources(*PACKAGES):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_every_decision_has_a_number_of_its_own():
    names = sorted(path.name for path in (ROOT / "docs/decisions").glob("0*.md"))
    numbers = [int(name[:4]) for name in names]
    assert len(set(numbers)) == len(numbers)
    for name, number in zip(names, numbers, strict=True):
        heading = (ROOT / "docs/decisions" / name).read_text().partition("\n")[0]
        assert heading.startswith(f"# {number}. "), name
    index = (ROOT / "docs/decisions/README.md").read_text()
    assert re.findall(r"\((0[0-9]{3}-[a-z0-9-]+\.md)\)", index) == names
    listed = [int(number) for number in re.findall(r"^([0-9]+)\. \[", index, re.MULTILINE)]
    assert listed == numbers


def test_the_architecture_page_has_all_layers_of_the_server():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    [layers] = [
        each["layers"]
        for each in contracts["contracts"]
        if each.get("containers") == ["isthmus_server"]
    ]
    page = (ROOT / "docs/architecture.md").read_text()
    table = page.partition("| package | contents |\n")[2].partition("\n\n")[0]
    rows = [line.split("|")[1] for line in table.splitlines()[1:]]
    named = [name for row in rows for name in re.findall(r"`([a-z]+)[a-z.]*`", row)]
    expected = [name.strip() for layer in layers for name in layer.split("|")]
    assert set(named) == set(expected)


@pytest.mark.parametrize("package", [*PACKAGES, VERIFIER])
def test_what_a_checker_is_told_to_ignore_has_a_reason(package):
    bare = re.compile(r"# (noqa: [A-Z0-9]+(, [A-Z0-9]+)*|type: ignore(\[[a-z-]+\])?)\s*$")
    found = [
        f"{path.name}:{number}"
        for path in (ROOT / package).rglob("*.py")
        if "_pb2" not in path.name
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if bare.search(line)
    ]
    assert found == []


def test_no_module_has_an_unspecific_name():
    names = {"utils", "util", "common", "helpers", "helper", "misc", "shared", "tools"}
    assert [path for path in sources(*PACKAGES) if names & {path.stem, path.parent.name}] == []


def test_nothing_is_raised_inside_except_star():
    """Python before 3.11.4 wraps it in another group, so that callers see another exception."""
    found = [
        f"{path.relative_to(ROOT)}:{inner.lineno}"
        for path in sources(*PACKAGES)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.TryStar)
        for handler in node.handlers
        for inner in ast.walk(handler)
        if isinstance(inner, ast.Raise)
    ]
    assert found == []


@pytest.mark.parametrize("package", [*PACKAGES, VERIFIER])
def test_every_package_is_typed_and_alone_in_its_folder(package):
    path = ROOT / package
    assert (path / "py.typed").is_file()
    assert not (path.parent / "__init__.py").exists()


def test_imports_go_down_only():
    found = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr


def imported(path, modules):
    """The project's modules that a file imports, also in functions and for annotations only."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module in modules:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in modules else node.module


def test_the_verifier_needs_nothing_but_cryptography():
    allowed = {*sys.stdlib_module_names, "cryptography", "isthmus_verify"}
    found = set()
    for path in sources(VERIFIER):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found.update(alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                found.add((node.module or ".").partition(".")[0])
    assert "cryptography" in found
    assert found <= allowed
    project = tomllib.loads((ROOT / "verifier/pyproject.toml").read_text())["project"]
    assert [each.partition(">")[0] for each in project["dependencies"]] == ["cryptography"]
    assert project["version"] == PROJECT["project"]["version"]


def import_graph(root, folders):
    """For each module of some source roots, the modules that it imports."""
    modules = {}
    for folder in folders:
        for path in (root / folder).rglob("*.py"):
            parts = path.relative_to(root / folder).with_suffix("").parts
            modules[".".join(parts).removesuffix(".__init__")] = path
    return {name: set(imported(path, modules)) - {name} for name, path in modules.items()}


def test_no_files_import_each_other():
    graph = import_graph(ROOT, ROOTS)
    assert len(graph) > 400
    graphlib.TopologicalSorter(graph).prepare()  # its CycleError names the files of a circle


def test_imports_for_annotations_and_in_functions_are_part_of_a_circle(tmp_path):
    package = tmp_path / "root/package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "first.py").write_text("def use():\n    from package import second\n")
    (package / "second.py").write_text("if TYPE_CHECKING:\n    from package.first import use\n")
    graph = import_graph(tmp_path, ["root"])
    assert graph == {
        "package": set(),
        "package.first": {"package.second"},
        "package.second": {"package.first"},
    }


@pytest.mark.parametrize("module", ["isthmus_clients.device.agent", "isthmus_clients.commands"])
def test_an_idle_device_loads_nothing_large(module):
    heavy = {"torch", "numpy", "rich", "flwr", "pandas", "sklearn", "isthmus_server"}
    code = f"import sys, {module}; print(*sorted({heavy} & sys.modules.keys()))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []


def test_what_reads_or_administers_does_not_load_pytorch(make_job, tmp_path):
    """Each import takes seconds of every command, and memory of a server without a job."""
    with contextlib.closing(Store.create(tmp_path / "run", make_job(), tmp_path)) as store:
        store.plan(planned_attempt(1))
        models = {"current": store.checkpoints.write_model(1, b"model")}
        store.commit(round_record(1), CommittedState(models=models))
        (tmp_path / "run/model.safetensors").write_bytes(b"model")
        digest = hashlib.sha256(b"model").hexdigest()
        store.finish("finished", "done", dataclasses.replace(FINAL, model_sha256=digest))
    found = subprocess.run(
        [sys.executable, "-c", WATCHED, json.dumps([LIGHT_MODULES, LIGHT_COMMANDS])],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(found.stdout) == {}


def test_every_command_belongs_to_the_package_that_registers_it():
    written = PROJECT["project"]["entry-points"]["isthmus.commands"]
    installed = {point.name: point.value for point in entry_points(group="isthmus.commands")}
    assert installed == written
    assert all(value.split(".")[0].split(":")[0] in NAMES for value in written.values())


def surface(command, path):
    """Every command with its parameters, as a user could type them."""
    names = [
        parameter.opts[-1] if isinstance(parameter, click.Option) else parameter.name.upper()
        for parameter in command.params
    ]
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            yield from surface(command.get_command(context, name), f"{path} {name}")
    else:
        yield " ".join([path, *sorted(names)])


def test_the_command_line_is_frozen():
    """Scripts depend on it: a change here is a change for users, and goes into the changelog."""
    assert sorted(surface(cli.isthmus, "isthmus")) == COMMANDS
