"""What is refused or rearranged before a batch reaches Mooncake. Pure.

Promises: a batch that passes has no address outside its ring, no empty key or object, no overlapping destination, and
within one call to Mooncake no key twice (Mooncake fills only the last of two destinations and reports both as good).
Refuses to mend a caller's mistake: ranges raise `StoreMisuse` naming the item; only duplicates, which are legal here,
are rearranged into a later call.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from kvpool_agent.store.errors import StoreMisuse
from kvpool_agent.store.protocol import GetItem, PutItem

MAX_KEY_BYTES = 4096

Item = GetItem | PutItem


def check_key(key: bytes, *, where: str) -> None:
    """Refuse a key that is empty, too long or not printable ASCII."""
    if not 0 < len(key) <= MAX_KEY_BYTES:
        raise StoreMisuse(f"{where}: a key has 1 to {MAX_KEY_BYTES} bytes, this one has {len(key)}")
    if not key.isascii() or not key.decode("ascii").isprintable():
        raise StoreMisuse(f"{where}: a key is printable ASCII, this one is {key[:64]!r}")


def check_keys(keys: Sequence[bytes]) -> None:
    """Refuse the first unusable key."""
    for index, key in enumerate(keys):
        check_key(key, where=f"key {index}")


def check_items(items: Sequence[Item], *, ring_size: int) -> None:
    """Refuse items outside the ring, empty ones, and ones that overlap (even with equal keys)."""
    for index, item in enumerate(items):
        check_key(item.key, where=f"item {index}")
        if item.size <= 0 or item.offset < 0 or item.offset + item.size > ring_size:
            raise StoreMisuse(
                f"item {index}: bytes [{item.offset}, {item.offset + item.size}) do not lie in the ring of {ring_size} "
                "bytes, or are none"
            )
    order = sorted(range(len(items)), key=lambda index: items[index].offset)
    for left, right in pairwise(order):
        if items[left].offset + items[left].size > items[right].offset:
            raise StoreMisuse(f"items {left} and {right} overlap in the ring; give each its own bytes")


def split_batches(items: Sequence[Item], *, max_items: int, max_bytes: int) -> list[list[int]]:
    """Cut a request into calls to Mooncake.

    Args:
        items: the request.
        max_items: slices per call (Mooncake over TCP loses batches of more than about 2,050 slices to one peer).
        max_bytes: bytes per call (a call that outlives the lease loses all its items). One larger item goes alone.

    Returns:
        Lists of indices into `items`; every index once, in order but for repeated keys: the n-th occurrence of a key
        goes into a call of the n-th round.
    """
    rounds: list[list[int]] = []
    seen: dict[bytes, int] = {}
    for index, item in enumerate(items):
        occurrence = seen.get(item.key, 0)
        seen[item.key] = occurrence + 1
        if occurrence == len(rounds):
            rounds.append([])
        rounds[occurrence].append(index)
    batches: list[list[int]] = []
    for members in rounds:
        batch: list[int] = []
        used = 0
        for index in members:
            if batch and (len(batch) >= max_items or used + items[index].size > max_bytes):
                batches.append(batch)
                batch, used = [], 0
            batch.append(index)
            used += items[index].size
        if batch:
            batches.append(batch)
    return batches
