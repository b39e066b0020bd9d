"""Writes what is generated from the operator's models: the definitions in `crds/` and their reference page.

python tools/gen_crds.py            write the files
python tools/gen_crds.py --check    exit 1 if the committed files are not what the models say
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "operator"))

from kvpool_operator.api import crd  # noqa: E402 - the checkout's own models, wherever it is installed from

PAGE = ROOT / "docs" / "reference" / "crd.md"
INTRODUCTION = """# Custom resources

Generated from the operator's models by `make crds`. `kubectl explain kvstorepools.spec --recursive` shows the same.
A field with a default may be left out; one that is *required* may not, once the object it is in is there.
"""


def wanted() -> dict[Path, str]:
    """What each generated file has to hold."""
    definitions = crd.definitions()
    files = {ROOT / "crds" / name: crd.print_yaml(definition) for name, definition in definitions.items()}
    return files | {PAGE: "\n".join([INTRODUCTION, *map(page_of, definitions.values())])}


def page_of(definition: dict[str, Any]) -> str:
    """The part of the reference page about one definition."""
    names, (version,) = definition["spec"]["names"], definition["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]
    lines = [
        f"## {names['kind']}",
        "",
        f"{schema['description']} Short name `{names['shortNames'][0]}`.",
        "",
        "| field | type | default | meaning |",
        "| --- | --- | --- | --- |",
        *rows(schema["properties"]["spec"], "spec"),
        *rows(schema["properties"]["status"], "status"),
        "",
        "Rules that no single field can hold:",
        "",
        *rules(schema, ""),
        "",
    ]
    return "\n".join(lines)


def rows(schema: dict[str, Any], place: str) -> Iterator[str]:
    """One line of the table for everything below `schema`."""
    for name, field in schema["properties"].items():
        where = f"{place}.{name}"
        needed = name in schema.get("required", ())
        default = "*required*" if needed else _literal(field.get("default"))
        yield f"| `{where}` | {_kind(field)} | {default} | {_escape(field['description'])} |"
        below, suffix = _below(field)
        if below is not None:
            yield from rows(below, where + suffix)


def rules(schema: dict[str, Any], place: str) -> Iterator[str]:
    """The rules of `schema` and of everything below it."""
    for rule in schema.get("x-kubernetes-validations", ()):
        at = place + rule.get("fieldPath", "") or "metadata.name"
        yield f"- `{at.removeprefix('.')}`: {rule['message']}"
    for name, field in schema.get("properties", {}).items():
        below, suffix = _below(field)
        if below is not None:
            yield from rules(below, f"{place}.{name}{suffix}")


def _below(field: dict[str, Any]) -> tuple[dict[str, Any] | None, str]:
    item = field.get("items", {})
    if "properties" in item:
        return item, "[]"
    return (field, "") if "properties" in field else (None, "")


def _kind(field: dict[str, Any]) -> str:
    if "enum" in field:
        return ", ".join(f"`{one}`" for one in field["enum"])
    if field.get("x-kubernetes-int-or-string"):
        return "integer or string"
    if field["type"] == "array":
        return "list of objects" if "properties" in field["items"] else "list of strings"
    if "additionalProperties" in field:
        return "map of strings"
    bounds = [str(field[one]) for one in ("minimum", "maximum") if one in field]
    return f"{field['type']}, {' to '.join(bounds)}" if len(bounds) == 2 else str(field["type"])


def _literal(default: object) -> str:
    if default is None or default == [] or isinstance(default, dict):
        return ""
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def _escape(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 on a difference")
    arguments = parser.parse_args()
    files = wanted()
    stale = [path for path, text in files.items() if not path.exists() or path.read_text() != text]
    if arguments.check:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is not what the models say; run: make crds", file=sys.stderr)
        return 1 if stale else 0
    for path in stale:
        path.write_text(files[path])
    return 0


if __name__ == "__main__":
    sys.exit(main())
