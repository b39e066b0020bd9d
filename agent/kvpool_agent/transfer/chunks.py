"""Which chunks a job moves, and between which blocks and keys. Pure; everything a job says is checked here first.

Promises: a table that was returned names each chunk once, no memory twice (also not by two groups), no block that is
null or out of range, and only hash units that the job's chain holds; a load's chunks are exactly those that the plan's
masks name and that do not end at or before its start (MASK_COVERS_HIT has been held against the coordinator before).
Refuses: to leave anything out silently, but null blocks of a save, which hold nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvpool_agent.coordinator import KVCoordinator, PlanError, check_plan
from kvpool_agent.transfer.errors import BadBlocks, BadPlan
from kvpool_agent.transfer.types import HashChain, LoadJob, SaveJob
from kvpool_wire.layout import WorkerLayout


@dataclass(frozen=True, slots=True, eq=False)
class ChunkTable:
    """The chunks of one transfer, one row each, as columns.

    Attributes:
        groups: index of the group.
        chunks: index of the block in the prompt.
        blocks: id of the block in the engine's pool.
        units: the hash unit that names the chunk's key.
    """

    groups: NDArray[np.int64]
    chunks: NDArray[np.int64]
    blocks: NDArray[np.int64]
    units: NDArray[np.int64]

    def __len__(self) -> int:
        """Chunks."""
        return len(self.groups)

    def where(self, keep: NDArray[np.bool_]) -> "ChunkTable":
        """The rows where `keep` is True."""
        return ChunkTable(self.groups[keep], self.chunks[keep], self.blocks[keep], self.units[keep])

    def blocks_by_group(self) -> dict[int, list[int]]:
        """Block ids per group; groups without a chunk are left out."""
        return {int(group): self.blocks[self.groups == group].tolist() for group in np.unique(self.groups)}

    def ends(self, block_sizes: Sequence[int]) -> NDArray[np.int64]:
        """Where each chunk ends, in tokens."""
        return (self.chunks + 1) * np.asarray(block_sizes, dtype=np.int64)[self.groups]


def load_table(coordinator: KVCoordinator, layout: WorkerLayout, job: LoadJob) -> ChunkTable:
    """The chunks that a load moves on this rank.

    Raises:
        BadPlan: MASK_COVERS_HIT does not hold for the plan, or its hashes are not all there.
        BadBlocks: the block ids cannot be right.
    """
    hit = job.plan.hit_length
    if not 0 <= job.start <= hit:
        raise BadPlan(f"start {job.start} is outside the hit of {hit} tokens")
    try:
        check_plan(coordinator, range(job.total_hashes), job.plan)
    except (PlanError, ValueError) as error:
        raise BadPlan(f"MASK_COVERS_HIT: {error}") from error
    parts: list[ChunkTable] = []
    for group, (spec, held) in enumerate(zip(coordinator.groups, layout.groups, strict=True)):
        if held.shard is None:
            continue
        first = job.start // spec.block_size
        covered = -(-hit // spec.block_size)
        ids = _ids(job.blocks, group, max(0, covered - first), f"start {job.start}, hit {hit}")
        wanted = np.flatnonzero(job.plan.groups[group].mask[first:])
        units = job.plan.groups[group].key_units[first:][wanted]
        parts.append(_part(group, wanted + first, ids[wanted], units))
    table = _join(parts)
    _check_units(table, job.chain)
    _check_blocks(table, layout)
    return table


def save_table(coordinator: KVCoordinator, layout: WorkerLayout, job: SaveJob) -> ChunkTable:
    """The chunks that a save may move on this rank: whole, worth saving, and not in a null block.

    Raises:
        BadBlocks: the block ids cannot be right.
        BadPlan: the chain does not reach the end.
    """
    if not 0 <= job.start <= job.end:
        raise BadPlan(f"start {job.start} and end {job.end} are no range of tokens")
    masks = coordinator.store_mask(job.end, start=job.start, num_prompt_tokens=job.num_prompt_tokens)
    parts: list[ChunkTable] = []
    for group, (spec, held) in enumerate(zip(coordinator.groups, layout.groups, strict=True)):
        if held.shard is None:
            continue
        size = spec.block_size
        base, first, end = job.start // size, -(-job.start // size), job.end // size
        ids = _ids(job.blocks, group, end - base, f"start {job.start}, end {job.end}")
        mask = masks[group]
        kept = np.arange(max(0, end - first)) if mask is None else np.flatnonzero(mask)
        blocks = ids[kept + first - base]
        worth = blocks != held.null_block
        chunks = kept[worth] + first
        units = (chunks + 1) * (size // coordinator.sizes.hash_block) - 1
        parts.append(_part(group, chunks, blocks[worth], units))
    table = _join(parts)
    _check_units(table, job.chain)
    _check_blocks(table, layout)
    return table


def _ids(blocks: Sequence[NDArray[np.int32]], group: int, count: int, why: str) -> NDArray[np.int64]:
    if group >= len(blocks):
        raise BadBlocks(
            f"block ids of {len(blocks)} groups, group {group} is missing; send one list per group"
        )
    if blocks[group].shape != (count,):
        raise BadBlocks(f"group {group}: {blocks[group].size} block ids where {count} are due ({why})")
    return blocks[group].astype(np.int64)


def _part(
    group: int, chunks: NDArray[np.int64], blocks: NDArray[np.int64], units: NDArray[np.int64]
) -> ChunkTable:
    return ChunkTable(np.full(len(chunks), group, dtype=np.int64), chunks, blocks, units.astype(np.int64))


def _join(parts: Sequence[ChunkTable]) -> ChunkTable:
    empty = np.zeros(0, dtype=np.int64)
    return ChunkTable(
        np.concatenate([empty, *(part.groups for part in parts)]),
        np.concatenate([empty, *(part.chunks for part in parts)]),
        np.concatenate([empty, *(part.blocks for part in parts)]),
        np.concatenate([empty, *(part.units for part in parts)]),
    )


def _check_units(table: ChunkTable, chain: HashChain) -> None:
    highest = int(table.units.max(initial=-1))
    if highest >= len(chain):
        raise BadPlan(
            f"a chunk is keyed by hash unit {highest}, the chain that came with it has {len(chain)} units"
        )


def _check_blocks(table: ChunkTable, layout: WorkerLayout) -> None:
    for group, held in enumerate(layout.groups):
        ids = table.blocks[table.groups == group]
        if not ids.size:
            continue
        stray = ids[(ids < 0) | (ids >= held.num_blocks)]
        if stray.size:
            raise BadBlocks(f"group {group}: block {int(stray[0])} is outside 0..{held.num_blocks - 1}")
        if held.null_block >= 0 and (ids == held.null_block).any():
            raise BadBlocks(
                f"group {group}: block {held.null_block} is the null block; a chunk cannot go there"
            )
        ordered = np.sort(ids)
        doubled = ordered[1:][ordered[1:] == ordered[:-1]]
        if doubled.size:
            raise BadBlocks(
                f"group {group}: block {int(doubled[0])} is named twice; every chunk needs its own"
            )
    _check_shared(table, layout.overlap)


def _check_shared(table: ChunkTable, overlap: Sequence[int]) -> None:
    """One id in two groups that share memory is one block for two chunks; checked once per group already."""
    pools = np.asarray(overlap, dtype=np.int64)[table.groups]
    order = np.lexsort((table.groups, table.blocks, pools))
    pools, blocks = pools[order], table.blocks[order]
    doubled = np.flatnonzero((pools[1:] == pools[:-1]) & (blocks[1:] == blocks[:-1]))
    if doubled.size:
        at = int(doubled[0])
        one, other = table.groups[order[at : at + 2]].tolist()
        raise BadBlocks(
            f"block {int(blocks[at])} is named by group {one} and by group {other}, which share its memory; every chunk"
            " needs a block of its own"
        )
