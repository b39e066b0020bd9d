"""Objects of an API server, read into models and held against the rules.

Promises: every problem at once, each with its field, as a value that becomes a condition: an object may be older than a
rule, so that a broken one is no reason to crash. Refuses to repair or to guess.
"""

from collections.abc import Iterator
from typing import TypeVar

from pydantic import ValidationError

from kvpool_operator.api.model import InvalidObjectError, Problem, Section, problems_of
from kvpool_operator.api.node import KVStoreNode
from kvpool_operator.api.pool import KVStorePool
from kvpool_operator.api.rules import RULES

M = TypeVar("M", bound=Section)


def parse_pool(body: object) -> KVStorePool:
    """A KVStorePool as an API server holds it.

    Raises:
        InvalidObjectError: every problem, by field.
    """
    return _parse(KVStorePool, body)


def parse_node(body: object) -> KVStoreNode:
    """A KVStoreNode as an API server holds it.

    Raises:
        InvalidObjectError: every problem, by field.
    """
    return _parse(KVStoreNode, body)


def _parse(model: type[M], body: object) -> M:
    try:
        parsed = model.model_validate(body)
    except ValidationError as error:
        raise InvalidObjectError(problems_of(error)) from error
    if broken := tuple(broken_rules(parsed)):
        raise InvalidObjectError(broken)
    return parsed


def broken_rules(part: Section, place: str = "") -> Iterator[Problem]:
    """Every rule that `part` or something below it breaks."""
    for rule in RULES:
        if rule.model is type(part) and rule.check is not None and not rule.check(part):
            yield Problem(_join(place, rule.field), rule.message)
    for attribute, field in type(part).model_fields.items():
        value = getattr(part, attribute)
        below = _join(place, field.alias or attribute)
        if isinstance(value, Section):
            yield from broken_rules(value, below)
        elif isinstance(value, tuple):
            for place_in_list, entry in enumerate(value):
                if isinstance(entry, Section):
                    yield from broken_rules(entry, f"{below}.{place_in_list}")


def _join(place: str, field: str) -> str:
    return f"{place}.{field}" if place and field else place or field
