"""The release table: which store and which images belong together.

Promises: a pool keeps the release that it was given, whatever table a newer operator brings; a table that cannot be
used is refused whole, with every fault. The table itself is data of the chart. Refuses to know a default image: nothing
here falls back to `latest`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

_RELEASE: Final = re.compile(r"[0-9A-Za-z]([-+.0-9A-Za-z]*[0-9A-Za-z])?")
_STORE: Final = re.compile(r"[0-9]+\.[0-9]+\.[0-9]+[0-9A-Za-z.]*")
_IMAGE: Final = re.compile(r"[a-zA-Z0-9][^\s@]*(:[\w][\w.-]{0,127}|@sha256:[0-9a-f]{64})")


class Feature(StrEnum):
    """What some agents can do and others cannot. An agent refuses a configuration that names what it does not know."""

    HUGEPAGES = "hugepages"
    """`segment.hugepages`."""

    FALLBACK = "transport-fallback"
    """`store.fallback`."""

    REQUIRED_IDENTITY = "required-identity"
    """`engines.require`."""


class ReleaseTableError(ValueError):
    """A release table that cannot be used."""


@dataclass(frozen=True, slots=True)
class Release:
    """One release.

    Attributes:
        name: what `spec.version` says.
        store_version: version of Mooncake in both images; clients work only within its minor line.
        agent_image: image of the agents, by digest or tag.
        master_image: image of the masters, by digest or tag.
        features: what its agents can do beyond the first release.
    """

    name: str
    store_version: str
    agent_image: str
    master_image: str
    features: frozenset[Feature] = frozenset()

    @property
    def store_line(self) -> str:
        """The minor line of the store, such as `0.3.13`: Mooncake counts it in the third number."""
        return ".".join(self.store_version.split(".")[:3])


@dataclass(frozen=True, slots=True)
class ReleaseTable:
    """All releases that an operator knows, and the one that new pools get."""

    default: str
    releases: Mapping[str, Release]

    def find(self, name: str | None) -> Release | None:
        """A release by name, the default for None; None where there is none of that name."""
        return self.releases.get(self.default if name is None else name)


def parse_table(tree: object) -> ReleaseTable:
    """The table from the chart's JSON: `{"default": NAME, "releases": {NAME: {"storeVersion", "images", "features"}}}`.

    Raises:
        ReleaseTableError: every fault, with its place.
    """
    faults: list[str] = []
    table = tree if isinstance(tree, dict) else {}
    entries = table.get("releases")
    releases = {
        str(name): _release(str(name), entry, faults)
        for name, entry in (entries.items() if isinstance(entries, dict) else ())
    }
    default = table.get("default")
    if not isinstance(default, str) or default not in releases:
        faults.append(
            f"default: {default!r} is not one of the releases ({', '.join(releases) or 'there are none'})"
        )
    if faults:
        raise ReleaseTableError("release table: " + "; ".join(faults))
    return ReleaseTable(default=str(default), releases=releases)


def _release(name: str, entry: object, faults: list[str]) -> Release:
    fields = entry if isinstance(entry, dict) else {}
    images = fields.get("images")
    images = images if isinstance(images, dict) else {}
    if not _RELEASE.fullmatch(name) or len(name) > 32:
        faults.append(f"{name!r}: a release's name has at most 32 letters, digits, '.', '-' and '+'")
    return Release(
        name=name,
        store_version=_text(fields, "storeVersion", _STORE, name, faults),
        agent_image=_text(images, "agent", _IMAGE, f"{name}.images", faults),
        master_image=_text(images, "master", _IMAGE, f"{name}.images", faults),
        features=_features(fields.get("features", []), name, faults),
    )


def _text(
    fields: Mapping[str, object], key: str, form: re.Pattern[str], place: str, faults: list[str]
) -> str:
    value = fields.get(key)
    if isinstance(value, str) and form.fullmatch(value):
        return value
    wanted = "an image with a digest or a tag" if form is _IMAGE else "a version such as 0.3.13"
    faults.append(f"{place}.{key}: {value!r} is not {wanted}")
    return ""


def _features(given: object, place: str, faults: list[str]) -> frozenset[Feature]:
    known = {str(feature): feature for feature in Feature}
    names = given if isinstance(given, list) else [given]
    unknown = [name for name in names if name not in known]
    if unknown:
        faults.append(f"{place}.features: {unknown} unknown; known are {', '.join(known)}")
    return frozenset(known[name] for name in names if name in known)
