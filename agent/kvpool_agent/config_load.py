"""Reads the configuration: file, then environment, then every fault at once.

Promises one `ConfigFault` that names for each fault the field (as it is spelled in the file), what is wrong, and how to
mend it; an unknown field is answered with the nearest known one. Refuses to fall back to anything: a file that is named
has to be there.
"""

import difflib
import json
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.alias_generators import to_camel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from kvpool_agent.config import AgentConfig
from kvpool_agent.errors import ConfigFault

ENV_PREFIX: Final = "KVPOOL_AGENT__"
MAX_FILE_BYTES: Final = 1 << 20
"""A configuration is a few kilobytes; anything near this is not one."""


def load_config(path: Path, environment: Mapping[str, str]) -> AgentConfig:
    """The configuration of `path`, overridden by `environment`.

    Raises:
        ConfigFault: every fault that was found.
    """
    tree = _read(path)
    overridden = _override(tree, environment)
    try:
        return AgentConfig.model_validate(tree)
    except ValidationError as error:
        problems = [_explain(detail, overridden) for detail in error.errors(include_url=False)]
        raise ConfigFault(path, *problems) from error


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigFault(path, f"larger than {MAX_FILE_BYTES} bytes; name the agent's own configuration")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigFault(
            path, f"cannot be read: {error.strerror}; check --config and its permissions"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigFault(path, f"is not UTF-8 text ({error.reason} at byte {error.start})") from error
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigFault(path, f"is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise ConfigFault(path, "holds no sections; see --print-default-config for a complete one")
    return tree


def _override(tree: dict[str, Any], environment: Mapping[str, str]) -> set[str]:
    """Put the environment's values into `tree`; returns the fields that came from there."""
    done: set[str] = set()
    for name in sorted(environment):
        if not name.upper().startswith(ENV_PREFIX):
            continue
        path = _field_path(name)
        try:
            value = yaml.safe_load(environment[name])
        except yaml.YAMLError as error:
            raise ConfigFault(name, f"its value is not YAML: {' '.join(str(error).split())}") from error
        place = tree
        for key in path[:-1]:
            below = place.setdefault(key, {})
            if not isinstance(below, dict):
                raise ConfigFault(name, f"section {key} is not a mapping in the file")
            place = below
        place[path[-1]] = value
        done.add(".".join(path))
    return done


def _field_path(name: str) -> list[str]:
    """The file's names of the field that a variable overrides."""
    model: type[BaseModel] | None = AgentConfig
    path: list[str] = []
    for part in name[len(ENV_PREFIX) :].split("__"):
        known = {_plain(alias): (alias, field) for alias, field in fields(model)} if model is not None else {}
        found = known.get(_plain(part))
        if found is None:
            near = difflib.get_close_matches(_plain(part), known, n=1, cutoff=0.5)
            names = ", ".join(alias for alias, _ in known.values())
            hint = f"did you mean {known[near[0]][0]!r}" if near else f"known are {names}"
            raise ConfigFault(name, f"{'.'.join(path) or 'the configuration'} has no field {part!r}; {hint}")
        path.append(found[0])
        model = section_of(found[1])
    return path


def _plain(name: str) -> str:
    return name.replace("_", "").lower()


def fields(model: type[BaseModel]) -> Iterator[tuple[str, FieldInfo]]:
    """A model's fields under the names that the file uses."""
    for name, field in model.model_fields.items():
        yield field.alias or to_camel(name), field


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The section that a field holds, None where it holds a value."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _explain(detail: ErrorDetails, overridden: set[str]) -> str:
    place = ".".join(str(part) for part in detail["loc"])
    origin = f" (from the environment, {ENV_PREFIX}...)" if place in overridden else ""
    message = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "missing":
        message = (
            "is missing; set it in the file or by "
            + ENV_PREFIX
            + "__".join(str(p).upper() for p in detail["loc"])
        )
    elif detail["type"] == "extra_forbidden":
        message = _nearest(detail["loc"])
    elif not isinstance(detail["input"], dict) and str(detail["input"]) not in message:
        message = f"{message}, found {detail['input']!r}"
    return f"{place}{origin}: {message}" if place else message


def _nearest(place: tuple[int | str, ...]) -> str:
    model: type[BaseModel] = AgentConfig
    for part in place[:-1]:
        below = next((section_of(field) for name, field in fields(model) if name == part), None)
        if below is None:
            break
        model = below
    known = [name for name, _ in fields(model)]
    near = difflib.get_close_matches(str(place[-1]), known, n=1, cutoff=0.5)
    return "is not a known field; " + (
        f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
    )


# ------------------------------------------------------------------------------------------- the default, as a file


def default_config() -> str:
    """A complete file with every default, each field explained; required fields hold an example."""
    lines = [
        "# Configuration of a kvpool node agent. Every field, with its default; fields marked `required` have none."
    ]
    lines += _print_section(AgentConfig, 0)
    return "\n".join(lines) + "\n"


EXAMPLES: Final = {
    "namespace": "default",
    "directory": "/run/kvpool",
    "ip": "127.0.0.1",
    "masterAddress": "127.0.0.1:50051",
}
"""Values of required fields that a default cannot be given for."""


def _print_section(model: type[BaseModel], depth: int) -> list[str]:
    indent = "  " * depth
    lines: list[str] = []
    for name, field in fields(model):
        section = section_of(field)
        lines += ["", *(f"{indent}# {line}" for line in describe(field).splitlines())]
        if section is not None:
            lines += [f"{indent}{name}:", *_print_section(section, depth + 1)]
        else:
            default: object = (
                EXAMPLES.get(name, "example") if field.is_required() else default_of(model, name)
            )
            lines.append(f"{indent}{name}: {json.dumps(default)}")
    return lines


def describe(field: FieldInfo) -> str:
    """A field's own words, with what it accepts."""
    words = (field.description or "").strip()
    choices = _choices(field.annotation)
    notes = [f"One of {', '.join(choices)}."] if choices else []
    return "\n".join(
        [words, *notes, *(["Required."] if field.is_required() and section_of(field) is None else [])]
    )


def _choices(kind: object) -> list[str]:
    return [member.value for member in kind] if isinstance(kind, type) and issubclass(kind, StrEnum) else []


def default_of(model: type[BaseModel], name: str) -> object:
    """A field's default as the file writes it, None for a required one."""
    for attribute, field in model.model_fields.items():
        if (field.alias or to_camel(attribute)) == name and not field.is_required():
            one = model.model_construct(**{attribute: field.get_default(call_default_factory=True)})
            return one.model_dump(mode="json", by_alias=True, include={attribute}, warnings=False)[name]
    return None
