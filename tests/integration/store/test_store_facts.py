"""The twelve facts about Mooncake that shape the store layer: each is ruled out or bounded by our own API.

Where it is cheap, raw Mooncake is shown to have the hazard still, so that a release that changes it is noticed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from kvpool_agent.store.config import StoreConfig, setup_arguments
from kvpool_agent.store.mooncake_store import MooncakeStore
from kvpool_agent.store.protocol import ChunkStatus, GetItem, PutItem, Transport
from support.mooncake import Master, free_ports
from support.processes import children, executable, gone, handshake_port, mapping, status_of
from support.raw import Raw
from support.store_nodes import Node, layout, now, until

OK = ChunkStatus.OK
NewNode = Callable[..., Awaitable[Node]]
NewRaw = Callable[..., Raw]


async def _frozen_owner(
    master: Master, new_raw: NewRaw, count: int, size: int
) -> tuple[Raw, dict[bytes, bytes]]:
    raw = new_raw()
    assert raw.connect(master, segment=128 << 20) == 0
    return raw, raw.fill(count, size, prefix="frozen/")


async def test_fact_01_ok_of_a_put_does_not_mean_that_these_bytes_are_there(node: Node, owner: Raw) -> None:
    """So the trailer decides, not the status; what our API promises is only that the first bytes stay."""
    assert owner.put("fact01", b"first bytes") == 0
    node.ring.memory[:11] = b"other bytes"
    assert await node.loader.put([PutItem(b"fact01", 0, 11)], deadline=now() + 5) == [OK]
    assert await node.get([GetItem(b"fact01", 64, 11)]) == [OK]
    assert node.ring.memory[64:75] == b"first bytes"


async def test_fact_02_a_get_past_its_deadline_writes_nothing_afterwards_fenced(
    own_master: Master, new_raw: NewRaw, new_node: NewNode
) -> None:
    raw, objects = await _frozen_owner(own_master, new_raw, 64, 64 << 10)
    node = await new_node(own_master)
    items = layout(objects)
    assert await node.get(items[:1]) == [OK]  # the connection is warm: late writes would come over it
    node.ring.memory[items[0].offset : items[0].offset + items[0].size] = b"\x5a" * items[0].size
    raw.freeze()
    pid, begun = node.loader.pid, now()
    statuses = await node.get(items, seconds=1.5)
    took = now() - begun
    assert statuses == [ChunkStatus.DEADLINE] * 64
    assert took < 2.5
    assert gone(pid)
    quiet = node.ring.snapshot()
    raw.thaw()
    assert raw.run("result = 1") == 1  # the peer runs again and has had its chance to send
    assert await node.get([GetItem(items[0].key, 30 << 20, items[0].size)], seconds=10) == [OK]
    assert node.ring.memory[: 30 << 20] == quiet[: 30 << 20]
    assert node.ring.untouched_outside([*items, GetItem(b"-", 30 << 20, items[0].size)])


async def test_fact_02_a_get_that_failed_writes_nothing_afterwards_fenced(
    own_master: Master, new_raw: NewRaw, new_node: NewNode
) -> None:
    """Mooncake's own timeout (-800) comes before the deadline: the process is replaced before the call returns."""
    raw, objects = await _frozen_owner(own_master, new_raw, 2, 64 << 10)
    node = await new_node(own_master, peer_timeout=1.0)
    items = layout(objects)
    assert await node.get(items) == [OK, OK]
    before = node.ring.snapshot()
    raw.freeze()
    pid, generation = node.loader.pid, node.loader.generation
    statuses = await node.get(items, seconds=20)
    assert statuses == [ChunkStatus.PEER_FAILED] * 2
    assert gone(pid)
    assert node.loader.generation == generation + 1
    node.ring.memory[:] = b"\x5a" * node.ring.size
    raw.thaw()
    assert await node.get([GetItem(items[1].key, 30 << 20, items[1].size)], seconds=10) == [OK]
    assert node.ring.untouched_outside([GetItem(b"-", 30 << 20, items[1].size)])
    assert before != node.ring.snapshot()


async def test_fact_03_more_slices_than_mooncakes_queue_takes(node: Node, owner: Raw) -> None:
    objects = owner.fill(4000, 512, prefix="fact03/")
    items = layout(objects, gap=16)
    assert await node.get(items) == [OK] * 4000
    assert all(node.ring.at(item) == objects[item.key] for item in items)
    assert node.ring.untouched_outside(items)


async def test_masters_are_found_through_every_etcd_that_is_named(
    tmp_path: Path,
) -> None:
    """Mooncake takes what stands after `etcd://` for a list, and speaks HTTP/2 to each of it."""
    hello = b"PRI * HTTP/2.0\r\n"
    greeted: asyncio.Queue[int] = asyncio.Queue()

    async def listen(stack: AsyncExitStack, number: int) -> int:
        async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if await reader.read(len(hello)) == hello:
                greeted.put_nowait(number)
            writer.close()

        server = await stack.enter_async_context(await asyncio.start_server(take, "127.0.0.1", 0))
        return int(server.sockets[0].getsockname()[1])

    async with AsyncExitStack() as stack:
        ports = [await listen(stack, number) for number in (0, 1)]
        address = "etcd://" + ";".join(f"127.0.0.1:{port}" for port in ports)
        store = MooncakeStore(StoreConfig(address, "127.0.0.1", log_dir=str(tmp_path), cluster_id="c1"))
        await store.start()
        try:
            async with asyncio.timeout(15):
                seen: set[int] = set()
                while seen != {0, 1}:
                    seen.add(await greeted.get())
            assert not store.health().master_reachable
        finally:
            await store.stop(deadline=now() + 5)


async def test_fact_04_rdma_without_a_device_fails_instead_of_becoming_tcp(
    master: Master, owner: Raw, new_node: NewNode, new_raw: NewRaw
) -> None:
    node = await new_node(master, ready=False, protocol=Transport.RDMA, backoff_first=30.0, backoff_most=30.0)
    await until(lambda: "-600" in node.store.health().last_error, 15, "the refusal of RDMA")
    assert not await node.store.wait_ready(deadline=now())
    assert await node.get([GetItem(b"any", 0, 8)], seconds=1) == [ChunkStatus.NOT_ATTEMPTED]
    raw = new_raw(MC_FORCE_TCP="")
    hazard = f"""
    from mooncake.store import MooncakeDistributedStore
    del os.environ["MC_FORCE_TCP"]
    result = MooncakeDistributedStore().setup({raw.name!r}, "P2PHANDSHAKE", 0, 0, "rdma", "", {master.address!r})
    """
    assert raw.run(hazard) == 0


async def test_fact_05_no_call_reaches_a_closed_client(master: Master, owner: Raw, new_raw: NewRaw) -> None:
    config = StoreConfig(master.address, "127.0.0.1")
    script = f"""
    from kvpool_agent.store.mooncake import MooncakeClient
    from kvpool_agent.store.errors import StoreMisuse
    client = MooncakeClient({setup_arguments(config, local_port=free_ports(1)[0])!r})
    memory = bytearray(1 << 20)
    base = ctypes.addressof((ctypes.c_char * len(memory)).from_buffer(memory))
    client.register(base, len(memory))
    busy = threading.Thread(target=lambda: [client.get(["fact05"], [base], [64]) for _ in range(200)])
    busy.start()
    client.close()
    client.close()
    refused = 0
    for call in (client.exist, client.remove, client.locate, lambda keys: client.get(keys, [base], [1]),
                 lambda keys: client.put(keys, [base], [1]), client.unmount):
        try:
            call(["fact05"])
        except StoreMisuse:
            refused += 1
    result = refused
    """
    assert new_raw(PYTHONPATH=":".join(sys.path)).run(script) == 6
    crash = "from mooncake.store import MooncakeDistributedStore as S; S().batch_is_exist(['k'])"
    assert status_of([sys.executable, "-c", crash]) == -signal.SIGSEGV


async def test_fact_06_workers_are_executed_not_forked_and_fork_nothing(node: Node) -> None:
    """A client that is forked after its setup hangs; the agent has none, and no worker has children."""
    for pid in node.store.health().pids.values():
        assert executable(pid) == executable(os.getpid())
        assert children(pid) == []


async def test_fact_07_the_event_loop_runs_while_a_client_is_set_up(
    new_node: NewNode, tmp_path: Path
) -> None:
    """Mooncake's setup holds the GIL for 4.3 s against a dead master: in the worker, not here."""
    store = MooncakeStore(StoreConfig(f"127.0.0.1:{free_ports(1)[0]}", "127.0.0.1", log_dir=str(tmp_path)))
    begun = now()
    await store.start()
    turns = 0
    while now() - begun < 1.0:
        await asyncio.sleep(0.01)
        turns += 1
    pid = store.health().pids["prober"]
    assert not gone(pid)  # still in its setup
    assert turns > 20
    await store.stop(deadline=now() + 1)
    assert gone(pid)


async def test_fact_08_a_dead_master_is_noticed_without_heartbeats(
    own_master: Master, new_node: NewNode, new_raw: NewRaw
) -> None:
    raw = new_raw()
    assert raw.connect(own_master) == 0
    node = await new_node(own_master, probe_interval=0.1)
    await until(lambda: node.store.health().master_reachable, 5, "the first probe")
    own_master.kill()
    await until(lambda: not node.store.health().master_reachable, 5, "the failed probe")
    assert raw.run("result = store.health_check()") == 0  # Mooncake's own answer, for ever


async def test_fact_09_watching_the_store_takes_no_leases(
    own_master: Master, new_node: NewNode, new_raw: NewRaw
) -> None:
    raw = new_raw()
    assert raw.connect(own_master, segment=16 << 20) == 0
    assert raw.put("watched", b"1") == 0
    assert raw.put("asked", b"2") == 0
    node = await new_node(own_master, probe_interval=0.01)
    await node.store.prober.exists_keys([b"asked"], deadline=now() + 5)
    for _ in range(20):
        node.store.health()
        await asyncio.sleep(0.01)
    statuses = await node.loader.remove([b"watched", b"asked"], deadline=now() + 5)
    assert statuses == [OK, ChunkStatus.LEASED]


async def test_fact_10_chunks_of_a_dead_owner_are_reported_though_the_master_lists_them(
    own_master: Master, new_node: NewNode, new_raw: NewRaw
) -> None:
    raw = new_raw()
    assert raw.connect(own_master, segment=32 << 20) == 0
    objects = raw.fill(8, 4096, prefix="dead/")
    node = await new_node(own_master)
    raw.kill()
    items = layout(objects)
    assert await node.store.prober.exists_keys(list(objects), deadline=now() + 5) == [OK] * 8
    begun = now()
    assert await node.get(items, seconds=5) == [ChunkStatus.PEER_FAILED] * 8
    assert now() - begun < 5
    assert node.ring.untouched_outside([])
    deadline = now() + 15
    while await node.get(items, seconds=5) != [ChunkStatus.ABSENT] * 8:  # until the client's TTL
        assert now() < deadline
        await asyncio.sleep(0.2)
    assert node.ring.untouched_outside([])


async def test_fact_11_a_frozen_owner_never_contacted_costs_the_deadline_not_a_minute_a_key(
    own_master: Master, new_node: NewNode, new_raw: NewRaw
) -> None:
    raw, objects = await _frozen_owner(own_master, new_raw, 3, 4096)
    node = await new_node(own_master)
    raw.freeze()
    begun, pid = now(), node.loader.pid
    assert await node.get(layout(objects), seconds=1.5) == [ChunkStatus.DEADLINE] * 3
    assert now() - begun < 2.5
    assert gone(pid)
    assert node.ring.untouched_outside([])


async def test_fact_12_a_foreign_client_can_write_a_ring_so_bytes_count_only_after_the_trailer_check(
    node: Node, new_raw: NewRaw
) -> None:
    """Mooncake has no authentication. If this fails because the write is refused, `limits.md` may be relaxed."""
    pid = node.loader.pid
    await node.get([GetItem(b"fact12", 0, 8)])
    start = mapping(pid, "kvpool-ring")
    endpoint = f"127.0.0.1:{handshake_port(pid)}"
    attack = f"""
    from mooncake.engine import TransferEngine
    engine = TransferEngine()
    code = engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
    memory = bytearray(b"intruder" * 512)
    base = ctypes.addressof((ctypes.c_char * len(memory)).from_buffer(memory))
    engine.register_memory(base, len(memory))
    result = [code, engine.transfer_sync_write({endpoint!r}, base, {start + 4096}, 4096)]
    """
    assert new_raw().run(attack) == [0, 0]
    assert node.ring.memory[4096:8192] == b"intruder" * 512


@pytest.mark.parametrize("seconds", [0.0, -1.0])
async def test_a_deadline_that_has_passed_answers_at_once_and_fences(
    node: Node, owner: Raw, seconds: float
) -> None:
    assert owner.put("late", b"x" * 4096) == 0
    statuses = await node.get([GetItem(b"late", 0, 4096)], seconds=seconds)
    assert statuses == [ChunkStatus.DEADLINE]
    quiet = node.ring.snapshot()
    assert await node.get([GetItem(b"late", 8192, 4096)]) == [OK]
    assert node.ring.snapshot()[:8192] == quiet[:8192]
