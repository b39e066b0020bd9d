"""What is refused or rearranged before a batch reaches Mooncake."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool_agent.store.errors import StoreMisuse
from kvpool_agent.store.guards import MAX_KEY_BYTES, check_items, check_keys, split_batches
from kvpool_agent.store.protocol import GetItem


@pytest.mark.parametrize(
    "item",
    [
        GetItem(b"k", -1, 4),
        GetItem(b"k", 0, 0),
        GetItem(b"k", 0, -4),
        GetItem(b"k", 97, 4),
        GetItem(b"k", 1 << 62, 1 << 62),
        GetItem(b"", 0, 4),
        GetItem(b"a b\n", 0, 4),
        GetItem("ключ".encode(), 0, 4),
        GetItem(b"k" * (MAX_KEY_BYTES + 1), 0, 4),
    ],
)
def test_an_item_that_mooncake_would_choke_on_is_refused_with_its_number(item: GetItem) -> None:
    with pytest.raises(StoreMisuse, match="item 1"):
        check_items([GetItem(b"good", 50, 4), item], ring_size=100)


def test_the_whole_ring_may_be_used() -> None:
    check_items([GetItem(b"a", 0, 60), GetItem(b"b", 60, 40)], ring_size=100)


def test_overlapping_destinations_are_refused() -> None:
    with pytest.raises(StoreMisuse, match="items 1 and 0 overlap"):
        check_items([GetItem(b"a", 10, 10), GetItem(b"b", 5, 6)], ring_size=100)


def test_a_bad_key_is_named() -> None:
    with pytest.raises(StoreMisuse, match="key 1"):
        check_keys([b"good", b"\x00"])


_ITEMS = st.lists(
    st.builds(GetItem, st.sampled_from([b"a", b"b", b"c", b"d"]), st.just(0), st.integers(1, 50)), max_size=40
)


@given(_ITEMS, st.integers(1, 8), st.integers(1, 120))
def test_batches_hold_every_item_once_no_key_twice_and_keep_the_limits(
    items: list[GetItem], max_items: int, max_bytes: int
) -> None:
    batches = split_batches(items, max_items=max_items, max_bytes=max_bytes)
    assert sorted(index for batch in batches for index in batch) == list(range(len(items)))
    for batch in batches:
        keys = [items[index].key for index in batch]
        assert len(set(keys)) == len(keys) <= max_items
        assert len(batch) == 1 or sum(items[index].size for index in batch) <= max_bytes


@given(_ITEMS)
def test_occurrences_of_a_key_keep_their_order(items: list[GetItem]) -> None:
    order = [index for batch in split_batches(items, max_items=5, max_bytes=100) for index in batch]
    for key in {item.key for item in items}:
        of_key = [index for index in order if items[index].key == key]
        assert of_key == sorted(of_key)


def test_a_request_without_repeats_is_cut_as_seldom_as_possible() -> None:
    items = [GetItem(str(index).encode(), index, 1) for index in range(1025)]
    batches = split_batches(items, max_items=512, max_bytes=1 << 30)
    assert [len(batch) for batch in batches] == [512, 512, 1]
