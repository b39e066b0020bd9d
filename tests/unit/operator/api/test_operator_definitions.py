"""The definitions: what is committed is what the models say, and keeps to the API conventions."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvpool_operator.api import crd
from kvpool_operator.api.model import Section
from kvpool_operator.api.schema import schema_of

ROOT = Path(__file__).resolve().parents[4]
DEFINITIONS = crd.definitions()
EVERY = pytest.mark.parametrize("name", DEFINITIONS)

Schema = dict[str, Any]


def version(name: str) -> dict[str, Any]:
    (only,) = DEFINITIONS[name]["spec"]["versions"]
    return dict(only)


def fields(schema: Schema, place: str = "") -> Iterator[tuple[str, Schema]]:
    """Every field below a schema, with its place; list entries end in []."""
    for name, below in schema.get("properties", {}).items():
        yield f"{place}.{name}", below
        yield from fields(below, f"{place}.{name}")
        yield from fields(below.get("items", {}), f"{place}.{name}[]")


def own_fields(name: str) -> list[tuple[str, Schema]]:
    schema = version(name)["schema"]["openAPIV3Schema"]
    return [(place, one) for place, one in fields(schema) if place.startswith((".spec", ".status"))]


def test_what_is_committed_is_what_the_models_say() -> None:
    tool = [sys.executable, str(ROOT / "tools/gen_crds.py"), "--check"]
    done = subprocess.run(tool, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr


@EVERY
def test_the_file_is_the_definition(name: str) -> None:
    assert yaml.safe_load((ROOT / "crds" / name).read_text()) == DEFINITIONS[name]


@EVERY
def test_the_definition_is_far_smaller_than_an_annotation_may_be(name: str) -> None:
    # `kubectl apply` without --server-side keeps a copy in an annotation of at most 262,144 bytes.
    assert len(crd.print_yaml(DEFINITIONS[name])) < 100_000


@EVERY
def test_every_field_is_explained(name: str) -> None:
    for place, schema in own_fields(name):
        assert len(schema.get("description", "")) > 3, place


@EVERY
def test_everything_that_a_person_can_write_is_bounded(name: str) -> None:
    for place, schema in own_fields(name):
        kind = schema.get("type")
        if kind == "string" and "enum" not in schema:
            assert "maxLength" in schema, place
        if kind == "array":
            assert "maxItems" in schema, place
            assert "x-kubernetes-list-type" in schema, place
        if "additionalProperties" in schema:
            assert "maxProperties" in schema, place
        assert kind != "number", f"{place}: a float does not survive every client"
        if kind == "integer":
            assert schema["format"] in ("int32", "int64"), place


def test_a_yes_or_no_is_only_what_will_never_have_a_third_answer() -> None:
    flags = [
        place for name in DEFINITIONS for place, schema in own_fields(name) if schema.get("type") == "boolean"
    ]
    assert flags == [".spec.transport.hostNetwork", ".spec.paused"]


@EVERY
def test_a_status_has_no_defaults(name: str) -> None:
    status = [(place, schema) for place, schema in own_fields(name) if place.startswith(".status")]
    assert status
    assert [place for place, schema in status if "default" in schema] == []


@EVERY
def test_enumerations_are_camel_case(name: str) -> None:
    for place, schema in own_fields(name):
        for value in schema.get("enum", ()):
            assert re.fullmatch(r"[A-Z][A-Za-z]*|[0-9][MG]i", value), f"{place}: {value}"


@EVERY
def test_printed_columns_read_fields_that_are_there(name: str) -> None:
    places = {place for place, _ in own_fields(name)} | {".metadata.creationTimestamp"}
    for column in version(name)["additionalPrinterColumns"]:
        path = re.sub(r"\[\?\(.*\)\]", "[]", column["jsonPath"])
        assert path in places, column


def test_the_pool_answers_is_it_up_how_full_how_good() -> None:
    columns = version("kvpool.dev_kvstorepools.yaml")["additionalPrinterColumns"]
    assert [one["name"] for one in columns if not one.get("priority")] == [
        *("READY", "AGENTS", "CAPACITY", "USED", "HIT%", "AGE"),
    ]


@EVERY
def test_conditions_merge_by_their_type(name: str) -> None:
    conditions = dict(own_fields(name))[".status.conditions"]
    assert conditions["x-kubernetes-list-type"] == "map"
    assert conditions["x-kubernetes-list-map-keys"] == ["type"]


@EVERY
def test_names_are_short_and_in_one_category(name: str) -> None:
    names = DEFINITIONS[name]["spec"]["names"]
    assert names["categories"] == ["kvpool"]
    assert names["shortNames"] in (["kvp"], ["kvn"])


def test_a_type_without_a_schema_is_refused() -> None:
    class Odd(Section):
        """Odd."""

        one: float
        """A float."""

    with pytest.raises(TypeError, match="has no schema"):
        schema_of(Odd)


def test_a_field_without_words_is_refused() -> None:
    class Silent(Section):
        """Silent."""

        one: str

    with pytest.raises(TypeError, match="no description"):
        schema_of(Silent)
