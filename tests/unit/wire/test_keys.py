"""The key format: every part, its golden value, and what a pool may be called."""

from __future__ import annotations

import pytest

from kvpool_wire import agent_pb2 as pb
from kvpool_wire.identity import IdentityError
from kvpool_wire.keys import KEY_FORMAT, KeySpace, check_pool_name, chunk_key, key_digest
from support.identities import rich_extras, rich_identity

SPACE = KeySpace.of("ns.pool", rich_identity())


def test_golden_key_does_not_drift() -> None:
    key = chunk_key(SPACE.prefixes(0, rich_extras())[3], bytes(range(32)))
    prefix = b"kvp1/ns.pool/2638b27a2bd3d4fe/61222ab2cc5ebc4967128d862407b91b/"
    assert key == prefix + b"000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
    assert key_digest(key).hex() == "c04a993bb8ba981bf910f34fe3bfac2c"


def test_a_key_is_made_of_format_pool_identity_namespace_and_hash() -> None:
    key = chunk_key(SPACE.prefix(0, 0), b"\x00\xff").decode("ascii")
    form, pool, identity, namespace, unit = key.split("/")
    assert (form, pool, unit) == (KEY_FORMAT, "ns.pool", "00ff")
    assert identity == SPACE.digest[:8].hex()
    assert len(bytes.fromhex(namespace)) == 16


def test_same_identity_groups_shards_and_extras_have_prefixes_of_their_own() -> None:
    prefixes = [
        prefix
        for group in (0, 1)
        for extras in (pb.Extras(), rich_extras(), pb.Extras(cache_salt="salt"))
        for prefix in SPACE.prefixes(group, extras)
    ]
    assert len(set(prefixes)) == len(prefixes) == 3 * 4 + 3 * 1


def test_same_identity_the_order_of_the_groups_is_part_of_the_identity() -> None:
    swapped = rich_identity()
    swapped.groups.reverse()
    space = KeySpace.of("ns.pool", swapped)
    assert set(space.prefixes(1, pb.Extras())).isdisjoint(SPACE.prefixes(0, pb.Extras()))


def test_same_identity_a_key_space_does_not_follow_changes_of_the_message() -> None:
    identity = rich_identity()
    space = KeySpace.of("ns.pool", identity)
    identity.groups[0].block_size = 99
    assert space.prefix(0, 0) == SPACE.prefix(0, 0)


def test_key_digests_differ_with_any_byte() -> None:
    keys = [chunk_key(SPACE.prefix(0, 0), bytes([unit])) for unit in range(256)]
    assert len({key_digest(key) for key in keys}) == 256


@pytest.mark.parametrize("name", ["a", "ns.pool", "team-1.kv-pool-2", "0.9", "x" * 128])
def test_pool_names_that_kubernetes_gives_are_taken(name: str) -> None:
    assert check_pool_name(name) == name


@pytest.mark.parametrize(
    "name", ["", "Pool", "a/b", "a b", "-a", "a-", ".a", "a.", "a..b", "a-.b", "a\n", "ä", "a_b", "x" * 129]
)
def test_pool_names_that_could_break_a_key_are_refused(name: str) -> None:
    with pytest.raises(IdentityError, match="pool name"):
        KeySpace.of(name, rich_identity())


def test_an_identity_is_checked_before_it_names_anything() -> None:
    with pytest.raises(IdentityError, match=r"identity\.model is empty"):
        KeySpace.of("p", pb.Identity())
