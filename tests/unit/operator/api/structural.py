"""An API server's reading of a structural schema, written from the Kubernetes documentation and not from our generator.

Nulls of fields go first, then defaults apply, then the value is checked; unknown fields are dropped. CEL is not
evaluated here: `tests/cluster` asks a real API server.
"""

import copy
import re
from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]


def admit(schema: Schema, value: Any) -> tuple[Any, list[str]]:
    """What an API server would store, and what it would complain about."""
    stored = _default(schema, copy.deepcopy(value))
    return stored, list(_faults(schema, stored, "."))


def _default(schema: Schema, value: Any) -> Any:
    if isinstance(value, dict):
        properties = schema.get("properties")
        if properties is not None:
            value = {name: one for name, one in value.items() if name in properties and one is not None}
            for name, below in properties.items():
                if name not in value and "default" in below:
                    value[name] = copy.deepcopy(below["default"])
            return {name: _default(properties[name], one) for name, one in value.items()}
        return value
    if isinstance(value, list) and "items" in schema:
        return [_default(schema["items"], one) for one in value]
    return value


def _is(kind: str, value: Any) -> bool:
    number = isinstance(value, int) and not isinstance(value, bool)
    kinds = {"object": dict, "array": list, "string": str, "boolean": bool}
    return number if kind == "integer" else isinstance(value, kinds[kind])


def _faults(schema: Schema, value: Any, place: str) -> Iterator[str]:
    kinds = [schema["type"]] if "type" in schema else [one["type"] for one in schema["anyOf"]]
    if not any(_is(kind, value) for kind in kinds):
        yield f"{place}: not {' or '.join(kinds)}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{place}: not one of {schema['enum']}"
    if isinstance(value, str):
        yield from _string_faults(schema, value, place)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield from _number_faults(schema, value, place)
    elif isinstance(value, list):
        yield from _list_faults(schema, value, place)
    elif isinstance(value, dict):
        yield from _object_faults(schema, value, place)


def _string_faults(schema: Schema, value: str, place: str) -> Iterator[str]:
    if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)):
        yield f"{place}: too short or too long"
    # Go's `$` is the end of the text; Python's would also match before a last newline.
    pattern = schema.get("pattern", "")
    if not re.search(pattern[:-1] + r"\Z" if pattern.endswith("$") else pattern, value, re.ASCII):
        yield f"{place}: does not match {pattern}"


def _number_faults(schema: Schema, value: int, place: str) -> Iterator[str]:
    bits = {"int32": 31, "int64": 63}.get(schema.get("format", ""))
    if bits and not -(1 << bits) <= value < 1 << bits:
        yield f"{place}: more than {bits} bits"
    if not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        yield f"{place}: out of range"


def _list_faults(schema: Schema, value: list[Any], place: str) -> Iterator[str]:
    if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
        yield f"{place}: too few or too many"
    for number, one in enumerate(value):
        yield from _faults(schema["items"], one, f"{place}[{number}]")
    keys = schema.get("x-kubernetes-list-map-keys")
    if keys:
        names = [repr([one.get(key) for key in keys]) for one in value if isinstance(one, dict)]
    elif schema.get("x-kubernetes-list-type") == "set":
        names = [repr(one) for one in value]
    else:
        return
    if len(set(names)) != len(names):
        yield f"{place}: an entry twice"


def _object_faults(schema: Schema, value: dict[str, Any], place: str) -> Iterator[str]:
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{place}{name}: required"
    if len(value) > schema.get("maxProperties", len(value)):
        yield f"{place}: too many"
    for name, one in value.items():
        below = schema.get("properties", {}).get(name) or schema.get("additionalProperties")
        if below:
            yield from _faults(below, one, f"{place}{name}.")
