"""Generate the tables of job keys, policy settings and device limits from the pydantic models."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import names
from generated import add_page, load, table
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files

Schema = Mapping[str, Any]

HEADER = ("Key", "Type", "Default", "Meaning")

_BOUNDS = {
    "minimum": "at least {:,}",
    "exclusiveMinimum": "above {:,}",
    "maximum": "at most {:,}",
    "exclusiveMaximum": "below {:,}",
    "pattern": "matching `{}`",
    "minLength": "at least {} characters",
}
_SIMPLE = {
    "integer": "whole number",
    "number": "number",
    "string": "text",
    "boolean": "`true` or `false`",
    "null": "",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the three pages."""
    add_page(config, files, "reference/job.md", job_page(load(names.JOB_SCHEMA)()))
    limits = load(names.OWNER_LIMITS).model_json_schema()
    add_page(config, files, "reference/limits.md", limits_page(limits))
    add_page(config, files, "reference/policies.md", policies_page())
    return files


def job_page(schema: Schema) -> Iterator[str]:
    """Every key of a job file."""
    yield "# Job keys\n"
    yield (
        "A job is a TOML file. This page is generated from the models that validate it; "
        "`isthmus job schema` prints the same as JSON schema. Unknown keys are errors. "
        "`--set table.key=value` changes one key of one run.\n"
    )
    yield "## Top level\n"
    yield from tables(schema, schema, "")


def limits_page(schema: Schema) -> Iterator[str]:
    """Every key of an owner's limits."""
    yield "# Device limits\n"
    yield (
        "The owner of a device limits what it does in one TOML file. Keys that are left out "
        "have the default. How each limit is enforced is in [run devices](../edge.md).\n"
    )
    yield "## Top level\n"
    yield from tables(schema, schema, "")


def policies_page() -> Iterator[str]:
    """The settings of every built-in policy."""
    yield "# Policy settings\n"
    yield (
        "Keys of `[strategy.settings]`, for each policy that `strategy.policy` may name. "
        "What each policy does is in [strategy](../strategy.md).\n"
    )
    for name, factory in load(names.POLICIES).items():
        yield f"## `{name}`\n"
        model = settings_model(factory)
        if model is None:
            yield "No settings.\n"
        else:
            yield from tables(model.model_json_schema(), model.model_json_schema(), "")


def settings_model(factory: Any) -> Any:
    """The settings of a policy: the model that its module defines, or imports from its package.

    None if there is no such model.
    """
    made = factory.func if isinstance(factory, functools.partial) else factory
    module = sys.modules[made.__module__]
    section = load(names.SECTION)
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, section)
        and value.__module__.rpartition(".")[0] == module.__name__.rpartition(".")[0]
    ]
    assert len(found) <= 1, f"{module.__name__} has several models of settings: {found}"
    return found[0] if found else None


def tables(schema: Schema, root: Schema, prefix: str) -> Iterator[str]:
    """The keys of one table, then those of the tables inside it, each under a heading."""
    properties = schema["properties"]
    required = set(schema.get("required", ()))
    plain = {
        name: each
        for name, each in properties.items()
        if not _is_table(each, root) or _inner(each, root) is schema
    }
    rows = [
        (
            f"`{name}`",
            type_of(each, root),
            "required" if name in required else default_of(each),
            each.get("description", ""),
        )
        for name, each in plain.items()
    ]
    if rows:
        yield from table(HEADER, rows)
    for name, each in properties.items():
        inner = _inner(each, root)
        if inner is None or inner is schema:
            continue
        path = f"{prefix}{name}"
        heading = f"## `[{path}]`" if _is_table(each, root) else f"## Entries of `{path}`"
        yield heading + "\n"
        if _is_table(each, root) and "description" in each:
            yield each["description"] + "\n"
        if inner.get("description"):
            yield inner["description"] + "\n"
        yield from tables(inner, root, f"{path}.")


def _is_table(field: Schema, root: Schema) -> bool:
    return _reference(field, root) is not None


def _inner(field: Schema, root: Schema) -> Schema | None:
    """The model inside a field: a table, an optional table, or a list of tables."""
    return _reference(field, root) or _reference(field.get("items", {}), root)


def _reference(field: Schema, root: Schema) -> Schema | None:
    choices = [field, *field.get("anyOf", ()), *field.get("allOf", ())]
    for choice in choices:
        if "$ref" in choice:
            found: Schema = root["$defs"][choice["$ref"].rpartition("/")[2]]
            return found if "properties" in found else None
    return None


def type_of(field: Schema, root: Schema) -> str:
    """The type of a field in words, with its bounds."""
    if "enum" in field:
        return "one of " + ", ".join(f"`{json.dumps(value)}`" for value in field["enum"])
    if "const" in field:
        return f"`{json.dumps(field['const'])}`"
    if "anyOf" in field:
        kinds = [type_of(each, root) for each in field["anyOf"]]
        return " or ".join(kind for kind in kinds if kind)
    if "$ref" in field:
        return "table"
    kind = field.get("type", "")
    if kind == "array":
        items = field.get("items", {})
        return "list of tables" if "$ref" in items else f"list of {type_of(items, root)}"
    if kind == "object":
        return "table"
    bounds = [text.format(field[key]) for key, text in _BOUNDS.items() if key in field]
    return ", ".join([_SIMPLE.get(kind, str(kind)), *bounds])


def default_of(field: Schema) -> str:
    """The default as it would be written in TOML; a dash if there is none."""
    default = field.get("default")
    if default is None:
        return "-"
    if isinstance(default, dict):
        inner = ", ".join(f"{key} = {json.dumps(value)}" for key, value in default.items())
        return f"`{{ {inner} }}`" if inner else "`{}`"
    return f"`{json.dumps(default)}`"
