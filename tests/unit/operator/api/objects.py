"""Specs for properties: right ones, and ones that are wrong in one or two places, drawn from a definition's schema."""

from typing import Any

from hypothesis import strategies as st

from kvpool_operator.api import crd

Schema = dict[str, Any]

POOL = crd.definitions()["kvpool.dev_kvstorepools.yaml"]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
NODE = crd.definitions()["kvpool.dev_kvstorenodes.yaml"]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]

AMOUNTS = [0, 1, 5, 9999, 10_000, 10_001, 16 << 20, (16 << 20) - 1, 1 << 46, (1 << 46) + 1, -1]
_AMOUNTS = """
0 1 7 16777215 16777216 16Mi 1Mi 1023Ki 64Mi 1Gi 2Gi 64Gi 65Gi 64Ti 65Ti 1T 999999999999999Pi 5k 1.5Gi 1e3 -1 1Ei Gi
10m 500m 1.5 1.2345 12345 9999 100% 101% 1% 0% 10% 007Gi
"""
AMOUNTS_AS_TEXT = _AMOUNTS.split()
_TEXTS = """
a A-b a.b v1 0.1.0 demo nvidia.com/gpu /x x/ -x x- mlx5_0 rdma/hca rdma/ 10s 0s 1s 999ms 1m30s 30s 31s 500ms 10m 11m
24h 1h 1h1ms 2h 25h 5 1h2h ms 99999h http://collector:4317 https://c/x http:// ftp://x 0 1 0.01 1.0 0.12345 .5
host:50051 host:0 host:65535 host:65536 host:99999
[::1]:50051 10.0.0.1:50051 :1 kvpool/agent:1 kvpool/agent@sha256:aa 12 1x true Exists
"""
TEXTS = [*_TEXTS.split(), "", " ", "a b", "a\n", "10s\n", "ä", "x" * 63, "x" * 64, "x" * 254, "x" * 600]
INTEGERS = [
    -1,
    0,
    1,
    2,
    5,
    6,
    15,
    50,
    89,
    99,
    100,
    101,
    255,
    256,
    1023,
    1024,
    9400,
    15_000,
    17_000,
    17_001,
    65_535,
    65_536,
]
WRONG: list[Any] = [None, "1", 1, True, [], {}, ["a"], {"a": "b"}, 1 << 31, 1 << 63]


def value(schema: Schema) -> st.SearchStrategy[Any]:
    """A value for a field: mostly of its type, often out of its bounds."""
    return st.one_of(_typed(schema), _typed(schema), _typed(schema), st.sampled_from(WRONG))


def _typed(schema: Schema) -> st.SearchStrategy[Any]:
    if "enum" in schema:
        return st.sampled_from([*schema["enum"], *schema["enum"], schema["enum"][0].lower() + "x"])
    if schema.get("x-kubernetes-int-or-string"):
        return st.sampled_from([*AMOUNTS, *AMOUNTS_AS_TEXT])
    match schema["type"]:
        case "string":
            return st.sampled_from(TEXTS)
        case "integer":
            return st.sampled_from(INTEGERS)
        case "boolean":
            return st.booleans()
        case "array":
            return st.lists(_typed(schema["items"]), max_size=3)
    if "additionalProperties" in schema:
        return st.dictionaries(
            st.sampled_from(TEXTS[:12]), _typed(schema["additionalProperties"]), max_size=2
        )
    required = {name: _typed(schema["properties"][name]) for name in schema.get("required", ())}
    optional = {name: _typed(below) for name, below in schema["properties"].items() if name not in required}
    return st.fixed_dictionaries(required, optional=optional)


def _leaves(schema: Schema, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Schema]]:
    if "properties" not in schema:
        return [(path, schema)]
    whole = [(path, schema)] if path else []
    return whole + [
        leaf for name, one in schema["properties"].items() for leaf in _leaves(one, (*path, name))
    ]


BASE: dict[str, Any] = {"transport": {"protocol": "RDMA"}, "segment": {"size": "1Gi"}}


@st.composite
def specs(draw: st.DrawFn, schema: Schema = POOL["properties"]["spec"]) -> dict[str, Any]:
    """A pool's spec with up to four fields changed from one that is right."""
    tree: dict[str, Any] = {name: dict(part) for name, part in BASE.items()}
    for path, below in draw(st.lists(st.sampled_from(_leaves(schema)), min_size=1, max_size=4)):
        *parents, last = path
        place = tree
        for name in parents:
            child = place.get(name)
            place[name] = child = dict(child) if isinstance(child, dict) else {}
            place = child
        place[last] = draw(value(below))
    return tree
