"""The plan: what a lookup returns and what a load may fetch.

Promises that a `Plan` made by the coordinator names only keys that were seen present, and that `check_plan`
refuses any plan, whoever sent it, whose masks are not exactly `load_mask(hashes, hit_length)`. A plan holds
no hashes, no deadlines and no block ids.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvpool_agent.coordinator.masks import BoolArray, IntArray
from kvpool_agent.coordinator.specs import GroupKind, GroupSpec, Sizes


class PlanError(ValueError):
    """A plan that says something else than the coordinator does; loading it could leave blocks unfilled."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupPlan:
    """What one group loads.

    Attributes:
        mask: one entry per block that the hit covers, ceil(hit / block_size) of them; True where the chunk is
            loaded.
        key_units: as long as `mask`: the hash unit whose key was seen present, -1 where the chunk is not
            loaded.
    """

    mask: BoolArray
    key_units: IntArray

    def __eq__(self, other: object) -> bool:
        """Compare by content."""
        if not isinstance(other, GroupPlan):
            return NotImplemented
        return np.array_equal(self.mask, other.mask) and np.array_equal(self.key_units, other.key_units)

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class Plan:
    """A lookup's answer, complete in itself.

    Attributes:
        hit_length: tokens at the start of the prompt that need not be computed.
        hit_length_without_eagle: the same had nothing been pruned; the difference is what the prune cost.
        groups: one entry per group, in group order.
    """

    hit_length: int
    hit_length_without_eagle: int
    groups: tuple[GroupPlan, ...]

    __hash__ = None  # type: ignore[assignment]


def check_group(
    index: int, spec: GroupSpec, sizes: Sizes, plan: Plan, expected: GroupPlan, num_units: int
) -> None:
    """Raise `PlanError` if group `index` of `plan` is not the `expected` one.

    MASK_COVERS_HIT: the masks must be equal, entry for entry. Every loaded chunk must be named by the unit
    that closes it, the chunk inside which the hit ends by one of its `tail_candidates`.
    """
    group = plan.groups[index]
    where = (
        f"plan for a hit of {plan.hit_length} tokens, group {index} ({spec.kind}, block {spec.block_size})"
    )
    # A plan may come from another process, so its types are checked, not believed.
    received: tuple[tuple[str, object, str], ...] = (
        ("mask", group.mask, "b"),
        ("key_units", group.key_units, "iu"),
    )
    for name, array, kinds in received:
        if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in kinds:
            raise PlanError(f"{where}: {name} is not a one-dimensional array of the right type")
        if array.size != expected.mask.size:
            raise PlanError(
                f"{where}: {name} has {array.size} entries, the hit covers {expected.mask.size} blocks"
            )
    wrong = np.flatnonzero(group.mask != expected.mask)
    if wrong.size:
        chunk = int(wrong[0])
        verb = "is masked off" if expected.mask[chunk] else "is loaded"
        raise PlanError(
            f"{where}: chunk {chunk} {verb}, the load mask says otherwise ({wrong.size} such chunks)"
        )
    stray = np.flatnonzero(group.key_units != expected.key_units)
    tail = tail_candidates(spec, sizes, plan.hit_length, num_units)
    for chunk in stray[:2].tolist():
        unit = int(group.key_units[chunk])
        if not (tail and expected.mask[chunk] and chunk == expected.mask.size - 1 and unit in tail):
            raise PlanError(
                f"{where}: chunk {chunk} names hash unit {unit}, expected {expected.key_units[chunk]}"
            )


def expected_group(
    spec: GroupSpec, sizes: Sizes, hit: int, mask: BoolArray, first: int, closing: IntArray
) -> GroupPlan:
    """Return a group's part of a plan of `hit` tokens, a chunk inside which it ends named by the very boundary.

    Args:
        spec: the group.
        sizes: hash unit and alignment.
        hit: tokens.
        mask: the load mask of the hit.
        first: the first loaded chunk.
        closing: per chunk of the mask the hash unit that closes it, read-only.
    """
    if first == 0 and hit % spec.block_size == 0:
        return GroupPlan(mask, closing)
    key_units = np.empty(mask.size, dtype=np.int64)
    key_units[:first] = -1
    key_units[first:] = closing[first:]
    if hit % spec.block_size and first < mask.size:
        key_units[-1] = hit // sizes.hash_block - 1
    return GroupPlan(mask, key_units)


def tail_candidates(spec: GroupSpec, sizes: Sizes, hit: int, num_units: int) -> range:
    """Return the hash units that may name the chunk inside which a hit ends, best first; empty if there is none."""
    if hit % spec.block_size == 0:
        return range(0)
    stride = spec.block_size // sizes.hash_block
    boundary = hit // sizes.hash_block - 1
    if spec.kind is GroupKind.MAMBA:
        return range(boundary, boundary + 1)
    return range(boundary, min(-(-hit // spec.block_size) * stride, num_units))


def group_plan(
    spec: GroupSpec, sizes: Sizes, hit: int, expected: GroupPlan, first: int, units: BoolArray
) -> GroupPlan:
    """Return the group's part of a plan, every loaded chunk with the unit whose key was seen.

    LOAD_SUBSET_OF_VERIFIED is enforced here, whatever the search did.

    Args:
        spec: the group.
        sizes: hash unit and alignment.
        hit: tokens.
        expected: what `expected_group` says.
        first: the first loaded chunk.
        units: the group's own presence by hash unit.

    Raises:
        PlanError: a chunk that the mask names was not seen; the search has a fault, and the plan must not go
            out.
    """
    stride = spec.block_size // sizes.hash_block
    whole = hit // spec.block_size
    tail = tail_candidates(spec, sizes, hit, units.size)
    seen = bool(units[(first + 1) * stride - 1 : whole * stride : stride].all())
    key_units = expected.key_units
    if tail and first < expected.mask.size:
        present = np.flatnonzero(units[tail.start : tail.stop])
        seen = seen and present.size > 0
        key_units[-1] = tail[int(present[0])] if present.size else -1
    if not seen:
        raise PlanError(
            f"a {spec.kind} group would load a chunk that was not seen present, at a hit of {hit} tokens"
        )
    key_units.setflags(write=False)
    return GroupPlan(expected.mask, key_units)


def local_chunks(spec: GroupSpec, start: int) -> slice:
    """Return the chunks that an engine with `start` tokens surely has: whole ones that going on from there reads.

    Full attention reads everything, a window what it reaches back to, chunked attention the current attention chunk,
    a recurrent state only itself. What lies further back the engine may have given away, and a block that `start`
    cuts may be written by the very load that failed.
    """
    whole = start // spec.block_size
    match spec.kind:
        case GroupKind.FULL_ATTENTION:
            first = 0
        case GroupKind.SLIDING_WINDOW:
            first = max(0, start + 1 - (spec.sliding_window or 1)) // spec.block_size
        case GroupKind.CHUNKED_LOCAL:
            chunk = spec.chunk_size or spec.block_size
            first = start // chunk * chunk // spec.block_size
        case GroupKind.MAMBA:
            first = whole - (0 if start % spec.block_size else 1)
    return slice(max(0, first), whole)


def arrived_units(
    specs: Sequence[GroupSpec], sizes: Sizes, plan: Plan, arrived: Sequence[BoolArray], *, start: int
) -> list[BoolArray]:
    """Turn what arrived per chunk, or is local below `start`, into presence per hash unit of the hit.

    An attention chunk that arrived serves every unit inside it, up to the hit. A recurrent state serves its
    own boundary only: the end of its chunk, or the hit for the last chunk.

    Raises:
        ValueError: not one boolean array per group with one entry per block of the hit.
    """
    if len(arrived) != len(specs):
        raise ValueError(
            f"arrived has {len(arrived)} arrays for {len(specs)} groups; give one per group, in group order"
        )
    num_units = plan.hit_length // sizes.hash_block
    presence: list[BoolArray] = []
    for index, (spec, given) in enumerate(zip(specs, arrived, strict=True)):
        chunks = np.asarray(given)
        expected = -(-plan.hit_length // spec.block_size)
        if chunks.shape != (expected,) or (chunks.dtype != np.bool_ and expected):
            raise ValueError(
                f"arrived of group {index} must be {expected} booleans, one per block of the hit, "
                f"got {chunks.dtype} with shape {chunks.shape}"
            )
        local = np.zeros(expected, dtype=np.bool_)
        local[local_chunks(spec, start)] = True
        chunks = chunks | (local & ~plan.groups[index].mask)
        stride = spec.block_size // sizes.hash_block
        if spec.kind is GroupKind.MAMBA:
            units = np.zeros(num_units, dtype=np.bool_)
            ends = np.minimum(np.arange(1, expected + 1) * stride, num_units) - 1
            units[ends] = chunks
        else:
            units = np.repeat(chunks.astype(np.bool_), stride)[:num_units]
        presence.append(units)
    return presence
