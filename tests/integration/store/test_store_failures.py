"""Deaths and restarts of every process around the store: masters, owners, workers, the agent itself."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from kvpool_agent.store.errors import StoreDeadline, StoreUnavailable
from kvpool_agent.store.protocol import ChunkStatus, GetItem, PutItem
from support.mooncake import Master
from support.processes import ended, gone
from support.raw import Raw
from support.store_nodes import Node, layout, now, until

OK, ABSENT = ChunkStatus.OK, ChunkStatus.ABSENT
NewNode = Callable[..., Awaitable[Node]]
NewRaw = Callable[..., Raw]


async def test_killing_the_loader_loses_no_key(own_master: Master, new_node: NewNode) -> None:
    node = await new_node(own_master, segment_size=64 << 20)
    puts = [PutItem(f"kept/{index}".encode(), index * 65536, 65536) for index in range(200)]
    for put in puts:
        node.ring.memory[put.offset : put.offset + put.size] = put.key[-1:] * put.size
    assert await node.loader.put(puts, deadline=now() + 10) == [OK] * 200
    before = own_master.keys()
    assert len(before) == 200
    pid = node.loader.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await until(lambda: node.loader.pid not in (pid, None), 5, "another loader")
    await node.loader.replace()
    assert own_master.keys() == before
    node.ring.memory[:] = b"\x5a" * node.ring.size
    assert await node.store.wait_ready(deadline=now() + 5)
    items = [GetItem(put.key, put.offset, put.size) for put in puts]
    assert await node.get(items) == [OK] * 200
    assert all(node.ring.at(item) == item.key[-1:] * item.size for item in items)


async def test_killing_the_segment_worker_loses_its_keys_and_no_others(
    own_master: Master, new_node: NewNode, new_raw: NewRaw
) -> None:
    raw = new_raw()
    assert raw.connect(own_master, segment=64 << 20) == 0
    kept = raw.fill(20, 4096, prefix="other-node/")
    node = await new_node(own_master, segment_size=64 << 20)
    segment = node.store.segment
    assert segment is not None
    for index in range(20):
        assert raw.put(f"lost/{index:05d}", b"z" * 4096, segment=segment.name) == 0
    lost = [f"lost/{index:05d}".encode() for index in range(20)]
    os.kill(node.store.health().pids["segment"], signal.SIGKILL)
    await until(lambda: node.store.segment is None, 5, "the death to be seen")
    await until(lambda: node.store.segment is not None, 10, "a new mount")
    assert node.store.segment != segment
    deadline = now() + 15
    while (
        await node.store.prober.exists_keys(lost, deadline=now() + 5) != [ABSENT] * 20
    ):  # until the client's TTL
        assert now() < deadline
        await asyncio.sleep(0.2)
    items = layout(kept)
    assert await node.get(items) == [OK] * 20
    assert all(node.ring.at(item) == kept[item.key] for item in items)
    assert own_master.keys() == {key.decode() for key in kept}
    assert node.store.health().restarts["segment"] == 1


async def test_loader_killed_in_mid_get_reports_every_chunk_and_leaves_the_ring_quiet_fenced(
    own_master: Master, new_node: NewNode, new_raw: NewRaw
) -> None:
    """One chunk's owner is frozen, so that the call is surely under way while the others' bytes arrive."""
    well, frozen = new_raw(), new_raw()
    assert well.connect(own_master, segment=64 << 20) == 0
    assert frozen.connect(own_master, segment=32 << 20) == 0
    objects = well.fill(24, 1 << 20, prefix="midget/") | frozen.fill(1, 4096, prefix="stuck/")
    node = await new_node(own_master)
    items = layout(objects)
    assert await node.get(items) == [OK] * 25  # the connections are warm
    node.ring.memory[:] = b"\x5a" * node.ring.size
    frozen.freeze()
    fetching = asyncio.create_task(node.get(items, seconds=30))
    await until(lambda: not node.ring.untouched_outside([]), 5, "the first bytes")
    pid = node.loader.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert await fetching == [ChunkStatus.WORKER_DIED] * 25
    assert gone(pid)
    quiet = node.ring.snapshot()
    assert node.ring.untouched_outside(items)
    frozen.thaw()
    assert await node.store.wait_ready(deadline=now() + 10)
    assert node.ring.snapshot() == quiet
    assert await node.get(items) == [OK] * 25
    assert [node.ring.at(item) for item in items] == list(objects.values())


@pytest.mark.parametrize("role", ["prober", "loader-1"])
async def test_a_worker_that_crashes_fails_its_calls_at_once_and_comes_back(
    own_master: Master, new_node: NewNode, role: str
) -> None:
    node = await new_node(own_master)
    pid = node.store.health().pids[role]
    own_master.freeze()  # so that the calls below hang in the worker
    calls = [
        asyncio.create_task(node.get([GetItem(b"crash", 0, 8)], seconds=30)),
        asyncio.create_task(node.store.prober.exists_keys([b"crash"], deadline=now() + 30)),
    ]
    call = calls[role.startswith("prober")]
    await asyncio.wait({call}, timeout=0.2)
    begun = now()
    os.kill(pid, signal.SIGSEGV)
    answer = (await asyncio.gather(call, return_exceptions=True))[0]
    assert now() - begun < 10  # and not the 30 s of the deadline
    assert answer == [ChunkStatus.WORKER_DIED] or isinstance(answer, StoreUnavailable)
    own_master.thaw()
    await asyncio.gather(*calls, return_exceptions=True)
    await until(lambda: node.store.health().restarts[role] >= 1, 5, "the restart")
    assert await node.store.wait_ready(deadline=now() + 10)
    await until(lambda: node.store.health().master_reachable, 10, "the master's answer")
    assert await node.get([GetItem(b"crash", 0, 8)]) == [ABSENT]


async def test_after_the_masters_restart_everything_reconnects_and_remounts(
    own_master: Master, new_node: NewNode
) -> None:
    node = await new_node(own_master, segment_size=32 << 20, probe_interval=0.1)
    put, get = PutItem(b"again", 0, 4096), GetItem(b"again", 8192, 4096)
    assert await node.loader.put([put], deadline=now() + 5) == [OK]
    pids = node.store.health().pids
    own_master.kill()
    await until(lambda: not node.store.health().master_reachable, 5, "the failed probe")
    begun = now()
    with pytest.raises(StoreUnavailable):
        await node.store.prober.exists([b"x"], b"12345678", 8, deadline=now() + 5)
    assert await node.get([get], seconds=5) == [ChunkStatus.MASTER_FAILED]
    assert await node.loader.put([put], deadline=now() + 5) == [ChunkStatus.MASTER_FAILED]
    assert now() - begun < 3  # Mooncake would take 4.3 s for each
    own_master.start()
    await until(lambda: node.store.health().master_reachable, 10, "the reconnect")
    deadline = now() + 10
    while (statuses := await node.get([get])) != [ABSENT]:  # a master without HA forgets
        assert statuses == [ChunkStatus.MASTER_FAILED]  # of a connection that has not noticed the restart yet
        assert now() < deadline
    while await node.loader.put([put], deadline=now() + 5) != [OK]:
        assert now() < deadline
        await asyncio.sleep(0.1)
    assert await node.get([get]) == [OK]
    assert node.ring.at(get) == b"\x5a" * 4096
    assert node.store.health().pids == pids  # nobody had to be restarted
    assert [one["segment_name"] for one in own_master.segments()] == [getattr(node.store.segment, "name", "")]


async def test_a_frozen_master_costs_a_lookup_its_deadline_and_then_nothing(
    own_master: Master, new_node: NewNode
) -> None:
    node = await new_node(own_master, probe_interval=0.1, probe_timeout=0.5, rpc_timeout=2.0)
    await until(lambda: node.store.health().master_reachable, 5, "the first probe")
    own_master.freeze()
    begun = now()
    with pytest.raises((StoreDeadline, StoreUnavailable)):
        await node.store.prober.exists_keys([b"k"], deadline=now() + 0.3)
    assert now() - begun < 1
    await until(lambda: not node.store.health().master_reachable, 5, "the failed probe")
    with pytest.raises(StoreUnavailable):
        await node.store.prober.exists_keys([b"k"], deadline=now() + 5)
    own_master.thaw()
    await until(lambda: node.store.health().master_reachable, 10, "the answer")
    assert await node.store.prober.exists_keys([b"k"], deadline=now() + 5) == [ABSENT]


async def test_a_start_against_a_dead_master_holds_nobody_up_and_mends_itself(
    own_master: Master, new_node: NewNode
) -> None:
    own_master.kill()
    begun = now()
    node = await new_node(own_master, ready=False, segment_size=16 << 20, backoff_most=0.5)
    with pytest.raises(StoreUnavailable):
        await node.store.prober.exists_keys([b"k"], deadline=now() + 5)
    assert node.store.segment is None
    assert await node.get([GetItem(b"k", 0, 8)], seconds=0.2) == [ChunkStatus.NOT_ATTEMPTED]
    assert now() - begun < 2
    await until(lambda: node.store.health().restarts["prober"] >= 1, 15, "the second attempt")
    assert not node.store.health().master_reachable
    assert "-600" in node.store.health().last_error
    own_master.start()
    assert await node.store.wait_ready(deadline=now() + 20)
    assert await node.get([GetItem(b"k", 0, 8)]) == [ABSENT]


async def test_a_segment_stays_mounted_past_the_clients_ttl_and_leaves_cleanly(
    own_master: Master, new_node: NewNode
) -> None:
    node = await new_node(own_master, segment_size=32 << 20)
    assert await node.loader.put([PutItem(b"stays", 0, 4096)], deadline=now() + 5) == [OK]
    ends = now() + 5  # the TTL is 3 s
    while now() < ends:
        (listed,) = await asyncio.to_thread(own_master.segments)
        assert listed["status"] == "OK"
        await asyncio.sleep(0.25)
    assert await node.get([GetItem(b"stays", 8192, 4096)]) == [OK]
    await node.store.stop(deadline=now() + 10)
    assert own_master.segments() == []


async def test_a_hung_loader_holds_up_no_other_session_and_is_replaced(
    own_master: Master, new_node: NewNode, new_raw: NewRaw
) -> None:
    frozen, well = new_raw(), new_raw()
    assert frozen.connect(own_master, segment=32 << 20) == 0
    assert well.connect(own_master, segment=32 << 20) == 0
    stuck = layout(frozen.fill(4, 4096, prefix="stuck/"))
    objects = well.fill(8, 4096, prefix="well/")
    node = await new_node(own_master)
    other = await node.store.open_loader(node.ring)
    assert await node.store.wait_ready(deadline=now() + 5)
    frozen.freeze()
    hung = asyncio.create_task(node.get(stuck, seconds=50))
    items = layout(objects, start=1 << 20)
    for _ in range(5):
        assert await other.get(items, deadline=now() + 10) == [OK] * 8
    assert not hung.done()
    await node.loader.replace()
    assert await hung == [ChunkStatus.WORKER_DIED] * 4
    assert await node.get(layout(objects, start=2 << 20)) == [OK] * 8  # by the replacement
    assert node.ring.at(layout(objects, start=2 << 20)[3]) == list(objects.values())[3]


async def test_a_cancelled_get_ends_only_when_its_process_is_gone_fenced(
    own_master: Master, new_node: NewNode, new_raw: NewRaw
) -> None:
    raw = new_raw()
    assert raw.connect(own_master, segment=32 << 20) == 0
    items = layout(raw.fill(4, 4096, prefix="cancel/"))
    node = await new_node(own_master)
    raw.freeze()
    pid = node.loader.pid
    fetching = asyncio.create_task(node.get(items, seconds=30))
    await asyncio.wait({fetching}, timeout=0.2)
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    assert gone(pid)
    raw.thaw()
    assert await node.get([GetItem(items[0].key, 1 << 20, 4096)]) == [OK]
    assert node.ring.untouched_outside([GetItem(b"-", 1 << 20, 4096)])


async def test_replace_and_close_return_when_the_process_isgone(node: Node, owner: Raw) -> None:
    pid, generation = node.loader.pid, node.loader.generation
    await node.loader.replace()
    assert gone(pid)
    assert node.loader.generation == generation + 1
    assert await node.get([GetItem(b"none", 0, 8)]) == [ABSENT]
    pid = node.loader.pid
    await node.loader.close()
    await node.loader.close()
    assert gone(pid)
    assert node.loader.pid is None
    assert await node.get([GetItem(b"none", 0, 8)]) == [ChunkStatus.NOT_ATTEMPTED]


@pytest.mark.parametrize("thread", ["main", "another"])
async def test_workers_die_with_the_agent_crash_only(own_master: Master, tmp_path: Path, thread: str) -> None:
    """The agent is killed; its workers are gone at once.

    By a signal if they were started from the main thread, so even if they are stopped; else by their sockets' end.
    """
    agent = textwrap.dedent(f"""
        import asyncio, json, threading
        from kvpool_agent.store.config import StoreConfig
        from kvpool_agent.store.mooncake_store import MooncakeStore
        async def main():
            store = MooncakeStore(StoreConfig({own_master.address!r}, "127.0.0.1", segment_size=16 << 20,
                                              log_dir={str(tmp_path)!r}))
            await store.start()
            assert await store.wait_ready(deadline=asyncio.get_running_loop().time() + 15)
            print(json.dumps(dict(store.health().pids)), flush=True)
            await asyncio.Event().wait()
        if {thread!r} == "main":
            asyncio.run(main())
        else:
            threading.Thread(target=lambda: asyncio.run(main())).start()
    """)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        agent,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
    )
    assert process.stdout is not None
    pids = json.loads(await asyncio.wait_for(process.stdout.readline(), 20))
    assert sorted(pids) == ["prober", "segment"]
    if thread == "main":
        os.kill(pids["prober"], signal.SIGSTOP)
    process.kill()
    await process.wait()
    await until(lambda: all(ended(pid) for pid in pids.values()), 3, "the workers' end")
    await until(lambda: own_master.segments() == [], 15, "the master to drop the segment")


async def test_a_prober_that_hangs_is_replaced_and_no_lookup_waits_for_it(
    own_master: Master, new_node: NewNode
) -> None:
    node = await new_node(
        own_master, hang_timeout=1.0, probe_interval=0.1, probe_timeout=0.5, max_outstanding=4
    )
    pid = node.store.health().pids["prober"]
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(StoreDeadline):
        await node.store.prober.exists_keys([b"k"], deadline=now() + 0.2)
    await until(lambda: gone(pid), 10, "its end")
    await until(lambda: node.store.health().master_reachable, 10, "an answer of another")
    assert await node.store.prober.exists_keys([b"k"], deadline=now() + 5) == [ABSENT]


async def test_a_worker_holds_a_limited_number_of_requests_bounded(
    own_master: Master, new_node: NewNode
) -> None:
    node = await new_node(own_master, max_outstanding=3, probe_interval=60.0)
    await until(lambda: node.store.health().master_reachable, 5, "the first and only probe")
    os.kill(node.store.health().pids["prober"], signal.SIGSTOP)
    for _ in range(3):
        with pytest.raises(StoreDeadline):
            await node.store.prober.exists_keys([b"k"], deadline=now() + 0.01)
    with pytest.raises(StoreUnavailable, match="the limit"):
        await node.store.prober.exists_keys([b"k"], deadline=now() + 5)
