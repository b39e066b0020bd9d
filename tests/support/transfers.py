"""A worker session in one process: real sealed memory, a real mapped pool, a real coordinator, a store in memory.

The engine's memory is compared as a whole: `Rig.expect` is what it must be, byte for byte, written by an obvious
reference of its own (one slice per layer), so a byte that moved anywhere else fails the test.
"""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvpool_agent.coordinator import GroupKind, GroupSpec, KVCoordinator, Plan
from kvpool_agent.pools.cpu import MappedCpuPool
from kvpool_agent.pools.memory import SealedMemory
from kvpool_agent.pools.pool import MappedPool
from kvpool_agent.store.memory import MemoryCluster, MemoryStore
from kvpool_agent.store.protocol import Loader, Store
from kvpool_agent.transfer.guard import SaveGuard, Shared, TransferIds
from kvpool_agent.transfer.manager import TransferManager
from kvpool_agent.transfer.movers import CopyMover, MappedMover
from kvpool_agent.transfer.removals import Removals
from kvpool_agent.transfer.ring import Ring
from kvpool_agent.transfer.settings import TransferSettings
from kvpool_agent.transfer.tombstones import Tombstones
from kvpool_agent.transfer.types import BlockMover, HashChain, LoadJob, SaveJob, TransferKind, TransferResult
from kvpool_wire import agent_pb2 as pb
from kvpool_wire.keys import KeySpace, chunk_key, key_digest
from kvpool_wire.layout import WorkerLayout, check_worker
from kvpool_wire.trailer import TRAILER_BYTES, seal
from support.manual_loop import ManualLoop, advance, turns

FULL, WINDOW = 0, 1
BLOCK_SIZES = (16, 8)
UNIT = 8
BLOCKS = 32
NULL = 0
PAD = 16
"""Bytes between two blocks of a layer; nobody may touch them."""

_SHAPES = ({"kv": 2, "token": 16, "content": 4}, {"token": 8, "content": 8})
_LAYERS = (3, 2)
SYNCHRONISED = pb.Ordering(synchronised=True)


def identity(*, window: int = 16) -> pb.Identity:
    """Full attention in blocks of 16 tokens, a sliding window in blocks of 8."""
    groups = []
    for group, kind in enumerate((pb.FULL_ATTENTION, pb.SLIDING_WINDOW)):
        form = pb.TensorFormat(dtype="uint8", axes=list(_SHAPES[group]), shape=list(_SHAPES[group].values()))
        layers = [pb.Layer(name=f"g{group}.l{layer}", tensors=[form]) for layer in range(_LAYERS[group])]
        groups.append(
            pb.Group(
                kind=kind,
                block_size=BLOCK_SIZES[group],
                sliding_window=window if group == WINDOW else 0,
                layers=layers,
                shards_per_stage=1,
            )
        )
    return pb.Identity(
        model="m",
        fingerprint="f",
        engine="e 1",
        hash_algorithm="sha256",
        hash_block_size=UNIT,
        scheduler_block_size=16,
        groups=groups,
    )


def coordinator_of(one: pb.Identity) -> KVCoordinator:
    """The coordinator of an identity of `identity`."""
    full, window = one.groups
    return KVCoordinator(
        [
            GroupSpec(GroupKind.FULL_ATTENTION, full.block_size),
            GroupSpec(GroupKind.SLIDING_WINDOW, window.block_size, sliding_window=window.sliding_window),
        ],
        hash_block_size=UNIT,
        scheduler_block_size=16,
        use_eagle=False,
    )


def layer_bytes(group: int) -> int:
    """Bytes of one block of one layer."""
    return int(np.prod(list(_SHAPES[group].values())))


def chain_of(units: int, *, prompt: str = "p") -> HashChain:
    """A hash chain; other prompts have other hashes."""
    return HashChain(
        b"".join(hashlib.sha256(f"{prompt}:{unit}".encode()).digest() for unit in range(units)), 32
    )


def content(group: int, chunk: int, *, prompt: str = "p") -> bytes:
    """The payload of one chunk of a prompt: bytes that no other chunk has."""
    size = layer_bytes(group) * _LAYERS[group]
    return hashlib.shake_256(f"{prompt}/{group}/{chunk}".encode()).digest(size)


class EngineMemory:
    """One storage per group, on sealed memory; per layer a region of blocks with gaps between them."""

    def __init__(self) -> None:
        self.storages = [
            SealedMemory.create(f"engine-{group}", _LAYERS[group] * BLOCKS * (layer_bytes(group) + PAD))
            for group in (FULL, WINDOW)
        ]
        for group, storage in enumerate(self.storages):
            storage.view[:] = np.random.default_rng(group).integers(0, 256, storage.size, np.uint8).tobytes()

    def worker(self, *, mode: "pb.Mode.ValueType" = pb.MAPPED) -> pb.Worker:
        """What the engine declares."""
        tensors = []
        for group in (FULL, WINDOW):
            shape = list(_SHAPES[group].values())
            strides = [int(np.prod(shape[axis + 1 :])) for axis in range(len(shape))]
            tensors += [
                pb.Tensor(
                    group=group,
                    layer=f"g{group}.l{layer}",
                    part=0,
                    storage=group,
                    offset=self._at(group, layer, 0),
                    shape=[BLOCKS, *shape],
                    strides=[layer_bytes(group) + PAD, *strides],
                    block_axis=0,
                )
                for layer in range(_LAYERS[group])
            ]
        return pb.Worker(
            shards=[0, 0],
            storages=[pb.Storage(size=storage.size, device=pb.CPU) for storage in self.storages],
            tensors=tensors,
            num_blocks=[BLOCKS, BLOCKS],
            null_blocks=[NULL, NULL],
            mode=mode,
        )

    def write(self, images: Sequence[bytearray], group: int, block: int, payload: bytes) -> None:
        """Put a payload into a block of `images`, layer by layer."""
        size = layer_bytes(group)
        for layer in range(_LAYERS[group]):
            at = self._at(group, layer, block)
            images[group][at : at + size] = payload[layer * size : (layer + 1) * size]

    def read(self, group: int, block: int) -> bytes:
        """The payload of a block."""
        size, view = layer_bytes(group), self.storages[group].view
        places = [self._at(group, layer, block) for layer in range(_LAYERS[group])]
        return b"".join(bytes(view[at : at + size]) for at in places)

    def fill(self, group: int, block: int, payload: bytes) -> None:
        """The engine computes a block."""
        size, view = layer_bytes(group), self.storages[group].view
        for layer in range(_LAYERS[group]):
            at = self._at(group, layer, block)
            view[at : at + size] = payload[layer * size : (layer + 1) * size]

    def image(self) -> list[bytearray]:
        """All bytes of all storages."""
        return [bytearray(storage.view) for storage in self.storages]

    def close(self) -> None:
        """Free the memory."""
        for storage in self.storages:
            storage.close()

    def _at(self, group: int, layer: int, block: int) -> int:
        step = layer_bytes(group) + PAD
        return (layer * BLOCKS + block) * step


@dataclass
class Metrics:
    """Counts what transfers report."""

    loads: list[dict[str, object]] = field(default_factory=list)
    saves: list[dict[str, object]] = field(default_factory=list)
    requests: list[tuple[str, str]] = field(default_factory=list)
    late: int = 0
    gone: Counter[str] = field(default_factory=Counter)
    given_up: Counter[str] = field(default_factory=Counter)
    forgotten: int = 0

    def load_done(
        self, *, mode: str, seconds: float, bytes_: int, ok: int, failed: int, corrupt: int, evicted: int
    ) -> None:
        """See `TransferMetrics`."""
        self.loads.append(
            {
                "mode": mode,
                "bytes": bytes_,
                "ok": ok,
                "failed": failed,
                "corrupt": corrupt,
                "evicted": evicted,
            }
        )

    def save_done(
        self, *, mode: str, seconds: float, bytes_: int, saved: int, already: int, failed: int, displaced: int
    ) -> None:
        """See `TransferMetrics`."""
        self.saves.append(
            {"mode": mode, "saved": saved, "already": already, "failed": failed, "displaced": displaced}
        )

    def store_request(self, *, operation: str, status: str, seconds: float, keys: int) -> None:
        """See `TransferMetrics`."""
        self.requests.append((operation, status))

    def late_completion(self) -> None:
        """See `TransferMetrics`."""
        self.late += 1

    def removed(self, *, reason: str, gone: int, given_up: int) -> None:
        """See `RemovalMetrics`."""
        self.gone[reason] += gone
        self.given_up[reason] += given_up

    def failure_forgotten(self) -> None:
        """See `GuardMetrics`."""
        self.forgotten += 1


class CopyClient:
    """The engine's side of copy mode: copies at once, or when told, or says that it cannot."""

    def __init__(self, engine: EngineMemory, ring: SealedMemory) -> None:
        self._engine = engine
        self._ring = ring
        self.mover: CopyMover | None = None
        self.wanted: list[pb.CopyWanted] = []
        self.asked = asyncio.Event()
        self.automatic = True
        self.refuse: set[tuple[int, int]] = set()

    def send(self, wanted: pb.CopyWanted) -> None:
        """Take one CopyWanted."""
        self.wanted.append(wanted)
        self.asked.set()
        if self.automatic:
            asyncio.get_running_loop().call_soon(self.copy, wanted)

    def copy(self, wanted: pb.CopyWanted) -> None:
        """Do the copies and answer."""
        failed = []
        for index, item in enumerate(wanted.items):
            size = layer_bytes(item.group) * _LAYERS[item.group]
            chunk = self._ring.view[item.offset : item.offset + size]
            if (item.group, item.block) in self.refuse:
                failed.append(index)
            elif wanted.kind == pb.LOAD:
                self._engine.fill(item.group, item.block, bytes(chunk))
            else:
                chunk[:] = self._engine.read(item.group, item.block)
        self.answer(wanted, failed)

    def answer(self, wanted: pb.CopyWanted, failed: Iterable[int] = ()) -> None:
        """Answer without copying."""
        assert self.mover is not None
        self.mover.on_copy_done(pb.CopyDone(transfer=wanted.transfer, batch=wanted.batch, failed=failed))


class Rig:
    """One worker session; make it inside a running loop with `Rig.make`, end it with `async with`."""

    def __init__(
        self,
        *,
        layout: WorkerLayout,
        one: pb.Identity,
        engine: EngineMemory,
        store: MemoryStore,
        ring: SealedMemory,
    ) -> None:
        self.layout = layout
        self.identity = one
        self.engine = engine
        self.store = store
        self.ring_memory = ring
        self.coordinator = coordinator_of(one)
        self.keyspace = KeySpace.of("ns.pool", one)
        self.metrics = Metrics()
        self.shared: Shared
        self.results: dict[int, TransferResult] = {}
        self.reported: list[TransferResult] = []
        self._waiting: dict[int, asyncio.Future[TransferResult]] = {}
        self.ring: Ring
        self.loader: Loader
        self.mover: BlockMover
        self.client: CopyClient | None = None
        self.manager: TransferManager
        self._expected = engine.image()

    @classmethod
    async def make(
        cls,
        *,
        mode: str = "mapped",
        settings: TransferSettings | None = None,
        ring_chunks: int = 16,
        cluster: MemoryCluster | None = None,
        on: Store | None = None,
        pool: "type[PoolWrapper] | None" = None,
        mover: "Callable[[Rig], BlockMover] | None" = None,
        window: int = 16,
        engine: str = "engine",
        beside: "Rig | None" = None,
        lease_seconds: float = 10.0,
    ) -> Self:
        """Build a session.

        Args:
            engine: the engine's id.
            beside: a session of the same agent.
            lease_seconds: what the agent takes a lease to last.
            mode: "mapped" or "copy".
            settings: limits; small batches by default, so that every transfer has several.
            ring_chunks: slots of the ring.
            cluster: the objects, shared with other rigs.
            on: a real store instead of the one in memory.
            pool: wraps the mapped pool.
            mover: makes another mover than the mode's.
            window: tokens of the sliding window.
        """
        one = identity(window=window)
        memory = EngineMemory()
        layout = check_worker(one, memory.worker(mode=pb.MAPPED if mode == "mapped" else pb.COPY))
        slot = -(-layout.max_chunk_bytes // 64) * 64
        rig = cls(
            layout=layout,
            one=one,
            engine=memory,
            store=MemoryStore(cluster) if beside is None else beside.store,
            ring=SealedMemory.create("ring", slot * ring_chunks),
        )
        rig.ring = Ring(rig.ring_memory, chunk_bytes=layout.max_chunk_bytes)
        store: Store = rig.store if on is None else on
        rig.shared = rig._agent(store, lease_seconds) if beside is None else beside.shared
        rig.loader = await store.open_loader(rig.ring)
        if mover is not None:
            rig.mover = mover(rig)
        elif mode == "mapped":
            mapped: MappedPool = MappedCpuPool.open(layout, [storage.fd for storage in memory.storages])
            rig.mover = MappedMover(mapped if pool is None else pool(mapped), ring=rig.ring, layout=layout)
        else:
            rig.client = CopyClient(memory, rig.ring_memory)
            rig.client.mover = CopyMover(send=rig.client.send, on_late=rig.metrics.late_completion)
            rig.mover = rig.client.mover
        rig.manager = TransferManager(
            engine_id=engine,
            shared=rig.shared,
            coordinator=rig.coordinator,
            keyspace=rig.keyspace,
            layout=layout,
            loader=rig.loader,
            prober=store.prober,
            ring=rig.ring,
            mover=rig.mover,
            settings=settings or TransferSettings(batch_chunks=3),
            metrics=rig.metrics,
            on_done=rig._done,
        )
        return rig

    @property
    def tombstones(self) -> Tombstones:
        """The agent's."""
        return self.shared.tombstones

    def _agent(self, store: Store, lease_seconds: float) -> Shared:
        """What an agent has once."""
        clock = asyncio.get_running_loop().time
        tombstones = Tombstones(ttl=600, capacity=1000, clock=clock)
        removals = Removals(
            store.prober, tombstones=tombstones, metrics=self.metrics, lease_seconds=lease_seconds
        )
        return Shared(
            ids=TransferIds(0),
            guard=SaveGuard(removals=removals, metrics=self.metrics, clock=clock),
            removals=removals,
            tombstones=tombstones,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        closing = asyncio.ensure_future(self.manager.close())
        await turns()
        if not closing.done() and isinstance(asyncio.get_running_loop(), ManualLoop):
            advance(
                1_000.0
            )  # the fake's hanging calls end at their deadlines, a real loader's with its process
        await closing
        await self.shared.removals.close(deadline=asyncio.get_running_loop().time())
        await turns()
        self.ring_memory.close()
        self.engine.close()

    # ------------------------------------------------------------------------------------------------- the store

    def key(self, group: int, chunk: int, *, prompt: str = "p", extras: pb.Extras | None = None) -> bytes:
        """The key of a chunk of a prompt."""
        unit = (chunk + 1) * BLOCK_SIZES[group] // UNIT - 1
        prefix = self.keyspace.prefixes(group, extras or pb.Extras())[0]
        return chunk_key(prefix, chain_of(unit + 1, prompt=prompt).unit(unit))

    def sealed(self, group: int, chunk: int, *, prompt: str = "p") -> bytes:
        """The object that a saver would store for a chunk."""
        payload = content(group, chunk, prompt=prompt)
        whole = bytearray(payload + bytes(TRAILER_BYTES))
        digest = self.layout.groups[group].layout_digest
        key = key_digest(self.key(group, chunk, prompt=prompt))
        seal(memoryview(whole), layout=digest, key=key, checksum=xxhash.xxh3_64_intdigest)
        return bytes(whole)

    def stock(self, tokens: int, *, prompt: str = "p") -> None:
        """Have the store hold every chunk of a prompt."""
        for group, size in enumerate(BLOCK_SIZES):
            for chunk in range(tokens // size):
                self.store.cluster.objects[self.key(group, chunk, prompt=prompt)] = self.sealed(
                    group, chunk, prompt=prompt
                )

    # -------------------------------------------------------------------------------------------------- the engine

    def plan(self, tokens: int) -> Plan:
        """The plan of a lookup that found everything."""
        units = tokens // UNIT
        everything = [np.ones(units, dtype=np.bool_) for _ in BLOCK_SIZES]
        plan = self.coordinator.plan(range(units), tokens, everything)
        assert plan.hit_length == tokens
        return plan

    def loaded(self, plan: Plan, *, start: int = 0) -> list[tuple[int, int]]:
        """(group, chunk) of what a load of `plan` from `start` on moves."""
        return [
            (group, chunk)
            for group, size in enumerate(BLOCK_SIZES)
            for chunk, wanted in enumerate(plan.groups[group].mask)
            if wanted and (chunk + 1) * size > start
        ]

    def load_job(
        self,
        tokens: int,
        *,
        start: int = 0,
        first_block: int = 1,
        request: str = "r",
        prompt: str = "p",
        seconds: float = 10.0,
        attempt: int = 0,
        blocks: Sequence[NDArray[np.int32]] | None = None,
    ) -> LoadJob:
        """A load of `tokens` tokens into blocks `first_block` and up, in both groups."""
        plan = self.plan(tokens)
        return LoadJob(
            request_id=request,
            plan=plan,
            chain=chain_of(tokens // UNIT, prompt=prompt),
            total_hashes=tokens // UNIT,
            extras=pb.Extras(),
            start=start,
            blocks=tuple(blocks) if blocks is not None else ids(tokens, start=start, first=first_block),
            deadline=asyncio.get_running_loop().time() + seconds,
            ordering=SYNCHRONISED,
            attempt=attempt,
        )

    def save_job(
        self,
        tokens: int,
        *,
        start: int = 0,
        first_block: int = 1,
        request: str = "r",
        prompt: str = "p",
        seconds: float = 10.0,
        attempt: int = 0,
        blocks: Sequence[NDArray[np.int32]] | None = None,
    ) -> SaveJob:
        """A save of tokens `start` to `tokens` from blocks `first_block` and up, in both groups."""
        return SaveJob(
            request_id=request,
            chain=chain_of(tokens // UNIT, prompt=prompt),
            extras=pb.Extras(),
            start=start,
            end=tokens,
            num_prompt_tokens=None,
            blocks=tuple(blocks) if blocks is not None else ids(tokens, start=start, first=first_block),
            deadline=asyncio.get_running_loop().time() + seconds,
            attempt=attempt,
            ordering=SYNCHRONISED,
        )

    def compute(self, tokens: int, *, first_block: int = 1, prompt: str = "p") -> None:
        """The engine computes a prompt into blocks `first_block` and up."""
        for group, size in enumerate(BLOCK_SIZES):
            for chunk in range(tokens // size):
                self.engine.fill(group, first_block + chunk, content(group, chunk, prompt=prompt))
        self._expected = self.engine.image()

    def expect(
        self, chunks: Iterable[tuple[int, int]], *, first_block: int = 1, start: int = 0, prompt: str = "p"
    ) -> None:
        """From now on these chunks of a prompt are expected in their blocks, and every other byte as it was."""
        for group, chunk in chunks:
            block = first_block + chunk - start // BLOCK_SIZES[group]
            self.engine.write(self._expected, group, block, content(group, chunk, prompt=prompt))

    def check_memory(self) -> None:
        """Every byte of the engine is what it is expected to be."""
        for group, (found, expected) in enumerate(zip(self.engine.image(), self._expected, strict=True)):
            if found != expected:
                wrong = next(at for at in range(len(found)) if found[at] != expected[at])
                step = layer_bytes(group) + PAD
                layer, block = divmod(wrong // step, BLOCKS)
                raise AssertionError(
                    f"group {group}, layer {layer}, block {block}: byte {wrong % step} is not as expected"
                )

    async def result(self, transfer: int) -> TransferResult:
        """The one result of a transfer."""
        if transfer not in self.results:
            self._waiting[transfer] = asyncio.get_running_loop().create_future()
            await self._waiting[transfer]
        return self.results[transfer]

    async def load(self, job: LoadJob) -> TransferResult:
        """Start a load and wait for its result."""
        return await self.result(self.manager.start_load(job)[0])

    async def save(self, job: SaveJob) -> TransferResult:
        """Start a save and wait for its result."""
        start = self.manager.start_save(job)
        assert start.transfer, start
        return await self.result(start.transfer)

    def _done(self, result: TransferResult) -> None:
        assert result.transfer not in self.results, "a transfer reports exactly once"
        self.results[result.transfer] = result
        self.reported.append(result)
        if result.transfer in self._waiting:
            self._waiting.pop(result.transfer).set_result(result)


class PoolWrapper:
    """A mapped pool that does what the one inside does; tests override what they want otherwise."""

    def __init__(self, inside: MappedPool) -> None:
        self.inside = inside

    def scatter(self, group: int, block: int, payload: memoryview) -> None:
        """See `MappedPool`."""
        self.inside.scatter(group, block, payload)

    def gather(self, group: int, block: int, payload: memoryview) -> None:
        """See `MappedPool`."""
        self.inside.gather(group, block, payload)

    def wait_ordering(self, ordering: pb.Ordering, *, give_up: Callable[[], bool]) -> None:
        """See `MappedPool`."""
        self.inside.wait_ordering(ordering, give_up=give_up)

    def close(self) -> None:
        """See `MappedPool`."""
        self.inside.close()


def ids(tokens: int, *, start: int = 0, first: int = 1) -> tuple[NDArray[np.int32], ...]:
    """Consecutive block ids for tokens start..tokens, per group, from `first` on."""
    return tuple(
        np.arange(first, first + tokens // size - start // size, dtype=np.int32) for size in BLOCK_SIZES
    )


def failed_chunks(result: TransferResult) -> dict[tuple[int, int], str]:
    """(group, chunk) to the reason's name; fails if a chunk is listed twice."""
    found = {(failure.group, failure.chunk): failure.reason.name for failure in result.failed}
    assert len(found) == len(result.failed), "a chunk is reported once"
    assert result.kind in TransferKind
    return found
