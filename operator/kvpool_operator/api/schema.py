"""A model as a structural OpenAPI schema, the dialect that a custom resource definition speaks.

Promises: descriptions, defaults, bounds, enumerations, list types and CEL rules all come from the models, so that
nothing can differ between what `kubectl explain` says and what the operator reads. Refuses a type that it does not know
instead of writing a schema that accepts anything.
"""

import types
from collections.abc import Mapping
from enum import EnumType
from typing import Annotated, Any, Final, Union, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo

from kvpool_operator.api.model import Section
from kvpool_operator.api.quantity import Wire
from kvpool_operator.api.rules import RULES

Schema = dict[str, Any]

_SCALARS: Final[Mapping[object, Schema]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    bool: {"type": "boolean"},
}


def schema_of(model: type[Section]) -> Schema:
    """The schema of a model and everything below it."""
    properties, required = {}, []
    for attribute, field in model.model_fields.items():
        name = field.alias or attribute
        properties[name] = _field(model, attribute, field)
        if field.is_required():
            required.append(name)
    schema: Schema = {"type": "object", "description": _words(model.__doc__), "properties": properties}
    if required:
        schema["required"] = required
    if rules := _rules(model):
        schema["x-kubernetes-validations"] = rules
    return schema


def _field(model: type[Section], attribute: str, field: FieldInfo) -> Schema:
    schema = _type(field.annotation, field.metadata)
    schema["description"] = _words(field.description)
    if not field.is_required():
        default = field.get_default(call_default_factory=True)
        if default is not None:
            schema["default"] = _printed(model, attribute, default)
    return schema


def _printed(model: type[Section], attribute: str, default: object) -> object:
    """A default as JSON, written out: an API server tries the rules on it before it applies the defaults inside it."""
    if isinstance(default, Section):
        return default.tree()
    values: dict[str, Any] = {attribute: default}
    one = model.model_construct(**values)
    (value,) = one.model_dump(mode="json", by_alias=True, include={attribute}, warnings=False).values()
    return value


def _type(kind: object, metadata: list[Any]) -> Schema:
    """The schema of a Python type with its constraints."""
    kind, inner = _unwrap(kind)
    metadata = [*inner, *metadata]
    whole = next((one.schema for one in metadata if isinstance(one, Wire) and _stands_alone(one)), None)
    schema = dict(whole) if whole else _plain(kind)
    for constraint in metadata:
        schema |= _constraint(constraint, schema)
    return schema


def _stands_alone(wire: Wire) -> bool:
    return "type" in wire.schema or "anyOf" in wire.schema


def _unwrap(kind: object) -> tuple[object, list[Any]]:
    """Take `Annotated` and `| None` off a type; returns it with what was annotated."""
    if get_origin(kind) is Annotated:
        inner, *metadata = get_args(kind)
        kind, more = _unwrap(inner)
        return kind, [*more, *metadata]
    if get_origin(kind) in (Union, types.UnionType):
        rest = [one for one in get_args(kind) if one is not type(None)]
        if len(rest) == 1:
            return _unwrap(rest[0])
    return kind, []


def _plain(kind: object) -> Schema:
    if isinstance(kind, EnumType):
        members: Mapping[str, object] = kind.__members__
        return {"type": "string", "enum": [str(member) for member in members.values()]}
    if isinstance(kind, type) and issubclass(kind, Section):
        return schema_of(kind)
    if get_origin(kind) is tuple:
        return {"type": "array", "items": _type(get_args(kind)[0], [])}
    if get_origin(kind) is dict:
        return {"type": "object", "additionalProperties": _type(get_args(kind)[1], [])}
    if kind in _SCALARS:
        return dict(_SCALARS[kind])
    raise TypeError(
        f"{kind!r} has no schema; use a Section, an enumeration, a scalar, tuple[X, ...] or dict[str, X]"
    )


_SIZES: Final = {"string": "Length", "array": "Items", "object": "Properties"}


def _constraint(constraint: object, schema: Schema) -> Schema:
    """What one constraint adds to a schema."""
    size = _SIZES.get(schema.get("type", ""), "")
    match constraint:
        case FieldInfo():
            return {k: v for one in constraint.metadata for k, v in _constraint(one, schema).items()}
        case annotated_types.Ge():
            return {"minimum": constraint.ge}
        case annotated_types.Le():
            return {"maximum": constraint.le}
        case annotated_types.MinLen():
            return {f"min{size}": constraint.min_length}
        case annotated_types.MaxLen():
            return {f"max{size}": constraint.max_length}
        case Wire():
            return {} if _stands_alone(constraint) else constraint.schema
    pattern = getattr(constraint, "pattern", None)
    return {"pattern": pattern} if pattern is not None else {}


def _rules(model: type[Section]) -> list[Schema]:
    rules = []
    for rule in RULES:
        if rule.model is model:
            entry = {"rule": rule.cel, "message": rule.message}
            # An API server accepts as fieldPath only fields of the schema that are there to be pointed at.
            if rule.field and not rule.field.startswith("metadata"):
                entry["fieldPath"] = f".{rule.field}"
            rules.append(entry)
    return rules


def _words(text: str | None) -> str:
    """A docstring as one paragraph."""
    words = " ".join((text or "").split())
    if not words:
        raise TypeError("a model or field has no description; `kubectl explain` would have nothing to say")
    return words
