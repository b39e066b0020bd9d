"""The key of a chunk, format 1.

    kvp1/<pool>/<identity, 16 hex>/<namespace, 32 hex>/<hash, hex>

* `pool`: `namespace.name`; so that an operator can count or remove one pool's keys by prefix;
* `identity`: the first half of the identity's digest, so that people can tell engines apart; the namespace covers it;
* `namespace`: digest over the whole identity, the group's own description, shard and shard count, and the request's
  extras (LoRA, salt, media). A group is named by what it is, never by its index: the identity holds them all;
* `hash`: the hash of the unit that *closes* the chunk (for a tail that was saved early: the unit that closed it then).

Keys of different identities, groups, shards or extras are different (SAME_IDENTITY), because their namespaces are, and
because no field can hold the separator. The format has a version of its own: `kvp1`.
"""

import re
from dataclasses import dataclass
from typing import Final

from kvpool_wire import agent_pb2 as pb
from kvpool_wire import limits
from kvpool_wire.identity import (
    IdentityError,
    check_identity,
    digest,
    extras_digest,
    identity_digest,
    namespace_digest,
    shard_count,
)

KEY_FORMAT: Final = "kvp1"
_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_POOL = re.compile(rf"{_LABEL}(\.{_LABEL})*")


def check_pool_name(pool: str) -> str:
    """Return `pool` if it can be part of a key: lower-case DNS labels joined by dots.

    Raises:
        IdentityError: naming the character set.
    """
    if not _POOL.fullmatch(pool) or len(pool) > limits.MAX_POOL_NAME_BYTES:
        raise IdentityError(
            f"pool name {pool!r:.80}: labels of lower-case letters, digits and '-', joined by '.',"
            f" at most {limits.MAX_POOL_NAME_BYTES} bytes"
        )
    return pool


def key_digest(key: bytes) -> bytes:
    """16 bytes that a chunk's trailer carries, so that whole bytes of another key are seen to be another's."""
    return digest("kvpool key 1", key)


@dataclass(frozen=True, slots=True)
class KeySpace:
    """Builds the keys of one engine identity in one pool. Immutable; shared by all sessions of that identity."""

    pool: str
    identity: pb.Identity
    digest: bytes
    """16 bytes; equal sessions may read each other's chunks."""

    @classmethod
    def of(cls, pool: str, identity: pb.Identity, *, with_engine: bool = True) -> "KeySpace":
        """Check `identity` and digest it.

        Raises:
            IdentityError: what is wrong with pool or identity.
        """
        check_pool_name(pool)
        check_identity(identity)
        own = pb.Identity()
        own.CopyFrom(identity)  # messages are mutable; what was digested must not change any more
        return cls(pool, own, identity_digest(pool, identity, with_engine=with_engine))

    def prefix(self, group: int, shard: int, extras: bytes = b"") -> bytes:
        """All of a key but its hash, ASCII.

        Args:
            group: index into the identity's groups.
            shard: number among all shards of the group (`identity.shard_index`).
            extras: what `extras_digest` gave for the request.
        """
        namespace = namespace_digest(self.digest, self.identity.groups[group], shard=shard, extras=extras)
        return f"{KEY_FORMAT}/{self.pool}/{self.digest[:8].hex()}/{namespace.hex()}/".encode()

    def prefixes(self, group: int, extras: pb.Extras) -> list[bytes]:
        """One prefix per KV shard of the group: a chunk is present only if it is present under all of them."""
        tag = extras_digest(extras)
        return [self.prefix(group, shard, tag) for shard in range(shard_count(self.identity.groups[group]))]


def chunk_key(prefix: bytes, unit_hash: bytes) -> bytes:
    """The key of the chunk that `unit_hash` closes, under a prefix of `KeySpace.prefix`."""
    return prefix + unit_hash.hex().encode()
