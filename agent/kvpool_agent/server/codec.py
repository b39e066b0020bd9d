"""Messages to values and back. Pure: no clock, no state, nothing is allocated beyond the limits of the wire.

Promises: a job that left this module has the shapes that its identity implies, and every refusal names the field.
MASK_COVERS_HIT: a plan from the wire is compared with what the coordinator recomputes from its hit length, before any
of it is used. Refuses: to trust a plan because it is well formed, and to load a plan of another identity.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, cast

import numpy as np
from numpy.typing import NDArray
from opentelemetry.context import Context

from kvpool_agent.coordinator import (
    GroupKind,
    GroupPlan,
    GroupSpec,
    KVCoordinator,
    Plan,
    PlanError,
    SpecError,
    check_plan,
)
from kvpool_agent.errors import CallRefused, Refusal, SessionRefused
from kvpool_agent.transfer.lookup import LookupRequest
from kvpool_agent.transfer.types import HashChain, LoadJob, SaveJob, TransferResult
from kvpool_wire import agent_pb2 as pb
from kvpool_wire import limits
from kvpool_wire.identity import IdentityError, check_extras

PLAN_VERSION: Final = 1
"""Version of the plan's meaning; an agent refuses one that it does not know."""

_KINDS: Final = {
    pb.FULL_ATTENTION: GroupKind.FULL_ATTENTION,
    pb.SLIDING_WINDOW: GroupKind.SLIDING_WINDOW,
    pb.CHUNKED_LOCAL: GroupKind.CHUNKED_LOCAL,
    pb.MAMBA: GroupKind.MAMBA,
}


def invalid(message: str) -> CallRefused:
    """A refusal of the request itself."""
    return CallRefused(Refusal.INVALID, message)


# ------------------------------------------------------------------------------------------------------- identity


def coordinator_of(identity: pb.Identity) -> KVCoordinator:
    """The hit search of an identity that `check_identity` has passed.

    Raises:
        SessionRefused: the sizes do not fit together.
    """
    try:
        groups = [
            GroupSpec(
                kind=_KINDS[group.kind],
                block_size=group.block_size,
                sliding_window=group.sliding_window or None,
                chunk_size=group.chunk_size or None,
                eagle=group.eagle,
                variant=group.variant,
            )
            for group in identity.groups
        ]
        return KVCoordinator(
            groups,
            hash_block_size=identity.hash_block_size,
            scheduler_block_size=identity.scheduler_block_size,
            use_eagle=identity.use_eagle,
            retention_interval=identity.retention_interval
            if identity.HasField("retention_interval")
            else None,
            partial_hits=identity.partial_hits,
        )
    except SpecError as error:
        raise SessionRefused("UnservableGroups", f"identity.groups: {error}") from error


# --------------------------------------------------------------------------------------------------------- pieces


def request_id(text: str) -> str:
    """A request's id, refused if it is empty or too long."""
    if not 0 < len(text.encode()) <= limits.MAX_REQUEST_ID_BYTES:
        raise invalid(f"request_id has 1 to {limits.MAX_REQUEST_ID_BYTES} bytes, got {len(text.encode())}")
    return text


def seconds(deadline_ms: int, *, longest: float) -> float:
    """The time that a call may take: what it asks for, at most `longest`; 0 asks for all of it."""
    if deadline_ms > limits.MAX_DEADLINE_MS:
        raise invalid(f"deadline_ms {deadline_ms} is above {limits.MAX_DEADLINE_MS}; ask for less")
    return min(deadline_ms / 1000, longest) if deadline_ms else longest


def chain(packed: bytes, size: int, where: str) -> HashChain:
    """A packed hash chain, refused if it is not whole units of an acceptable size."""
    if not limits.MIN_HASH_SIZE <= size <= limits.MAX_HASH_SIZE:
        raise invalid(
            f"{where}.hash_size {size}: {limits.MIN_HASH_SIZE} to {limits.MAX_HASH_SIZE} bytes are served"
        )
    if len(packed) % size or len(packed) // size > limits.MAX_HASH_UNITS:
        raise invalid(
            f"{where}.hashes has {len(packed)} bytes; "
            f"whole hashes of {size}, at most {limits.MAX_HASH_UNITS}, are needed"
        )
    return HashChain(packed, size)


def extras_of(extras: pb.Extras) -> pb.Extras:
    """The extras of a request, refused if they cannot be part of a key."""
    try:
        check_extras(extras)
    except IdentityError as error:
        raise invalid(f"extras: {error}") from error
    return extras


def block_ids(blocks: Sequence[pb.BlockIds], groups: int) -> tuple[NDArray[np.int32], ...]:
    """Block ids per group, views of the message's own bytes."""
    if len(blocks) != groups:
        raise invalid(f"blocks has {len(blocks)} lists; one per group of the identity, {groups}, are needed")
    for index, some in enumerate(blocks):
        if len(some.ids) % 4 or len(some.ids) // 4 > limits.MAX_HASH_UNITS:
            raise invalid(
                f"blocks[{index}].ids has {len(some.ids)} bytes; whole little-endian int32 are needed"
            )
    return tuple(np.frombuffer(some.ids, dtype="<i4") for some in blocks)


# ---------------------------------------------------------------------------------------------------------- plans


@dataclass(frozen=True, slots=True)
class WirePlan:
    """A plan as it travels: the coordinator's, and what its keys are made of.

    Attributes:
        plan: checked against the coordinator.
        chain: hash units 0 .. at least the highest that a loaded chunk is keyed by.
        total_hashes: units of the whole chain.
        extras: of the request that was looked up.
    """

    plan: Plan
    chain: HashChain
    total_hashes: int
    extras: pb.Extras


def plan_to_wire(
    plan: Plan, request: LookupRequest, *, identity: bytes, strides: Sequence[int], until: int
) -> pb.Plan:
    """The message of a plan.

    Args:
        plan: from the coordinator.
        request: what was asked; its chain covers every unit that the plan names.
        identity: 16 bytes of the identity's digest.
        strides: hash units per block, one per group.
        until: unix time in milliseconds; the plan's lease.
    """
    highest = max((int(group.key_units.max(initial=-1)) for group in plan.groups), default=-1)
    message = pb.Plan(
        version=PLAN_VERSION,
        identity=identity,
        extras=request.extras,
        hit_length=plan.hit_length,
        hit_length_without_eagle=plan.hit_length_without_eagle,
        total_hashes=request.total_hashes,
        hash_size=request.chain.size,
        hashes=request.chain.head(highest + 1).packed,
        good_until_unix_ms=until,
    )
    for index, group in enumerate(plan.groups):
        message.groups.add(blocks=group.mask.size, mask=np.packbits(group.mask, bitorder="little").tobytes())
        closing = _closing_units(group.mask.size, strides[index])
        for chunk in np.flatnonzero(group.mask & (group.key_units != closing)):
            message.tail_keys.add(group=index, chunk=int(chunk), unit=int(group.key_units[chunk]))
    return message


def plan_from_wire(message: pb.Plan, *, identity: bytes, coordinator: KVCoordinator) -> WirePlan:
    """A plan from the wire, checked.

    Raises:
        CallRefused: INVALID if it is malformed or says something else than the coordinator does (MASK_COVERS_HIT);
            FOREIGN if it is of another version or identity.
    """
    if message.version != PLAN_VERSION:
        raise CallRefused(Refusal.FOREIGN, f"plan.version {message.version}; this agent knows {PLAN_VERSION}")
    if message.identity != identity:
        raise CallRefused(
            Refusal.FOREIGN,
            f"plan of identity {message.identity.hex()[:32]}, this session's is {identity.hex()}: "
            "the engines differ in model, layout, hashes or pool",
        )
    if not message.total_hashes <= limits.MAX_HASH_UNITS:
        raise invalid(f"plan.total_hashes {message.total_hashes} is above {limits.MAX_HASH_UNITS}")
    units = chain(message.hashes, message.hash_size, "plan")
    groups = _groups_from_wire(message, coordinator)
    plan = Plan(message.hit_length, message.hit_length_without_eagle, groups)
    try:
        check_plan(coordinator, range(message.total_hashes), plan)
    except PlanError as error:
        raise invalid(f"MASK_COVERS_HIT: {error}; a load would leave blocks unfilled") from error
    highest = max(int(group.key_units.max(initial=-1)) for group in groups)
    if highest >= len(units):
        raise invalid(f"plan.hashes ends at unit {len(units)}, a loaded chunk is keyed by unit {highest}")
    return WirePlan(plan, units, message.total_hashes, extras_of(message.extras))


def _groups_from_wire(message: pb.Plan, coordinator: KVCoordinator) -> tuple[GroupPlan, ...]:
    if len(message.groups) != len(coordinator.groups):
        raise invalid(
            f"plan.groups has {len(message.groups)} entries, the identity has {len(coordinator.groups)} groups"
        )
    groups: list[GroupPlan] = []
    for index, group in enumerate(message.groups):
        if group.blocks > limits.MAX_HASH_UNITS or len(group.mask) != -(-group.blocks // 8):
            raise invalid(
                f"plan.groups[{index}]: a mask of {len(group.mask)} bytes cannot hold {group.blocks} blocks"
            )
        bits = np.unpackbits(np.frombuffer(group.mask, dtype=np.uint8), bitorder="little").astype(np.bool_)
        if bits[group.blocks :].any():
            raise invalid(f"plan.groups[{index}].mask has bits set past its {group.blocks} blocks")
        mask = bits[: group.blocks]
        stride = coordinator.groups[index].block_size // coordinator.sizes.hash_block
        groups.append(GroupPlan(mask, np.where(mask, _closing_units(mask.size, stride), -1)))
    if len(message.tail_keys) > len(groups):
        raise invalid(f"plan.tail_keys has {len(message.tail_keys)} entries; a group has one tail at most")
    for tail in message.tail_keys:
        if tail.group >= len(groups) or tail.chunk >= groups[tail.group].mask.size:
            raise invalid(
                f"plan.tail_keys names chunk {tail.chunk} of group {tail.group}, which the hit does not cover"
            )
        groups[tail.group].key_units[tail.chunk] = tail.unit
    return tuple(groups)


def _closing_units(blocks: int, stride: int) -> NDArray[np.int64]:
    return np.arange(1, blocks + 1, dtype=np.int64) * stride - 1


def arrived(
    plan: Plan, block_sizes: Sequence[int], *, start: int, failed: Sequence[pb.ChunkFailure]
) -> list[NDArray[np.bool_]]:
    """Per group and chunk of the hit: True where it is local (it ends at or before `start`) or was loaded.

    Raises:
        CallRefused: a failure names a chunk that the hit does not cover.
    """
    there: list[NDArray[np.bool_]] = []
    for group, block in zip(plan.groups, block_sizes, strict=True):
        ends = np.minimum(np.arange(1, group.mask.size + 1, dtype=np.int64) * block, plan.hit_length)
        there.append(group.mask | (ends <= start))
    for failure in failed:
        if failure.group >= len(there) or failure.chunk >= there[failure.group].size:
            raise invalid(
                f"failed names chunk {failure.chunk} of group {failure.group}, which the hit does not cover"
            )
        there[failure.group][failure.chunk] = False
    return there


# ----------------------------------------------------------------------------------------------------------- jobs


def lookup_request(
    message: pb.LookupRequest, *, hash_block: int, deadline: float, context: Context | None
) -> LookupRequest:
    """A lookup; `deadline` is event loop time."""
    request_id(message.request_id)
    units = chain(message.hashes, message.hash_size, "lookup")
    if message.total_hashes > limits.MAX_HASH_UNITS or len(units) > message.total_hashes:
        raise invalid(
            f"lookup.total_hashes {message.total_hashes} with {len(units)} hashes; "
            f"at least as many as were sent and at most {limits.MAX_HASH_UNITS} are served"
        )
    return LookupRequest(
        chain=units,
        total_hashes=message.total_hashes,
        # Tokens past the chain cannot be found, and a hostile number must not become a large array.
        max_length=min(message.max_length, message.total_hashes * hash_block),
        extras=extras_of(message.extras),
        deadline=deadline,
        context=context,
    )


def load_job(message: pb.LoadRequest, wire: WirePlan, *, deadline: float, context: Context | None) -> LoadJob:
    """A load of a plan that `plan_from_wire` has checked; `deadline` is event loop time."""
    if message.start > wire.plan.hit_length:
        raise invalid(f"load.start {message.start} is past the plan's hit of {wire.plan.hit_length} tokens")
    return LoadJob(
        request_id=request_id(message.request_id),
        plan=wire.plan,
        chain=wire.chain,
        total_hashes=wire.total_hashes,
        extras=wire.extras,
        start=message.start,
        blocks=block_ids(message.blocks, len(wire.plan.groups)),
        deadline=deadline,
        ordering=message.ordering,
        context=context,
    )


def save_job(
    message: pb.SaveRequest, *, groups: int, hash_block: int, deadline: float, context: Context | None
) -> SaveJob:
    """A save; `deadline` is event loop time."""
    units = chain(message.hashes, message.hash_size, "save")
    if not message.start <= message.end:
        raise invalid(f"save.start {message.start} is past save.end {message.end}")
    # A chain longer than the tokens is clipped; one that is shorter names no key for the last chunks.
    if message.end // hash_block > len(units):
        raise invalid(
            f"save.end {message.end} needs {message.end // hash_block} hash units, {len(units)} were sent"
        )
    longest = limits.MAX_HASH_UNITS * hash_block
    if message.HasField("num_prompt_tokens") and message.num_prompt_tokens > longest:
        raise invalid(f"save.num_prompt_tokens {message.num_prompt_tokens} is above {longest}")
    return SaveJob(
        request_id=request_id(message.request_id),
        chain=units,
        extras=extras_of(message.extras),
        start=message.start,
        end=message.end,
        num_prompt_tokens=message.num_prompt_tokens if message.HasField("num_prompt_tokens") else None,
        blocks=block_ids(message.blocks, groups),
        deadline=deadline,
        recomputed_after=message.recomputed_after,
        ordering=message.ordering,
        context=context,
    )


def transfer_done(result: TransferResult) -> pb.ServerEvent:
    """The event that reports a transfer."""
    done = pb.TransferDone(
        transfer=result.transfer,
        kind=cast("pb.TransferKind.ValueType", int(result.kind)),
        request_id=result.request_id,
        good=result.good,
        already_stored=result.already_stored,
        bytes=result.bytes,
        resume_length=result.resume_length,
    )
    for failure in result.failed:
        reason = cast("pb.FailureReason.ValueType", int(failure.reason))
        done.failed.add(group=failure.group, chunk=failure.chunk, reason=reason)
    return pb.ServerEvent(transfer_done=done)
