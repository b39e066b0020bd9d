"""The release table: read whole or refused whole."""

from typing import Any

import pytest

from kvpool_operator.desired.releases import Feature, ReleaseTableError, parse_table
from unit.operator.desired.builders import merged

DIGEST = "sha256:" + "0" * 64
TABLE: dict[str, Any] = {
    "default": "0.2.0",
    "releases": {
        "0.1.0": {"storeVersion": "0.3.12", "images": {"agent": f"a@{DIGEST}", "master": f"m@{DIGEST}"}},
        "0.2.0": {
            "storeVersion": "0.3.13.post1",
            "images": {"agent": "kvpool/agent:0.2.0", "master": "host:5000/kvpool/master:0.2.0"},
            "features": ["hugepages"],
        },
    },
}


def test_a_table_is_read() -> None:
    table = parse_table(TABLE)
    new = table.find(None)
    assert new is not None
    assert (new.name, new.store_version) == ("0.2.0", "0.3.13.post1")
    assert new.features == frozenset({Feature.HUGEPAGES})
    old = table.find("0.1.0")
    assert old is not None
    assert old.agent_image == f"a@{DIGEST}"
    assert table.find("0.9.0") is None


def test_a_client_works_within_its_minor_line_which_mooncake_counts_in_the_third_number() -> None:
    table = parse_table(TABLE)
    lines = [release.store_line for release in table.releases.values()]
    assert lines == ["0.3.12", "0.3.13"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"default": "0.9.0"}, "default: '0.9.0' is not one of the releases"),
        ({"default": None}, "default: None"),
        ({"releases": {"0.1.0": {"storeVersion": "new"}}}, "0.1.0.storeVersion: 'new' is not a version"),
        (
            {"releases": {"0.1.0": {"images": {"agent": "a"}}}},
            "0.1.0.images.agent: 'a' is not an image with a digest",
        ),
        ({"releases": {"0.1.0": {"images": {"agent": "a@sha256:12"}}}}, "0.1.0.images.agent"),
        ({"releases": {"0.1.0": {"images": None}}}, "0.1.0.images.master: None"),
        ({"releases": {"0.1.0": {"features": ["speed"]}}}, "['speed'] unknown; known are hugepages"),
        ({"releases": {"a b": {}}}, "'a b': a release's name"),
    ],
)
def test_a_table_that_cannot_be_used_is_refused_with_the_place(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ReleaseTableError) as error:
        parse_table(merged(TABLE, change))
    assert says in str(error.value)


@pytest.mark.parametrize("tree", [None, [], "x", {}, {"releases": []}, {"releases": {}, "default": ""}])
def test_what_is_no_table_is_refused(tree: object) -> None:
    with pytest.raises(ReleaseTableError):
        parse_table(tree)
