"""The two custom resource definitions, made from the models.

Promises: the same models give the same bytes; one served version, with a status subresource; printer columns that
answer "is it up, how full, how good". `python tools/gen_crds.py` writes them to `crds/`.
"""

from typing import Any, Final

import yaml

from kvpool_operator.api import node, pool
from kvpool_operator.api.model import GROUP, VERSION, Section
from kvpool_operator.api.schema import schema_of

Column = tuple[str, str, str, str, int]
"""Name, type, JSONPath, description, priority (1 is shown with `-o wide` only)."""

_READY: Final = '.status.conditions[?(@.type=="Ready")]'

POOL_COLUMNS: Final[tuple[Column, ...]] = (
    ("READY", "string", f"{_READY}.status", "Whether the pool works.", 0),
    ("AGENTS", "string", ".status.agents.summary", "Agents that are ready, of those that should be.", 0),
    ("CAPACITY", "string", ".status.capacity.total", "Memory of all nodes together.", 0),
    ("USED", "string", ".status.capacity.used", "Memory that chunks take.", 0),
    ("HIT%", "integer", ".status.hitPercent", "Tokens found among tokens asked for.", 0),
    ("AGE", "date", ".metadata.creationTimestamp", "Time since it was created.", 0),
    ("REASON", "string", f"{_READY}.reason", "Why it is ready or not.", 1),
    ("UPDATED", "integer", ".status.agents.updated", "Agents that run what the spec asks for.", 1),
    ("TRANSPORT", "string", ".spec.transport.protocol", "Transport between nodes.", 1),
    ("ENGINES", "integer", ".status.engines.attached", "Engines that are attached.", 1),
    ("VERSION", "string", ".status.version", "Release that the pool holds.", 1),
)

NODE_COLUMNS: Final[tuple[Column, ...]] = (
    ("POOL", "string", ".spec.poolName", "The pool.", 0),
    ("NODE", "string", ".spec.nodeName", "The Kubernetes node.", 0),
    ("READY", "string", f"{_READY}.status", "Whether the node serves the pool.", 0),
    ("SEGMENT", "string", ".status.segment.size", "Memory that the node lends.", 0),
    ("TRANSPORT", "string", ".status.segment.transport", "What it is really served by.", 0),
    ("AGE", "date", ".metadata.creationTimestamp", "Time since it was created.", 0),
    ("REASON", "string", f"{_READY}.reason", "Why it is ready or not.", 1),
    ("ERROR", "string", ".status.lastError", "The last fault.", 1),
)


def definition(
    model: type[Section],
    *,
    kind: str,
    plural: str,
    short_name: str,
    columns: tuple[Column, ...],
    selectable: tuple[str, ...] = (),
) -> dict[str, Any]:
    """One definition."""
    schema = schema_of(model)
    # What an object is, where it is and what kind it is, is the API server's own schema.
    properties = schema["properties"]
    properties |= {
        "apiVersion": {"type": "string"},
        "kind": {"type": "string"},
        "metadata": {"type": "object"},
    }
    properties["status"] = _without_defaults(properties["status"])
    schema["required"] = ["spec"]
    version: dict[str, Any] = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
        "subresources": {"status": {}},
        "additionalPrinterColumns": [_column(column) for column in columns],
    }
    if selectable:
        version["selectableFields"] = [{"jsonPath": path} for path in selectable]
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{GROUP}", "labels": {"app.kubernetes.io/part-of": "kvpool"}},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": kind,
                "listKind": f"{kind}List",
                "plural": plural,
                "singular": kind.lower(),
                "shortNames": [short_name],
                "categories": ["kvpool"],
            },
            "versions": [version],
        },
    }


def _without_defaults(schema: Any) -> Any:
    """A status has no defaults: a figure that nobody has read is absent, never 0 or empty."""
    if isinstance(schema, list):
        return [_without_defaults(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: _without_defaults(value)
        for name, value in schema.items()
        # A property may bear the name `default`; a schema's default is no schema.
        if name != "default" or (isinstance(value, dict) and "description" in value)
    }


def _column(column: Column) -> dict[str, Any]:
    name, kind, path, description, priority = column
    entry: dict[str, Any] = {"name": name, "type": kind, "jsonPath": path, "description": description}
    return entry | ({"priority": priority} if priority else {})


def definitions() -> dict[str, dict[str, Any]]:
    """Both definitions, by the name of their file."""
    return {
        f"{GROUP}_{pool.PLURAL}.yaml": definition(
            pool.KVStorePool, kind=pool.KIND, plural=pool.PLURAL, short_name="kvp", columns=POOL_COLUMNS
        ),
        f"{GROUP}_{node.PLURAL}.yaml": definition(
            node.KVStoreNode,
            kind=node.KIND,
            plural=node.PLURAL,
            short_name="kvn",
            columns=NODE_COLUMNS,
            selectable=(".spec.poolName", ".spec.nodeName"),
        ),
    }


class _Dumper(yaml.SafeDumper):
    """Writes everything out: an anchor would only puzzle who reads the file."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def print_yaml(definition: dict[str, Any]) -> str:
    """A definition as a file."""
    head = "# Generated from the operator's models by tools/gen_crds.py. Do not edit; run: make crds\n"
    return head + yaml.dump(definition, Dumper=_Dumper, sort_keys=False, width=118, allow_unicode=True)
