"""Lookups over a store: stages, shards, tombstones, deadlines; what the SDK is asked to do."""

import asyncio
import hashlib

import pytest

from kvpool_agent.coordinator import GroupKind, GroupSpec, KVCoordinator
from kvpool_agent.store.faults import Fault, FaultKind, Operation
from kvpool_agent.store.memory import MemoryCluster, MemoryStore
from kvpool_agent.telemetry.metrics import AgentMetrics
from kvpool_agent.transfer.lookup import LookupAnswer, LookupRequest, Lookups, pruned_tokens
from kvpool_agent.transfer.tombstones import Tombstones
from kvpool_agent.transfer.types import HashChain
from kvpool_wire import agent_pb2 as pb
from kvpool_wire.keys import KeySpace, chunk_key

BLOCK = 16
TENSOR = pb.TensorFormat(dtype="bfloat16", axes=["kv", "token"], shape=[2, BLOCK])


def keyspace(*, eagle: bool = True, shards: int = 2) -> KeySpace:
    group = pb.Group(
        kind=pb.FULL_ATTENTION,
        block_size=BLOCK,
        eagle=eagle,
        layers=[pb.Layer(name="layers.0", tensors=[TENSOR])],
        shards_per_stage=shards,
    )
    identity = pb.Identity(
        model="m",
        fingerprint="f",
        engine="e 1",
        hash_algorithm="sha256",
        hash_block_size=BLOCK,
        scheduler_block_size=BLOCK,
        use_eagle=eagle,
        groups=[group],
    )
    return KeySpace.of("ns.pool", identity)


def coordinator(*, eagle: bool = True) -> KVCoordinator:
    spec = GroupSpec(GroupKind.FULL_ATTENTION, BLOCK, eagle=eagle)
    return KVCoordinator([spec], hash_block_size=BLOCK, scheduler_block_size=BLOCK, use_eagle=eagle)


def chain(units: int) -> HashChain:
    return HashChain(b"".join(hashlib.sha256(bytes([i % 256, i // 256])).digest() for i in range(units)), 32)


class World:
    """A store with a prompt of `stored` units under every shard, and a `Lookups` over it."""

    def __init__(self, stored: int, *, shards: int = 2, eagle: bool = True) -> None:
        self.cluster = MemoryCluster()
        self.store = MemoryStore(self.cluster)
        self.keys = keyspace(shards=shards, eagle=eagle)
        self.tombstones = Tombstones(ttl=60, capacity=100, clock=lambda: 0.0)
        self.metrics = AgentMetrics()
        self.lookups = Lookups(
            prober=self.store.prober,
            tombstones=self.tombstones,
            metrics=self.metrics,
            lease_seconds=30.0,
            unix_time=lambda: 1000.0,
        )
        self.coordinator = coordinator(eagle=eagle)
        for unit in range(stored):
            for shard in range(shards):
                self.cluster.objects[self.key(unit, shard)] = b"x"

    def key(self, unit: int, shard: int, extras: pb.Extras | None = None) -> bytes:
        return chunk_key(self.keys.prefixes(0, extras or pb.Extras())[shard], chain(unit + 1).unit(unit))

    async def ask(
        self,
        sent: HashChain,
        *,
        total: int | None = None,
        extras: pb.Extras | None = None,
        seconds: float = 5.0,
    ) -> LookupAnswer:
        total = len(sent) if total is None else total
        deadline = asyncio.get_running_loop().time() + seconds
        request = LookupRequest(sent, total, total * BLOCK, extras or pb.Extras(), deadline)
        return await self.lookups.lookup(coordinator=self.coordinator, keyspace=self.keys, request=request)


async def test_a_hit_is_pruned_once_and_says_until_when_it_is_good() -> None:
    answer = await World(stored=8).ask(chain(8))

    assert answer.plan is not None
    assert (answer.plan.hit_length, pruned_tokens(answer.plan)) == (7 * BLOCK, BLOCK)
    assert answer.plan.groups[0].mask.tolist() == [True] * 7
    assert answer.good_until_unix_ms == 1_030_000
    assert answer.probed_keys == 8 * 2


async def test_a_chunk_counts_only_if_every_shard_of_it_is_there() -> None:
    world = World(stored=8, eagle=False)
    del world.cluster.objects[world.key(5, shard=1)]

    answer = await world.ask(chain(8))

    assert answer.plan is not None
    assert answer.plan.hit_length == 5 * BLOCK


async def test_requests_that_differ_only_in_salt_lora_or_media_do_not_see_each_other() -> None:
    world = World(stored=8)
    for extras in (pb.Extras(cache_salt="s"), pb.Extras(lora_name="a"), pb.Extras(media=["i"])):
        answer = await world.ask(chain(8), extras=extras)
        assert answer.plan is not None
        assert answer.plan.hit_length == 0, extras


async def test_a_tombstoned_key_is_a_miss() -> None:
    world = World(stored=8, eagle=False)
    world.tombstones.add([world.key(3, shard=0)])

    answer = await world.ask(chain(8))

    assert answer.plan is not None
    assert answer.plan.hit_length == 3 * BLOCK


async def test_the_first_hashes_settle_a_miss_at_any_length() -> None:
    short, long = World(stored=0), World(stored=0)

    asked = await short.ask(chain(256))
    answer = await long.ask(chain(256), total=65_536)

    assert answer.need_hashes == 0
    assert answer.plan is not None
    assert answer.plan.hit_length == 0
    assert answer.probed_keys == asked.probed_keys


async def test_more_hashes_are_asked_for_when_the_first_do_not_settle_it() -> None:
    world = World(stored=300, shards=1)

    first = await world.ask(HashChain(chain(300).packed[: 256 * 32], 32), total=300)
    answer = await world.ask(chain(300))

    assert first.plan is None
    assert 256 < first.need_hashes <= 300
    assert answer.plan is not None
    assert answer.plan.hit_length == 299 * BLOCK


@pytest.mark.parametrize(
    ("kind", "reason", "outcome"),
    [
        pytest.param(FaultKind.HANG, pb.DEADLINE, "deadline", id="a hanging store"),
        pytest.param(FaultKind.UNAVAILABLE, pb.STORE_UNAVAILABLE, "store_unavailable", id="a dead master"),
    ],
)
async def test_bounded_a_store_that_does_not_answer_is_a_miss_with_a_reason(
    kind: FaultKind, reason: pb.MissReason.ValueType, outcome: str
) -> None:
    world = World(stored=8)
    world.store.faults.armed.append(Fault(kind, Operation.EXISTS))
    begun = asyncio.get_running_loop().time()

    answer = await world.ask(chain(8), seconds=0.2)

    assert (answer.plan, answer.miss_reason) == (None, reason)
    assert asyncio.get_running_loop().time() - begun < 2.0
