"""The seven ways in which Mooncake reports success for wrong bytes, and what this layer does about each.

What this layer cannot see (bytes that are wrong though every call was right) is the chunk trailer's to catch, above.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path

from kvpool_agent.store import config as store_config
from kvpool_agent.store.protocol import ChunkStatus, GetItem, PutItem
from support.mooncake import Master
from support.raw import Raw
from support.store_nodes import Node, layout, now, until

OK, ABSENT = ChunkStatus.OK, ChunkStatus.ABSENT
NewNode = Callable[..., Awaitable[Node]]
NewRaw = Callable[..., Raw]


async def test_wrong_bytes_a_a_key_twice_in_one_batch_fills_every_destination(
    node: Node, owner: Raw, master: Master, new_raw: NewRaw
) -> None:
    objects = owner.fill(3, 4096, prefix="twice/")
    keys = [*objects, *objects, next(iter(objects))]
    items = [GetItem(key, index * 8192, 4096) for index, key in enumerate(keys)]
    assert await node.get(items) == [OK] * 7
    assert [node.ring.at(item) for item in items] == [objects[key] for key in keys]
    assert node.ring.untouched_outside(items)
    raw = new_raw()
    assert raw.connect(master) == 0
    hazard = """
    codes = store.batch_get_into(["twice/00000"] * 2, [base, base + 8192], [4096] * 2)
    result = [codes, memory[:4096].count(0) == 4096, memory[8192:8199] == b"twice/0"]
    """
    assert raw.run(hazard) == [[4096, 4096], True, True]


async def test_wrong_bytes_a_a_key_twice_in_a_put_stores_one_of_them_whole(node: Node, owner: Raw) -> None:
    node.ring.memory[:4096] = b"1" * 4096
    node.ring.memory[8192:12288] = b"2" * 4096
    items = [PutItem(b"put-twice", 0, 4096), PutItem(b"put-twice", 8192, 4096)]
    assert await node.loader.put(items, deadline=now() + 5) == [OK, OK]
    assert await node.get([GetItem(b"put-twice", 16384, 4096)]) == [OK]
    assert node.ring.memory[16384:20480] == b"1" * 4096


async def test_wrong_bytes_b_no_null_pointer_can_be_expressed(
    master: Master, owner: Raw, node: Node, new_raw: NewRaw
) -> None:
    """Offsets are checked here (`test_misuse_...`) and addresses once more in the worker, against its registration."""
    assert owner.put("null", b"12345678") == 0
    raw = new_raw(PYTHONPATH=os.pathsep.join(p for p in __import__("sys").path if p))
    assert raw.connect(master) == 0
    assert raw.run("result = store.batch_get_into(['null'], [0], [8])") == [8]  # success, nothing copied
    guarded = f"""
    from kvpool_agent.store.mooncake import MooncakeClient
    from kvpool_agent.store.errors import StoreMisuse
    from kvpool_agent.store.config import StoreConfig, setup_arguments
    client = MooncakeClient(setup_arguments(StoreConfig({master.address!r}, "127.0.0.1"), local_port=1))
    client.register(base, 4096)
    result = 0
    for address in (0, base - 1, base + 4089):
        try:
            client.get(["null"], [address], [8])
        except StoreMisuse:
            result += 1
    """
    assert raw.run(guarded) == 3


async def test_wrong_bytes_c_an_owner_restarted_under_its_name_serves_nothing_old(
    own_master: Master, new_node: NewNode, new_raw: NewRaw
) -> None:
    """Zeros as a success need an HTTP metadata server, which cannot be configured: it is always peer to peer."""
    raw = new_raw()
    assert raw.connect(own_master, segment=32 << 20) == 0
    objects = raw.fill(16, 8192, prefix="reborn/")
    node = await new_node(own_master)
    assert await node.get(layout(objects)) == [OK] * 16
    node.ring.memory[:] = b"\x5a" * node.ring.size
    raw.kill()
    again = new_raw()
    again.name = raw.name
    assert again.connect(own_master, segment=32 << 20) == 0
    statuses = await node.get(layout(objects), seconds=5)
    assert OK not in statuses
    assert set(statuses) <= {ChunkStatus.PEER_FAILED, ABSENT}
    assert node.ring.untouched_outside([])
    assert store_config.METADATA == "P2PHANDSHAKE"


async def test_wrong_bytes_d_a_removal_never_takes_a_chunk_from_under_a_reader(
    node: Node, owner: Raw
) -> None:
    objects = owner.fill(4, 4096, prefix="leased/")
    items = layout(objects)
    assert await node.get(items) == [OK] * 4
    assert await node.loader.remove(list(objects), deadline=now() + 5) == [ChunkStatus.LEASED] * 4
    assert await node.get(items) == [OK] * 4
    assert [node.ring.at(item) for item in items] == list(objects.values())


def test_wrong_bytes_e_the_unsafe_get_is_not_called() -> None:
    """`prefer_alloc_in_same_node` skips the lease check. A unit test pins the arguments; this one the names."""
    assert _sources_with("prefer_alloc_in_same_node", "multi_buffers") == []


def test_wrong_bytes_f_no_snapshot_can_be_asked_for() -> None:
    """The restore of a snapshot hands out other keys' bytes. Only a master's flags and MOONCAKE_* variables ask for it.

    A foreign master may still do so: whole bytes of another key are caught by the key digest in the trailer, above.
    """
    config = store_config.StoreConfig("127.0.0.1:1", "127.0.0.1")
    environment = store_config.worker_environment(
        config, {"MOONCAKE_SNAPSHOT_LOCAL_PATH": "/x", "PATH": "/bin"}
    )
    assert [name for name in environment if "SNAPSHOT" in name] == []
    assert _sources_with("enable_snapshot", "SNAPSHOT_") == []


async def test_wrong_bytes_g_a_put_that_is_killed_leaves_nothing_to_find_whole_or_absent(
    own_master: Master, new_node: NewNode, new_raw: NewRaw
) -> None:
    """Half-written put sessions become readable when they are ended: no sessions here, and a kill ends nothing."""
    raw = new_raw()
    assert raw.connect(own_master, segment=64 << 20) == 0
    node = await new_node(own_master, put_discard_timeout=3.0)
    puts = [PutItem(f"half/{index}".encode(), index << 20, 1 << 20) for index in range(16)]
    for put in puts:
        node.ring.memory[put.offset : put.offset + put.size] = bytes([put.offset >> 20]) * put.size
    raw.freeze()
    assert await node.loader.put(puts, deadline=now() + 1.0) == [ChunkStatus.DEADLINE] * 16
    keys = [put.key for put in puts]
    assert await node.store.prober.exists_keys(keys, deadline=now() + 5) == [ABSENT] * 16
    assert all((until_ := node.loader.blocked_until(key)) is not None and until_ > now() for key in keys)
    assert await node.loader.put(puts, deadline=now() + 5) == [ChunkStatus.NOT_READY] * 16
    raw.thaw()
    assert raw.run("result = 1") == 1
    assert await node.store.prober.exists_keys(keys, deadline=now() + 5) == [ABSENT] * 16
    await until(lambda: node.loader.blocked_until(keys[0]) is None, 5, "the keys to be free again")
    assert await node.loader.put(puts, deadline=now() + 10) == [OK] * 16
    items = [GetItem(put.key, 16 << 20, put.size) for put in puts]
    for index, item in enumerate(items):
        assert await node.get([item]) == [OK]
        assert node.ring.at(item) == bytes([index]) * item.size


async def test_wrong_bytes_a_shorter_or_longer_object_is_not_ok(node: Node, owner: Raw) -> None:
    """A destination longer than the object is a success for Mooncake (H5); a shorter one gets -600, untouched."""
    objects = owner.fill(1, 4096, prefix="size/")
    (key,) = objects
    assert await node.get([GetItem(key, 0, 4097)]) == [ChunkStatus.BAD_SIZE]
    assert await node.get([GetItem(key, 8192, 4095)]) == [ChunkStatus.BAD_SIZE]
    assert node.ring.memory[8192:16384] == b"\x5a" * 8192


def _sources_with(*words: str) -> list[str]:
    """Names of this layer's modules whose code (not its prose) has one of the words."""
    folder = Path(store_config.__file__).parent
    found = []
    for path in folder.glob("*.py"):
        code = compile(path.read_text(), str(path), "exec", dont_inherit=True, optimize=2)
        names = str(_names_of(code))
        found += [f"{path.name}: {word}" for word in words if word in names]
    return found


def _names_of(code: object) -> list[object]:
    """Names and constants of a code object and of those inside it; docstrings are gone at this level."""
    names: list[object] = [*getattr(code, "co_names", ()), *getattr(code, "co_varnames", ())]
    for constant in getattr(code, "co_consts", ()):
        names += _names_of(constant) if hasattr(constant, "co_code") else [constant]
    return names
