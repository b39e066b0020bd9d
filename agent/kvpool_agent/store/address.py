"""Where the master is found: under an address of its own, or through the etcd in which several elect a leader.

Promises: what passes is understood by the Mooncake that is published. Refuses what that Mooncake takes and then fails
on with nothing but -600: a missing port, an empty member of a list, a scheme in front of a member, and the other
backends of its source (`k8s://`, `redis://`), which are not compiled into it. Pure, and quick to import.
"""

import re
from typing import Final

ETCD: Final = "etcd://"

_SCHEME: Final = re.compile(r"[a-z0-9+.-]+://")
_MEMBER: Final = re.compile(r"(?:[^\s:;,/\[\]]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})")


def through_etcd(address: str) -> bool:
    """Whether the address names an etcd, not the master."""
    return address.startswith(ETCD)


def address_fault(address: str) -> str:
    """What is wrong with `address` and how to mend it, "" if nothing is.

    Args:
        address: `host:port`, or `etcd://host:port[;host:port]...`.
    """
    scheme = _SCHEME.match(address)
    if scheme is not None and scheme[0] != ETCD:
        return (
            f"{address!r}: {scheme[0]} is not compiled into Mooncake's published builds; "
            "write host:port, or etcd://host:port[;host:port]"
        )
    members = address.removeprefix(ETCD).split(";") if through_etcd(address) else [address]
    if all(_is_member(one) for one in members):
        return ""
    return (
        f"{address!r} is not host:port and not etcd://host:port[;host:port]; "
        "write for example master.kvpool.svc:50051"
    )


def _is_member(text: str) -> bool:
    match = _MEMBER.fullmatch(text)
    return match is not None and 0 < int(match["port"]) < 65536
