"""Puts, gets, questions and removals through real worker processes on a real master, byte for byte."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from kvpool_agent.store.errors import StoreMisuse
from kvpool_agent.store.protocol import ChunkStatus, GetItem, PutItem
from support.mooncake import Master
from support.processes import command, maps_of, niceness
from support.raw import Raw
from support.store_nodes import Node, layout, now

OK, ABSENT = ChunkStatus.OK, ChunkStatus.ABSENT
NewNode = Callable[..., Awaitable[Node]]


async def test_get_fills_its_destinations_and_nothing_else(node: Node, owner: Raw) -> None:
    objects = owner.fill(40, 33_333, prefix="fills/")
    items = layout(objects)
    items.insert(7, GetItem(b"fills/never-saved", 20 << 20, 4096))
    statuses = await node.get(items)
    assert statuses == [OK] * 7 + [ABSENT] + [OK] * 33
    for item in items:
        if item.key in objects:
            assert node.ring.at(item) == objects[item.key]
    assert node.ring.untouched_outside([item for item in items if item.key in objects])


async def test_put_on_one_node_is_read_on_another(
    master: Master, owner: Raw, node: Node, new_node: NewNode
) -> None:
    other = await new_node(master)
    chunks = {f"shared/{index}".encode(): os.urandom(50_000 + index) for index in range(20)}
    puts = []
    for item in layout(chunks):
        node.ring.memory[item.offset : item.offset + item.size] = chunks[item.key]
        puts.append(PutItem(item.key, item.offset, item.size))
    before = node.ring.snapshot()
    assert await node.loader.put(puts, deadline=now() + 10) == [OK] * 20
    assert node.ring.snapshot() == before
    items = layout(chunks, start=1 << 20)
    assert await other.get(items) == [OK] * 20
    assert [other.ring.at(item) for item in items] == list(chunks.values())
    assert other.ring.untouched_outside(items)
    assert await node.store.prober.exists_keys(list(chunks), deadline=now() + 5) == [OK] * 20


async def test_existence_of_many_keys_keeps_its_order_over_pieces(node: Node, owner: Raw) -> None:
    rng = np.random.default_rng(7)
    hashes = rng.integers(0, 256, size=(3000, 16), dtype=np.uint8)
    present = np.zeros((3, 3000), dtype=np.uint8)
    prefixes = [b"order/a/", b"order/b/", b"order/c/"]
    for group, unit in [(0, 0), (0, 2047), (0, 2048), (1, 0), (1, 1095), (1, 1096), (2, 2999)]:
        key = (prefixes[group] + hashes[unit].tobytes().hex().encode()).decode()
        assert owner.put(key, b"x") == 0
        present[group, unit] = 1
    answer = await node.store.prober.exists(prefixes, hashes.tobytes(), 16, deadline=now() + 10)
    assert answer.dtype == np.uint8
    np.testing.assert_array_equal(answer, present)


async def test_existence_of_nothing_is_empty(node: Node) -> None:
    answer = await node.store.prober.exists([b"a", b"b"], b"", 8, deadline=now() + 5)
    assert answer.shape == (2, 0)
    assert await node.store.prober.exists_keys([], deadline=now() + 5) == []
    assert await node.get([]) == []


async def test_remove_says_ok_absent_or_leased(node: Node, owner: Raw) -> None:
    assert owner.put("remove/free", b"1") == 0
    assert owner.put("remove/read", b"2") == 0
    assert await node.get([GetItem(b"remove/read", 0, 1)]) == [OK]
    keys = [b"remove/free", b"remove/none", b"remove/read", b"remove/free"]
    statuses = await node.loader.remove(keys, deadline=now() + 5)
    assert statuses == [OK, ABSENT, ChunkStatus.LEASED, OK]
    assert await node.store.prober.exists_keys(keys[:3], deadline=now() + 5) == [ABSENT, ABSENT, OK]


async def test_own_segment_is_found_and_read_directly(own_master: Master, new_node: NewNode) -> None:
    node = await new_node(own_master, segment_size=64 << 20)
    data = os.urandom(1 << 20)
    node.ring.memory[: 1 << 20] = data
    assert await node.loader.put([PutItem(b"local", 0, 1 << 20)], deadline=now() + 5) == [OK]
    found = await node.store.prober.locate([b"local", b"nowhere"], deadline=now() + 5)
    segment = node.store.segment
    assert segment is not None
    assert found[1] is None
    assert found[0] is not None
    offset = segment.offset_of(found[0])
    assert offset is not None
    assert os.pread(segment.fd, 1 << 20, offset) == data
    (listed,) = own_master.segments()
    assert (listed["segment_name"], listed["te_endpoint"]) == (segment.name, segment.endpoint)
    assert int(listed["base_address"], 16) == segment.base
    assert node.store.health().segment_mounted_bytes == 64 << 20


async def test_chunk_of_another_segment_is_not_taken_for_local(
    master: Master, owner: Raw, node: Node, new_node: NewNode
) -> None:
    assert owner.put("elsewhere", b"1234") == 0
    other = await new_node(master, segment_size=16 << 20)
    (found,) = await other.store.prober.locate([b"elsewhere"], deadline=now() + 5)
    assert found is not None
    assert other.store.segment is not None
    assert other.store.segment.offset_of(found) is None


async def test_misuse_is_refused_before_any_byte_moves(node: Node, owner: Raw) -> None:
    assert owner.put("misuse", b"12345678") == 0
    before = node.ring.snapshot()
    bad = [
        GetItem(b"misuse", -8, 8),
        GetItem(b"misuse", node.ring.size - 7, 8),
        GetItem(b"misuse", 0, 0),
        GetItem(b"", 0, 8),
        GetItem(b"mis\nuse", 0, 8),
    ]
    for item in bad:
        with pytest.raises(StoreMisuse):
            await node.get([GetItem(b"misuse", 64, 8), item])
    with pytest.raises(StoreMisuse, match="overlap"):
        await node.get([GetItem(b"misuse", 64, 8), GetItem(b"other", 71, 8)])
    assert node.ring.snapshot() == before


async def test_the_agent_loads_no_mooncake_and_forks_nothing(node: Node) -> None:
    assert "mooncake" not in maps_of("self")
    for pid in node.store.health().pids.values():
        assert command(pid)[1:4] == ["-P", "-m", "kvpool_agent.store.worker"]


async def test_transfer_threads_have_the_lowest_priority(node: Node) -> None:
    await node.get([GetItem(b"priority", 0, 8)])
    nice = niceness(node.loader.pid)
    assert 19 in nice  # the thread that called batch_get_into
    assert nice.count(0) > 1  # and not the process
