"""SAME_IDENTITY as a property: different identities, groups, shards, extras or hashes never give equal keys."""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st

from kvpool_wire import agent_pb2 as pb
from kvpool_wire.identity import canonical, extras_digest, shard_count
from kvpool_wire.keys import KeySpace, chunk_key

# Few, short, similar values: collisions by concatenation ("a" + "bc" against "ab" + "c") are what could go wrong.
TEXT = st.text("ab/\0", min_size=1, max_size=3)
OPTIONAL = st.text("ab/\0", max_size=3)
SMALL = st.integers(1, 3)
DTYPES = st.sampled_from(["uint8", "int8", "float16"])
AXES = st.permutations(["token", "head", "content"])


@st.composite
def tensor_formats(draw: st.DrawFn) -> pb.TensorFormat:
    axes = draw(AXES)[: draw(SMALL)]
    return pb.TensorFormat(dtype=draw(DTYPES), axes=axes, shape=[draw(SMALL) for _ in axes])


@st.composite
def groups(draw: st.DrawFn, names: list[str]) -> pb.Group:
    return pb.Group(
        kind=draw(st.sampled_from([pb.FULL_ATTENTION, pb.SLIDING_WINDOW, pb.CHUNKED_LOCAL, pb.MAMBA])),
        block_size=draw(SMALL),
        sliding_window=draw(st.integers(0, 2)),
        chunk_size=draw(st.integers(0, 2)),
        variant=draw(OPTIONAL),
        shards_per_stage=draw(SMALL),
        layers=[
            pb.Layer(
                name=name,
                stage=draw(st.integers(0, 1)),
                tensors=draw(st.lists(tensor_formats(), min_size=1, max_size=2)),
            )
            for name in names
        ],
    )


@st.composite
def identities(draw: st.DrawFn) -> pb.Identity:
    names = draw(st.lists(TEXT, min_size=1, max_size=3, unique=True))
    cut = draw(st.integers(1, len(names)))
    found = pb.Identity(
        model=draw(TEXT),
        fingerprint=draw(TEXT),
        engine=draw(TEXT),
        hash_algorithm=draw(TEXT),
        hash_seed=draw(st.binary(max_size=2)),
        hash_block_size=draw(SMALL),
        scheduler_block_size=1,
    )
    for part in (names[:cut], names[cut:]):
        if part:
            found.groups.append(draw(groups(part)))
    return found


EXTRAS = st.builds(
    lambda lora, revision, salt, media: pb.Extras(
        lora_name=lora, lora_revision=revision if lora else "", cache_salt=salt, media=media
    ),
    OPTIONAL,
    OPTIONAL,
    OPTIONAL,
    st.lists(OPTIONAL, max_size=2),
)
POOLS = st.sampled_from(["a", "b", "a.b", "ab"])
HASHES = st.binary(min_size=8, max_size=9)


def keys(pool: str, identity: pb.Identity, extras: pb.Extras, unit: bytes) -> set[bytes]:
    """All keys of one hash: every group, every shard."""
    space = KeySpace.of(pool, identity)
    return {
        chunk_key(prefix, unit)
        for group in range(len(identity.groups))
        for prefix in space.prefixes(group, extras)
    }


@given(POOLS, POOLS, identities(), identities(), EXTRAS, EXTRAS, HASHES, HASHES)
def test_same_identity_whatever_differs_the_keys_do(
    pool_a: str,
    pool_b: str,
    a: pb.Identity,
    b: pb.Identity,
    extras_a: pb.Extras,
    extras_b: pb.Extras,
    unit_a: bytes,
    unit_b: bytes,
) -> None:
    same = (pool_a, a, extras_a, unit_a) == (pool_b, b, extras_b, unit_b)
    ours, theirs = keys(pool_a, a, extras_a, unit_a), keys(pool_b, b, extras_b, unit_b)
    assert ours == theirs if same else ours.isdisjoint(theirs)


FIELDS = ["model", "fingerprint", "engine", "hash_algorithm", "hash_block_size"]


@given(identities(), identities(), st.sampled_from(FIELDS), EXTRAS, HASHES)
def test_same_identity_one_field_is_enough(
    a: pb.Identity, other: pb.Identity, field: str, extras: pb.Extras, unit: bytes
) -> None:
    b = pb.Identity()
    b.CopyFrom(a)
    setattr(b, field, getattr(other, field))
    assume(a != b)
    assert keys("p", a, extras, unit).isdisjoint(keys("p", b, extras, unit))


@given(identities(), EXTRAS, HASHES)
def test_same_identity_every_group_and_shard_has_a_key_of_its_own(
    identity: pb.Identity, extras: pb.Extras, unit: bytes
) -> None:
    assume(len(identity.groups) < 2 or identity.groups[0] != identity.groups[1])
    assert len(keys("p", identity, extras, unit)) == sum(map(shard_count, identity.groups))


@given(identities(), EXTRAS, HASHES)
def test_same_identity_equal_means_equal(identity: pb.Identity, extras: pb.Extras, unit: bytes) -> None:
    again = pb.Identity.FromString(identity.SerializeToString())
    assert keys("p", identity, extras, unit) == keys("p", again, extras, unit)


@given(EXTRAS, EXTRAS)
def test_same_identity_different_extras_have_different_digests(a: pb.Extras, b: pb.Extras) -> None:
    assert (extras_digest(a) == extras_digest(b)) == (a == b)


PART = st.one_of(
    st.binary(max_size=3),
    st.text("ab", max_size=3),
    st.integers(-2, 12),
    st.lists(st.binary(max_size=2), max_size=3),
)
PARTS = st.lists(PART, max_size=4)


@given(PARTS, PARTS)
def test_same_identity_canonical_is_injective(a: list[object], b: list[object]) -> None:
    assert (canonical(*a) == canonical(*b)) == (a == b)  # type: ignore[arg-type]  # the four kinds above


@given(PARTS, PARTS)
def test_same_identity_no_encoding_is_the_beginning_of_another(a: list[object], b: list[object]) -> None:
    one, other = canonical(a_list(a)), canonical(a_list(b))
    assert one == other or not other.startswith(one)


def a_list(parts: list[object]) -> list[bytes]:
    return [canonical(part) for part in parts]  # type: ignore[arg-type]  # as above
